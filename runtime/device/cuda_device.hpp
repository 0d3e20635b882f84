// A GPU by way of the CUDA runtime. Of the plug-in's sources only.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>

#include "runtime/device/cuda_context.hpp"
#include "runtime/device/device.hpp"

namespace zshard::device {

inline cudaStream_t cuda(NativeStream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}
inline cudaEvent_t cuda(NativeEvent event) {
  return static_cast<cudaEvent_t>(event.handle);
}

class CudaDevice final : public Device {
 public:
  /// Drivers refuse very large registrations where they take the same memory in pieces.
  static constexpr std::int64_t kPinPiece = std::int64_t{1} << 30;

  /// rank: for messages. pin_piece: bytes that pin() registers at a time. Throws DeviceError if the
  /// GPU cannot be started.
  CudaDevice(int ordinal, int rank, std::int64_t pin_piece = kPinPiece);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  /// Makes this the calling thread's GPU, for CUDA and for the messages of errors. Throws the first
  /// fault of the device, if there was one.
  void make_current() const;

  [[nodiscard]] int ordinal() const override { return context_->ordinal(); }
  [[nodiscard]] int rank() const { return context_->rank(); }
  [[nodiscard]] std::string name() const override { return name_; }
  void memory(std::int64_t& free_bytes, std::int64_t& total_bytes) const override;
  std::byte* allocate(std::int64_t bytes) override;
  void free_memory(std::byte* memory) noexcept override;
  bool pin(std::byte* memory, std::int64_t bytes) override;
  void unpin(std::byte* memory, std::int64_t bytes) noexcept override;
  NativeStream make_stream(const char* name) override;
  void destroy_stream(NativeStream stream) noexcept override;
  NativeEvent make_event() override;
  void destroy_event(NativeEvent event) noexcept override;
  void record(NativeEvent event, NativeStream stream) override;
  void wait(NativeStream stream, NativeEvent event) override;
  [[nodiscard]] bool reached(NativeEvent event) override;
  [[nodiscard]] bool passed(NativeEvent event) override;
  void copy(void* target, const void* source, std::int64_t bytes, NativeStream stream) override;
  void fill(void* target, int value, std::int64_t bytes, NativeStream stream) override;

 private:
  /// make_current() for what must not throw: false if the GPU cannot be made current.
  bool enter() const noexcept;
  /// What a destroying call answered: said once, since there is nobody to throw at.
  void note(cudaError_t code, const char* call) noexcept;
  void clear(std::byte* memory, std::int64_t bytes);
  void unregister(std::byte* memory, std::int64_t bytes) noexcept;
  [[nodiscard]] std::int64_t until_cut(const void* memory) const;

  std::shared_ptr<CudaContext> context_;
  std::string name_;
  std::int64_t pin_piece_;
  std::atomic<bool> pin_failure_said_{false};
  std::atomic<bool> destroy_failure_said_{false};
  mutable std::shared_mutex pinned_mutex_;
  std::map<std::uintptr_t, std::int64_t> pinned_;  // bytes by address
};

}  // namespace zshard::device
