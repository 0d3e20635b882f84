// The element loops as CUDA kernels. Of the plug-in's sources only.
#pragma once

#include <memory>

#include "runtime/kernels/device_kernels.hpp"

namespace zshard::kernels {

/// Works on the device that is current in the calling thread.
std::unique_ptr<DeviceKernels> make_cuda_kernels();

}  // namespace zshard::kernels
