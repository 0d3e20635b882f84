// One row of the table: a quantity of zshard, the limit that is measured beside it, and what their
// ratio has to reach. Rows are Google Benchmark cases of one iteration a repetition; the medians of
// its counters are the figures. Absolute figures mean nothing on a shared machine.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace bench {

/// One repetition, both taken within milliseconds to seconds of each other.
struct Sample {
  double ours = 0.0;            ///< in the row's unit
  std::optional<double> limit;  ///< in the same unit; unset: nothing to compare with
  double seconds = 0.0;         ///< that `ours` took
};

struct Row {
  std::string name;
  std::string unit;
  std::string limit;   ///< what the limit is, in words
  std::string target;  ///< "ratio >= 0.90", "ratio <= 1.25", "ours <= 0.2"; "" none
  std::string peers;   ///< what others reach, with the source; "" unknown
  std::function<Sample()> measure;
  int repetitions = 0;  ///< 0: repetitions()
};

/// Fewer repetitions and smaller sizes: shows that everything runs, not how fast.
bool quick();
/// How often a row is measured where it does not say it.
int repetitions();

/// Reads --quick; everything else is Google Benchmark's. Before rows are added.
void initialize(int argc, char** argv);
void add(Row row);
/// Runs all rows, prints a line for each, and writes JSON where --benchmark_out says. Returns the
/// exit code: 1 if a row could not be measured.
int run();

class Stopwatch {
 public:
  Stopwatch() : start_(std::chrono::steady_clock::now()) {}
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_;
};

/// Seconds that fn() takes.
template <class Function>
double timed(Function&& fn) {
  const Stopwatch watch;
  fn();
  return watch.seconds();
}

}  // namespace bench
