// AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2, in the form of
// torch.optim.AdamW: eps outside the root, decay by the current learning rate before the update.
#include "optimizers/adam_update.hpp"
#include "optimizers/checks.hpp"
#include "optimizers/rules.hpp"
#include "optimizers/update_loop.hpp"

namespace zshard::optimizers {
namespace {

ZSHARD_CLONES void adamw_pass(const Elements& elements, const Constants& constants, std::int64_t) {
  update_loop<2>(elements, AdamWElement(constants, elements.factor));
}

class AdamWRule final : public Rule {
 public:
  explicit AdamWRule(const AdamW& config) : config_(config) { validate(defaults()); }

  [[nodiscard]] std::string name() const override { return "AdamW"; }
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
    constants.value[kDecay] = static_cast<float>(keep(hyper));
    return constants;
  }
  [[nodiscard]] std::span<const Pass> passes() const override { return kPasses; }
  [[nodiscard]] std::span<const DevicePass> device_passes() const override { return kDevicePasses; }
  void validate(const Resolved& hyper) const override {
    check_adam(name(), hyper);
    check_rate(name(), hyper.lr, keep(hyper));
  }

 private:
  static constexpr Pass kPasses[] = {adamw_pass};
  static constexpr DevicePass kDevicePasses[] = {DevicePass::adamw};

  /// What decay leaves of a parameter.
  static double keep(const Resolved& hyper) { return 1.0 - hyper.lr * hyper.weight_decay; }

  AdamW config_;
};

}  // namespace

std::shared_ptr<const Rule> make_adamw(const AdamW& config) {
  return std::make_shared<AdamWRule>(config);
}

}  // namespace zshard::optimizers
