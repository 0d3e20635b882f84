#include "float_views.hpp"

#include <utility>

namespace gpt {

FloatViews::FloatViews(const GptSpec& spec, zshard::DType dtype, std::shared_ptr<Compute> compute)
    : spec_(spec), scratch_(dtype == zshard::DType::bf16), compute_(std::move(compute)) {
  for (const UnitInfo& unit : spec.units) {
    std::vector<std::int64_t>& counts = counts_.emplace_back();
    for (const ParameterInfo& parameter : unit.parameters) {
      std::int64_t count = 1;
      for (const std::int64_t extent : parameter.shape) count *= extent;
      counts.push_back(count);
    }
  }
  if (scratch_) {
    const std::int64_t count =
        largest_unit_bytes(spec.units) / static_cast<std::int64_t>(sizeof(float));
    weight_scratch_ = Buffer(compute_, count);
    gradient_scratch_ = Buffer(compute_, count);
  }
}

std::span<const float* const> FloatViews::weights(const zshard::Guard& guard, std::size_t unit) {
  weights_.clear();
  float* scratch = weight_scratch_.data();
  for (std::size_t i = 0; i < counts_[unit].size(); ++i) {
    const zshard::ParameterId id = spec_.parameter_ids[unit][i];
    if (scratch_) {
      compute_->widen(guard.pointer<std::uint16_t>(id), scratch, counts_[unit][i]);
      weights_.push_back(scratch);
      scratch += counts_[unit][i];
    } else {
      weights_.push_back(guard.pointer<float>(id));
    }
  }
  return weights_;
}

std::span<float* const> FloatViews::gradients(const zshard::Guard& guard, std::size_t unit) {
  gradients_.clear();
  float* scratch = gradient_scratch_.data();
  for (std::size_t i = 0; i < counts_[unit].size(); ++i) {
    if (scratch_) {
      gradients_.push_back(scratch);
      scratch += counts_[unit][i];
    } else {
      gradients_.push_back(guard.gradient<float>(spec_.parameter_ids[unit][i]));
    }
  }
  return gradients_;
}

void FloatViews::store(const zshard::Guard& guard, std::size_t unit, zshard::GradientMode mode) {
  if (!scratch_) return;
  const bool add_to = mode == zshard::GradientMode::accumulate;
  const float* scratch = gradient_scratch_.data();
  for (std::size_t i = 0; i < counts_[unit].size(); ++i) {
    auto* gradient = guard.gradient<std::uint16_t>(spec_.parameter_ids[unit][i]);
    if (add_to) {
      compute_->narrow_add(scratch, gradient, counts_[unit][i]);
    } else {
      compute_->narrow(scratch, gradient, counts_[unit][i]);
    }
    scratch += counts_[unit][i];
  }
}

}  // namespace gpt
