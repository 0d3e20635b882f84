// Tiers on disk: the same bits as in memory, whatever lies where.
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>
#include <random>
#include <tuple>

#include "tests/engine/offload_lab.hpp"
#include "tests/engine/pairwise.hpp"

namespace zshard::lab::disk {
namespace {

constexpr std::array<std::int64_t, 6> kAlignments = {0, 1, 28, 4095, 4096, 4097};

/// Parameters of these sizes in elements, and of as many bytes where that can be.
ModelSpec aligned_model(const std::vector<std::int64_t>& sizes) {
  ModelSpec spec;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::string name = "u" + std::to_string(i);
    auto unit = spec.unit(name);
    unit.parameter(name + ".f32", {sizes[i]});
    unit.parameter(name + ".bf16", {sizes[i]}, {.dtype = DType::bf16});
    if (sizes[i] % 4 == 0) unit.parameter(name + ".bytes", {sizes[i] / 4});
  }
  return spec;
}

lab::Case aligned_case(const std::vector<std::int64_t>& sizes, int world, std::uint64_t seed) {
  lab::Case c;
  c.spec = aligned_model(sizes);
  c.world = world;
  std::mt19937_64 random(seed);
  c.uses = lab::random_uses(random, c.spec, world, 3, 2, 100);
  c.clip = 0.5;
  return c;
}

/// factors: tiers, stage, backend, buffers, sub-groups, verification.
void set(EngineOptions& o, const std::vector<int>& row) {
  o.stage = static_cast<Stage>(row[1]);
  lab::set_tiers(o, kTierLevels[static_cast<std::size_t>(row[0])]);
  o.offload.io_backend = row[2] == 0 ? IoBackendKind::automatic : IoBackendKind::posix;
  o.offload.io_buffers = std::vector<int>{1, 2, 3, 8}[static_cast<std::size_t>(row[3])];
  // 341 elements, rounded up to the smallest sub-group of 2048; two of those; all.
  o.sub_group_bytes =
      std::vector<std::int64_t>{4096, 40000, 16 << 20}[static_cast<std::size_t>(row[4])];
  o.offload.io_verify = row[5] == 1;
  o.poison_slots = true;
}

TEST(Offload, ShardsOfAllAlignmentsGiveTheBitsOfMemory) {
  const std::vector<std::int64_t> sizes(kAlignments.begin(), kAlignments.end());
  const auto rows = lab::pairwise({5, 4, 2, 4, 3, 2}, 3);
  int number = 0;
  std::map<int, lab::Tensors> memory;
  for (const auto& row : rows) {
    const int world = 1 + number++ % 4;
    lab::Case c = aligned_case(sizes, world, static_cast<std::uint64_t>(world));
    if (memory.count(world) == 0) memory[world] = lab::train(c);
    set(c.options, row);
    lab::Tensors got = lab::train(c);
    got.forward_hash = memory[world].forward_hash;
    EXPECT_EQ(lab::difference(memory[world], got), "") << lab::text(row);
  }
  // Memory itself is right.
  lab::Tensors one = memory[2];
  one.forward_hash = 0;
  EXPECT_EQ(lab::difference(lab::oracle(aligned_case(sizes, 2, 2)), one), "");
}

TEST(Offload, TheProductOfTiersStagesBackendsBuffersSubGroupsAndAlignments) {
  if (!exhaustive()) {
    GTEST_SKIP() << "runs for minutes: set ZSHARD_EXHAUSTIVE=1 (tests/run.sh --exhaustive)";
  }
  int runs = 0;
  for (const std::int64_t size : kAlignments) {
    const int world = size % 2 == 0 ? 2 : 3;
    const lab::Case plain = aligned_case({size}, world, 1);
    const lab::Tensors memory = lab::train(plain);
    for (int tiers = 0; tiers < 5; ++tiers) {
      for (int stage = 0; stage < 4; ++stage) {
        for (int backend = 0; backend < 2; ++backend) {
          for (int buffers = 0; buffers < 4; ++buffers) {
            for (int groups = 0; groups < 3; ++groups) {
              const std::vector<int> row = {tiers, stage, backend, buffers, groups, runs % 2};
              lab::Case c = plain;
              set(c.options, row);
              EXPECT_EQ(lab::difference(memory, lab::train(c)), "")
                  << "size " << size << ": " << lab::text(row);
              ++runs;
            }
          }
        }
      }
    }
  }
  std::cout << runs << " runs\n";
}

TEST(Offload, AShardOf28824000BytesGivesTheBitsOfMemory) {
  ModelSpec spec;
  spec.unit("small").parameter("small", {1000});
  spec.unit("large").parameter("large", {7206000});
  const auto body = [](Engine& engine) {
    fill(engine);
    train(engine, 0, 1);
    train(engine, 1, 1);
    return everything(engine);
  };
  const Values memory = on_ranks(1, spec, lab::at_stage(3), body);
  for (const auto& [stage, tiers, group] :
       {std::tuple{3, lab::kAllNvme, std::int64_t{16} << 20},
        std::tuple{0, lab::kOptimizerNvme, std::int64_t{1} << 20}}) {
    if (kSanitized && stage == 0) continue;
    EngineOptions options = on_disk(stage, tiers);
    options.sub_group_bytes = group;
    options.offload.io_verify = stage == 0;
    EXPECT_EQ(difference(memory, on_ranks(1, spec, options, body)), "") << stage;
  }
}

TEST(Offload, TwoDirectoriesGiveTheSameBits) {
  const std::string a = lab::nvme_directory() + "/a";
  const std::string b = lab::nvme_directory() + "/b";
  std::filesystem::create_directory(a);
  std::filesystem::create_directory(b);
  for (const std::int64_t block :
       {std::int64_t{4096}, std::int64_t{20000}, std::int64_t{1} << 20}) {
    for (const int stage : {0, 3}) {
      EngineOptions options = on_disk(stage, lab::kAllNvme);
      options.offload.nvme_dir = a + "," + b;
      options.offload.io_block_bytes = block;
      options.offload.io_depth = block == 4096 ? 1 : 8;
      const Values values = on_ranks(2, model(), options, [](Engine& engine) {
        EXPECT_EQ(engine.ledger(), engine.plan());
        fill(engine);
        for (int t = 0; t < 3; ++t) train(engine, t);
        return everything(engine);
      });
      EXPECT_EQ(difference(undisturbed(2).values, values), "") << block << " stage " << stage;
    }
  }
  EXPECT_EQ(files_in(a) + files_in(b), 0);
  std::filesystem::remove(a);
  std::filesystem::remove(b);
}

TEST(Offload, AModelWithoutElementsOrWithoutTrainedOnesTrainsOnDisk) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const lab::TierLevel tiers : kTierLevels) {
      ModelSpec none;
      none.unit("u").parameter("u.empty", {0});
      ModelSpec frozen;
      frozen.unit("f").parameter("f.w", {777}, {.frozen = true});
      for (const ModelSpec& spec : {none, frozen, ModelSpec()}) {
        run_ranks(2, [&](const ProcessGroup& group) {
          Engine engine(spec, AdamW{}, group, on_disk(stage, tiers));
          EXPECT_EQ(engine.ledger(), engine.plan());
          fill(engine);
          train(engine, 0);
          train(engine, 1);
        });
      }
    }
  }
}

