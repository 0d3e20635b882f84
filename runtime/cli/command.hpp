// One command of the tool.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/cli/exit_code.hpp"

namespace zshard::cli {

class Command {
 public:
  virtual ~Command() = default;
  /// Adds the subcommand, which keeps pointers to this object, and returns it.
  virtual CLI::App* describe(CLI::App& tool) = 0;
  /// Runs it. `others` are the arguments that the description does not name. Errors are thrown.
  virtual ExitCode run(const std::vector<std::string>& others) = 0;
};

std::unique_ptr<Command> make_options_command();
std::unique_ptr<Command> make_info_command();
std::unique_ptr<Command> make_plan_command();
std::unique_ptr<Command> make_bench_io_command();

/// Names of all options of a command, with their dashes, for suggestions.
std::vector<std::string> names_of(const CLI::App& command);

/// Adds an option whose text is checked by us: CLI11 would take "" for 0 and 1e30 for the nearest
/// number.
CLI::Option* add_text(CLI::App& command, const std::string& name, const std::string& meta,
                      const std::string& help, std::function<void(const std::string&)> take);

/// Runs the tool with these arguments (the program's name left out); errors become messages and
/// exit codes.
ExitCode run_tool(std::vector<std::string> arguments);

}  // namespace zshard::cli
