// For intervals that are fixed at construction and stamps that never decrease: which stamp was put
// last on anything that overlaps an interval. Logarithmic, and without allocation after
// construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zshard::engine {

class LatestCover {
 public:
  LatestCover() = default;
  /// Half-open intervals [first, second), one an index; empty ones overlap nothing.
  explicit LatestCover(const std::vector<std::pair<std::int64_t, std::int64_t>>& intervals);

  /// Puts a stamp on an interval. Not smaller than any stamp before it.
  void stamp(std::size_t interval, std::uint64_t stamp);
  /// The last stamp of an interval that overlaps this one, itself included; 0: none.
  [[nodiscard]] std::uint64_t latest(std::size_t interval) const;

 private:
  // Elementary pieces between neighbouring bounds are the leaves of a tree: leaf i is node
  // leaves_ + i, node k's children are 2k and 2k + 1.
  std::size_t leaves_ = 0;
  std::vector<std::pair<std::size_t, std::size_t>> pieces_;  // per interval: leaves [first, second)
  std::vector<std::uint64_t> whole_;  // per node: the latest stamp on all of it
  std::vector<std::uint64_t> any_;    // per node: the latest stamp on it or on a part of it
};

}  // namespace zshard::engine
