#include "runtime/base/environment.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace zshard::base {

const std::vector<EnvironmentVariable>& environment_registry() {
  static const std::vector<EnvironmentVariable> registry = {
      {"ZSHARD_LOG", false,
       "log levels: one for all topics, then single ones, as in `info,comm=debug`"},
      {"ZSHARD_TEST_", true, "switches of the tests"},
      {"ZSHARD_SPEC_DIR", false, "directory of the executable specification, for the tests"},
      {"ZSHARD_DATA_DIR", false, "directory of training texts, for examples and tests"},
      {"ZSHARD_FIXTURES_DIR", false, "directory of model files, for the tests"},
      {"ZSHARD_NVME_DIR", false, "directory for the nvme tier of examples/run.sh"},
      {"ZSHARD_EXHAUSTIVE", false, "1: the tests run their long variants"},
      {"ZSHARD_SEED", false, "seed of the randomised tests, a whole number"},
  };
  return registry;
}

bool registered_variable(std::string_view name) {
  const auto& registry = environment_registry();
  return std::any_of(registry.begin(), registry.end(), [&](const EnvironmentVariable& known) {
    return known.prefix ? name.substr(0, known.name.size()) == known.name : name == known.name;
  });
}

std::optional<std::string> environment_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

std::vector<std::pair<std::string, std::string>> environment_variables(std::string_view prefix) {
  std::vector<std::pair<std::string, std::string>> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    if (name.substr(0, prefix.size()) != prefix) continue;
    found.emplace_back(name, text.substr(equals + 1));
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace zshard::base
