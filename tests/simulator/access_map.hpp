// Who wrote and who read each byte of a memory last, as intervals, and the check of a new access
// against them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/simulator/clock.hpp"

namespace simulator {

/// What a report says about an access, and its place in the order.
struct Operation {
  std::string name;
  std::string stream;
  std::size_t id = 0;          // of the stream, in clocks
  std::uint64_t count = 0;     // in clocks
  std::uint64_t position = 0;  // in the stream, from 1, for reports
};
using OperationPointer = std::shared_ptr<const Operation>;

struct Conflict {
  OperationPointer first;
  OperationPointer second;
  bool first_writes = false;
  bool second_writes = false;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

/// Calls may come from any thread.
class AccessMap {
 public:
  /// Notes that `operation`, which comes after `clock`, touches [begin, end). Appends what it is
  /// not ordered with: one conflict per earlier operation, with the first run of bytes.
  void access(std::uintptr_t begin, std::uintptr_t end, bool write,
              const OperationPointer& operation, const Clock& clock,
              std::vector<Conflict>& conflicts);
  /// Forgets the accesses of [begin, end): the memory was freed or is new.
  void forget(std::uintptr_t begin, std::uintptr_t end);
  [[nodiscard]] std::size_t intervals() const;

 private:
  struct Interval {
    std::uintptr_t end = 0;
    OperationPointer writer;
    std::vector<OperationPointer> readers;
  };
  using Intervals = std::map<std::uintptr_t, Interval>;

  void split(std::uintptr_t at);
  void write(std::uintptr_t begin, std::uintptr_t end, const OperationPointer& operation);
  void read(std::uintptr_t begin, std::uintptr_t end, const OperationPointer& operation,
            const Clock& clock);
  void merge(std::uintptr_t begin, std::uintptr_t end);

  mutable std::mutex mutex_;
  Intervals intervals_;
};

}  // namespace simulator
