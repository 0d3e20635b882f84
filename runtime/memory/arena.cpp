#include "runtime/memory/arena.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

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

std::shared_ptr<Arena> Arena::make(std::int64_t bytes) {
  if (bytes <= 0) return std::shared_ptr<Arena>(new Arena(nullptr, 0, 0));
  const std::int64_t reserved = round_to_arena(bytes);
  // mmap aligns to pages only: take one huge page more and give back both ends.
  const std::size_t length =
      static_cast<std::size_t>(reserved) + static_cast<std::size_t>(kArenaRounding);
  void* mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw OutOfMemory("cannot map an arena of " + std::to_string(bytes) +
                      " bytes: " + std::strerror(errno) +
                      ". Shard over more ranks, lower the budgets, or raise the limit (ulimit -v)");
  }
  auto* begin = static_cast<std::byte*>(mapped);
  const auto misfit = reinterpret_cast<std::uintptr_t>(begin) % kArenaRounding;
  const std::size_t head = misfit == 0 ? 0 : static_cast<std::size_t>(kArenaRounding) - misfit;
  if (head != 0) munmap(begin, head);
  std::byte* data = begin + head;
  const std::size_t tail = length - head - static_cast<std::size_t>(reserved);
  if (tail != 0) munmap(data + reserved, tail);
  madvise(data, static_cast<std::size_t>(reserved),
          MADV_HUGEPAGE);  // an offer: refusal costs speed
  for (std::int64_t at = 0; at < bytes; at += kPage) {
    *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
  in_process.fetch_add(reserved, std::memory_order_relaxed);
  return std::shared_ptr<Arena>(new Arena(data, bytes, reserved));
}

Arena::~Arena() {
  if (data_ == nullptr) return;
  munmap(data_, static_cast<std::size_t>(reserved_));
  in_process.fetch_sub(reserved_, std::memory_order_relaxed);
}

std::int64_t arena_bytes_in_process() {
  return in_process.load(std::memory_order_relaxed);
}

std::int64_t available_memory() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return -1;
  char line[256];
  long long kib = -1;
  while (kib < 0 && std::fgets(line, sizeof line, file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %lld kB", &kib) != 1) kib = -1;
  }
  std::fclose(file);
  return kib < 0 ? -1 : static_cast<std::int64_t>(kib) * 1024;
}

}  // namespace zshard::memory
