#include "optimizers/rule.hpp"

namespace zshard::optimizers {

Resolved merged(Resolved base, const HyperParameters& over) {
  base.lr = over.lr.value_or(base.lr);
  base.weight_decay = over.weight_decay.value_or(base.weight_decay);
  base.beta1 = over.beta1.value_or(base.beta1);
  base.beta2 = over.beta2.value_or(base.beta2);
  base.eps = over.eps.value_or(base.eps);
  base.momentum = over.momentum.value_or(base.momentum);
  return base;
}

}  // namespace zshard::optimizers
