// Reading and writing of whole tensors, groups, evaluation, gradients edited before the norm:
// pitfalls.md, kinds "Reduction" and "Interface".
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>

#include "tests/engine/lab.hpp"

namespace zshard {
namespace {

std::vector<float> ramp(std::int64_t count, float first) {
  std::vector<float> out(static_cast<std::size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

std::vector<float> read(Engine& engine, const std::string& name, std::int64_t count) {
  std::vector<float> out(static_cast<std::size_t>(count), -1.0f);
  engine.read_parameter(name, out);
  return out;
}

/// One micro-step in which every element of every parameter of `unit` gets this gradient.
void feed(Engine& engine, UnitId unit, float value) {
  Guard guard = engine.backward(unit);
  for (const ParameterSpec& p :
       engine.spec().units()[static_cast<std::size_t>(unit.value)].parameters) {
    auto* g = guard.gradient<float>(p.id);
    for (std::int64_t i = 0; g != nullptr && i < p.count(); ++i) g[i] += value;
  }
  guard.commit();
}

void at_every_stage(int world, const std::function<void(const ProcessGroup&, Stage)>& body) {
  for (int stage = 0; stage < 4; ++stage) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    run_ranks(world, [&](const ProcessGroup& group) { body(group, static_cast<Stage>(stage)); },
              {20.0});
  }
}

TEST(Contents, WhatIsWrittenIsReadBackInPartsAndWholeAtEveryStage) {
  at_every_stage(3, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("empty", {0, 4});
    unit.parameter("w", {130});
    unit.parameter("scalar", {});
    unit.parameter("half", {33}, {.dtype = DType::bf16});
    unit.parameter("kept", {5}, {.frozen = true, .resident = true});
    Engine engine(spec, AdamW{}, group, {.stage = stage});
    engine.write_parameter("w", ramp(130, 1));
    engine.write_parameter("scalar", ramp(1, 7));
    engine.write_parameter("half", ramp(33, 257));
    engine.write_parameter("kept", ramp(5, -2));
    engine.write_parameter("empty", {});
    engine.write_parameter("w", ramp(10, 500), 60);
    engine.write_state("w", "exp_avg", ramp(130, 3));
    engine.write_state("half", "exp_avg_sq", ramp(33, 9));

    auto w = ramp(130, 1);
    const auto middle = ramp(10, 500);
    std::copy(middle.begin(), middle.end(), w.begin() + 60);
    EXPECT_EQ(read(engine, "w", 130), w);
    std::vector<float> part(20);
    engine.read_parameter("w", part, 55);
    EXPECT_EQ(part, std::vector<float>(w.begin() + 55, w.begin() + 75));
    EXPECT_EQ(read(engine, "scalar", 1), ramp(1, 7));
    EXPECT_EQ(read(engine, "kept", 5), ramp(5, -2));
    std::vector<float> state(130);
    engine.read_state("w", "exp_avg", state);
    EXPECT_EQ(state, ramp(130, 3));
    // bf16 rounds 257 to 256 and 259 to 260; the master keeps them.
    const auto half = read(engine, "half", 33);
    EXPECT_EQ(half[0], 256.0f);
    EXPECT_EQ(half[2], 260.0f);
    std::vector<float> master(33);
    engine.read_state("half", "master", master);
    EXPECT_EQ(master, ramp(33, 257));
    EXPECT_THROW(engine.read_state("w", "master", state), UsageError);
    EXPECT_THROW(engine.read_state("kept", "exp_avg", state), UsageError);
    EXPECT_THROW(engine.read_parameter("v", state), UsageError);
    EXPECT_THROW(engine.read_parameter("w", state, 1), UsageError);
    EXPECT_THROW(engine.read_parameter("w", part, -1), UsageError);
  });
}

TEST(Contents, RanksThatWriteDifferentValuesGetAnErrorOnEveryRank) {
  run_ranks(2,
            [](const ProcessGroup& group) {
              ModelSpec spec;
              spec.unit("u").parameter("w", {8});
              Engine engine(spec, SGD{}, group, {});
              EXPECT_THROW(engine.write_parameter("w", ramp(8, static_cast<float>(group.rank()))),
                           CommError);
              EXPECT_THROW(
                  engine.step_count() == 0 ? engine.write_parameter("w", ramp(8, 1)) : void(),
                  CommError);
            },
            {20.0});
}

TEST(Contents, AReadOnOneRankWhileTheOtherTrainsIsAnErrorOnBothLongBeforeTheDeadline) {
  for (int stage = 0; stage < 4; ++stage) {
    const auto start = std::chrono::steady_clock::now();
    run_ranks(2,
              [&](const ProcessGroup& group) {
                ModelSpec spec;
                auto unit = spec.unit("u");
                unit.parameter("w", {8});
                Engine engine(spec, SGD{}, group, {.stage = static_cast<Stage>(stage)});
                try {
                  if (group.rank() == 0) read(engine, "w", 8);
                  for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1))
                    feed(engine, unit.id(), 1);
                  engine.step();
                  ADD_FAILURE() << "no error on rank " << group.rank();
                } catch (const CommError& error) {
                  const std::string text = error.what();
                  EXPECT_NE(text.find("rank 0 is in a read of a tensor"), std::string::npos)
                      << text;
                }
              },
              {600.0});
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    EXPECT_LT(spent.count(), 60.0) << "stage " << stage;
  }
}

