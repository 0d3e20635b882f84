// Reading and setting contents of engines on disk: every answer is that of memory.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "tests/engine/offload_lab.hpp"

namespace zshard::lab::disk {
namespace {

/// Parameters larger than the 1 MiB windows, at odd places of them.
ModelSpec wide_model() {
  ModelSpec spec;
  auto a = spec.unit("a");
  a.parameter("a.first", {1001});
  a.parameter("a.w", {700001});
  auto b = spec.unit("b");
  b.parameter("b.first", {333}, {.dtype = DType::bf16});
  b.parameter("b.w", {600003}, {.dtype = DType::bf16});
  b.parameter("b.frozen", {300001}, {.frozen = true});
  return spec;
}

/// A random walk over everything that sets or tells contents; what it read.
std::vector<std::vector<float>> walk(Engine& engine, std::uint64_t seed, int length) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<float>> told;
  fill(engine);
  std::vector<const ParameterSpec*> parameters;
  for (int u = 0; u < units_of(engine); ++u) {
    for (const ParameterSpec& p : spec_of(engine, u).parameters) parameters.push_back(&p);
  }
  const auto pick = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() %
                                     static_cast<std::uint64_t>(std::max<std::int64_t>(1, n)));
  };
  std::int64_t tick = 0;
  const auto some = [&](const ParameterSpec& p) {
    const std::int64_t first = pick(p.count());
    const std::int64_t count = pick(4) == 0
                                   ? p.count() - first
                                   : pick(std::min<std::int64_t>(p.count() - first, 5000) + 1);
    return std::pair{first, count};
  };
  const auto slot_of = [&](const ParameterSpec& p) {
    const std::vector<std::string> slots = {"exp_avg", "exp_avg_sq", "master"};
    return slots[static_cast<std::size_t>(pick(p.options.dtype == DType::f32 ? 2 : 3))];
  };
  for (int i = 0; i < length; ++i) {
    const ParameterSpec& p =
        *parameters[static_cast<std::size_t>(pick(static_cast<std::int64_t>(parameters.size())))];
    const auto [first, count] = some(p);
    auto values = lab::uniform(7, static_cast<std::uint64_t>(i), p.name, count);
    // Second moments are not negative.
    for (float& x : values) x = std::fabs(x);
    switch (pick(p.options.frozen ? 4 : 8)) {
      case 0:
      case 1:
        engine.read_parameter(p.name, values, first);
        told.push_back(values);
        break;
      case 2:
        engine.write_parameter(p.name, values, first);
        break;
      case 3: {
        const int kind = static_cast<int>(pick(5));
        if (kind == 4) engine.set_step_count(pick(5));
        const StepReport report =
            train(engine, static_cast<int>(++tick), 1 + static_cast<int>(pick(2)),
                  kind == 0 ? static_cast<int>(pick(units_of(engine))) : -1, kind == 1);
        EXPECT_EQ(report.skipped, kind == 1);
        told.push_back({static_cast<float>(report.norm)});
        break;
      }
      case 4:
        engine.read_state(p.name, slot_of(p), values, first);
        told.push_back(values);
        break;
      case 5:
        engine.write_state(p.name, slot_of(p), values, first);
        break;
      case 6:  // gradients, which are there behind the last micro-step only
        for (const MicroStep micro : engine.micro_steps(2)) {
          pass(engine, 1000 + i * 2 + micro.index());
        }
        engine.write_gradient(p.name, values, first);
        told.emplace_back(static_cast<std::size_t>(p.count()));
        engine.read_gradient(p.name, told.back());
        told.push_back({static_cast<float>(engine.step().norm)});
        break;
      case 7:
        for ([[maybe_unused]] const MicroStep micro : engine.evaluation_passes(1)) {
          for (int u = 0; u < units_of(engine); ++u) {
            const Guard guard = engine.forward(unit(u));
            const ParameterSpec& q = spec_of(engine, u).parameters.back();
            told.push_back(lab::load(guard.pointer(q.id), q.options.dtype, q.count()));
          }
        }
        break;
      default:
        break;
    }
  }
  for (auto& [name, values] : everything(engine)) told.push_back(std::move(values));
  return told;
}

