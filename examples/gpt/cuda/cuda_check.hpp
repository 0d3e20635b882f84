// The one helper through which results of the CUDA runtime and of cuBLAS go.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "zshard/error.hpp"

namespace gpt::gpu {

/// The rank that the calling thread is, for messages; -1: not known.
inline thread_local int thread_rank = -1;

/// Throws zshard::DeviceError, or zshard::OutOfMemory where memory is short: the call, the
/// library's name and text of the error, GPU, rank, file and line.
[[noreturn]] inline void throw_failure(bool no_memory, const char* call, const char* text,
                                       const char* name, const char* file, int line) {
  // Otherwise the next launch on this thread would report it as its own. Also before the caller
  // goes on with less memory.
  (void)cudaGetLastError();
  int gpu = -1;
  if (cudaGetDevice(&gpu) != cudaSuccess) (void)cudaGetLastError();
  std::string message = std::string(call) + ": " + text + " (" + name + "; ";
  if (gpu >= 0) message += "GPU " + std::to_string(gpu) + ", ";
  if (thread_rank >= 0) message += "rank " + std::to_string(thread_rank) + ", ";
  // Inside the repository: where the build lay says nothing to a reader.
  std::string path = file;
  if (const std::size_t at = path.rfind("/examples/"); at != std::string::npos)
    path.erase(0, at + 1);
  message += path + ":" + std::to_string(line) + ")";
  if (no_memory) {
    throw zshard::OutOfMemory("the model's own memory on the GPU: " + message +
                              "; use a smaller --batch, --context or model");
  }
  throw zshard::DeviceError(message);
}

inline void check_cuda(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  throw_failure(code == cudaErrorMemoryAllocation, call, cudaGetErrorString(code),
                cudaGetErrorName(code), file, line);
}

}  // namespace gpt::gpu

#define GPT_CUDA(expression) ::gpt::gpu::check_cuda((expression), #expression, __FILE__, __LINE__)
