// Ranks that measure something together: threads of this process, or this program started again W
// times with a launcher's variables.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "zshard/process_group.hpp"

namespace bench {

enum class Ranks { threads, processes };
std::string to_string(Ranks ranks);

/// Numbers of one repetition, on rank 0; what other ranks give is dropped.
using Emit = std::function<void(const std::vector<double>&)>;
using Arguments = std::vector<std::string>;
/// What every rank runs.
using Job = std::function<void(const zshard::ProcessGroup&, const Arguments&, const Emit&)>;

/// Names a job, so that a process can be told what to run. Before worker() and run_team().
void add_job(const std::string& name, Job job);

/// True if this process was started as a rank: it has run its job, and main returns *code.
bool worker(int argc, char** argv, int* code);

/// Runs a job on `world` ranks; the lines that rank 0 gave. Throws std::runtime_error if a rank
/// failed.
std::vector<std::vector<double>> run_team(Ranks ranks, int world, const std::string& job,
                                          const Arguments& arguments);

/// The repetitions of one job, measured together when the first is asked for, then handed out one
/// by one.
class Measured {
 public:
  using Source = std::function<std::vector<std::vector<double>>()>;
  explicit Measured(Source source) : source_(std::move(source)) {}
  const std::vector<double>& line(std::size_t index);

 private:
  Source source_;
  std::vector<std::vector<double>> lines_;
  bool done_ = false;
  std::string failure_;
};

}  // namespace bench
