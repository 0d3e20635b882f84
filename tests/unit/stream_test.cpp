// Queues of work and the counter that threads sleep on.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/base/futex.hpp"
#include "runtime/device/stream.hpp"

namespace zshard {
namespace {

using device::make_inline_stream;
using device::make_thread_stream;
using device::Stream;
using std::chrono::milliseconds;

/// Processor time of this thread.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Notes the arguments of its tasks; throws at one of them, waits at another.
struct Log {
  std::vector<std::uint64_t> seen;  // written by the stream, read after wait()
  std::uint64_t bad = ~0ULL;
  std::uint64_t slow = ~0ULL;
  std::atomic<bool> go{false};
  std::atomic<bool> running{false};

  device::Task task(std::uint64_t argument) {
    return {[](void* object, std::uint64_t value) {
              auto* self = static_cast<Log*>(object);
              if (value == self->slow) {
                self->running.store(true);
                while (!self->go.load()) std::this_thread::yield();
              }
              if (value == self->bad) throw std::runtime_error("bad task");
              self->seen.push_back(value);
            },
            this, argument};
  }
};

std::vector<std::unique_ptr<Stream>> streams() {
  std::vector<std::unique_ptr<Stream>> all;
  all.push_back(make_inline_stream());
  all.push_back(make_thread_stream(4, 0, 1));
  all.push_back(make_thread_stream(0, 200, 2));  // at least two places, with pauses
  return all;
}

TEST(Stream, RunsTasksInOrderAndShowsWhatTheyWrote) {
  for (const auto& stream : streams()) {
    Log log;
    for (std::uint64_t i = 0; i < 100; ++i) stream->submit(log.task(i));  // many times its places
    EXPECT_EQ(stream->submitted(), 100U);
    stream->wait(100);
    EXPECT_EQ(stream->completed(), 100U);
    ASSERT_EQ(log.seen.size(), 100U);
    for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(log.seen[i], i);
    stream->wait(0);
    stream->wait(7);
  }
}

TEST(Stream, AnErrorStopsItAndReachesEveryLaterWait) {
  for (const auto& stream : streams()) {
    Log log;
    log.bad = 1;
    int thrown = 0;
    for (std::uint64_t i = 0; i < 3; ++i) {
      try {
        stream->submit(log.task(i));
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "bad task");
        ++thrown;
      }
    }
    for (int i = 0; i < 3; ++i) {
      try {
        stream->wait(3);
        ADD_FAILURE() << "no error";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "bad task");
      }
    }
    EXPECT_EQ(stream->completed(), 1U);
    EXPECT_EQ(log.seen, std::vector<std::uint64_t>{0});
    EXPECT_LE(thrown, 2);  // inline: its own submit and the next
  }
}

TEST(Stream, WhatWasCompleteBeforeTheErrorCanBeWaitedFor) {
  const auto stream = make_thread_stream(4, 0, 1);
  Log log;
  log.bad = 1;
  stream->submit(log.task(0));
  stream->submit(log.task(1));
  EXPECT_THROW(stream->wait(2), std::runtime_error);
  stream->wait(1);
  EXPECT_EQ(log.seen.size(), 1U);
}

TEST(Stream, AFullQueueBlocksAndAStoppedOneThrowsInsteadOfHanging) {
  const auto stream = make_thread_stream(2, 0, 1);
  Log log;
  log.bad = 0;
  int thrown = 0;
  for (std::uint64_t i = 0; i < 10; ++i) {
    try {
      stream->submit(log.task(i));
    } catch (const std::runtime_error&) {
      ++thrown;
    }
  }
  EXPECT_EQ(thrown, 8);  // two places were free
  EXPECT_TRUE(log.seen.empty());
}

TEST(Stream, DestructionWaitsForTheRunningTaskAndDropsTheRest) {
  Log log;
  log.slow = 0;
  {
    auto stream = make_thread_stream(8, 0, 1);
    for (std::uint64_t i = 0; i < 5; ++i) stream->submit(log.task(i));
    stream->kick();
    while (!log.running.load()) std::this_thread::yield();
    std::thread late([&] {
      std::this_thread::sleep_for(milliseconds(30));
      log.go.store(true);
    });
    stream.reset();
    EXPECT_TRUE(log.go.load());
    late.join();
  }
  EXPECT_EQ(log.seen, std::vector<std::uint64_t>{0});
}

