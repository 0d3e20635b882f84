// Adam: Kingma and Ba, Adam: A Method for Stochastic Optimization, algorithm 1, in the form of
// torch.optim.Adam: eps outside the root, weight decay as an L2 term of the gradient.
#include "optimizers/adam_update.hpp"
#include "optimizers/checks.hpp"
#include "optimizers/rules.hpp"
#include "optimizers/update_loop.hpp"

namespace zshard::optimizers {
namespace {

ZSHARD_CLONES void adam_pass(const Elements& elements, const Constants& constants, std::int64_t) {
  if (constants.value[kDecay] != 0.0f) {
    update_loop<2>(elements, AdamElement<true>(constants, elements.factor));
  } else {
    update_loop<2>(elements, AdamElement<false>(constants, elements.factor));
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
