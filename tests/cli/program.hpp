// Starts the tool, found beside this test's binary, with a time limit and no input.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/process/children.hpp"

namespace zshard::lab {

inline constexpr double kToolSeconds = 120;

inline std::string tool() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "zshard").string();
}

/// Standard output and standard error come together.
inline Ending run_tool(std::vector<std::string> arguments, const Variables& variables = {}) {
  arguments.insert(arguments.begin(), tool());
  Children children(kToolSeconds);
  return children.wait(children.start(arguments, variables));
}

/// The tool as $1 of a script of bash.
inline Ending run_script(const std::string& script) {
  Children children(kToolSeconds);
  return children.wait(children.start({"bash", "-c", script, "script", tool()}, {}));
}

/// A directory that goes with its owner.
class Directory {
 public:
  explicit Directory(const std::filesystem::path& below = std::filesystem::temp_directory_path()) {
    std::string pattern = (below / "zshard_test_cli_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no directory");
    path_ = pattern;
  }
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  [[nodiscard]] std::string path() const { return path_.string(); }
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(file(name), std::ios::binary) << content;
    return file(name);
  }

 private:
  std::filesystem::path path_;
};

/// A document that names everything the format has.
inline const char* const kFullSpec = R"({
  "dtype": "bf16",
  "hold": 2,
  "block_quantised": false,
  "groups": {"slow": {"lr": 1e-4, "beta1": 0.5}},
  "units": [
    {"name": "in", "parameters": [
      {"name": "table", "shape": [11, 8]},
      {"name": "base", "shape": [8, 8], "frozen": true, "dtype": "f16"}]},
    {"name": "mid", "parameters": [
      {"name": "w", "shape": [8, 24], "group": "slow", "lr_scale": 0.5},
      {"name": "b", "shape": [24], "decay": false, "dtype": "f32"},
      {"name": "s", "shape": [], "resident": true},
      {"name": "none", "shape": [0, 4]}]},
    {"name": "out", "parameters": [
      {"name": "head", "shape": [11, 8], "alias": "table"},
      {"name": "g", "shape": [8], "resident": true, "frozen": true}]}],
  "program": [["in", "forward"], ["mid", "forward"], ["out", "forward"], ["in", "forward"],
              ["in", "backward"], ["out", "backward"], ["mid", "recompute"], ["mid", "backward"],
              ["in", "backward"]]
})";

}  // namespace zshard::lab
