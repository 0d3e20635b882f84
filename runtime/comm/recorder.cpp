#include "runtime/comm/recorder.hpp"

#include <algorithm>
#include <chrono>

namespace zshard::comm {
namespace {

std::int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

void Recorder::issue(std::uint64_t sequence) {
  issued_[sequence % issued_.size()].store(now(), std::memory_order_relaxed);
}

void Recorder::arrive(Lane lane, std::uint64_t sequence) {
  Ring& ring = rings_[static_cast<std::size_t>(lane)];
  ring.newest = (ring.newest + 1) % kKept;
  Entry& entry = ring.entries[ring.newest];
  entry.stamp.store(0, std::memory_order_relaxed);
  entry.arrived.store(now(), std::memory_order_relaxed);
  entry.met.store(0, std::memory_order_relaxed);
  entry.done.store(0, std::memory_order_relaxed);
  entry.stamp.store(sequence + 1, std::memory_order_release);
}

void Recorder::meet(Lane lane) {
  Ring& ring = rings_[static_cast<std::size_t>(lane)];
  ring.entries[ring.newest].met.store(now(), std::memory_order_relaxed);
}

void Recorder::finish(Lane lane) {
  Ring& ring = rings_[static_cast<std::size_t>(lane)];
  ring.entries[ring.newest].done.store(now(), std::memory_order_relaxed);
}

std::vector<Recorder::Times> Recorder::kept() const {
  std::vector<Times> all;
  for (std::size_t lane = 0; lane < rings_.size(); ++lane) {
    for (const Entry& entry : rings_[lane].entries) {
      const std::uint64_t stamp = entry.stamp.load(std::memory_order_acquire);
      if (stamp == 0) continue;
      all.push_back({stamp - 1, static_cast<Lane>(lane), issued(stamp - 1),
                     entry.arrived.load(std::memory_order_relaxed),
                     entry.met.load(std::memory_order_relaxed),
                     entry.done.load(std::memory_order_relaxed)});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Times& a, const Times& b) { return a.sequence < b.sequence; });
  return all;
}

}  // namespace zshard::comm
