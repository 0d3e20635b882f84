// Which rows a step reads, who reads them, and when texts are refused.
#include "gpt/data.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "gpt/config.hpp"
#include "gpt/trainer.hpp"

namespace gpt_test {
namespace {

using gpt::Dataset;
using gpt::Order;
using gpt::RowOffsets;
using gpt::Rows;

TEST(Rows, PiecesCoverEachRowOnceForEveryWorldAndAccumulation) {
  for (std::int64_t count = 0; count < 20; ++count) {
    for (std::int64_t world = 1; world <= 8; ++world) {
      for (std::int64_t accumulation = 1; accumulation <= 5; ++accumulation) {
        const Rows step{0, count};
        std::int64_t next = 0;
        std::int64_t largest = 0;
        for (std::int64_t rank = 0; rank < world; ++rank) {
          const Rows mine = step.piece(rank, world);
          EXPECT_EQ(mine.first, count * rank / world);
          for (std::int64_t micro = 0; micro < accumulation; ++micro) {
            const Rows rows = mine.piece(micro, accumulation);
            EXPECT_EQ(rows.first, next);
            EXPECT_GE(rows.count, 0);
            next += rows.count;
            largest = std::max(largest, rows.count);
          }
        }
        EXPECT_EQ(next, count);
        EXPECT_EQ(largest, step.largest_piece(world, accumulation));
      }
    }
  }
}

TEST(RowOffsets, SequentialRowsFollowEachOtherAndStartOver) {
  constexpr std::int64_t kContext = 8;
  constexpr std::int64_t kBytes = 50;  // 42 places
  const RowOffsets offsets(Order::sequential, 1, 3, kContext, kBytes);
  EXPECT_EQ(offsets.offset(0, 0), 0);
  EXPECT_EQ(offsets.offset(0, 2), 16);
  EXPECT_EQ(offsets.offset(1, 0), 24);
  EXPECT_EQ(offsets.offset(1, 2), 40);
  EXPECT_EQ(offsets.offset(2, 0), 48 % 42);
  for (std::int64_t step = 0; step < 100; ++step) {
    EXPECT_LE(offsets.offset(step, 0) + kContext + 1, kBytes);
  }
  const RowOffsets single(Order::sequential, 1, 3, kContext, kContext + 1);
  EXPECT_EQ(single.offset(7, 2), 0);
}

TEST(RowOffsets, RandomRowsDependOnSeedAndNumberOnly) {
  constexpr std::int64_t kBytes = 1000;
  const RowOffsets twelve(Order::random, 1, 12, 64, kBytes);
  const RowOffsets four(Order::random, 1, 4, 64, kBytes);
  const RowOffsets other(Order::random, 2, 12, 64, kBytes);
  std::set<std::int64_t> seen;
  int equal = 0;
  for (std::int64_t i = 0; i < 12000; ++i) {
    const std::int64_t offset = twelve.offset(i / 12, i % 12);
    EXPECT_EQ(offset, four.offset(i / 4, i % 4));
    EXPECT_GE(offset, 0);
    EXPECT_LE(offset + 65, kBytes);
    seen.insert(offset);
    equal += offset == other.offset(i / 12, i % 12) ? 1 : 0;
  }
  EXPECT_EQ(seen.size(), 936U);  // every place, the last one too
  EXPECT_LT(equal, 60);          // 12.8 expected by chance
}

TEST(CounterRandom, NormalsHaveTheMomentsOfTheNormalDistribution) {
  const gpt::CounterRandom random(1, "wte.weight");
  double sum = 0.0;
  double squares = 0.0;
  double fourth = 0.0;
  constexpr int kCount = 100000;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double x = random.normal(i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  // Four standard errors.
  EXPECT_NEAR(sum / kCount, 0.0, 4.0 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1.0, 4.0 * std::sqrt(2.0 / kCount));
  EXPECT_NEAR(fourth / kCount, 3.0, 4.0 * std::sqrt(96.0 / kCount));
  EXPECT_NE(gpt::CounterRandom(1, "a").bits(0), gpt::CounterRandom(1, "b").bits(0));
  EXPECT_NE(gpt::CounterRandom(1, "a").bits(0), gpt::CounterRandom(2, "a").bits(0));
}

TEST(Dataset, LastPartIsForValidation) {
  std::vector<std::uint8_t> bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
  const Dataset data(bytes, 0.25, 8);
  EXPECT_EQ(data.training().size(), 75U);
  ASSERT_EQ(data.validation().size(), 25U);
  EXPECT_EQ(data.validation().front(), 75);
  EXPECT_TRUE(Dataset(bytes, 0.0, 8).validation().empty());
}

TEST(Dataset, TextsShorterThanARowAreRefused) {
  EXPECT_THROW(Dataset({}, 0.0, 1), gpt::ConfigError);
  EXPECT_THROW(Dataset(std::vector<std::uint8_t>(8), 0.0, 8), gpt::ConfigError);
  EXPECT_NO_THROW(Dataset(std::vector<std::uint8_t>(9), 0.0, 8));
  EXPECT_THROW(Dataset(std::vector<std::uint8_t>(16), 0.5, 8), gpt::ConfigError);
  EXPECT_THROW(Dataset(std::vector<std::uint8_t>(100), 0.05, 8), gpt::ConfigError);
}

TEST(Dataset, FilesThatCannotBeReadAreRefused) {
  EXPECT_THROW(Dataset::read({"/nowhere/text"}), gpt::ConfigError);
  EXPECT_THROW(Dataset::read({"/"}), gpt::ConfigError);
  EXPECT_THROW(Dataset::read({"/dev/zero"}), gpt::ConfigError);
  EXPECT_THROW(Dataset::read({""}), gpt::ConfigError);
}

TEST(LearningRate, WarmsUpAndFallsAlongACosine) {
  gpt::Config config;
  config.lr = 1e-3;
  config.min_lr = 1e-4;
  config.warmup = 100;
  config.steps = 2000;
  EXPECT_DOUBLE_EQ(gpt::learning_rate(config, 0), 1e-3 / 101);
  EXPECT_DOUBLE_EQ(gpt::learning_rate(config, 99), 1e-3 * 100 / 101);
  EXPECT_DOUBLE_EQ(gpt::learning_rate(config, 100), 1e-3);
  EXPECT_DOUBLE_EQ(gpt::learning_rate(config, 1050), 0.5 * (1e-3 + 1e-4));
  EXPECT_NEAR(gpt::learning_rate(config, 1999), 1e-4, 1e-9);
  EXPECT_DOUBLE_EQ(gpt::learning_rate(config, 2000), 1e-4);
  config.min_lr = config.lr;
  config.warmup = 0;
  for (const std::int64_t step : {0, 1, 1999}) {
    EXPECT_EQ(gpt::learning_rate(config, step), 1e-3);
  }
  config.warmup = 5000;  // longer than the run
  EXPECT_DOUBLE_EQ(gpt::learning_rate(config, 1999), 1e-3 * 2000 / 5001);
}

}  // namespace
}  // namespace gpt_test
