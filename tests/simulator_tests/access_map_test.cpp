#include "tests/simulator/access_map.hpp"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <set>
#include <utility>

namespace simulator_tests {
namespace {

using simulator::AccessMap;
using simulator::Clock;
using simulator::Conflict;
using simulator::Operation;
using simulator::OperationPointer;

constexpr std::size_t kBytes = 64;
constexpr std::size_t kStreams = 4;

/// The same, byte by byte, with nothing pruned but what a write ends.
class Bytes {
 public:
  std::set<std::pair<const Operation*, bool>> access(std::size_t begin, std::size_t end, bool write,
                                                     const OperationPointer& operation,
                                                     const Clock& clock) {
    std::set<std::pair<const Operation*, bool>> found;
    const auto unordered = [&](const OperationPointer& o) { return clock.at(o->id) < o->count; };
    for (std::size_t i = begin; i < end; ++i) {
      Byte& byte = bytes_[i];
      if (byte.writer && unordered(byte.writer)) found.emplace(byte.writer.get(), true);
      if (write) {
        for (const OperationPointer& reader : byte.readers) {
          if (unordered(reader)) found.emplace(reader.get(), false);
        }
        byte = {operation, {}};
      } else {
        byte.readers.push_back(operation);
      }
    }
    return found;
  }
  void forget(std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) bytes_[i] = {};
  }

 private:
  struct Byte {
    OperationPointer writer;
    std::vector<OperationPointer> readers;
  };
  std::array<Byte, kBytes> bytes_;
};

TEST(AccessMap, FindsWhatACheckOfEveryByteFinds) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return random() % n; };
    AccessMap map;
    Bytes bytes;
    std::array<Clock, kStreams> clocks;
    std::vector<OperationPointer> kept;  // so that addresses stay unique
    for (int step = 0; step < 200; ++step) {
      const std::size_t stream = below(kStreams);
      if (below(3) == 0) clocks[stream].join(clocks[below(kStreams)]);
      const std::size_t begin = below(kBytes);
      const std::size_t end = begin + below(kBytes - begin + 1);
      if (below(20) == 0) {
        map.forget(begin, end);
        bytes.forget(begin, end);
        continue;
      }
      auto operation = std::make_shared<Operation>();
      operation->id = stream;
      operation->count = clocks[stream].at(stream) + 1;
      clocks[stream].set(stream, operation->count);
      kept.push_back(operation);
      const bool write = below(2) == 0;
      std::vector<Conflict> conflicts;
      map.access(begin, end, write, operation, clocks[stream], conflicts);
      const auto expected = bytes.access(begin, end, write, operation, clocks[stream]);
      std::set<std::pair<const Operation*, bool>> found;
      for (const Conflict& conflict : conflicts) {
        EXPECT_TRUE(found.emplace(conflict.first.get(), conflict.first_writes).second) << "twice";
        EXPECT_EQ(conflict.second, operation);
        EXPECT_LE(begin, conflict.begin);
        EXPECT_LT(conflict.begin, conflict.end);
        EXPECT_LE(conflict.end, end);
      }
      // A reader may be left out for a later one that comes after it: the verdict is the same.
      for (const auto& one : found) ASSERT_TRUE(expected.count(one)) << "seed " << seed;
      ASSERT_EQ(found.empty(), expected.empty()) << "seed " << seed << " step " << step;
    }
  }
}

TEST(AccessMap, StaysSmall) {
  AccessMap map;
  Clock clock;
  std::vector<Conflict> conflicts;
  for (std::uint64_t i = 1; i <= 1000; ++i) {
    auto operation = std::make_shared<Operation>();
    operation->count = i;
    clock.set(0, i);
    map.access(i % 50, i % 50 + 100, i % 3 == 0, operation, clock, conflicts);
  }
  EXPECT_TRUE(conflicts.empty());
  EXPECT_LE(map.intervals(), 150U);
  auto last = std::make_shared<Operation>();
  last->count = 1001;
  clock.set(0, 1001);
  map.access(0, 1000, true, last, clock, conflicts);
  EXPECT_EQ(map.intervals(), 1U);
}

}  // namespace
}  // namespace simulator_tests
