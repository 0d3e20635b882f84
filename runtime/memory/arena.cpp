#include "runtime/memory/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "runtime/base/system_reason.hpp"
#include "zshard/error.hpp"

namespace zshard::memory {
namespace {

std::atomic<std::int64_t> in_process{0};
constexpr std::int64_t kPage = 4096;

}  // namespace

std::int64_t round_to_arena(std::int64_t bytes) {
  if (bytes > std::numeric_limits<std::int64_t>::max() - kArenaRounding) {
    return std::numeric_limits<std::int64_t>::max() / kArenaRounding * kArenaRounding;
  }
  return (bytes + kArenaRounding - 1) / kArenaRounding * kArenaRounding;
}

namespace {

[[noreturn]] void refuse(const std::string& what, std::int64_t bytes, const std::string& remedy) {
  throw OutOfMemory("cannot " + what + " an arena of " + std::to_string(bytes) +
                    " bytes: " + base::system_reason(errno) + ". " + remedy);
}

/// Where the reason itself names the limit, if it is one.
constexpr const char* kSmaller = "Shard over more ranks or lower the budgets";
constexpr const char* kRemedy =
    "Shard over more ranks, lower the budgets, or raise the limit (ulimit -v)";

/// `reserved` bytes of address space, aligned to huge pages; MAP_FAILED with errno.
void* reserve(std::int64_t reserved, int protection) {
  // mmap aligns to pages only: take one huge page more and give back both ends.
  const std::size_t length =
      static_cast<std::size_t>(reserved) + static_cast<std::size_t>(kArenaRounding);
  void* mapped =
      mmap(nullptr, length, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return mapped;
  auto* begin = static_cast<std::byte*>(mapped);
  const auto misfit = reinterpret_cast<std::uintptr_t>(begin) % kArenaRounding;
  const std::size_t head = misfit == 0 ? 0 : static_cast<std::size_t>(kArenaRounding) - misfit;
  if (head != 0) munmap(begin, head);
  std::byte* data = begin + head;
  const std::size_t tail = length - head - static_cast<std::size_t>(reserved);
  if (tail != 0) munmap(data + reserved, tail);
  return data;
}

void touch(std::byte* data, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += kPage) {
    *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
}

/// Maps the memfd; MAP_FAILED with errno.
std::byte* map_shared(int descriptor, std::int64_t reserved) {
  void* data = reserve(reserved, PROT_NONE);
  if (data == MAP_FAILED) return static_cast<std::byte*>(data);
  void* fixed = mmap(data, static_cast<std::size_t>(reserved), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED, descriptor, 0);
  if (fixed == MAP_FAILED) {
    const int error = errno;
    munmap(data, static_cast<std::size_t>(reserved));
    errno = error;
  }
  return static_cast<std::byte*>(fixed);
}

}  // namespace

std::shared_ptr<Arena> Arena::make(std::int64_t bytes) {
  if (bytes <= 0) return std::shared_ptr<Arena>(new Arena(nullptr, 0, 0));
  const std::int64_t reserved = round_to_arena(bytes);
  void* mapped = reserve(reserved, PROT_READ | PROT_WRITE);
  if (mapped == MAP_FAILED) refuse("map", bytes, kRemedy);
  auto* data = static_cast<std::byte*>(mapped);
  madvise(data, static_cast<std::size_t>(reserved),
          MADV_HUGEPAGE);  // an offer: refusal costs speed
  touch(data, bytes);
  in_process.fetch_add(reserved, std::memory_order_relaxed);
  return std::shared_ptr<Arena>(new Arena(data, bytes, reserved));
}

std::shared_ptr<Arena> Arena::make_shared(std::int64_t bytes) {
  const std::int64_t reserved = round_to_arena(bytes);
  base::Descriptor memory(memfd_create("zshard", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) {
    refuse("make a memfd for", bytes, kSmaller);
  }
  // Past this limit the kernel would send SIGXFSZ.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(reserved)) {
    errno = EFBIG;
    refuse("size the memfd of", bytes, kSmaller);
  }
  if (ftruncate(memory.get(), reserved) != 0) refuse("size the memfd of", bytes, kSmaller);
  // Reserved now: later a lack of memory would be a SIGBUS.
  int refused = 0;
  do {
    refused = fallocate(memory.get(), 0, 0, bytes);
  } while (refused != 0 && errno == EINTR);
  if (refused != 0)
    refuse("reserve the pages of", bytes, "Free memory, or raise the memory limit of the job");
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    refuse("seal the memfd of", bytes, kSmaller);
  }
  std::byte* data = map_shared(memory.get(), reserved);
  if (data == MAP_FAILED) refuse("map", bytes, kRemedy);
  touch(data, bytes);
  // Gives huge pages even where shared memory does not get them by itself (Linux 6.1 and later).
  // Only whole ones: collapsing the last would take memory that the plan does not have.
#ifdef MADV_COLLAPSE
  constexpr int kCollapse = MADV_COLLAPSE;
#else
  constexpr int kCollapse = 25;
#endif
  const std::int64_t whole = bytes / kArenaRounding * kArenaRounding;
  if (whole != 0) madvise(data, static_cast<std::size_t>(whole), kCollapse);
  in_process.fetch_add(reserved, std::memory_order_relaxed);
  std::shared_ptr<Arena> arena(new Arena(data, bytes, reserved));
  arena->descriptor_ = std::move(memory);
  return arena;
}

std::shared_ptr<Arena> Arena::map(base::Descriptor descriptor, std::int64_t bytes) {
  const std::int64_t reserved = round_to_arena(bytes);
  struct stat facts {};
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (bytes <= 0 || fstat(descriptor.get(), &facts) != 0 || facts.st_size != reserved ||
      seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw CommError("a peer passed something that is no sealed memory of " + std::to_string(bytes) +
                    " bytes");
  }
  std::byte* data = map_shared(descriptor.get(), reserved);
  if (data == MAP_FAILED) refuse("map a peer's memory,", bytes, kRemedy);
    // Faults on another process' pages are taken now, not in the middle of a step.
#ifdef MADV_POPULATE_READ
  madvise(data, static_cast<std::size_t>(bytes / kPage * kPage), MADV_POPULATE_READ);
#endif
  std::shared_ptr<Arena> arena(new Arena(data, bytes, reserved));
  arena->counted_ = false;
  return arena;
}

Arena::~Arena() {
  if (data_ == nullptr) return;
  munmap(data_, static_cast<std::size_t>(reserved_));
  if (counted_) in_process.fetch_sub(reserved_, std::memory_order_relaxed);
}

std::int64_t arena_bytes_in_process() {
  return in_process.load(std::memory_order_relaxed);
}

namespace {

/// The number in the first line of a file; -1 if it cannot be read or is none ("max").
std::int64_t number_in(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return -1;
  long long value = -1;
  if (std::fscanf(file, "%lld", &value) != 1) value = -1;
  std::fclose(file);
  return value;
}

/// What the memory limit of this process' control group, or of one above it, leaves; -1: no limit.
std::int64_t left_in_group() {
  std::FILE* file = std::fopen("/proc/self/cgroup", "re");
  if (file == nullptr) return -1;
  char line[4096];
  std::string group;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strncmp(line, "0::/", 4) == 0) group = line + 3;  // version 2
  }
  std::fclose(file);
  while (!group.empty() && (group.back() == '\n' || group.back() == '/')) group.pop_back();
  std::int64_t least = -1;
  while (true) {
    const std::string directory = "/sys/fs/cgroup" + group;
    const std::int64_t limit = number_in(directory + "/memory.max");
    const std::int64_t used = number_in(directory + "/memory.current");
    if (limit >= 0 && used >= 0) {
      const std::int64_t left = std::max<std::int64_t>(0, limit - used);
      least = least < 0 ? left : std::min(least, left);
    }
    if (group.empty()) return least;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

std::int64_t available_memory() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return -1;
  char line[256];
  long long kib = -1;
  while (kib < 0 && std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %lld kB", &kib) != 1) kib = -1;
  }
  std::fclose(file);
  const std::int64_t machine = kib < 0 ? -1 : static_cast<std::int64_t>(kib) * 1024;
  const std::int64_t group = left_in_group();
  return group < 0 || (machine >= 0 && machine < group) ? machine : group;
}

}  // namespace zshard::memory
