// fp32 pointers into the unit that a guard holds, whatever the dtype of its parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compute.hpp"
#include "spec.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// For f32 the pointers are the engine's own. For bf16 the weights are widened into a scratch
/// buffer, gradients are computed in another one, and store() rounds them into the engine's; each
/// is as large as the largest unit. One guard at a time: pointers are valid until the next call.
class FloatViews {
 public:
  /// compute: whose memory the engine's pointers are in.
  FloatViews(const GptSpec& spec, zshard::DType dtype, std::shared_ptr<Compute> compute);

  std::span<const float* const> weights(const zshard::Guard& guard, std::size_t unit);
  /// Of a backward guard.
  std::span<float* const> gradients(const zshard::Guard& guard, std::size_t unit);
  /// 0 if what gradients() points to is to be overwritten, 1 if it is to be added to.
  [[nodiscard]] float beta(zshard::GradientMode mode) const {
    return !scratch_ && mode == zshard::GradientMode::accumulate ? 1.0f : 0.0f;
  }
  /// Brings what was written to gradients() into the engine's buffers.
  void store(const zshard::Guard& guard, std::size_t unit, zshard::GradientMode mode);

 private:
  const GptSpec& spec_;
  bool scratch_;
  std::vector<std::vector<std::int64_t>> counts_;  // [unit][parameter]
  std::shared_ptr<Compute> compute_;
  Buffer weight_scratch_;
  Buffer gradient_scratch_;
  std::vector<const float*> weights_;
  std::vector<float*> gradients_;
};

}  // namespace gpt
