// Memory that io_uring locks, and how much of it the system lets this user lock.
#pragma once

#include <cstdint>
#include <string>

namespace zshard::offload {

/// What a ring of `depth` requests and `buffers` bytes registered with it count against
/// RLIMIT_MEMLOCK at most: huge pages count as a whole. Saturates instead of overflowing.
std::int64_t locked_bytes(int depth, std::int64_t buffers);

struct LockLimit {
  std::int64_t bytes = -1;  // RLIMIT_MEMLOCK, soft; -1: unlimited
  bool exempt = false;      // CAP_IPC_LOCK, and not that of a user namespace: it does not count
  std::int64_t used = 0;    // registered by this process; of others' the system does not say

  [[nodiscard]] bool counts() const { return bytes >= 0 && !exempt; }
  [[nodiscard]] bool allows(std::int64_t more) const { return !counts() || more <= bytes - used; }
  /// "the limit of locked memory (RLIMIT_MEMLOCK) is 65536 bytes, of which this process has 0;
  /// raise it (ulimit -l)".
  [[nodiscard]] std::string text() const;
};

/// Of this thread, now.
LockLimit lock_limit();

}  // namespace zshard::offload
