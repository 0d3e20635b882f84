// Environment variables: one way to read them, and the one registry of those that zshard knows.
// Reading is not safe beside setenv in another thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zshard::base {

/// A variable that is not an option's.
struct EnvironmentVariable {
  std::string name;
  bool prefix = false;  ///< every variable that starts with `name`
  std::string help;     ///< one line
};

/// All variables that zshard, its tests and its tools read, besides the options'
/// (OptionInfo::environment) and a launcher's.
const std::vector<EnvironmentVariable>& environment_registry();

/// True if the registry has the variable.
bool registered_variable(std::string_view name);

/// The variable's value; unset if it is not there.
std::optional<std::string> environment_variable(const std::string& name);

/// Name and value of every variable whose name starts with `prefix`, by name.
std::vector<std::pair<std::string, std::string>> environment_variables(std::string_view prefix);

}  // namespace zshard::base
