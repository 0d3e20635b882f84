#include "runtime/device/cuda_check.hpp"

#include <string>
#include <string_view>

#include "runtime/device/cuda_context.hpp"
#include "zshard/error.hpp"

namespace zshard::device {

namespace {

thread_local std::shared_ptr<CudaContext> current;

/// Whether the error leaves the process' context on the device unusable.
bool is_sticky(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDevicesUnavailable:  // lost while it was in use
      return true;
    default:
      return false;
  }
}

const char* remedy(cudaError_t code) {
  switch (code) {
    case cudaErrorNoKernelImageForDevice:
      return " The build has no code for this GPU: add its architecture to "
             "ZSHARD_CUDA_ARCHITECTURES.";
    case cudaErrorInsufficientDriver:
      return " Install a driver that serves this version of CUDA.";
    case cudaErrorDevicesUnavailable:
      return " Another process may hold the GPU in exclusive mode.";
    default:
      return "";
  }
}

/// The path inside the repository: where the build lay says nothing to a reader.
std::string_view inside_repository(std::string_view file) {
  for (const std::string_view top : {"/runtime/", "/optimizers/", "/tests/"}) {
    const std::size_t at = file.rfind(top);
    if (at != std::string_view::npos) return file.substr(at + 1);
  }
  return file;
}

}  // namespace

std::string CudaContext::keep_fault(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!faulted_.load(std::memory_order_relaxed)) {
    fault_ = message;
    faulted_.store(true, std::memory_order_release);
  }
  return fault_;
}

void CudaContext::check() const {
  if (!faulted()) return;
  const std::lock_guard lock(mutex_);
  throw DeviceError(fault_);
}

CudaContext* current_context() noexcept {
  return current.get();
}

void set_current_context(const std::shared_ptr<CudaContext>& context) noexcept {
  // The thread's own share keeps the address from being given to another context meanwhile.
  if (current != context) current = context;
}

std::string place(const char* file, int line) {
  std::string text = " (";
  if (current != nullptr) {
    text += "GPU " + std::to_string(current->ordinal()) + ", rank " +
            std::to_string(current->rank()) + ", ";
  }
  text += std::string(inside_repository(file)) + ":" + std::to_string(line) + ")";
  return text;
}

void throw_cuda_error(cudaError_t code, const char* call, const char* file, int line) {
  // Otherwise the next launch on this thread would find it and report it as its own.
  (void)cudaGetLastError();
  std::string message = std::string(call) + " failed: " + cudaGetErrorName(code) + ", " +
                        cudaGetErrorString(code) + place(file, line) + "." + remedy(code);
  if (is_sticky(code)) {
    message +=
        " The GPU's results cannot be trusted any more and this process cannot use it again: "
        "start a new one from the last checkpoint.";
    if (current != nullptr) message = current->keep_fault(message);
  }
  if (code == cudaErrorMemoryAllocation) throw OutOfMemory(message);
  throw DeviceError(message);
}

}  // namespace zshard::device
