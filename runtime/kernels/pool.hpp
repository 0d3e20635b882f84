// Threads that share one element loop. Loops give the same bits however a range is cut, so the
// number of threads changes speed only.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/base/futex.hpp"

namespace zshard::kernels {

class Pool {
 public:
  /// threads: in all, the caller's included; at least 1. Throws std::system_error if they cannot
  /// start.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Calls body(lo, hi) for pieces that cover [0, count), each but the last a multiple of `grain`,
  /// and returns when all are done. The caller works too. Runs whole on the caller where the range
  /// is short or another thread uses the pool now. body must not throw.
  template <class Body>
  void split(std::int64_t count, std::int64_t grain, Body&& body);

  [[nodiscard]] int threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  // Shorter ranges cost more to hand out than to do.
  static constexpr std::int64_t kShortest = 1 << 17;  // elements

  using Function = void (*)(void* body, std::int64_t lo, std::int64_t hi);
  void work();
  void stop();
  void run(Function function, void* body, std::int64_t count, std::int64_t piece);
  void take_pieces();

  std::mutex mutex_;  // one range at a time
  Function function_ = nullptr;
  void* body_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t piece_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::uint32_t round_ = 0;
  base::Counter started_;
  base::Counter finished_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

template <class Body>
void Pool::split(std::int64_t count, std::int64_t grain, Body&& body) {
  if (workers_.empty() || count < kShortest || !mutex_.try_lock()) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
  const std::int64_t pieces = 4 * threads();  // some threads start late
  const std::int64_t piece = ((count + pieces - 1) / pieces + grain - 1) / grain * grain;
  run([](void* object, std::int64_t lo,
         std::int64_t hi) { (*static_cast<std::remove_reference_t<Body>*>(object))(lo, hi); },
      &body, count, piece);
  mutex_.unlock();
}

/// Threads of a rank's element loops: `wanted`, or where that is 0 the machine's cores divided
/// among its ranks.
int kernel_threads(int wanted, int ranks_here);

}  // namespace zshard::kernels
