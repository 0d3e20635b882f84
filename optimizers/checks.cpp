#include "optimizers/checks.hpp"

#include <charconv>
#include <cmath>
#include <limits>
#include <string>

#include "zshard/error.hpp"

namespace zshard::optimizers {
namespace {

/// The shortest text that reads back as the same value.
std::string text(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return {buffer, end};
}

bool fits(double value) {
  return std::abs(value) <= std::numeric_limits<float>::max();
}

}  // namespace

void reject(std::string_view rule, std::string_view field, double value, std::string_view allowed) {
  throw UsageError(std::string(rule) + ": " + std::string(field) + " = " + text(value) +
                   " is out of range: it must be " + std::string(allowed) +
                   ". Change it in the optimizer, in ModelSpec::group, in StepOptions or in "
                   "StepOptions::groups, whichever set it last; lr includes "
                   "ParameterOptions::lr_scale.");
}

void check_size(std::string_view rule, std::string_view field, double value) {
  if (!(value >= 0.0 && fits(value))) {
    reject(rule, field, value, "at least 0 and finite in fp32 (up to 3.4e38)");
  }
}

void check_fraction(std::string_view rule, std::string_view field, double value) {
  if (!(value >= 0.0 && value < 1.0)) reject(rule, field, value, "at least 0 and less than 1");
}

void check_rate(std::string_view rule, double lr, double constant) {
  if (fits(constant)) return;
  reject(rule, "lr", lr,
         "small enough for fp32 after bias correction and weight decay; here it becomes " +
             text(constant));
}

void check_step(std::string_view rule, std::int64_t step) {
  if (step < 1) {
    throw UsageError(std::string(rule) + ": step = " + std::to_string(step) +
                     " is out of range: steps count from 1");
  }
}

}  // namespace zshard::optimizers