TEST(Offload, OptimizersWithOtherStatesTrainOnDisk) {
  for (const bool momentum : {false, true}) {
    std::map<int, Values> results;
    for (int stage = -1; stage < 4; ++stage) {
      const EngineOptions options =
          stage < 0 ? lab::at_stage(2) : on_disk(stage, lab::kAllNvme, 1 + stage);
      run_ranks(2, [&](const ProcessGroup& group) {
        Engine engine(model(), SGD{.lr = 0.1, .momentum = momentum ? 0.9 : 0.0}, group, options);
        EXPECT_EQ(engine.ledger(), engine.plan());
        fill(engine);
        for (int t = 0; t < 3; ++t) train(engine, t);
        Values values;
        for (const char* name : {"a.w", "a.b", "b.w", "c.w"}) {
          auto& all = values[name];
          all.resize(std::string(name) == "a.w"   ? 9000
                     : std::string(name) == "b.w" ? 7000
                     : std::string(name) == "c.w" ? 3000
                                                  : 5);
          engine.read_parameter(name, all);
        }
        if (group.rank() == 0) results[stage] = values;
      });
      EXPECT_EQ(difference(results[-1], results[stage]), "") << stage << momentum;
    }
  }
}

}  // namespace
}  // namespace zshard::lab::disk
