// Names and texts of the CUDA runtime's errors that the simulated runtime gives or tests inject.
#pragma once

#include <cuda_runtime_api.h>

namespace simulator {

/// Whether a GPU cannot be used any more after it.
bool is_sticky(cudaError_t code);

}  // namespace simulator