TEST(Stream, WhatIsKickedRunsWithoutAWait) {
  for (const auto& stream : streams()) {
    Log log;
    for (std::uint64_t turn = 1; turn <= 20; ++turn) {
      stream->submit(log.task(turn));
      stream->kick();
      while (stream->completed() < turn) std::this_thread::yield();
    }
    EXPECT_EQ(log.seen.size(), 20U);
  }
}

TEST(Stream, ASubmitAndAWaitRightAfterTheWorkerFellIdleAreNotLost) {
  const auto stream = make_thread_stream(4, 0, 1);
  Log log;
  constexpr std::uint64_t kTurns = 2000;
  for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
    stream->submit(log.task(2 * turn));
    stream->kick();
    while (stream->completed() < 2 * turn + 1) {
    }
    // Just now the worker takes its last look at the queue.
    stream->submit(log.task(2 * turn + 1));
    stream->wait(2 * turn + 2);
  }
  EXPECT_EQ(log.seen.size(), 2 * kTurns);
}

TEST(Stream, ManyMayBeMadeAndDestroyedIdle) {
  for (int i = 0; i < 200; ++i) (void)make_thread_stream(2, 0, 1);
}

TEST(Stream, SeveralThreadsMayWait) {
  const auto stream = make_thread_stream(64, 100, 1);
  Log log;
  for (std::uint64_t i = 0; i < 50; ++i) stream->submit(log.task(i));
  std::vector<std::thread> threads;
  std::atomic<int> woken{0};
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      stream->wait(10 * (t + 2));
      EXPECT_GE(stream->completed(), 10 * (t + 2));
      ++woken;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(woken.load(), 4);
}

TEST(Counter, WakesASleeperWhenTheTargetIsReached) {
  base::Counter counter;
  std::thread sleeper([&] { EXPECT_TRUE(counter.wait(3, [] { return false; })); });
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(milliseconds(2));
    counter.add();
  }
  sleeper.join();
  EXPECT_TRUE(counter.reached(3));
  EXPECT_FALSE(counter.reached(4));
}

TEST(Counter, AConditionEndsTheWait) {
  base::Counter counter;
  std::atomic<bool> stop{false};
  std::thread sleeper([&] { EXPECT_FALSE(counter.wait(1, [&] { return stop.load(); })); });
  std::this_thread::sleep_for(milliseconds(5));
  stop.store(true);
  counter.nudge();
  sleeper.join();
}

TEST(Counter, CountsRoundTheEndOfItsWord) {
  base::Counter counter;
  counter.add(0xFFFFFFFE);
  EXPECT_TRUE(counter.reached(0xFFFFFFFE));
  EXPECT_FALSE(counter.reached(1));
  counter.add(3);
  EXPECT_TRUE(counter.reached(1));
  EXPECT_TRUE(counter.reached(0xFFFFFFFF));
}

TEST(Counter, AWaiterSpinsBrieflyAndThenLeavesItsCore) {
  // Processor time, which does not depend on what else runs: 50 us of spinning and a look at the
  // condition every 20 ms.
  base::Counter counter;
  std::atomic<bool> stop{false};
  double used = -1.0;
  int looks = 0;
  std::thread sleeper([&] {
    const double before = thread_seconds();
    EXPECT_FALSE(counter.wait(1, [&] {
      ++looks;
      return stop.load();
    }));
    used = thread_seconds() - before;
  });
  std::this_thread::sleep_for(milliseconds(400));
  stop.store(true);
  sleeper.join();
  EXPECT_LT(used, 0.04);
  EXPECT_LT(looks, 400 / 20 + 5);
}

TEST(Counter, NoWakeUpIsLost) {
  // Two threads that hand a turn back and forth: a lost wake-up costs 20 ms, so a few show.
  base::Counter a, b;
  constexpr std::uint32_t kTurns = 3000;
  const auto start = std::chrono::steady_clock::now();
  std::thread other([&] {
    for (std::uint32_t i = 1; i <= kTurns; ++i) {
      a.wait(i, [] { return false; });
      b.add();
    }
  });
  for (std::uint32_t i = 1; i <= kTurns; ++i) {
    a.add();
    b.wait(i, [] { return false; });
  }
  other.join();
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  EXPECT_LT(spent.count(), kTurns * 0.01);
}

}  // namespace
}  // namespace zshard
