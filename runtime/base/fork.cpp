#include "runtime/base/fork.hpp"

#include <pthread.h>

#include <atomic>
#include <string>

#include "zshard/error.hpp"

namespace zshard::base {
namespace {

std::atomic<std::uint32_t> generation{0};

}  // namespace

std::uint32_t fork_generation() noexcept {
  [[maybe_unused]] static const int watched =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return generation.load(std::memory_order_relaxed);
}

void ProcessMark::refuse(std::string_view what) {
  throw UsageError(std::string(what) +
                   " was used in a child of fork(): its threads and its place among the ranks stay "
                   "with the parent; make process groups and engines after the fork, or leave the "
                   "child by exec or _exit");
}

}  // namespace zshard::base
