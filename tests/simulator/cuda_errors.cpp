#include "tests/simulator/cuda_errors.hpp"

namespace simulator {

namespace {

struct Named {
  cudaError_t code;
  const char* name;
  const char* text;
  bool sticky;
};

#define ZSHARD_NAMED(code, text, sticky) \
  { code, #code, text, sticky }

constexpr Named kErrors[] = {
    ZSHARD_NAMED(cudaSuccess, "no error", false),
    ZSHARD_NAMED(cudaErrorInvalidValue, "invalid argument", false),
    ZSHARD_NAMED(cudaErrorMemoryAllocation, "out of memory", false),
    ZSHARD_NAMED(cudaErrorInitializationError, "initialization error", false),
    ZSHARD_NAMED(cudaErrorCudartUnloading, "driver shutting down", false),
    ZSHARD_NAMED(cudaErrorInvalidConfiguration, "invalid configuration argument", false),
    ZSHARD_NAMED(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy", false),
    ZSHARD_NAMED(cudaErrorInsufficientDriver,
                 "CUDA driver version is insufficient for CUDA runtime version", false),
    ZSHARD_NAMED(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable",
                 true),
    ZSHARD_NAMED(cudaErrorNoDevice, "no CUDA-capable device is detected", false),
    ZSHARD_NAMED(cudaErrorInvalidDevice, "invalid device ordinal", false),
    ZSHARD_NAMED(cudaErrorNoKernelImageForDevice,
                 "no kernel image is available for execution on the device", false),
    ZSHARD_NAMED(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered", true),
    ZSHARD_NAMED(cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS",
                 false),
    ZSHARD_NAMED(cudaErrorInvalidResourceHandle, "invalid resource handle", false),
    ZSHARD_NAMED(cudaErrorNotReady, "device not ready", false),
    ZSHARD_NAMED(cudaErrorIllegalAddress, "an illegal memory access was encountered", true),
    ZSHARD_NAMED(cudaErrorLaunchOutOfResources, "too many resources requested for launch", false),
    ZSHARD_NAMED(cudaErrorLaunchTimeout, "the launch timed out and was terminated", true),
    ZSHARD_NAMED(cudaErrorAssert, "device-side assert triggered", true),
    ZSHARD_NAMED(cudaErrorHostMemoryAlreadyRegistered,
                 "part or all of the requested memory range is already mapped", false),
    ZSHARD_NAMED(cudaErrorHostMemoryNotRegistered,
                 "pointer does not correspond to a registered memory region", false),
    ZSHARD_NAMED(cudaErrorHardwareStackError, "hardware stack error", true),
    ZSHARD_NAMED(cudaErrorMisalignedAddress, "misaligned address", true),
    ZSHARD_NAMED(cudaErrorLaunchFailure, "unspecified launch failure", true),
    ZSHARD_NAMED(cudaErrorNotPermitted, "operation not permitted", false),
    ZSHARD_NAMED(cudaErrorNotSupported, "operation not supported", false),
    ZSHARD_NAMED(cudaErrorSystemNotReady, "system not yet initialized", false),
    ZSHARD_NAMED(cudaErrorUnknown, "unknown error", true),
};

#undef ZSHARD_NAMED

const Named* find(cudaError_t code) {
  for (const Named& error : kErrors) {
    if (error.code == code) return &error;
  }
  return nullptr;
}

}  // namespace

bool is_sticky(cudaError_t code) {
  const Named* error = find(code);
  return error != nullptr && error->sticky;
}

}  // namespace simulator

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  const simulator::Named* known = simulator::find(error);
  return known == nullptr ? "unrecognized error code" : known->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const simulator::Named* known = simulator::find(error);
  return known == nullptr ? "unrecognized error code" : known->text;
}

}  // extern "C"
