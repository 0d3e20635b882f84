#include "zshard/optimizer.hpp"

#include "optimizers/rules.hpp"

namespace zshard {

Optimizer::Optimizer(const AdamW& config) : rule_(optimizers::make_adamw(config)) {}
Optimizer::Optimizer(const Adam& config) : rule_(optimizers::make_adam(config)) {}
Optimizer::Optimizer(const SGD& config) : rule_(optimizers::make_sgd(config)) {}

std::string Optimizer::name() const {
  return rule_->name();
}

std::vector<std::string> Optimizer::slots() const {
  std::vector<std::string> names;
  for (const optimizers::StateSlot& slot : rule_->slots()) names.emplace_back(slot.name);
  return names;
}

}  // namespace zshard
