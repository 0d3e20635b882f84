#include "runtime/device/cuda_device.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

#include "runtime/base/bytes.hpp"
#include "runtime/base/log.hpp"
#include "runtime/device/cuda_check.hpp"
#include "zshard/error.hpp"
#if defined(ZSHARD_SIMULATED_DEVICE)
#include ZSHARD_SIMULATED_LAUNCH
#else
#include <nvtx3/nvToolsExtCudaRt.h>
#endif

namespace zshard::device {

namespace {

void check_bytes(std::int64_t bytes, const char* call) {
  if (bytes >= 0) return;
  throw UsageError(std::string("Device::") + call + ": " + std::to_string(bytes) + " bytes");
}

std::uintptr_t address_of(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

/// Collectives are what other ranks wait for: their kernels go first where both are ready.
bool carries_collectives(const char* name) {
  return std::strstr(name, "gather") != nullptr || std::strstr(name, "reduce") != nullptr;
}

}  // namespace

CudaDevice::CudaDevice(int ordinal, int rank, std::int64_t pin_piece)
    : context_(std::make_shared<CudaContext>(ordinal, rank)), pin_piece_(pin_piece) {
  if (pin_piece <= 0) throw UsageError("CudaDevice: pin_piece must be positive");
  make_current();
  cudaDeviceProp properties{};
  ZSHARD_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  name_ = properties.name;
}

CudaDevice::~CudaDevice() {
  while (!pinned_.empty()) {
    const auto [address, bytes] = *pinned_.begin();
    unpin(reinterpret_cast<std::byte*>(address), bytes);
  }
}

void CudaDevice::make_current() const {
  set_current_context(context_);
  context_->check();
  // The thread is the user's as well and may have chosen another GPU since: asking costs
  // nanoseconds.
  int now = -1;
  if (cudaGetDevice(&now) != cudaSuccess || now != ordinal()) {
    ZSHARD_CUDA(cudaSetDevice(ordinal()));
  }
}

bool CudaDevice::enter() const noexcept {
  set_current_context(context_);
  int now = -1;
  if (cudaGetDevice(&now) == cudaSuccess && now == ordinal()) return true;
  if (cudaSetDevice(ordinal()) == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

void CudaDevice::note(cudaError_t code, const char* call) noexcept {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  // After a fault every call fails; at the end of the process the driver is gone already.
  if (code == cudaErrorCudartUnloading || context_->faulted()) return;
  if (destroy_failure_said_.exchange(true)) return;
  base::log_warning(base::Topic::device, rank(), "GPU {}: {} failed: {}, {}", ordinal(), call,
                    cudaGetErrorName(code), cudaGetErrorString(code));
}

void CudaDevice::memory(std::int64_t& free_bytes, std::int64_t& total_bytes) const {
  make_current();
  std::size_t free_now = 0;
  std::size_t total = 0;
  ZSHARD_CUDA(cudaMemGetInfo(&free_now, &total));
  free_bytes = static_cast<std::int64_t>(free_now);
  total_bytes = static_cast<std::int64_t>(total);
}

std::byte* CudaDevice::allocate(std::int64_t bytes) {
  check_bytes(bytes, "allocate");
  make_current();
  if (bytes == 0) return nullptr;
  void* memory_made = nullptr;
  const cudaError_t code = cudaMalloc(&memory_made, static_cast<std::size_t>(bytes));
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    std::int64_t free_bytes = 0;
    std::int64_t total_bytes = 0;
    memory(free_bytes, total_bytes);
    throw OutOfMemory("cudaMalloc of " + base::human_bytes(bytes) + " (" + std::to_string(bytes) +
                      " bytes) failed: " + cudaGetErrorName(code) + "; " +
                      base::human_bytes(free_bytes) + " of " + base::human_bytes(total_bytes) +
                      " are free" + place(__FILE__, __LINE__));
  }
  ZSHARD_CUDA_CHECK(code, "cudaMalloc");
  auto* result = static_cast<std::byte*>(memory_made);
  try {
    clear(result, bytes);
  } catch (...) {
    free_memory(result);
    throw;
  }
  return result;
}

void CudaDevice::clear(std::byte* memory, std::int64_t bytes) {
  // Not on the default stream: it would wait for work of the user's that has nothing to do with it.
  const NativeStream stream = make_stream("clear");
  try {
    fill(memory, 0, bytes, stream);
    ZSHARD_CUDA(cudaStreamSynchronize(cuda(stream)));
  } catch (...) {
    destroy_stream(stream);
    throw;
  }
  destroy_stream(stream);
}

void CudaDevice::free_memory(std::byte* memory) noexcept {
  if (memory == nullptr) return;
  if (enter()) note(cudaFree(memory), "cudaFree");
}

bool CudaDevice::pin(std::byte* memory, std::int64_t bytes) {
  check_bytes(bytes, "pin");
  make_current();
  if (bytes == 0) return true;
  for (std::int64_t at = 0; at < bytes; at += pin_piece_) {
    const std::int64_t piece = std::min(pin_piece_, bytes - at);
    const cudaError_t code =
        cudaHostRegister(memory + at, static_cast<std::size_t>(piece), cudaHostRegisterPortable);
    if (code == cudaSuccess) continue;
    unregister(memory, at);
    (void)cudaGetLastError();
    if (code != cudaErrorMemoryAllocation && code != cudaErrorNotSupported &&
        code != cudaErrorHostMemoryAlreadyRegistered && code != cudaErrorInvalidValue &&
        code != cudaErrorNotPermitted && code != cudaErrorOperatingSystem) {
      ZSHARD_CUDA_CHECK(code, "cudaHostRegister");
    }
    if (!pin_failure_said_.exchange(true)) {
      base::log_warning(
          base::Topic::device, rank(),
          "GPU {}: host memory stays pageable, so copies are slower and do not run beside "
          "everything else: cudaHostRegister of {} at byte {} of {}: {}, {}. A larger memlock "
          "limit (ulimit -l) may mend it.",
          ordinal(), base::human_bytes(piece), at, base::human_bytes(bytes), cudaGetErrorName(code),
          cudaGetErrorString(code));
    }
    return false;
  }
  try {
    const std::unique_lock lock(pinned_mutex_);
    pinned_[address_of(memory)] = bytes;
  } catch (...) {
    unregister(memory, bytes);
    throw;
  }
  return true;
}

void CudaDevice::unregister(std::byte* memory, std::int64_t bytes) noexcept {
  for (std::int64_t at = 0; at < bytes; at += pin_piece_) {
    note(cudaHostUnregister(memory + at), "cudaHostUnregister");
  }
}

void CudaDevice::unpin(std::byte* memory, std::int64_t bytes) noexcept {
  {
    const std::unique_lock lock(pinned_mutex_);
    const auto known = pinned_.find(address_of(memory));
    if (known == pinned_.end() || known->second != bytes) return;
    pinned_.erase(known);
  }
  if (enter()) unregister(memory, bytes);
}

NativeStream CudaDevice::make_stream(const char* name) {
  make_current();
  int least = 0;
  int greatest = 0;
  ZSHARD_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  ZSHARD_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                           carries_collectives(name) ? greatest : least));
#if defined(ZSHARD_SIMULATED_DEVICE)
  simulator::name_stream(stream, name);
#else
  nvtxNameCudaStreamA(stream, name);
#endif
  return {stream};
}

void CudaDevice::destroy_stream(NativeStream stream) noexcept {
  if (stream.handle == nullptr) return;
  if (enter()) note(cudaStreamDestroy(cuda(stream)), "cudaStreamDestroy");
}

NativeEvent CudaDevice::make_event() {
  make_current();
  cudaEvent_t event = nullptr;
  // Timing makes recording an event slower, and nothing reads it.
  ZSHARD_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return {event};
}

void CudaDevice::destroy_event(NativeEvent event) noexcept {
  if (event.handle == nullptr) return;
  if (enter()) note(cudaEventDestroy(cuda(event)), "cudaEventDestroy");
}

void CudaDevice::record(NativeEvent event, NativeStream stream) {
  make_current();
  ZSHARD_CUDA(cudaEventRecord(cuda(event), cuda(stream)));
}

void CudaDevice::wait(NativeStream stream, NativeEvent event) {
  make_current();
  ZSHARD_CUDA(cudaStreamWaitEvent(cuda(stream), cuda(event), 0));
}

bool CudaDevice::reached(NativeEvent event) {
  make_current();
  const cudaError_t code = cudaEventQuery(cuda(event));
  if (code == cudaErrorNotReady) {
    // No error, but the runtime keeps it as one for the next launch to find.
    (void)cudaGetLastError();
    return false;
  }
  ZSHARD_CUDA_CHECK(code, "cudaEventQuery");
  return true;
}

bool CudaDevice::passed(NativeEvent event) {
#if defined(ZSHARD_SIMULATED_DEVICE)
  // What a watcher happens to see would hide waits that are missing.
  const simulator::Watching watching;
#endif
  return reached(event);
}

/// Bytes from `memory` to the next place where a registration of pin() begins or ends.
std::int64_t CudaDevice::until_cut(const void* memory) const {
  const std::uintptr_t address = address_of(memory);
  const std::shared_lock lock(pinned_mutex_);
  const auto next = pinned_.upper_bound(address);
  if (next != pinned_.begin()) {
    const auto& [begin, bytes] = *std::prev(next);
    const auto at = static_cast<std::int64_t>(address - begin);
    if (at < bytes) return std::min(pin_piece_ - at % pin_piece_, bytes - at);
  }
  if (next == pinned_.end()) return std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(
      std::min<std::uintptr_t>(next->first - address, std::numeric_limits<std::int64_t>::max()));
}

void CudaDevice::copy(void* target, const void* source, std::int64_t bytes, NativeStream stream) {
  check_bytes(bytes, "copy");
  make_current();
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  // CUDA refuses a copy whose host memory lies in more than one registration.
  for (std::int64_t done = 0; done < bytes;) {
    const std::int64_t piece =
        std::min({bytes - done, until_cut(to + done), until_cut(from + done)});
    ZSHARD_CUDA(cudaMemcpyAsync(to + done, from + done, static_cast<std::size_t>(piece),
                                cudaMemcpyDefault, cuda(stream)));
    done += piece;
  }
}

void CudaDevice::fill(void* target, int value, std::int64_t bytes, NativeStream stream) {
  check_bytes(bytes, "fill");
  make_current();
  if (bytes == 0) return;
  ZSHARD_CUDA(cudaMemsetAsync(target, value, static_cast<std::size_t>(bytes), cuda(stream)));
}

}  // namespace zshard::device
