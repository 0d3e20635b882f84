// The model's kernels as tasks of a simulated stream. They declare nothing and take pointers into
// device memory as they are: simulator::set_open_memory(true) first.
#pragma once

#include "gpt/cuda/cuda_check.hpp"
#include "tests/simulator/launch.hpp"

namespace gpt::gpu {

template <class Task>
void run_task(const char* name, void* stream, Task task) {
  simulator::launch(name, static_cast<cudaStream_t>(stream), {}, {}, task);
  check_cuda(cudaGetLastError(), name, __FILE__, __LINE__);
}

}  // namespace gpt::gpu
