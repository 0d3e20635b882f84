// Adam: Kingma and Ba, Adam: A Method for Stochastic Optimization, algorithm 1, in the form of
// torch.optim.Adam: eps outside the root, weight decay as an L2 term of the gradient.
#include "optimizers/adam_update.hpp"
#include "optimizers/checks.hpp"
#include "optimizers/rules.hpp"

namespace zshard::optimizers {
namespace {

template <bool decays>
ZSHARD_INLINE void adam_loop(const Elements& elements, const Constants& constants) {
  float* __restrict parameter = elements.parameter;
  float* __restrict exp_avg = elements.slots[kExpAvg];
  float* __restrict exp_avg_sq = elements.slots[kExpAvgSq];
  const float* __restrict gradient = elements.gradient;
  const std::int64_t count = elements.count;
  const AdamElement<decays> element(constants, elements.factor);
  for (std::int64_t i = 0; i < count; ++i) {
    parameter[i] = element(parameter[i], gradient[i], exp_avg[i], exp_avg_sq[i]);
  }
}

ZSHARD_CLONES void adam_pass(const Elements& elements, const Constants& constants, std::int64_t) {
  if (constants.value[kDecay] != 0.0f) {
    adam_loop<true>(elements, constants);
  } else {
    adam_loop<false>(elements, constants);
  }
}

class AdamRule final : public Rule {
 public:
  explicit AdamRule(const Adam& config) : config_(config) { validate(defaults()); }

  [[nodiscard]] std::string name() const override { return "Adam"; }
  [[nodiscard]] std::span<const StateSlot> slots() const override { return kAdamSlots; }
  [[nodiscard]] Resolved defaults() const override {
    return {.lr = config_.lr,
            .weight_decay = config_.weight_decay,
            .beta1 = config_.beta1,
            .beta2 = config_.beta2,
            .eps = config_.eps};
  }
  [[nodiscard]] Constants constants(const Resolved& hyper, std::int64_t step) const override {
    check_step(name(), step);
    Constants constants = adam_constants(hyper, step);
    constants.value[kDecay] = static_cast<float>(hyper.weight_decay);
    return constants;
  }
  [[nodiscard]] std::span<const Pass> passes() const override { return kPasses; }
  [[nodiscard]] std::span<const DevicePass> device_passes() const override { return kDevicePasses; }
  void validate(const Resolved& hyper) const override { check_adam(name(), hyper); }

 private:
  static constexpr Pass kPasses[] = {adam_pass};
  static constexpr DevicePass kDevicePasses[] = {DevicePass::adam};

  Adam config_;
};

}  // namespace

std::shared_ptr<const Rule> make_adam(const Adam& config) {
  return std::make_shared<AdamRule>(config);
}

}  // namespace zshard::optimizers
