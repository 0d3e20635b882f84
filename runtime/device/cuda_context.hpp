// What an error on a thread can say about the device that the thread uses, and the first fault of
// that device. Of the plug-in's sources only.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace zshard::device {

/// One rank's use of a GPU. Shared by its CudaDevice and the threads that used it last.
class CudaContext {
 public:
  CudaContext(int ordinal, int rank) : ordinal_(ordinal), rank_(rank) {}
  [[nodiscard]] int ordinal() const { return ordinal_; }
  [[nodiscard]] int rank() const { return rank_; }

  /// Keeps `message` if it is the first fault. Returns the first one.
  std::string keep_fault(const std::string& message);
  [[nodiscard]] bool faulted() const noexcept { return faulted_.load(std::memory_order_acquire); }
  /// Throws DeviceError with the first fault, if there was one: after it no result of the device
  /// can be trusted, and CUDA itself answers every call with an error.
  void check() const;

 private:
  const int ordinal_;
  const int rank_;
  std::atomic<bool> faulted_{false};
  mutable std::mutex mutex_;
  std::string fault_;
};

/// The context of the device that the calling thread made current last, or null.
CudaContext* current_context() noexcept;
void set_current_context(const std::shared_ptr<CudaContext>& context) noexcept;

/// " (GPU 0, rank 1, runtime/device/cuda_device.cpp:17)", as far as it is known.
std::string place(const char* file, int line);

}  // namespace zshard::device
