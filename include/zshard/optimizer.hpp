// The optimizers that an engine can run. Formulas are those of current PyTorch; each operation
// rounds to fp32.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace zshard {

/// Adam with decoupled weight decay (Loshchilov and Hutter): p -= lr * wd * p first, then the Adam
/// update.
struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;  ///< added outside the root
  double weight_decay = 1e-2;
};

/// Adam (Kingma and Ba) with L2 regularisation through the moments.
struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
};

/// Stochastic gradient descent. With momentum the first buffer is the gradient; no dampening.
struct SGD {
  double lr = 1e-3;
  double momentum = 0.0;
  bool nesterov = false;
  double weight_decay = 0.0;
};

namespace optimizers {
class Rule;
}

/// Any optimizer, by value. Cheap to copy; immutable. Construction throws UsageError, naming the
/// field, for hyper-parameters that make no sense. Whether SGD has a momentum buffer is decided by
/// SGD::momentum; groups and steps may vary it only if it is not 0.
class Optimizer {
 public:
  Optimizer(const AdamW& config);  // NOLINT(google-explicit-constructor): an AdamW is an Optimizer
  Optimizer(const Adam& config);   // NOLINT(google-explicit-constructor)
  Optimizer(const SGD& config);    // NOLINT(google-explicit-constructor)

  [[nodiscard]] std::string name() const;
  /// Names of the state slots ("exp_avg", "exp_avg_sq", "momentum_buffer"), as Engine::read_state
  /// takes them.
  [[nodiscard]] std::vector<std::string> slots() const;
  [[nodiscard]] const optimizers::Rule& rule() const { return *rule_; }

 private:
  std::shared_ptr<const optimizers::Rule> rule_;
};

}  // namespace zshard
