#include "runtime/engine/latest_cover.hpp"

#include <algorithm>
#include <bit>

namespace zshard::engine {

LatestCover::LatestCover(const std::vector<std::pair<std::int64_t, std::int64_t>>& intervals) {
  std::vector<std::int64_t> bounds;
  for (const auto& [lo, hi] : intervals) {
    if (lo < hi) {
      bounds.push_back(lo);
      bounds.push_back(hi);
    }
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  const auto leaf = [&bounds](std::int64_t bound) {
    return static_cast<std::size_t>(std::lower_bound(bounds.begin(), bounds.end(), bound) -
                                    bounds.begin());
  };
  pieces_.reserve(intervals.size());
  for (const auto& [lo, hi] : intervals) {
    pieces_.push_back(lo < hi ? std::pair(leaf(lo), leaf(hi))
                              : std::pair<std::size_t, std::size_t>());
  }
  leaves_ = std::bit_ceil(std::max<std::size_t>(bounds.size(), 1));
  whole_.assign(2 * leaves_, 0);
  any_.assign(2 * leaves_, 0);
}

void LatestCover::stamp(std::size_t interval, std::uint64_t stamp) {
  const auto [first, second] = pieces_[interval];
  const auto cover = [this, stamp](std::size_t node) {
    whole_[node] = stamp;
    for (; node > 0; node /= 2) {
      any_[node] = stamp;  // stamps never decrease
    }
  };
  for (std::size_t lo = first + leaves_, hi = second + leaves_; lo < hi; lo /= 2, hi /= 2) {
    if (lo % 2 != 0) {
      cover(lo++);
    }
    if (hi % 2 != 0) {
      cover(--hi);
    }
  }
}

std::uint64_t LatestCover::latest(std::size_t interval) const {
  const auto [first, second] = pieces_[interval];
  std::uint64_t found = 0;
  const auto look = [this, &found](std::size_t node) {
    found = std::max(found, any_[node]);
    for (node /= 2; node > 0; node /= 2) {
      found = std::max(found, whole_[node]);
    }
  };
  for (std::size_t lo = first + leaves_, hi = second + leaves_; lo < hi; lo /= 2, hi /= 2) {
    if (lo % 2 != 0) {
      look(lo++);
    }
    if (hi % 2 != 0) {
      look(--hi);
    }
  }
  return found;
}

}  // namespace zshard::engine
