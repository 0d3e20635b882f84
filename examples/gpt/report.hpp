// What the program prints and logs. All of these are collective where they take an engine.
#pragma once

#include <fstream>
#include <string>

#include "config.hpp"
#include "trainer.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// A table of planned bytes of a rank by category, a column a tier, and whether each rank has
/// allocated just that; one that has not gets a table of its own.
std::string memory_table(const zshard::Engine& engine, const zshard::ProcessGroup& group);

/// A table of planned bytes of one rank for stages 0 to 3, by category and tier; '*' marks the
/// stage in use.
std::string stage_table(const Config& config, int world);

/// One line each, "digest NAME 16-hex-digits": XXH3-64 of all parameters, then of each state slot,
/// in order of the parameters' names, as fp32 in the machine's byte order.
std::string digest_lines(Trainer& trainer, const Config& config);

/// The log of steps, one JSON object a line. Throws ConfigError if the file cannot be opened,
/// std::runtime_error if it cannot be written.
class StepLog {
 public:
  explicit StepLog(const std::string& path);
  void write(std::int64_t step, const StepResult& result, double tokens_per_second);

 private:
  std::string path_;
  std::ofstream file_;
};

/// Where the time of a rank's steps goes. Everything but the loop and the steps' own length is the
/// engine's account; parts overlap, so they may sum to more than the whole.
class TimeSplit {
 public:
  void add(double seconds, const zshard::StepReport& report);
  /// Means a step; empty before the first one.
  [[nodiscard]] std::string text() const;

 private:
  std::int64_t steps_ = 0;
  double seconds_ = 0.0;
  zshard::StepReport sums_;
};

/// The most memory that the engine's arenas on this rank, and that this process, have taken so far,
/// beside what was planned for them. `peak_bytes` is that of the last step's report; `own` are the
/// bytes of a rank's activations in main memory, `local_ranks` the ranks of this process.
std::string peak_lines(const zshard::Engine& engine, std::int64_t peak_bytes, double own,
                       int local_ranks);

/// Says how training goes: a line that is written over on a terminal, else a line now and then.
class Progress {
 public:
  explicit Progress(std::int64_t steps);
  void step(std::int64_t step, const StepResult& result, double tokens_per_second);
  void validation(std::int64_t step, double training_loss, double validation_loss);

 private:
  void clear() const;

  std::int64_t steps_;
  bool terminal_;
};

}  // namespace gpt
