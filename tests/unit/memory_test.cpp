// Arenas, and the arithmetic of memory plans.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/descriptor.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/error.hpp"
#include "zshard/memory_plan.hpp"

#ifndef ZSHARD_SANITIZER
#include <sys/resource.h>
#include <sys/wait.h>
#endif

namespace zshard {
namespace {

using memory::Arena;
using memory::arena_bytes_in_process;
using memory::kArenaRounding;
using memory::round_to_arena;

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

TEST(Arena, IsZeroAlignedWritableAndGivenBack) {
  const std::int64_t before = arena_bytes_in_process();
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{4096}, kArenaRounding - 1,
                                   kArenaRounding, kArenaRounding + 1, 5 * kArenaRounding}) {
    {
      const auto arena = Arena::make(bytes);
      EXPECT_EQ(arena->bytes(), bytes);
      EXPECT_EQ(arena->reserved(), round_to_arena(bytes));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena->data()) % kArenaRounding, 0U);
      EXPECT_EQ(arena_bytes_in_process(), before + arena->reserved());
      for (std::int64_t at = 0; at < bytes; at += 511) {
        ASSERT_EQ(arena->data()[at], std::byte{0});
        arena->data()[at] = std::byte{7};
      }
      arena->data()[bytes - 1] = std::byte{9};
    }
    EXPECT_EQ(arena_bytes_in_process(), before);
  }
}

TEST(Arena, OfNothingIsNoMapping) {
  const std::int64_t before = arena_bytes_in_process();
  const auto arena = Arena::make(0);
  EXPECT_EQ(arena->data(), nullptr);
  EXPECT_EQ(arena->bytes(), 0);
  EXPECT_EQ(arena->reserved(), 0);
  EXPECT_EQ(arena_bytes_in_process(), before);
}