TEST(Contents, AnInitializerIsAskedForOwnedPiecesOnceOverAllRanks) {
  for (int stage = 0; stage < 4; ++stage) {
    std::mutex mutex;
    std::vector<int> asked(10000, 0);
    run_ranks(3, [&](const ProcessGroup& group) {
      ModelSpec spec;
      auto unit = spec.unit("u");
      unit.parameter("w", {100, 100});
      Engine engine(spec, AdamW{}, group, {.stage = static_cast<Stage>(stage)});
      engine.initialize(unit.id(), [&](const ParameterRange& range, std::span<float> out) {
        EXPECT_EQ(range.name, "w");
        EXPECT_EQ(range.shape.size(), 2U);
        EXPECT_EQ(static_cast<std::int64_t>(out.size()), range.count);
        EXPECT_LE(range.count, 4096);
        const std::lock_guard<std::mutex> lock(mutex);
        for (std::int64_t i = 0; i < range.count; ++i) {
          ++asked[static_cast<std::size_t>(range.first + i)];
          out[static_cast<std::size_t>(i)] = static_cast<float>(range.first + i);
        }
      });
      EXPECT_EQ(read(engine, "w", 10000), ramp(10000, 0));
    });
    EXPECT_EQ(asked, std::vector<int>(10000, 1)) << "stage " << stage;
  }
}

TEST(Contents, ThreeMicroStepsOfGradients1And2And4SumTo7AndTheNextStepStartsFromZero) {
  at_every_stage(3, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("w", {70});
    Engine engine(spec, SGD{.lr = 1.0}, group, {.stage = stage});
    const float values[] = {1, 2, 4};
    for (const MicroStep micro : engine.micro_steps(3))
      feed(engine, unit.id(), values[micro.index()]);
    std::vector<float> gradient(70);
    engine.read_gradient("w", gradient);
    EXPECT_EQ(gradient, std::vector<float>(70, 21.0f));  // over three ranks
    StepReport report = engine.step({.gradient_scale = 1.0});
    EXPECT_DOUBLE_EQ(report.norm, 21.0 * std::sqrt(70.0));
    EXPECT_EQ(read(engine, "w", 70), std::vector<float>(70, -21.0f));
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1))
      feed(engine, unit.id(), 0.0f);
    report = engine.step({.gradient_scale = 1.0});
    EXPECT_EQ(report.norm, 0.0);
    EXPECT_EQ(read(engine, "w", 70), std::vector<float>(70, -21.0f));
    EXPECT_EQ(engine.step_count(), 2);
  });
}

