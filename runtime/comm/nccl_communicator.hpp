// Collectives over NCCL. Of the plug-in's sources only.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "runtime/comm/communicator.hpp"
#include "runtime/device/cuda_device.hpp"

namespace zshard::comm {

/// Rank 0's part of making a communicator. Throws CommError.
CommunicatorId make_nccl_id();

/// Sets what NCCL reads from the environment when it starts, where the user has not: before the
/// first use of NCCL, and before other threads read the environment.
void prepare_nccl_environment();

/// Whether NCCL starts collectives of several communicators in the host's order: 2.26 and later,
/// unless the user has switched it off.
bool nccl_orders_collectives();

/// A non-blocking NCCL communicator. Each call returns when its work is queued on the stream; the
/// first ones wait for peers to connect, up to the deadline. One thread at a time issues calls;
/// failure() and abort() may come from any. Must go before its device.
class NcclCommunicator final : public Communicator {
 public:
  /// Collective over `world` ranks. Throws CommError, also if the peers do not come in time.
  NcclCommunicator(device::CudaDevice& device, const CommunicatorId& id, int rank, int world,
                   double deadline_seconds);
  /// Waits, up to the deadline, for what is under way; after a failure ends it.
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  void all_gather(void* buffer, std::int64_t bytes, device::NativeStream stream) override;
  void all_to_all(const void* send, void* received, std::int64_t bytes,
                  device::NativeStream stream) override;
  void reduce_scatter(const void* send, void* received, std::int64_t count, DType dtype,
                      device::NativeStream stream) override;
  void group_start() override;
  void group_end() override;
  [[nodiscard]] std::optional<std::string> failure() override;
  void abort() noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  using Call = std::function<ncclResult_t(ncclComm_t)>;

  void issue(const char* call, int line, const Call& body);
  void await(const char* call, int line);
  void close_group(const char* call, int line);
  static void leave_groups() noexcept;
  void check_usable() const;
  [[noreturn]] void fail(ncclResult_t code, const char* call, int line);
  void throw_own_fault() const;
  void keep_failure(const std::string& text);
  [[nodiscard]] std::string failure_text() const;
  bool finish() noexcept;
  std::unique_lock<std::mutex> lock_for(std::chrono::milliseconds time) noexcept;

  device::CudaDevice& device_;
  const int rank_;
  const int world_;
  const Clock::duration deadline_;
  // NCCL frees a communicator that is aborted: no call of NCCL may be under way in it meanwhile.
  std::mutex mutex_;
  std::atomic<ncclComm_t> comm_{nullptr};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> failed_{false};
  mutable std::mutex text_mutex_;
  std::string failure_;
};

}  // namespace zshard::comm