TEST(Arena, SizesThatNoSystemHasAreOutOfMemory) {
  const std::int64_t before = arena_bytes_in_process();
  for (const std::int64_t bytes :
       {std::int64_t{1} << 48, std::int64_t{1} << 62, kMost - 1, kMost}) {
    try {
      (void)Arena::make(bytes);
      ADD_FAILURE() << bytes;
    } catch (const OutOfMemory& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("Cannot allocate memory"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(arena_bytes_in_process(), before);
}

#ifndef ZSHARD_SANITIZER
TEST(Arena, ALimitOnAddressSpaceIsOutOfMemory) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const rlimit limit{std::uint64_t{1} << 30, std::uint64_t{1} << 30};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    try {
      (void)Arena::make(std::int64_t{2} << 30);
      _exit(3);
    } catch (const OutOfMemory& error) {
      _exit(std::string(error.what()).find("ulimit") == std::string::npos ? 4 : 0);
    } catch (...) {
      _exit(5);
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}
#endif

// -- memory that peers see --

/// What mapping it says; "" if it works.
std::string mapped(int descriptor, std::int64_t bytes) {
  try {
    (void)Arena::map(base::Descriptor(dup(descriptor)), bytes);
    return "";
  } catch (const CommError& error) {
    return error.what();
  }
}

TEST(Arena, SharedMemoryIsSeenByWhoMapsItsDescriptor) {
  const std::int64_t before = arena_bytes_in_process();
  {
    const auto mine = Arena::make_shared(3 * kArenaRounding / 2);
    const auto theirs = Arena::map(base::Descriptor(dup(mine->descriptor().get())), mine->bytes());
    ASSERT_NE(mine->data(), theirs->data());
    for (const auto at : {std::int64_t{0}, kArenaRounding, mine->bytes() - 1}) {
      EXPECT_EQ(theirs->data()[at], std::byte{0});
      mine->data()[at] = std::byte{5};
      EXPECT_EQ(theirs->data()[at], std::byte{5});
    }
    EXPECT_EQ(arena_bytes_in_process(), before + mine->reserved()) << "counted by its owner only";
  }
  EXPECT_EQ(arena_bytes_in_process(), before);
}

TEST(Arena, SharedMemoryCannotBeTakenFromUnderItsReaders) {
  // A page that is cut off or was never reserved would be a SIGBUS of whoever touches it.
  const auto arena = Arena::make_shared(kArenaRounding + 5000);
  const int memory = arena->descriptor().get();
  EXPECT_EQ(fcntl(memory, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  for (const std::int64_t size : {std::int64_t{0}, arena->reserved() * 2}) {
    EXPECT_EQ(ftruncate(memory, size), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_NE(fcntl(memory, F_GETFD) & FD_CLOEXEC, 0);
  struct stat facts {};
  ASSERT_EQ(fstat(memory, &facts), 0);
  EXPECT_EQ(facts.st_size, arena->reserved());
  EXPECT_GE(facts.st_blocks * 512, arena->bytes()) << "pages are reserved at the start";
  EXPECT_EQ(facts.st_nlink, 0U) << "it has no name";
}

TEST(Arena, ADescriptorThatIsNoSealedMemoryOfThatSizeIsRefused) {
  const auto arena = Arena::make_shared(kArenaRounding);
  EXPECT_EQ(mapped(arena->descriptor().get(), kArenaRounding), "");
  for (const std::int64_t bytes : {std::int64_t{-1}, std::int64_t{0}, kArenaRounding + 1}) {
    EXPECT_NE(mapped(arena->descriptor().get(), bytes).find("no sealed memory of"),
              std::string::npos)
        << bytes;
  }
  const base::Descriptor open_memory(memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(open_memory.get(), kArenaRounding), 0);
  EXPECT_NE(mapped(open_memory.get(), kArenaRounding), "");
  ASSERT_EQ(fcntl(open_memory.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  EXPECT_NE(mapped(open_memory.get(), kArenaRounding), "") << "its owner could still cut it off";
  const base::Descriptor nothing(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_NE(mapped(nothing.get(), kArenaRounding), "");
}

TEST(Arena, MayGoOnAnotherThread) {
  const std::int64_t before = arena_bytes_in_process();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back(
        [arena = Arena::make(kArenaRounding), t] { arena->data()[t] = std::byte{1}; });
  }
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  EXPECT_EQ(arena_bytes_in_process(), before);
}

TEST(Arena, RoundingSaturates) {
  EXPECT_EQ(round_to_arena(0), 0);
  EXPECT_EQ(round_to_arena(1), kArenaRounding);
  EXPECT_EQ(round_to_arena(kArenaRounding), kArenaRounding);
  EXPECT_EQ(round_to_arena(kArenaRounding + 1), 2 * kArenaRounding);
  for (const std::int64_t bytes : {kMost, kMost - 1, kMost - kArenaRounding}) {
    EXPECT_GT(round_to_arena(bytes), kMost - 2 * kArenaRounding);
    EXPECT_EQ(round_to_arena(bytes) % kArenaRounding, 0);
  }
}

TEST(Arena, AvailableMemoryIsPlausible) {
  const std::int64_t available = memory::available_memory();
  EXPECT_GT(available, std::int64_t{64} << 20);
  EXPECT_LT(available, std::int64_t{1} << 50);
}

TEST(MemoryPlan, SumsOverTiersAndCategories) {
  MemoryPlan plan;
  plan.add(Category::moments, Tier::host, 10);
  plan.add(Category::moments, Tier::device, kArenaRounding + 1);
  plan.add(Category::master, Tier::nvme, 5);
  EXPECT_EQ(plan.bytes(Category::moments), kArenaRounding + 11);
  EXPECT_EQ(plan.arena_bytes(Tier::device), 2 * kArenaRounding);
  EXPECT_EQ(plan.arena_bytes(Tier::host), kArenaRounding);
  EXPECT_EQ(plan.memory_bytes(), 3 * kArenaRounding);
  const std::string text = plan.to_string();
  for (const char* part : {"moments", "master", "gather slots", "total", "device", "nvme"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
}

TEST(MemoryPlan, SumsPastTheLargestNumberStopThere) {
  MemoryPlan plan;
  for (int c = 0; c < kCategories; ++c) {
    plan.add(static_cast<Category>(c), Tier::device, kMost);
    plan.add(static_cast<Category>(c), Tier::host, kMost);
  }
  EXPECT_EQ(plan.bytes(Category::moments), kMost);
  EXPECT_EQ(plan.arena_bytes(Tier::host), kMost);
  EXPECT_EQ(plan.memory_bytes(), kMost);
  EXPECT_NE(plan.to_string().find(std::to_string(kMost)), std::string::npos);
}

}  // namespace
}  // namespace zshard
