#include "offload/io/lock_limit.hpp"

#include <fmt/format.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "offload/io/uring_driver.hpp"

namespace zshard::offload {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

std::int64_t rounded(std::int64_t bytes, std::int64_t unit) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(bytes, unit - 1, &sum) ? kMost : sum / unit * unit;
}

/// The two areas that a ring shares with the system: requests; heads, completions and indices.
std::int64_t ring_bytes(int depth) {
  constexpr std::int64_t kRequest = 64;
  constexpr std::int64_t kHeads = 320;
  constexpr std::int64_t kCompletions = 2 * 16;  // two a request
  constexpr std::int64_t kIndex = 4;
  const auto entries =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(depth) + kOwnEntries));
  return rounded(entries * kRequest, kPage) +
         rounded(kHeads + entries * (kCompletions + kIndex), kPage);
}

/// The system asks for the capability in its own user namespace: that of a container's root does
/// not count. In doubt true, since registration then shows it.
bool may_lock_memory() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (syscall(SYS_capget, &header, data) != 0) return true;
  if ((data[CAP_IPC_LOCK / 32].effective >> (CAP_IPC_LOCK % 32) & 1) == 0) return false;
  char name[64] = {};
  const ssize_t length = readlink("/proc/self/ns/user", name, sizeof name - 1);
  constexpr char kFirst[] = "user:[4026531837]";  // PROC_USER_INIT_INO, fixed since Linux 3.8
  return length < 0 || std::string(name) == kFirst;
}

/// What io_uring has pinned for this process. VmLck, which mlock() counts, is compared apart.
std::int64_t pinned_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmPin:", 0) == 0) return std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
  }
  return 0;
}

}  // namespace

std::int64_t locked_bytes(int depth, std::int64_t buffers) {
  std::int64_t sum = 0;
  return __builtin_add_overflow(ring_bytes(depth), rounded(buffers, kHugePage), &sum) ? kMost : sum;
}

std::string LockLimit::text() const {
  return fmt::format(
      "the limit of locked memory (RLIMIT_MEMLOCK) is {} bytes, of which this process has {}; "
      "raise "
      "it (ulimit -l)",
      bytes, used);
}

LockLimit lock_limit() {
  LockLimit result;
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    result.bytes =
        static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, static_cast<rlim_t>(kMost)));
  }
  result.exempt = may_lock_memory();
  result.used = pinned_bytes();
  return result;
}

}  // namespace zshard::offload
