// Stochastic gradient descent in the form of torch.optim.SGD: the momentum buffer holds gradients
// without the learning rate, weight decay is an L2 term of the gradient, no dampening.
#include "optimizers/checks.hpp"
#include "optimizers/rules.hpp"
#include "optimizers/sgd_update.hpp"
#include "optimizers/update_loop.hpp"
#include "zshard/error.hpp"

namespace zshard::optimizers {
namespace {

template <Momentum kind>
ZSHARD_INLINE void sgd(const Elements& elements, const Constants& constants) {
  constexpr int kSlots = kind == Momentum::none ? 0 : 1;
  if (constants.value[kSgdDecay] != 0.0f) {
    update_loop<kSlots>(elements, SgdElement<kind, true>(constants, elements.factor));
  } else {
    update_loop<kSlots>(elements, SgdElement<kind, false>(constants, elements.factor));
  }
}

ZSHARD_CLONES void plain_pass(const Elements& elements, const Constants& constants, std::int64_t) {
  sgd<Momentum::none>(elements, constants);
}

ZSHARD_CLONES void heavy_ball_pass(const Elements& elements, const Constants& constants,
                                   std::int64_t) {
  sgd<Momentum::heavy_ball>(elements, constants);
}

ZSHARD_CLONES void nesterov_pass(const Elements& elements, const Constants& constants,
                                 std::int64_t) {
  sgd<Momentum::nesterov>(elements, constants);
}

/// The configuration decides for good whether there is a buffer, since memory is planned from it.
/// Momentum may then vary between groups and steps; where it is 0 the buffer still follows the
/// gradient.
class SgdRule final : public Rule {
 public:
  explicit SgdRule(const SGD& config) : config_(config) { validate(defaults()); }

  [[nodiscard]] std::string name() const override { return "SGD"; }
  [[nodiscard]] std::string variant() const override { return config_.nesterov ? "nesterov" : ""; }
  [[nodiscard]] std::span<const StateSlot> slots() const override {
    return has_buffer() ? std::span<const StateSlot>(kSlots) : std::span<const StateSlot>();
  }
  [[nodiscard]] Resolved defaults() const override {
    return {.lr = config_.lr, .weight_decay = config_.weight_decay, .momentum = config_.momentum};
  }
  [[nodiscard]] Constants constants(const Resolved& hyper, std::int64_t step) const override {
    check_step(name(), step);
    Constants constants;
    constants.value[kLr] = static_cast<float>(hyper.lr);
    constants.value[kMomentum] = static_cast<float>(hyper.momentum);
    constants.value[kSgdDecay] = static_cast<float>(hyper.weight_decay);
    return constants;
  }
  [[nodiscard]] std::span<const Pass> passes() const override {
    if (!has_buffer()) return kPlain;
    return config_.nesterov ? kNesterov : kHeavyBall;
  }
  [[nodiscard]] std::span<const DevicePass> device_passes() const override {
    if (!has_buffer()) return kDevicePlain;
    return config_.nesterov ? kDeviceNesterov : kDeviceHeavyBall;
  }
  void validate(const Resolved& hyper) const override {
    check_size(name(), "lr", hyper.lr);
    check_size(name(), "weight_decay", hyper.weight_decay);
    check_fraction(name(), "momentum", hyper.momentum);
    if (has_buffer()) return;
    if (config_.nesterov) {
      throw UsageError(
          "SGD: nesterov = true with momentum = 0 has no momentum to look ahead by. Set "
          "SGD::momentum to a value in (0, 1), or nesterov to false.");
    }
    if (hyper.momentum != 0.0) {
      reject(name(), "momentum", hyper.momentum,
             "0 where SGD::momentum is 0, since no momentum_buffer was planned; give SGD::momentum "
             "a value in (0, 1) and override that");
    }
  }

 private:
  static constexpr StateSlot kSlots[] = {{"momentum_buffer"}};
  static constexpr Pass kPlain[] = {plain_pass};
  static constexpr Pass kHeavyBall[] = {heavy_ball_pass};
  static constexpr Pass kNesterov[] = {nesterov_pass};
  static constexpr DevicePass kDevicePlain[] = {DevicePass::sgd};
  static constexpr DevicePass kDeviceHeavyBall[] = {DevicePass::sgd_heavy_ball};
  static constexpr DevicePass kDeviceNesterov[] = {DevicePass::sgd_nesterov};

  [[nodiscard]] bool has_buffer() const { return config_.momentum != 0.0; }

  SGD config_;
};

}  // namespace

std::shared_ptr<const Rule> make_sgd(const SGD& config) {
  return std::make_shared<SgdRule>(config);
}

}  // namespace zshard::optimizers
