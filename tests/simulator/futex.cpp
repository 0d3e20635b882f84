#include "tests/simulator/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace simulator {

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t microseconds,
              Sleepers sleepers) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(microseconds / 1'000'000);
  limit.tv_nsec = static_cast<long>(microseconds % 1'000'000 * 1000);
  syscall(SYS_futex, &word, sleepers == Sleepers::here ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT, seen,
          &limit, nullptr, 0);
}

void wake_all(const std::atomic<std::uint32_t>& word, Sleepers sleepers) {
  syscall(SYS_futex, &word, sleepers == Sleepers::here ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, INT_MAX,
          nullptr, nullptr, 0);
}

}  // namespace simulator
