// CUDA ranks give the bits of the oracle, which knows neither devices nor streams.
#include <gtest/gtest.h>

#include <iostream>

#include "tests/device_engine/cuda_lab.hpp"
#include "tests/engine/pairwise.hpp"

namespace zshard {
namespace {

class CudaEquality : public testing::Test {
 protected:
  void SetUp() override {
    lab::open_plugin();
#if defined(ZSHARD_TEST_SIMULATED)
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
#else
    if (lab::gpus() == 0) GTEST_SKIP() << "no GPU is visible";
#endif
  }

  /// Ranks that can have a device each.
  static int most_ranks() {
#if defined(ZSHARD_TEST_SIMULATED)
    return 8;
#else
    return lab::gpus();
#endif
  }

  static void expect_clean(const std::string& what) {
#if defined(ZSHARD_TEST_SIMULATED)
    for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << what << race.text();
    for (const std::string& fault : simulator::faults()) ADD_FAILURE() << what << fault;
    for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << what << leak;
#else
    (void)what;
#endif
  }

  static void check(const lab::Case& c, const std::string& what) {
    lab::Tensors got = lab::train(c);
    got.forward_hash = 0;
    EXPECT_EQ(lab::difference(lab::oracle(c), got), "") << what;
    expect_clean(what + ": ");
  }
};

TEST_F(CudaEquality, EveryPairOfFactorsGivesTheOraclesBits) {
  const auto rows = lab::pairwise(lab::kLevels, 11);
  int runs = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
#if defined(ZSHARD_TEST_SIMULATED)
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
    simulator::set_delays(i % 2 == 0 ? 0 : 20, i);
#endif
    lab::Case c = lab::make_case(rows[i], 100 * i);
    lab::on_cuda(c);
    if (c.world > most_ranks()) continue;
    check(c, "row " + std::to_string(i) + ": " + lab::text(rows[i]));
    ++runs;
    if (HasFailure()) return;
  }
  std::cout << runs << " runs\n";
}

TEST_F(CudaEquality, ForwardPassesSeeWhatHostRanksSee) {
  std::mt19937_64 random(7);
  for (int model = 0; model < 2; ++model) {
    lab::Case c;
    c.spec = lab::random_spec(random);
    c.world = std::min(most_ranks(), 1 + model * 2);
    c.uses = lab::random_uses(random, c.spec, c.world, 2, 2, 100);
    c.options.poison_slots = true;
    c.evaluate = true;
    const lab::Tensors host = lab::train(c);
    lab::on_cuda(c);
    for (int stage = 0; stage < 4; ++stage) {
      c.options.stage = static_cast<Stage>(stage);
      for (const auto& budget : lab::budgets(c.spec, c.world)) {
        c.options.gather_budget = budget;
        EXPECT_EQ(lab::difference(host, lab::train(c)), "")
            << "model " << model << " stage " << stage;
        if (stage < 3) break;
      }
    }
  }
  expect_clean("");
}

TEST_F(CudaEquality, EveryTierAtEveryStage) {
  for (int stage = 0; stage < 4; ++stage) {
    for (std::size_t tier = 0; tier < static_cast<std::size_t>(lab::kLevels[lab::kTiers]); ++tier) {
      std::mt19937_64 random(17 * static_cast<std::uint64_t>(stage) + tier);
      lab::Case c;
      c.spec = lab::random_spec(random);
      c.world = std::min(most_ranks(), 2);
      c.uses = lab::random_uses(random, c.spec, c.world, 3, 2, 100);
      c.options.stage = static_cast<Stage>(stage);
      c.options.sub_group_bytes = 8192;
      c.options.poison_slots = true;
      lab::set_tiers(c.options, tier);
      lab::on_cuda(c);
      check(c, "stage " + std::to_string(stage) + " tier " + std::to_string(tier));
    }
  }
}

// Its order of summation is the communicator's: near the oracle, and the same at every stage.
TEST_F(CudaEquality, NativeReductionIsNearTheOracle) {
  const int world = std::min(most_ranks(), 3);
  std::mt19937_64 random(23);
  lab::Case c;
  c.spec.unit("a").parameter("a.w", {3000});
  c.spec.unit("b").parameter("b.w", {40, 40});
  c.world = world;
  c.uses = lab::random_uses(random, c.spec, world, 2, 2, 100);
  const lab::Tensors want = lab::oracle(c);
  c.options.reduction = Reduction::native;
  lab::on_cuda(c);
  bool other_bits = false;
  for (int stage = 0; stage < 4; ++stage) {
    for (const Accumulation mode : {Accumulation::reduced, Accumulation::local}) {
      c.options.stage = static_cast<Stage>(stage);
      c.options.accumulation = mode;
      const lab::Tensors got = lab::train(c);
      other_bits = other_bits || !lab::difference(want, got).empty();
      ASSERT_EQ(want.values.size(), got.values.size());
      for (const auto& [name, values] : want.values) {
        const std::vector<float>& mine = got.values.at(name);
        ASSERT_EQ(values.size(), mine.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
          // Adam divides by the root of a sum of squares: small gradients may change its sign.
          ASSERT_NEAR(values[i], mine[i], 2e-2) << name << " " << i;
        }
      }
      for (std::size_t k = 0; k < want.norms.size(); ++k) {
        EXPECT_NEAR(want.norms[k], got.norms[k], 1e-5 * want.norms[k]);
      }
    }
  }
  EXPECT_EQ(other_bits, world > 2);  // a sum of two has one order
  expect_clean("");
}

TEST_F(CudaEquality, TheLedgerIsThePlan) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const Tier tier : {Tier::device, Tier::host}) {
      std::mt19937_64 random(static_cast<std::uint64_t>(stage));
      lab::Case c;
      c.spec = lab::random_spec(random);
      c.world = std::min(most_ranks(), 2);
      c.options.stage = static_cast<Stage>(stage);
      c.options.offload.optimizer = tier;
      lab::on_cuda(c);
      run_ranks(c.world, [&](const ProcessGroup& group) {
        const Engine engine(c.spec, c.optimizer, group, c.options);
        EXPECT_EQ(engine.ledger(), engine.plan());
#if defined(ZSHARD_TEST_SIMULATED)
        EXPECT_EQ(simulator::allocated_bytes(group.rank()),
                  engine.plan().arena_bytes(Tier::device));
#endif
      });
    }
  }
  expect_clean("");
}

}  // namespace
}  // namespace zshard
