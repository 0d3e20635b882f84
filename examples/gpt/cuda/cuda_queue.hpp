// The queue of a real GPU.
#pragma once

#include <memory>

#include "queue.hpp"

namespace gpt::gpu {

/// Makes the GPU the calling thread's. Throws zshard::DeviceError.
std::unique_ptr<Queue> open_cuda_queue(int ordinal);

}  // namespace gpt::gpu
