// Transfers take no memory: counts every allocation of the process.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/offload/support.hpp"

#ifndef ZSHARD_SANITIZER  // they bring their own operators

namespace {
std::atomic<std::int64_t> allocations{0};
}

// Not inlined: g++ 12 would report a mismatch of malloc and delete.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace zshard::offload::testing {
namespace {

class Allocations : public ::testing::TestWithParam<IoBackendKind> {};

TEST_P(Allocations, AreNotMadeByTransfers) {
  ZSHARD_NEED(GetParam());
  const Directory directory;
  const Pages pages(8 * kMiB);
  std::vector<std::uint64_t> words(static_cast<std::size_t>(verify_words(32 * kMiB)));
  StoreOptions wanted{.directories = {directory.path()},
                      .backend = GetParam(),
                      .block_bytes = 64 * 1024,
                      .bytes = 32 * kMiB,
                      .buffers = pages.bytes(),
                      .checksums = words};
  auto store = Store::make(wanted);
  const std::int64_t before = allocations.load();
  for (int i = 0; i < 100; ++i) {
    const std::int64_t offset = i % 4 * 8 * kMiB;
    const Ticket one = store->write(offset, pages.bytes().first(4 * kMiB));
    const Ticket two = store->read(offset + 4 * kMiB, pages.bytes().subspan(4 * kMiB));
    store->wait(two);
    store->wait(one);
  }
  store->settle();
  EXPECT_EQ(allocations.load(), before);
}

INSTANTIATE_TEST_SUITE_P(All, Allocations,
                         ::testing::Values(IoBackendKind::io_uring, IoBackendKind::posix),
                         [](const auto& one) { return name_of(one.param); });

}  // namespace
}  // namespace zshard::offload::testing

#endif