TEST(Contents, AGradientEditedBeforeTheStepIsWhatTheNormAndTheUpdateSee) {
  at_every_stage(2, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("w", {2});
    Engine engine(spec, SGD{.lr = 1.0}, group, {.stage = stage});
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
      std::vector<float> early(2);
      EXPECT_THROW(engine.read_gradient("w", early), UsageError);  // not complete yet
      feed(engine, unit.id(), 100.0f);
    }
    engine.write_gradient("w", std::vector<float>{3.0f, 4.0f});
    const StepReport report = engine.step({.gradient_scale = 1.0, .clip_norm = 1.0});
    EXPECT_EQ(report.norm, 5.0);
    const auto w = read(engine, "w", 2);
    EXPECT_FLOAT_EQ(w[0], -0.599999905f);  // numerics.md: 3 / (5 + 1e-6)
    EXPECT_FLOAT_EQ(w[1], -0.799999833f);
    std::vector<float> late(2);
    EXPECT_THROW(engine.read_gradient("w", late), UsageError);  // gone with the step
  });
}

TEST(Contents, AGradientWrittenIntoAUnitThatNobodyUsedIsApplied) {
  at_every_stage(2, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    spec.unit("u").parameter("w", {3});
    Engine engine(spec, SGD{.lr = 1.0}, group, {.stage = stage});
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
    }
    engine.write_gradient("w", std::vector<float>{1, 2, 3});
    const StepReport report = engine.step({.gradient_scale = 1.0});
    EXPECT_EQ(report.touched_units, 1);
    EXPECT_EQ(read(engine, "w", 3), (std::vector<float>{-1, -2, -3}));
  });
}

TEST(Contents, GroupsHaveTheirOwnHyperParametersAndTheMostSpecificLevelWins) {
  at_every_stage(2, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("plain", {4});
    unit.parameter("still", {4}, {.group = "still"});
    unit.parameter("half", {4}, {.lr_scale = 0.5});
    unit.parameter("own", {4}, {.group = "own"});
    spec.group("still", {.lr = 0.0}).group("own", {.lr = 2.0});
    Engine engine(spec, SGD{.lr = 1.0}, group, {.stage = stage});
    engine.write_parameter("still", ramp(4, 5));
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1))
      feed(engine, unit.id(), 1.0f);
    engine.step({.gradient_scale = 0.5});
    EXPECT_EQ(read(engine, "plain", 4), std::vector<float>(4, -1.0f));
    EXPECT_EQ(read(engine, "still", 4), ramp(4, 5));
    EXPECT_EQ(read(engine, "half", 4), std::vector<float>(4, -0.5f));
    EXPECT_EQ(read(engine, "own", 4), std::vector<float>(4, -2.0f));
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1))
      feed(engine, unit.id(), 1.0f);
    engine.step({.lr = 10.0, .gradient_scale = 0.5, .groups = {{"own", {.lr = 4.0}}}});
    EXPECT_EQ(read(engine, "plain", 4), std::vector<float>(4, -11.0f));
    EXPECT_EQ(read(engine, "still", 4), ramp(4, 5));
    EXPECT_EQ(read(engine, "half", 4), std::vector<float>(4, -5.5f));
    EXPECT_EQ(read(engine, "own", 4), std::vector<float>(4, -6.0f));
  });
}

TEST(Contents, TheNormCountsEachElementOnceOverRanksPaddingAndTiedNames) {
  // numerics.md: rank 0 has [3, 0], rank 1 owns [4]; wrong answers are 3.5, 3, 4 and 7.07.
  at_every_stage(2, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    const ParameterId a = unit.parameter("a", {2});
    unit.parameter("tied", {2}, {.alias = "a"});
    const ParameterId b = unit.parameter("b", {65});
    Engine engine(spec, SGD{.lr = 1.0}, group, {.stage = stage, .poison_slots = true});
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
      Guard guard = engine.backward(unit.id());
      if (group.rank() == 0) guard.gradient<float>(a)[0] = 3.0f;
      if (group.rank() == 1) guard.gradient<float>(b)[64] = 4.0f;
      guard.commit();
    }
    EXPECT_EQ(engine.step({.gradient_scale = 1.0}).norm, 5.0);
    EXPECT_EQ(read(engine, "tied", 2), (std::vector<float>{-3.0f, 0.0f}));
  });
}

