// The rules that the public configurations stand for. Each maker throws UsageError for a
// configuration that makes no sense.
#pragma once

#include <memory>

#include "optimizers/rule.hpp"
#include "zshard/optimizer.hpp"

namespace zshard::optimizers {

std::shared_ptr<const Rule> make_adamw(const AdamW& config);
std::shared_ptr<const Rule> make_adam(const Adam& config);
std::shared_ptr<const Rule> make_sgd(const SGD& config);

}  // namespace zshard::optimizers
