#include "runtime/kernels/pool.hpp"

#include <sched.h>

#include <algorithm>

namespace zshard::kernels {

Pool::Pool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {
    stop();  // those that did start
    throw;
  }
}

Pool::~Pool() {
  stop();
}

void Pool::stop() {
  stop_.store(true);
  started_.add();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Function function, void* body, std::int64_t count, std::int64_t piece) {
  function_ = function;
  body_ = body;
  count_ = count;
  piece_ = piece;
  next_.store(0);
  ++round_;
  started_.add();
  take_pieces();
  // Every worker passes through every round, so none can come late into the next one's words.
  finished_.wait(round_ * static_cast<std::uint32_t>(workers_.size()), [] { return false; });
}

void Pool::take_pieces() {
  while (true) {
    const std::int64_t lo = next_.fetch_add(piece_);
    if (lo >= count_) return;
    function_(body_, lo, std::min(lo + piece_, count_));
  }
}

void Pool::work() {
  for (std::uint32_t round = 1;; ++round) {
    while (!started_.wait(round, [this] { return stop_.load(); })) {
      if (stop_.load()) return;
    }
    if (stop_.load()) return;
    take_pieces();
    finished_.add();
  }
}

int kernel_threads(int wanted, int ranks_here) {
  if (wanted > 0) return wanted;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // What this process may use, not what the machine has: containers and taskset count.
  const int usable = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::max(1, usable / std::max(1, ranks_here));
}

}  // namespace zshard::kernels
