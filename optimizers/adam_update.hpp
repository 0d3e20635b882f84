// What Adam and AdamW have in common: the constants, the moments; and their updates, one element at
// a time, for the host's loops and the device's.
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

/// Adam's element. The decay is a term of the gradient; without decay it is left out, as in
/// PyTorch: adding p * 0 would turn -0.0 into +0.0.
template <bool decays>
struct AdamElement {
  AdamUpdate update;
  float factor, decay;

  ZSHARD_INLINE AdamElement(const Constants& constants, float gradient_factor)
      : update(constants), factor(gradient_factor), decay(constants.value[kDecay]) {}

  ZSHARD_INLINE float operator()(float p, float gradient, float& m, float& v) const {
    float g = gradient * factor;
    if constexpr (decays) g = g + p * decay;
    return update(p, g, m, v);
  }
};

/// AdamW's element. The constant kDecay is what decay leaves of a parameter.
struct AdamWElement {
  AdamUpdate update;
  float factor, keep;

  ZSHARD_INLINE AdamWElement(const Constants& constants, float gradient_factor)
      : update(constants), factor(gradient_factor), keep(constants.value[kDecay]) {}

  ZSHARD_INLINE float operator()(float p, float gradient, float& m, float& v) const {
    const float g = gradient * factor;
    return update(p * keep, g, m, v);
  }
};

}  // namespace zshard::optimizers