void compare_walks(const ModelSpec& spec, int world, const EngineOptions& options,
                   const std::vector<std::vector<float>>& memory, std::uint64_t seed, int length,
                   const std::string& what) {
  const auto got =
      on_ranks(world, spec, options, [&](Engine& engine) { return walk(engine, seed, length); });
  ASSERT_EQ(got.size(), memory.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(lab::same_bits(got[i], memory[i])) << what << ", answer " << i;
  }
}

TEST(Offload, RandomCallsOnContentsAnswerAsInMemory) {
  const int seeds = exhaustive() ? 40 : kSanitized ? 1 : 2;
  constexpr int kLength = 40;
  for (int seed = 0; seed < seeds; ++seed) {
    const int world = 1 + (seed + 1) % 3;
    const auto s = static_cast<std::uint64_t>(seed);
    const auto memory = on_ranks(world, model(), lab::at_stage(2),
                                 [&](Engine& engine) { return walk(engine, s, kLength); });
    for (int stage = 0; stage < 4; ++stage) {
      for (std::size_t t = 0; t < kTierLevels.size(); ++t) {
        EngineOptions options = on_disk(stage, kTierLevels[t], 1 + (stage + seed) % 4);
        options.offload.io_verify = (seed + stage) % 2 == 0;
        options.sub_group_bytes = t % 2 == 0 ? kSmallest : 60000;
        compare_walks(model(), world, options, memory, s, kLength,
                      "seed " + std::to_string(seed) + " stage " + std::to_string(stage) +
                          " tiers " + std::to_string(t) + " world " + std::to_string(world));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(Offload, TensorsAreReadAndWrittenAcrossTheWindowsOfTheDisk) {
  constexpr int kLength = kSanitized ? 6 : 12;
  const auto memory = on_ranks(2, wide_model(), lab::at_stage(3),
                               [&](Engine& engine) { return walk(engine, 5, kLength); });
  for (const int stage : kStages) {
    EngineOptions options = on_disk(stage, lab::kAllNvme);
    options.sub_group_bytes = 900000;
    compare_walks(wide_model(), 2, options, memory, 5, kLength, "stage " + std::to_string(stage));
  }
}

TEST(Offload, BuffersDoNotServeWhatAWriteHasReplaced) {
  // A model that lies in the buffers as a whole: nothing is read again unless it must be.
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {2000});
  spec.unit("b").parameter("b.w", {2000}, {.dtype = DType::bf16});
  const auto body = [](Engine& engine) {
    fill(engine);
    train(engine, 0);
    const std::vector<float> values(7, 0.25F);
    engine.write_state("a.w", "exp_avg_sq", values, 1990);
    engine.write_state("b.w", "master", values, 3);
    train(engine, 1);
    engine.write_parameter("a.w", values, 5);
    engine.write_parameter("b.w", values, 5);
    train(engine, 2);
    // After its gradients, and the read-ahead of the step with them, were there.
    for (const MicroStep micro : engine.micro_steps(1)) pass(engine, 3 + micro.index());
    engine.write_gradient("a.w", values, 11);
    engine.step();
    return everything(engine);
  };
  for (const int world : {1, 2}) {
    const Values memory = on_ranks(world, spec, lab::at_stage(0), body);
    for (int stage = 0; stage < 4; ++stage) {
      const EngineOptions options = on_disk(stage, lab::kAllNvme, 8);
      EXPECT_EQ(difference(memory, on_ranks(world, spec, options, body)), "") << stage;
    }
  }
}

TEST(Offload, PaddingOfParametersStaysZeroOnDisk) {
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {9000});
  spec.unit("b").parameter("b.w", {100}, {.dtype = DType::bf16});
  spec.unit("c").parameter("c.w", {9000});
  for (const int buffers : {1, 2}) {
    run_ranks(1, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{.lr = 0.01}, group, on_disk(3, lab::kAllNvme, buffers));
      fill(engine);
      for (int t = 0; t < 3; ++t) {
        train(engine, t);
        for ([[maybe_unused]] const MicroStep micro : engine.evaluation_passes(1)) {
          const Guard guard = engine.forward(unit(1));
          const auto* values = guard.pointer<std::uint16_t>(ParameterId{1});
          EXPECT_NE(values[99], 0);
          // Up to the quantum of 256 bytes.
          for (int i = 100; i < 128; ++i) EXPECT_EQ(values[i], 0) << "step " << t << " at " << i;
        }
      }
    });
  }
}

}  // namespace
}  // namespace zshard::lab::disk
