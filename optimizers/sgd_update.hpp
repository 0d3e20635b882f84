// The update of SGD, one element at a time, for the host's loops and the device's.
#pragma once

#include "optimizers/rule.hpp"
#include "runtime/kernels/clones.hpp"

namespace zshard::optimizers {

enum SgdSlot { kMomentumBuffer };
enum SgdConstant { kLr, kMomentum, kSgdDecay };
enum class Momentum { none, heavy_ball, nesterov };

/// Without decay the term is left out, as in PyTorch: adding p * 0 would turn -0.0 into +0.0.
template <Momentum kind, bool decays>
struct SgdElement {
  float factor, lr, momentum, decay;

  ZSHARD_INLINE SgdElement(const Constants& constants, float gradient_factor)
      : factor(gradient_factor),
        lr(constants.value[kLr]),
        momentum(constants.value[kMomentum]),
        decay(constants.value[kSgdDecay]) {}

  /// The new parameter; the momentum buffer is updated, and not touched where there is none. Each
  /// operation rounds to fp32, in this order.
  ZSHARD_INLINE float operator()(float p, float gradient, float& buffer) const {
    float g = gradient * factor;
    if constexpr (decays) g = g + p * decay;
    if constexpr (kind != Momentum::none) {
      // PyTorch's first buffer is g itself. A buffer born as +0.0 gives the same without knowing
      // which step is a parameter's first, which a unit that was unused so far would get wrong;
      // only a first g of -0.0 is stored as +0.0.
      const float b = buffer * momentum + g;
      buffer = b;
      g = kind == Momentum::nesterov ? g + b * momentum : b;
    }
    return p - g * lr;
  }
};

}  // namespace zshard::optimizers
