// Every stage, budget and mode gives the oracle's bits.
#include <gtest/gtest.h>

#include "tests/engine/lab.hpp"

namespace zshard {
namespace {

TEST(Equality, ARandomModelGivesTheOraclesBitsAtEveryStageAndBudget) {
  std::mt19937_64 random(7);
  for (int model = 0; model < 6; ++model) {
    lab::Case c;
    c.spec = lab::random_spec(random);
    c.world = lab::pick(random, 1, 4);
    c.uses = lab::random_uses(random, c.spec, c.world, 3, lab::chance(random, 50) ? 1 : 3,
                              lab::chance(random, 60) ? 100 : 70);
    c.clip = lab::chance(random, 50) ? std::optional<double>(0.5) : std::nullopt;
    c.options.poison_slots = true;
    const lab::Tensors expected = lab::oracle(c);
    std::uint64_t forward = 0;
    for (int stage = 0; stage < 4; ++stage) {
      c.options.stage = static_cast<Stage>(stage);
      for (const auto& budget : lab::budgets(c.spec, c.world)) {
        c.options.gather_budget = budget;
        lab::Tensors got = lab::train(c);
        if (forward == 0) forward = got.forward_hash;
        EXPECT_EQ(got.forward_hash, forward) << "model " << model << " stage " << stage;
        got.forward_hash = 0;
        EXPECT_EQ(lab::difference(expected, got), "") << "model " << model << " stage " << stage;
        if (stage < 3) break;
      }
    }
  }
}

}  // namespace
}  // namespace zshard
