// What a rank really takes: the plan to the byte, the formulas of the stages, and the process' peak
// at every phase.
#include <gtest/gtest.h>

#include <fstream>

#include "tests/engine/lab.hpp"

namespace zshard {
namespace {

/// A field of /proc/self/status in bytes.
std::int64_t status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  throw std::runtime_error("no " + field + " in /proc/self/status");
}

/// The kernel's peak counter starts again from what is resident now.
bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return static_cast<bool>(file);
}

// 12 layers of 512 Ki elements: shards divide without padding at world 4.
constexpr int kLayers = 12;
constexpr std::int64_t kElements = 512 * 1024;
constexpr std::int64_t kModel = kLayers * kElements;  // elements

ModelSpec model(DType dtype) {
  ModelSpec spec;
  for (int l = 0; l < kLayers; ++l) {
    spec.unit("h." + std::to_string(l))
        .parameter("h." + std::to_string(l) + ".w", {512, 1024}, {.dtype = dtype});
  }
  return spec;
}

void train(Engine& engine, DType dtype) {
  for (int l = 0; l < kLayers; ++l) {
    engine.initialize(UnitId{l}, [](const ParameterRange& range, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = static_cast<float>((range.first + static_cast<std::int64_t>(i)) % 7) * 0.01f;
      }
    });
  }
  for (int step = 0; step < 2; ++step) {
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(2)) {
      for (int l = 0; l < kLayers; ++l) const Guard guard = engine.forward(UnitId{l});
      for (int l = kLayers; l-- > 0;) {
        Guard guard = engine.backward(UnitId{l});
        std::memset(guard.gradient(ParameterId{l}), 0,
                    static_cast<std::size_t>(kElements * size_of(dtype)));
        guard.commit();
      }
    }
    engine.step({.clip_norm = 1.0});
    for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(1)) {
      for (int l = 0; l < kLayers; ++l) const Guard guard = engine.forward(UnitId{l});
    }
  }
}

TEST(Memory, BytesOfEachStageFollowTheFormulasAtWorldFour) {
  const std::int64_t n = kModel;
  const std::int64_t slot = kElements;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::int64_t b = size_of(dtype);
    const std::int64_t master = dtype == DType::f32 ? 0 : 4;
    struct Row {
      std::int64_t parameters, master, moments, gradients, gather, slots;
    };
    // Ranks 4: replicated state is whole, sharded state a quarter; two gradient slots (one runs on
    // behind).
    const Row rows[] = {{n * b, n * master, n * 8, n / 4 * 4 + n * b, 0, 0},
                        {n * b, n / 4 * master, n / 4 * 8, n / 4 * 4 + n * b, 0, 0},
                        {n * b, n / 4 * master, n / 4 * 8, n / 4 * 4, 0, 2 * slot * b},
                        {n / 4 * b, n / 4 * master, n / 4 * 8, n / 4 * 4, slot * b, 2 * slot * b}};
    for (int stage = 0; stage < 4; ++stage) {
      EngineOptions options{.stage = static_cast<Stage>(stage)};
      options.gather_budget = minimum_gather_budget(model(dtype), 4);
      const MemoryPlan plan = plan_memory(model(dtype), AdamW{}, 4, options);
      const Row& row = rows[stage];
      SCOPED_TRACE("stage " + std::to_string(stage) + " " + std::string(to_string(dtype)));
      EXPECT_EQ(plan.bytes(Category::parameters), row.parameters);
      EXPECT_EQ(plan.bytes(Category::master), row.master);
      EXPECT_EQ(plan.bytes(Category::moments), row.moments);
      EXPECT_EQ(plan.bytes(Category::gradients), row.gradients);
      EXPECT_EQ(plan.bytes(Category::gather_slots), row.gather);
      EXPECT_EQ(plan.bytes(Category::gradient_slots), row.slots);
    }
  }
}

TEST(Memory, TheProcessPeaksBelowThePlanInitialisationIncluded) {
#ifdef ZSHARD_SANITIZER
  GTEST_SKIP() << "sanitizers keep shadow memory: the process' peak says nothing";
#endif
  if (!reset_peak()) GTEST_SKIP() << "the kernel does not let this process reset its peak counter";
  constexpr std::int64_t kSlack = std::int64_t{16} << 20;  // a rank: stacks, tables, allocator
  constexpr int kWorld = 4;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (int stage = 0; stage < 4; ++stage) {
      SCOPED_TRACE("stage " + std::to_string(stage) + " " + std::string(to_string(dtype)));
      ASSERT_TRUE(reset_peak());
      const std::int64_t before = status("VmRSS");
      std::int64_t planned = 0;
      run_ranks(kWorld, [&](const ProcessGroup& group) {
        EngineOptions options{.stage = static_cast<Stage>(stage)};
        options.gather_budget = minimum_gather_budget(model(dtype), kWorld);
        Engine engine(model(dtype), AdamW{}, group, options);
        EXPECT_EQ(engine.ledger(), engine.plan());
        train(engine, dtype);
        EXPECT_EQ(engine.ledger(), engine.plan());
        if (group.rank() == 0) planned = engine.plan().memory_bytes();
      });
      const std::int64_t peak = status("VmHWM") - before;
      EXPECT_LE(peak, kWorld * (planned + kSlack));
      EXPECT_GE(peak, kWorld * planned / 2) << "the measure itself does not work";
    }
  }
}

}  // namespace
}  // namespace zshard
