// What a rank's queues did last: a fixed ring of collectives and their times, kept for the report
// of a failure. Written by the queues' threads, read by any; allocates nothing after construction.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/comm/board.hpp"

namespace zshard::comm {

class Recorder {
 public:
  /// Of each lane, this many.
  static constexpr std::size_t kKept = 32;

  /// Nanoseconds of steady_clock, which all processes of a machine share; 0: not yet.
  struct Times {
    std::uint64_t sequence = 0;
    Lane lane = Lane::gather;
    std::int64_t issued = 0;
    std::int64_t arrived = 0;  // this rank came to it
    std::int64_t met = 0;      // every rank had come
    std::int64_t done = 0;     // every rank had finished
  };

  /// capacity: collectives that may be issued and not done.
  explicit Recorder(std::uint64_t capacity) : issued_(capacity) {}

  void issue(std::uint64_t sequence);
  void arrive(Lane lane, std::uint64_t sequence);
  void meet(Lane lane);
  void finish(Lane lane);
  /// The kept ones of both lanes by sequence number; a queue's thread may be writing the newest.
  [[nodiscard]] std::vector<Times> kept() const;
  /// When it was issued; 0 if that is not known any more.
  [[nodiscard]] std::int64_t issued(std::uint64_t sequence) const {
    return issued_[sequence % issued_.size()].load(std::memory_order_relaxed);
  }

 private:
  struct Entry {
    std::atomic<std::uint64_t> stamp{0};  // sequence + 1
    std::atomic<std::int64_t> arrived{0};
    std::atomic<std::int64_t> met{0};
    std::atomic<std::int64_t> done{0};
  };
  struct Ring {
    std::array<Entry, kKept> entries;
    std::size_t newest = 0;
  };
  std::array<Ring, kLanes> rings_;
  std::vector<std::atomic<std::int64_t>> issued_;
};

}  // namespace zshard::comm