TEST(Contents, AUnitThatNoRankUsedKeepsItsBytesAndAUnitThatOneRankUsedDecays) {
  at_every_stage(3, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto used = spec.unit("used");
    used.parameter("w", {10});
    auto unused = spec.unit("unused");
    unused.parameter("x", {10});
    Engine engine(spec, AdamW{.lr = 0.1, .weight_decay = 0.5}, group, {.stage = stage});
    engine.write_parameter("w", ramp(10, 1));
    engine.write_parameter("x", ramp(10, 1));
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(2)) {
      if (group.rank() == 1 && micro.index() == 0) feed(engine, used.id(), 0.0f);
    }
    const StepReport report = engine.step();
    EXPECT_EQ(report.touched_units, 1);
    EXPECT_EQ(read(engine, "x", 10), ramp(10, 1));
    EXPECT_NE(read(engine, "w", 10), ramp(10, 1));
  });
}

TEST(Contents, StepCounterIsSetAndDrivesTheBiasCorrection) {
  // numerics.md: a counter that is reset before step 3 gives another value.
  const std::vector<std::vector<float>> gradients = {
      {.1f, -.2f, 0}, {.3f, .1f, -1e-4f}, {-.05f, .4f, 2}};
  run_ranks(1, [&](const ProcessGroup& group) {
    for (const bool reset : {false, true}) {
      ModelSpec spec;
      auto unit = spec.unit("u");
      const ParameterId w = unit.parameter("w", {3});
      Engine engine(spec, Adam{.lr = 0.01}, group, {});
      engine.write_parameter("w", std::vector<float>{1, -2, .5f});
      for (int step = 0; step < 3; ++step) {
        if (reset && step == 2) engine.set_step_count(0);
        for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
          Guard guard = engine.backward(unit.id());
          std::copy(gradients[static_cast<std::size_t>(step)].begin(),
                    gradients[static_cast<std::size_t>(step)].end(), guard.gradient<float>(w));
          guard.commit();
        }
        engine.step();
      }
      EXPECT_NEAR(read(engine, "w", 3)[0], reset ? 0.971415481651 : 0.974813056997865, 3e-7);
    }
  });
}

TEST(Contents, BoundPointersLiveAsLongAsTheGuards) {
  at_every_stage(2, [](const ProcessGroup& group, Stage stage) {
    float* w = nullptr;
    float* g = nullptr;
    std::uint16_t* h = nullptr;
    ModelSpec spec;
    auto unit = spec.unit("u");
    const ParameterId id = unit.parameter("w", {5}, &w, &g);
    unit.parameter("h", {3}, &h, nullptr, {.dtype = DType::bf16, .frozen = true});
    EXPECT_THROW(unit.parameter("bad", {3}, &w, nullptr, {.dtype = DType::bf16}), UsageError);
    EXPECT_THROW(unit.parameter("bad", {3}, &h), UsageError);
    Engine engine(spec, SGD{}, group, {.stage = stage});
    int events = 0;
    engine.on_bind([&](const Binding& b) {
      ++events;
      if (b.parameter == id) {
        EXPECT_EQ(b.data, static_cast<void*>(w));
      }
    });
    EXPECT_EQ(w, nullptr);
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
      {
        const Guard outer = engine.forward(unit.id());
        ASSERT_NE(w, nullptr);
        EXPECT_NE(h, nullptr);
        EXPECT_EQ(g, nullptr);
        EXPECT_EQ(outer.pointer<float>(id), w);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(w) % 256, 0U);
        {
          const Guard inner = engine.forward(unit.id());
          EXPECT_EQ(outer.pointer(id), inner.pointer(id));
        }
        EXPECT_NE(w, nullptr);
      }
      EXPECT_EQ(w, nullptr);
      Guard back = engine.backward(unit.id());
      EXPECT_NE(g, nullptr);
      EXPECT_EQ(back.gradient<float>(id), g);
      back.commit();
      back.release();
      EXPECT_EQ(g, nullptr);
    }
    engine.step();
    EXPECT_GT(events, 0);
  });
}

