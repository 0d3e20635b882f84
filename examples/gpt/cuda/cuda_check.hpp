// The one helper through which results of the CUDA runtime and of cuBLAS go.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "zshard/error.hpp"

namespace gpt::gpu {

/// Throws zshard::DeviceError, or zshard::OutOfMemory where memory is short: the call, CUDA's name
/// and text of the error, file and line.
inline void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  const std::string message = std::string(call) + ": " + cudaGetErrorString(code) + " (" +
                              cudaGetErrorName(code) + "), " + file + ":" + std::to_string(line);
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // not sticky: the caller may go on with less
    throw zshard::OutOfMemory("the model's own memory on the GPU: " + message +
                              "; use a smaller --batch, --context or model");
  }
  throw zshard::DeviceError(message);
}

}  // namespace gpt::gpu

#define GPT_CUDA(expression) ::gpt::gpu::check_cuda((expression), #expression, __FILE__, __LINE__)
