// The communicator of a rank that has no peers: it needs no NCCL. Of the plug-in's sources only.
#pragma once

#include "runtime/comm/communicator.hpp"

namespace zshard::comm {

class SingleCommunicator final : public Communicator {
 public:
  explicit SingleCommunicator(device::Device& device) : device_(device) {}
  void all_gather(void*, std::int64_t, device::NativeStream) override {}
  void all_to_all(const void* send, void* received, std::int64_t bytes,
                  device::NativeStream stream) override {
    if (send != received) device_.copy(received, send, bytes, stream);
  }
  void reduce_scatter(const void* send, void* received, std::int64_t count, DType dtype,
                      device::NativeStream stream) override {
    if (send != received) device_.copy(received, send, count * size_of(dtype), stream);
  }
  void group_start() override {}
  void group_end() override {}
  [[nodiscard]] std::optional<std::string> failure() override { return std::nullopt; }
  void abort() noexcept override {}

 private:
  device::Device& device_;
};

}  // namespace zshard::comm
