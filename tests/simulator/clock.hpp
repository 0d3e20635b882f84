// A vector clock: for each stream (and each host thread that touches memory) how many of its
// operations are known to come before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulator {

class Clock {
 public:
  [[nodiscard]] std::uint64_t at(std::size_t id) const {
    return id < counts_.size() ? counts_[id] : 0;
  }
  void set(std::size_t id, std::uint64_t count) {
    if (id >= counts_.size()) counts_.resize(id + 1);
    counts_[id] = count;
  }
  void join(const Clock& other) {
    if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size());
    for (std::size_t i = 0; i < other.counts_.size(); ++i) {
      counts_[i] = std::max(counts_[i], other.counts_[i]);
    }
  }
  void clear() { counts_.clear(); }

 private:
  std::vector<std::uint64_t> counts_;
};

}  // namespace simulator
