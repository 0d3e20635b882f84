#include "runtime/kernels/clip.hpp"

#include <cmath>

namespace zshard::kernels {

Clip clip(double total, double gradient_scale, double loss_scale, std::optional<double> clip_norm) {
  const double unscale = gradient_scale / loss_scale;
  const double norm = std::sqrt(total) * std::abs(unscale);
  double coefficient = 1.0;
  // Written so that a NaN leaves 1, as the spec's min(1.0, x) does.
  if (clip_norm && *clip_norm / (norm + 1e-6) < 1.0) coefficient = *clip_norm / (norm + 1e-6);
  return {norm, static_cast<float>(unscale * coefficient)};
}

}  // namespace zshard::kernels
