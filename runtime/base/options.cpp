// Reads and writes options by name, through the table.
#include "zshard/options.hpp"

#include <utility>

#include "runtime/base/option_table.hpp"
#include "zshard/error.hpp"

namespace zshard {

const std::vector<OptionInfo>& option_table() {
  static const std::vector<OptionInfo> table = [] {
    std::vector<OptionInfo> infos;
    for (const base::OptionRow& row : base::option_rows()) infos.push_back(row.info);
    return infos;
  }();
  return table;
}

void set_option(EngineOptions& options, std::string_view key, std::string_view value) {
  base::option_row(key).set(options, value);
}

std::string get_option(const EngineOptions& options, std::string_view key) {
  return base::option_row(key).get(options);
}

void validate(const EngineOptions& options) {
  // What a value's own text may not set is out of range: one check for text and for code.
  EngineOptions scratch;
  for (const base::OptionRow& row : base::option_rows()) row.set(scratch, row.get(options));
  if (options.offload.parameters != Tier::device && options.stage != Stage::parameters) {
    throw UsageError(
        "option offload.parameters: " + std::string(to_string(options.offload.parameters)) +
        " needs stage = parameters (3); the stage is " + std::string(to_string(options.stage)) +
        ". Set offload.parameters = device or stage = 3.");
  }
}

}  // namespace zshard
