#include "runtime/base/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>
#include <thread>

namespace zshard::base {
namespace {

// The kernel wants the address of the plain word inside the atomic.
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                std::int64_t microseconds) {
  timespec limit{static_cast<time_t>(microseconds / 1'000'000),
                 static_cast<long>(microseconds % 1'000'000 * 1000)};
  // Not the private form: the word may lie in memory that two processes share.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Counter::spin(std::uint32_t target) const {
  if (reached(target)) return true;
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(kSpinMicroseconds);
  do {
    for (int i = 0; i < 4; ++i) {
      if (reached(target)) return true;
      std::this_thread::yield();
    }
  } while (std::chrono::steady_clock::now() < end);
  return reached(target);
}

}  // namespace zshard::base
