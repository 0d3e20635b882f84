#include "zshard/sharded_optimizer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "zshard/error.hpp"

namespace zshard {

ShardedOptimizer::ShardedOptimizer(std::vector<FlatBuffer> buffers, const Optimizer& optimizer,
                                   const ProcessGroup& group, EngineOptions options)
    : buffers_(std::move(buffers)) {
  if (options.stage > Stage::optimizer) {
    throw UsageError(
        "ShardedOptimizer: stage " + std::string(to_string(options.stage)) +
        "; the loop owns parameters and gradients, so only stages 0 and 1 make sense. Use "
        "Engine for stages 2 and 3");
  }
  ModelSpec spec;
  for (const FlatBuffer& b : buffers_) {
    if (b.count < 0 || (b.count > 0 && (b.parameters == nullptr || b.gradients == nullptr))) {
      throw UsageError("ShardedOptimizer: buffer " + b.name +
                       " has a null pointer or a negative count");
    }
    UnitBuilder unit = spec.unit(b.name);
    parameters_.push_back(unit.parameter(b.name, {b.count}, {.decay = b.decay}));
    units_.push_back(unit.id());
  }
  engine_ = std::make_unique<Engine>(spec, optimizer, group, options);
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const FlatBuffer& b = buffers_[i];
    const auto bytes =
        std::as_writable_bytes(std::span(b.parameters, static_cast<std::size_t>(b.count)));
    group.broadcast(bytes, 0);
    engine_->write_parameter(
        b.name, std::span<const float>(b.parameters, static_cast<std::size_t>(b.count)));
  }
}

ShardedOptimizer::~ShardedOptimizer() = default;
ShardedOptimizer::ShardedOptimizer(ShardedOptimizer&&) noexcept = default;
ShardedOptimizer& ShardedOptimizer::operator=(ShardedOptimizer&&) noexcept = default;

StepReport ShardedOptimizer::step(const StepOptions& options) {
  for ([[maybe_unused]] const MicroStep micro : engine_->micro_steps(1)) {
    for (std::size_t i = buffers_.size(); i-- > 0;) {
      Guard guard = engine_->backward(units_[i]);
      if (buffers_[i].count != 0) {
        std::memcpy(guard.gradient(parameters_[i]), buffers_[i].gradients,
                    static_cast<std::size_t>(buffers_[i].count) * sizeof(float));
      }
      guard.commit();
    }
  }
  const StepReport report = engine_->step(options);
  if (report.skipped) return report;
  // An evaluation pass gives the addresses outside a step; at stages 0 and 1 it has no collective.
  for ([[maybe_unused]] const MicroStep micro : engine_->evaluation_passes(1)) {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const Guard guard = engine_->forward(units_[i]);
      if (buffers_[i].count == 0) continue;
      std::memcpy(buffers_[i].parameters, guard.pointer(parameters_[i]),
                  static_cast<std::size_t>(buffers_[i].count) * sizeof(float));
    }
  }
  return report;
}

std::string ShardedOptimizer::copies() const {
  std::string text;
  for (const FlatBuffer& b : buffers_) {
    text += b.name + ": gradients are copied into the engine and parameters back, " +
            std::to_string(b.count * 4) +
            " bytes each a step, since peers cannot see the loop's memory\n";
  }
  return text;
}

}  // namespace zshard
