// Checks of hyper-parameters, shared by the rules. All throw UsageError: which rule and field, the
// value, what is allowed, and where to mend it.
#pragma once

#include <cstdint>
#include <string_view>

namespace zshard::optimizers {

/// A check that failed: "AdamW: lr = -0.1 is out of range; ...". `allowed` completes "must be".
[[noreturn]] void reject(std::string_view rule, std::string_view field, double value,
                         std::string_view allowed);

/// 0 <= value <= the largest fp32, which is what the kernels compute in.
void check_size(std::string_view rule, std::string_view field, double value);

/// 0 <= value < 1.
void check_fraction(std::string_view rule, std::string_view field, double value);

/// `constant` is what the kernel gets of the learning rate: finite as fp32. A rate that overflows
/// would turn parameters whose gradient is 0 into NaN.
void check_rate(std::string_view rule, double lr, double constant);

/// step counts from 1.
void check_step(std::string_view rule, std::int64_t step);

}  // namespace zshard::optimizers
