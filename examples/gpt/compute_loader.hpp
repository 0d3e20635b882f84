// Finds what the model's arithmetic runs on. The GPU's part is a library of its own beside the
// program, libgpt_cuda.so, opened when it is asked for: gpt starts where there is no CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "compute.hpp"
#include "config.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// A GPU before anything of this program is on it.
struct GpuFacts {
  std::string name;
  int gpus = 0;  ///< of this machine
  std::int64_t free_bytes = 0;
  std::int64_t total_bytes = 0;
};

/// For config.engine.device; the GPU is the engine's for this rank. Throws ConfigError if this
/// program cannot serve it, zshard::DeviceError if the GPU fails.
std::shared_ptr<Compute> make_compute(const Config& config, const zshard::ProcessGroup& group);

/// The GPU that this rank of a machine's is to use. Throws ConfigError that says what is missing: a
/// build with CUDA, a library, a driver, a GPU.
GpuFacts gpu_facts(const Config& config, int local_rank);

}  // namespace gpt
