// The one helper through which every result of the CUDA runtime goes. Of the plug-in's sources
// only.
#pragma once

#include <cuda_runtime_api.h>

namespace zshard::device {

/// Throws DeviceError: what failed, CUDA's name and text of the error, file and line; OutOfMemory
/// for cudaErrorMemoryAllocation.
[[noreturn]] void throw_cuda_error(cudaError_t code, const char* call, const char* file, int line);

inline void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code != cudaSuccess) throw_cuda_error(code, call, file, line);
}

}  // namespace zshard::device

#define ZSHARD_CUDA_CHECK(result, call) \
  ::zshard::device::check_cuda((result), (call), __FILE__, __LINE__)
#define ZSHARD_CUDA(expression) ZSHARD_CUDA_CHECK((expression), #expression)
