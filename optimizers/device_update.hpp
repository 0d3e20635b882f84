// The element passes of the rules, queued on a stream of a device. The bits are those of the host.
#pragma once

#include <cstdint>
#include <string_view>

#include "optimizers/rule.hpp"
#include "runtime/device/device.hpp"

namespace zshard::optimizers {

class DeviceUpdate {
 public:
  virtual ~DeviceUpdate() = default;
  /// Runs all passes of the rule. All pointers of `elements` are device memory; they and the
  /// constants are taken by value. Throws DeviceError if a launch fails, UsageError for a rule that
  /// has no device form.
  virtual void run(const Rule& rule, const Elements& elements, const Constants& constants,
                   std::int64_t step, device::NativeStream stream) = 0;
};

}  // namespace zshard::optimizers
