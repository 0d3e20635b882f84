#include "runtime/kernels/pool.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

namespace zshard::kernels {
namespace {

TEST(Pool, EveryElementIsDoneOnceWhateverTheNumberOfThreads) {
  for (const int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t count : {0L, 1L, 1000L, 131072L, 131073L, 1000003L}) {
      std::vector<char> done(static_cast<std::size_t>(count), 0);
      pool.split(count, 1024, [&](std::int64_t lo, std::int64_t hi) {
        EXPECT_EQ(lo % 1024, 0);
        for (std::int64_t i = lo; i < hi; ++i) ++done[static_cast<std::size_t>(i)];
      });
      EXPECT_EQ(std::accumulate(done.begin(), done.end(), std::int64_t{0}), count);
    }
  }
}

TEST(Pool, TwoThreadsThatUseItAtOnceBothFinish) {
  Pool pool(3);
  const auto use = [&] {
    for (int round = 0; round < 200; ++round) {
      std::atomic<std::int64_t> sum{0};
      pool.split(200000, 1000, [&](std::int64_t lo, std::int64_t hi) { sum += hi - lo; });
      ASSERT_EQ(sum.load(), 200000);
    }
  };
  std::thread other(use);
  use();
  other.join();
}

TEST(Pool, ThreadsFollowTheOptionOrTheCoresOfThisProcess) {
  EXPECT_EQ(kernel_threads(7, 3), 7);
  EXPECT_GE(kernel_threads(0, 1), 1);
  EXPECT_EQ(kernel_threads(0, 1024), 1);
  cpu_set_t mine;
  ASSERT_EQ(sched_getaffinity(0, sizeof mine, &mine), 0);
  // On fewer and fewer of the cores, as in a container or under taskset.
  cpu_set_t some = mine;
  for (int cores = CPU_COUNT(&mine); cores > 0; --cores) {
    ASSERT_EQ(sched_setaffinity(0, sizeof some, &some), 0);
    for (int ranks = 1; ranks <= 5; ++ranks) {
      EXPECT_EQ(kernel_threads(0, ranks), std::max(1, cores / ranks)) << cores << " / " << ranks;
      EXPECT_EQ(kernel_threads(3, ranks), 3);
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &some)) continue;
      CPU_CLR(cpu, &some);
      break;
    }
  }
  EXPECT_EQ(sched_setaffinity(0, sizeof mine, &mine), 0);
}

}  // namespace
}  // namespace zshard::kernels
