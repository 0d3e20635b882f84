#include "runtime/kernels/pool.hpp"

#include <gtest/gtest.h>

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
}

}  // namespace
}  // namespace zshard::kernels
