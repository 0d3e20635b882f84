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
  // Behind the lab's factors: three tiers, and what updates.
  std::vector<int> levels = lab::kLevels;
  levels.insert(levels.end(), {3, 3, 3, 2});
  const auto rows = lab::pairwise(levels, 11);
  int runs = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
#if defined(ZSHARD_TEST_SIMULATED)
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
    simulator::set_delays(i % 2 == 0 ? 0 : 20, i);
#endif
    lab::Case c = lab::make_case(rows[i], 100 * i);
    const auto extra = [&](int k) {
      return rows[i][lab::kLevels.size() + static_cast<unsigned>(k)];
    };
    const lab::Placement where = lab::served(
        {static_cast<Tier>(extra(0)), static_cast<Tier>(extra(1)), static_cast<Tier>(extra(2)),
         extra(3) == 0 ? UpdateOn::automatic : UpdateOn::device},
        c.options);
    lab::place(c.options, where);
    lab::on_cuda(c);
    if (c.world > most_ranks()) continue;
    check(c, "row " + std::to_string(i) + ": " + lab::text(rows[i]) + where.text());
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

TEST_F(CudaEquality, EveryPlacementAtEveryStage) {
  int runs = 0;
  for (int stage = 0; stage < 4; ++stage) {
    for (const Accumulation mode : {Accumulation::reduced, Accumulation::local}) {
      for (const lab::Placement& where : lab::placements(static_cast<Stage>(stage), mode)) {
        std::mt19937_64 random(17 * static_cast<std::uint64_t>(stage) +
                               static_cast<std::uint64_t>(runs));
        lab::Case c;
        c.spec = lab::random_spec(random);
        c.world = std::min(most_ranks(), 1 + runs % 3);
        c.uses = lab::random_uses(random, c.spec, c.world, 3, 2, 100);
        c.options.stage = static_cast<Stage>(stage);
        c.options.accumulation = mode;
        c.options.sub_group_bytes = 8192;
        c.options.offload.io_buffers = 1 + runs % 4;
        c.options.poison_slots = true;
        c.clip = 0.5;
        lab::place(c.options, where);
        lab::on_cuda(c);
        check(c, "stage " + std::to_string(stage) + " world " + std::to_string(c.world) + ", " +
                     std::string(to_string(mode)) + ", " + where.text());
        ++runs;
        if (HasFailure()) return;
      }
    }
  }
  std::cout << runs << " runs\n";
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
  int made = 0;
  for (int stage = 0; stage < 4; ++stage) {
    for (const Accumulation mode : {Accumulation::reduced, Accumulation::local}) {
      for (const lab::Placement& where : lab::placements(static_cast<Stage>(stage), mode)) {
        SCOPED_TRACE("stage " + std::to_string(stage) + ", " + std::string(to_string(mode)) + ", " +
                     where.text());
        std::mt19937_64 random(static_cast<std::uint64_t>(stage + made));
        lab::Case c;
        c.spec = lab::random_spec(random);
        c.world = std::min(most_ranks(), 1 + made++ % 3);
        c.options.stage = static_cast<Stage>(stage);
        c.options.accumulation = mode;
        c.options.sub_group_bytes = 8192;
        lab::place(c.options, where);
        lab::on_cuda(c);
        run_ranks(c.world, [&](const ProcessGroup& group) {
          const Engine engine(c.spec, c.optimizer, group, c.options);
          EXPECT_EQ(engine.ledger(), engine.plan());
#if defined(ZSHARD_TEST_SIMULATED)
          EXPECT_EQ(simulator::allocated_bytes(group.rank()),
                    engine.plan().arena_bytes(Tier::device));
#endif
        });
        if (HasFailure()) return;
      }
    }
  }
  expect_clean("");
}

// What leaves the device is no longer counted there, and what it needs instead is small.
TEST_F(CudaEquality, WhatIsOffTheDeviceIsNotCountedThere) {
  ModelSpec spec;
  for (int u = 0; u < 8; ++u) {
    const std::string name = "u" + std::to_string(u);
    spec.unit(name).parameter(name + ".w", {1 << 20}, {.dtype = DType::bf16});
  }
  constexpr std::int64_t kElements = std::int64_t{8} << 20;
  constexpr int kWorld = 2;
  for (int stage = 0; stage < 4; ++stage) {
    for (const Accumulation mode : {Accumulation::reduced, Accumulation::local}) {
      for (const lab::Placement& where : lab::placements(static_cast<Stage>(stage), mode)) {
        SCOPED_TRACE("stage " + std::to_string(stage) + ", " + std::string(to_string(mode)) + ", " +
                     where.text());
        EngineOptions options;
        options.device = DeviceKind::cuda;
        options.stage = static_cast<Stage>(stage);
        options.accumulation = mode;
        options.sub_group_bytes = 1 << 20;
        lab::place(options, where);
        const MemoryPlan plan = plan_memory(spec, AdamW{}, kWorld, options);
        const auto at = [&](Category category, Tier tier) { return plan.bytes(category, tier); };
        const auto only_there = [&](Category category, Tier there, std::int64_t bytes) {
          for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
            EXPECT_EQ(at(category, tier), tier == there ? bytes : 0)
                << to_string(category) << " " << to_string(tier);
          }
        };
        const std::int64_t state = stage == 0 ? kElements : kElements / kWorld;
        only_there(Category::master, where.optimizer, 4 * state);
        only_there(Category::moments, where.optimizer, 8 * state);
        only_there(Category::parameters, where.parameters,
                   2 * (stage == 3 ? kElements / kWorld : kElements));
        const std::int64_t accumulators = 4 * kElements / kWorld;
        const std::int64_t buffers =
            (stage < 2 ? 2 * kElements : 0) + (mode == Accumulation::local ? 4 * kElements : 0);
        const bool here = where.gradients == Tier::device;
        EXPECT_EQ(at(Category::gradients, Tier::device), buffers + (here ? accumulators : 0));
        EXPECT_EQ(at(Category::gradients, Tier::host),
                  where.gradients == Tier::host ? accumulators : 0);
        EXPECT_EQ(at(Category::gradients, Tier::nvme),
                  where.gradients == Tier::nvme ? accumulators : 0);
        // Three buffers of a sub-group of 87,381 elements, rounded up to a cut of 2,048.
        EXPECT_LE(at(Category::io_staging, Tier::device), 3 * (4 + 2 + 12) * 88064);
        if (where.update_on == UpdateOn::host) {
          EXPECT_EQ(at(Category::io_staging, Tier::device), 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace zshard
