// zshard, the tool. docs/cli.md describes it.
#include <string>
#include <vector>

#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"

int main(int argc, char** argv) {
  zshard::cli::prepare_streams();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(zshard::cli::run_tool(arguments));
}
