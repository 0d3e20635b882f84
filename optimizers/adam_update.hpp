// What Adam and AdamW have in common: the constants, the moments and the update of an element.
#pragma once

#include <cmath>
#include <cstdint>

#include "optimizers/rule.hpp"
#include "runtime/kernels/clones.hpp"

namespace zshard::optimizers {

/// Slots, and what lies where in Constants.
enum AdamSlot { kExpAvg, kExpAvgSq };
enum AdamConstant { kBeta1, kOneMinusBeta1, kBeta2, kOneMinusBeta2, kEps, kRate, kRoot, kDecay };

inline constexpr StateSlot kAdamSlots[] = {{"exp_avg"}, {"exp_avg_sq"}};

/// The constants of a step but kDecay: rate = lr / (1 - beta1^step), root = 1 / sqrt(1 -
/// beta2^step), in fp64, each rounded to fp32 once.
Constants adam_constants(const Resolved& hyper, std::int64_t step);

/// Checks every hyper-parameter of both rules. Throws UsageError.
void check_adam(std::string_view rule, const Resolved& hyper);

/// The constants of a loop in registers.
struct AdamUpdate {
  float b1, c1, b2, c2, eps, rate, root;

  ZSHARD_INLINE explicit AdamUpdate(const Constants& constants)
      : b1(constants.value[kBeta1]),
        c1(constants.value[kOneMinusBeta1]),
        b2(constants.value[kBeta2]),
        c2(constants.value[kOneMinusBeta2]),
        eps(constants.value[kEps]),
        rate(constants.value[kRate]),
        root(constants.value[kRoot]) {}

  /// The new parameter; m and v are updated. Each operation rounds to fp32, in this order.
  ZSHARD_INLINE float operator()(float p, float g, float& m, float& v) const {
    m = m * b1 + g * c1;
    v = v * b2 + (g * g) * c2;
    return p - rate * (m / (std::sqrt(v) * root + eps));
  }
};

}  // namespace zshard::optimizers
