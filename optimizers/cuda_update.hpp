// The element passes of the rules as CUDA kernels. Of the plug-in's sources only.
#pragma once

#include <memory>

#include "optimizers/device_update.hpp"

namespace zshard::optimizers {

/// Works on the device that is current in the calling thread.
std::unique_ptr<DeviceUpdate> make_cuda_update();

}  // namespace zshard::optimizers
