// Every stage, budget, mode, queue and world gives the oracle's bits. A covering array in which
// every pair of values of any two factors occurs; the product of world, stage, budget, accumulation
// and mode runs with ZSHARD_EXHAUSTIVE=1.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "tests/engine/cases.hpp"
#include "tests/engine/lab.hpp"
#include "tests/engine/pairwise.hpp"
#include "tests/engine/placements.hpp"

namespace zshard {
namespace {

void check(const lab::Case& c, const std::string& what) {
  lab::Tensors got = lab::train(c);
  got.forward_hash = 0;
  EXPECT_EQ(lab::difference(lab::oracle(c), got), "") << what;
}

TEST(Equality, EveryPairOfFactorsGivesTheOraclesBits) {
  ASSERT_EQ(lab::kLevels.size(), static_cast<std::size_t>(lab::kFactors));
  const auto rows = lab::pairwise(lab::kLevels, 11);
  ASSERT_LE(3 * rows.size(), 240U);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::uint64_t model = 0; model < 3; ++model) {
      check(lab::make_case(rows[i], 100 * i + model), "row " + std::to_string(i) + ", model " +
                                                          std::to_string(model) + ": " +
                                                          lab::text(rows[i]));
    }
  }
  std::cout << rows.size() << " rows\n";
}

TEST(Equality, EveryRowGivesTheOraclesBitsWithInlineQueuesAndWithPauses) {
  const auto rows = lab::pairwise(lab::kLevels, 11);
#ifdef ZSHARD_SANITIZER
  constexpr std::size_t kEach = 5;
#else
  constexpr std::size_t kEach = 1;
#endif
  for (std::size_t i = 0; i < rows.size(); i += kEach) {
    for (const int queues : {1, 2}) {
      auto row = rows[i];
      row[lab::kQueues] = queues;
      check(lab::make_case(row, 7000 + i), "row " + std::to_string(i) + ": " + lab::text(row));
    }
  }
}

TEST(Equality, ForwardPassesSeeTheSameValuesAtEveryStageAndBudgetWithEveryKindOfQueue) {
  for (int model = 0; model < 4; ++model) {
    std::optional<lab::Tensors> first;
    for (const lab::Case& c : lab::placements(lab::watched_case(model, model + 1))) {
      const lab::Tensors got = lab::train(c);
      if (!first) first = got;
      EXPECT_EQ(lab::difference(*first, got), "") << "model " << model << ", " << lab::where(c);
    }
  }
}

TEST(Equality, OneRankOrOneMicroStepMakesLocalAndReducedAccumulationEqual) {
  for (const auto& [world, n, equal] : {std::tuple{1, 3, true}, {3, 1, true}, {3, 3, false}}) {
    std::vector<lab::Tensors> results;
    for (const Accumulation mode : {Accumulation::reduced, Accumulation::local}) {
      lab::Case c;
      UnitBuilder unit = c.spec.unit("u");
      unit.parameter("w", {100});
      unit.parameter("x", {40}, {.dtype = DType::bf16});
      c.world = world;
      std::mt19937_64 random(1);
      c.uses = lab::random_uses(random, c.spec, world, 2, n, 100);
      c.options.accumulation = mode;
      c.options.stage = Stage::gradients;
      results.push_back(lab::train(c));
    }
    EXPECT_EQ(lab::difference(results[0], results[1]).empty(), equal)
        << "world " << world << " n " << n;
  }
}

TEST(Equality, TheProductOfWorldPlacementAccumulationAndMode) {
  const char* wanted = std::getenv("ZSHARD_EXHAUSTIVE");
  if (wanted == nullptr || std::string(wanted) != "1") {
    GTEST_SKIP() << "runs for minutes: set ZSHARD_EXHAUSTIVE=1 (tests/run.sh --exhaustive)";
  }
  std::mt19937_64 random(5);
  int runs = 0;
  for (int model = 0; model < 12; ++model) {
    std::vector<int> row(lab::kFactors);
    for (std::size_t f = 0; f < row.size(); ++f) row[f] = lab::pick(random, 0, lab::kLevels[f] - 1);
    for (row[lab::kWorld] = 0; row[lab::kWorld] < 7; ++row[lab::kWorld]) {
      for (row[lab::kPlacement] = 0; row[lab::kPlacement] < 6; ++row[lab::kPlacement]) {
        for (row[lab::kMicroSteps] = 0; row[lab::kMicroSteps] < 2; ++row[lab::kMicroSteps]) {
          for (row[lab::kAccumulation] = 0; row[lab::kAccumulation] < 2;
               ++row[lab::kAccumulation]) {
            check(lab::make_case(row, 1000 + static_cast<std::uint64_t>(model)), lab::text(row));
            ++runs;
          }
        }
      }
    }
  }
  std::cout << runs << " runs\n";
}

}  // namespace
}  // namespace zshard
