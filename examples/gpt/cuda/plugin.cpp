#include "plugin.hpp"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <string>

#include "cuda_check.hpp"
#include "cuda_queue.hpp"

namespace {

// A number of the machine's, see plugin.hpp; how many there are in `gpus`.
int choose(int ordinal, int local_rank, int& gpus) {
  gpus = 0;
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
    throw zshard::DeviceError(
        "there is no NVIDIA driver on this machine, or the container does not show it "
        "(libcuda.so.1 is missing)");
  }
  GPT_CUDA(cudaGetDeviceCount(&gpus));
  if (gpus == 0) throw zshard::DeviceError("this machine has no GPU that CUDA can use");
  if (ordinal >= gpus) {
    throw zshard::DeviceError("GPU " + std::to_string(ordinal) + " does not exist; there are " +
                              std::to_string(gpus) + ", numbered from 0");
  }
  return ordinal >= 0 ? ordinal : local_rank % gpus;
}

}  // namespace

gpt::Compute* gpt_cuda_compute(int ordinal, int local_rank, bool bf16) {
  gpt::gpu::thread_rank = local_rank;  // all ranks are on one machine
  int gpus = 0;
  return gpt::gpu::make_gpu_compute(gpt::gpu::open_cuda_queue(choose(ordinal, local_rank, gpus)),
                                    bf16)
      .release();
}

void gpt_cuda_facts(int ordinal, int local_rank, char* name, int name_bytes, int* gpus,
                    std::int64_t* free_bytes, std::int64_t* total_bytes) {
  gpt::gpu::thread_rank = local_rank;
  const int chosen = choose(ordinal, local_rank, *gpus);
  GPT_CUDA(cudaSetDevice(chosen));
  cudaDeviceProp properties;
  GPT_CUDA(cudaGetDeviceProperties(&properties, chosen));
  std::snprintf(name, static_cast<std::size_t>(name_bytes), "%s", properties.name);
  std::size_t available = 0;
  std::size_t total = 0;
  GPT_CUDA(cudaMemGetInfo(&available, &total));
  *free_bytes = static_cast<std::int64_t>(available);
  *total_bytes = static_cast<std::int64_t>(total);
}
