#include "optimizers/adam_update.hpp"

#include "optimizers/checks.hpp"

namespace zshard::optimizers {

Constants adam_constants(const Resolved& hyper, std::int64_t step) {
  const auto t = static_cast<double>(step);
  Constants constants;
  const auto set = [&](AdamConstant which, double value) {
    constants.value[which] = static_cast<float>(value);
  };
  set(kBeta1, hyper.beta1);
  set(kOneMinusBeta1, 1.0 - hyper.beta1);
  set(kBeta2, hyper.beta2);
  set(kOneMinusBeta2, 1.0 - hyper.beta2);
  set(kEps, hyper.eps);
  set(kRate, hyper.lr / (1.0 - std::pow(hyper.beta1, t)));
  set(kRoot, 1.0 / std::sqrt(1.0 - std::pow(hyper.beta2, t)));
  return constants;
}

void check_adam(std::string_view rule, const Resolved& hyper) {
  check_size(rule, "lr", hyper.lr);
  check_fraction(rule, "beta1", hyper.beta1);
  check_fraction(rule, "beta2", hyper.beta2);
  check_size(rule, "eps", hyper.eps);
  check_size(rule, "weight_decay", hyper.weight_decay);
  check_rate(rule, hyper.lr, hyper.lr / (1.0 - hyper.beta1));  // the first step's, the largest
}

}  // namespace zshard::optimizers
