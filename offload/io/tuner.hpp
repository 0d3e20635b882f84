// Measures what a directory's disk gives for a backend, block size and depth, around the page
// cache, and recommends a setting.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "zshard/types.hpp"

namespace zshard::offload {

struct Measurement {
  IoBackendKind backend = IoBackendKind::automatic;  // io_uring or posix
  std::int64_t block_bytes = 0;
  int depth = 0;
  int threads = 0;         // independent streams, as ranks are
  std::int64_t bytes = 0;  // moved in each pass, by all streams together
  double read = 0.0;       // bytes a second, of all streams together
  double write = 0.0;      // overwriting in place
  double mixed = 0.0;      // reads and writes beside each other, both counted
  std::string driver;      // "io_uring, registered buffers"
};

struct MeasureOptions {
  std::string directory;
  std::int64_t bytes = std::int64_t{1} << 30;  // moved in each pass; rounded up to whole blocks
  std::int64_t block_bytes = std::int64_t{1} << 20;
  int depth = 8;
  IoBackendKind backend = IoBackendKind::automatic;
  int threads = 1;
  int repeats = 2;  // the best pass counts
};

/// Writes a file of `bytes`, measures, and leaves nothing. Throws UsageError for numbers out of
/// range, a directory that cannot be used, where direct I/O is refused (the page cache would be
/// measured) and where a backend asked for by name cannot be had; IoError for what the disk
/// says, OutOfMemory.
Measurement measure(const MeasureOptions& options);

struct TuneOptions {
  std::string directory;
  std::int64_t bytes = std::int64_t{1} << 30;
  int threads = 1;
  int repeats = 2;
  /// After each setting: how many are done, of how many, and the last one. May be empty.
  std::function<void(int done, int all, const Measurement& last)> progress;
};

struct Tuning {
  std::vector<Measurement> table;  // in the order in which they were measured
  Measurement recommended;         // the least bytes in flight within 5% of the best
  std::string io_uring_refusal;    // why io_uring is not in the table; "" if it is
};

/// Measures a table of settings in one file. Throws as measure() does.
Tuning tune(const TuneOptions& options);

/// What a setting is ranked by: bytes a second over reading, writing and both.
double score(const Measurement& measurement);

}  // namespace zshard::offload