TEST(Contents, OverwriteIsAnnouncedOnceThoughTheUnitIsUsedAgainInside) {
  at_every_stage(1, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("w", {5});
    Engine engine(spec, SGD{}, group, {.stage = stage, .gradient_mode = GradientMode::overwrite});
    int overwrites = 0;
    engine.on_bind([&](const Binding& b) {
      overwrites += b.gradient != nullptr && b.mode == GradientMode::overwrite ? 1 : 0;
    });
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
      EXPECT_EQ(engine.acquire(unit.id(), Pass::backward), GradientMode::overwrite);
      EXPECT_EQ(engine.acquire(unit.id(), Pass::recompute), GradientMode::accumulate);
      engine.release(unit.id(), Pass::recompute);
      EXPECT_EQ(engine.acquire(unit.id(), Pass::backward), GradientMode::accumulate);
      engine.commit(unit.id());
      engine.release(unit.id(), Pass::backward);
      for (int i = 0; i < 5; ++i) {
        static_cast<float*>(engine.gradient(engine.spec().parameter_id("w")))[i] = 1.0f;
      }
      engine.commit(unit.id());
      engine.release(unit.id(), Pass::backward);
    }
    EXPECT_EQ(overwrites, 1);
    engine.step();
  });
}

TEST(Contents, SubGroupsOfOneElementSevenElementsAndAllGiveTheSameBits) {
  std::vector<lab::Tensors> results;
  for (const std::int64_t bytes :
       {std::int64_t{4096}, std::int64_t{7 * 4096}, std::int64_t{64} << 20}) {
    lab::Case c;
    auto unit = c.spec.unit("u");
    unit.parameter("w", {5000});
    unit.parameter("h", {5000}, {.dtype = DType::bf16});
    c.world = 2;
    std::mt19937_64 random(1);
    c.uses = lab::random_uses(random, c.spec, 2, 3, 1, 100);
    c.options.sub_group_bytes = bytes;
    results.push_back(lab::train(c));
  }
  EXPECT_EQ(lab::difference(results[0], results[1]), "");
  EXPECT_EQ(lab::difference(results[0], results[2]), "");
}

TEST(Contents, TheNumberOfKernelThreadsChangesNoBit) {
  std::vector<lab::Tensors> results;
  for (const int threads : {1, 2, 5}) {
    lab::Case c;
    auto unit = c.spec.unit("u");
    unit.parameter("w", {700001});  // long enough for ranges to be shared out
    unit.parameter("h", {500003}, {.dtype = DType::bf16});
    c.world = 2;
    std::mt19937_64 random(1);
    c.uses = lab::random_uses(random, c.spec, 2, 2, 1, 100);
    c.clip = 0.5;
    c.options.threads = threads;
    c.bad_tick = 1;
    results.push_back(lab::train(c));
  }
  EXPECT_EQ(lab::difference(results[0], results[1]), "");
  EXPECT_EQ(lab::difference(results[0], results[2]), "");
}

TEST(Contents, AnEvaluationThatIsLeftEarlyIsFinishedByAsking) {
  at_every_stage(2, [](const ProcessGroup& group, Stage stage) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("w", {5});
    Engine engine(spec, SGD{}, group, {.stage = stage});
    for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(3)) {
      const Guard guard = engine.forward(unit.id());
      break;
    }
    EXPECT_THROW(engine.begin_micro_steps(1), UsageError);
    EXPECT_THROW(engine.step(), UsageError);
    engine.finish_evaluation();
    EXPECT_THROW(engine.finish_evaluation(), UsageError);
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1))
      feed(engine, unit.id(), 1.0f);
    EXPECT_FALSE(engine.step().skipped);
  });
}

}  // namespace
}  // namespace zshard
