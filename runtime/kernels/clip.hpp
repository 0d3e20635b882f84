// Gradient norm and the factor that every optimizer kernel multiplies the reduced sum by.
#pragma once

#include <optional>

namespace zshard::kernels {

struct Clip {
  double norm;   ///< of the unscaled gradient
  float factor;  ///< gradient_scale / loss_scale * clip coefficient, rounded to fp32 once
};

/// norm = sqrt(total) * |gradient_scale / loss_scale|, coefficient = min(1, clip_norm / (norm +
/// 1e-6)) or 1 without a clip_norm, all in fp64. `total` is the sum of squares of the reduced
/// gradient. An infinite total gives an infinite norm and coefficient 0, a NaN a NaN norm and
/// coefficient 1: a total that is not finite is the vote's business, and its step is skipped.
Clip clip(double total, double gradient_scale, double loss_scale, std::optional<double> clip_norm);

}  // namespace zshard::kernels
