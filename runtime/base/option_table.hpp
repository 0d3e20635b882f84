// The one table behind every way to set, read, check and document an option. A new option is one
// row in option_table.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "zshard/options.hpp"

namespace zshard::base {

/// How a value of a DeepSpeed configuration becomes an option's text.
enum class DeepspeedValue : std::uint8_t {
  whole,       ///< a whole number, as it is
  elements,    ///< a number of fp32 elements: 4 bytes each
  tier,        ///< "none", "cpu", "nvme"
  nvme_path,   ///< a directory, where the device beside it is "nvme"
  dtype,       ///< "fp32", "fp16", "bf16" or "bfp16"
  loss_scale,  ///< a constant, where "enabled" beside it is true; 0 is dynamic scaling
};

/// A name of a DeepSpeed configuration that sets the option.
struct DeepspeedName {
  std::string path;  ///< "zero_optimization.stage"
  DeepspeedValue value = DeepspeedValue::whole;
};

/// One option.
struct OptionRow {
  OptionInfo info;
  std::vector<DeepspeedName> deepspeed;
  /// Checks and sets; UsageError with the range, and nothing changed, if the text is not allowed.
  std::function<void(EngineOptions&, std::string_view)> set;
  /// Text that `set` takes; "" for an unset value.
  std::function<std::string(const EngineOptions&)> get;
};

/// All rows, in document order.
const std::vector<OptionRow>& option_rows();

/// The row of that name. Throws UsageError with the nearest name if there is none.
const OptionRow& option_row(std::string_view name);

}  // namespace zshard::base
