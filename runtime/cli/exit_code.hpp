// What the tool's exit codes mean; docs/cli.md says the same to users.
#pragma once

namespace zshard::cli {

enum class ExitCode : int {
  fine = 0,
  no = 1,      // the command ran, and its answer is no: the plan does not fit
  usage = 2,   // arguments, files or options that cannot be served
  system = 3,  // files, devices, memory: what the system refused
};

}  // namespace zshard::cli
