// The element loops of kernels.hpp, queued on a stream of a device. The bits are those of the host.
// All pointers are device memory. Calls throw DeviceError if a launch fails.
#pragma once

#include <cstdint>

#include "runtime/device/device.hpp"
#include "zshard/types.hpp"

namespace zshard::kernels {

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  /// dst[i] = src[i] widened to fp32, then rounded to dst's type, nearest even. dst and src do not
  /// overlap.
  virtual void convert(const void* src, DType from, void* dst, DType to, std::int64_t count,
                       device::NativeStream stream) = 0;
  /// acc[i] += chain over ranks r of source(r)[i], where source(r) = sources + r * stride (bytes),
  /// `ranks` of them, of `dtype`; in groups of `group` consecutive ranks, then over the partials
  /// (group 0: one group). Each chain starts from its first term. from_zero: acc counts as +0.0
  /// and is not read. acc overlaps no source.
  virtual void reduce_add(const void* sources, std::int64_t stride, int ranks, DType dtype,
                          int group, float* acc, std::int64_t count, bool from_zero,
                          device::NativeStream stream) = 0;
  /// buffer[i] += fp32 of gradient[i]. dtype is gradient's.
  virtual void accumulate(const void* gradient, DType dtype, float* buffer, std::int64_t count,
                          device::NativeStream stream) = 0;
  /// blocks[b] = fp64 sum of squares of values[1024 b, min(1024 (b + 1), count)), as
  /// kernels::block_squares. A block's sum is not finite exactly if one of its elements is not.
  virtual void block_squares(const float* values, std::int64_t count, double* blocks,
                             device::NativeStream stream) = 0;
};

}  // namespace zshard::kernels
