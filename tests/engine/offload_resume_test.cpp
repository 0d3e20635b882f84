// Steps that a disk interrupts: how they are resumed, and what happens if they are not.
#include <gtest/gtest.h>

#include <barrier>
#include <cerrno>
#include <stdexcept>
#include <thread>

#include "tests/engine/offload_lab.hpp"

namespace zshard::lab::disk {
namespace {

// Faults that come while the step is being resumed: each resume gets a little further.
TEST(Offload, AStepThatIsInterruptedAgainAndAgainComesToItsEnd) {
  for (const Setting& setting :
       {Setting{1, 2, lab::kOptimizerNvme, 3}, Setting{0, 2, lab::kOptimizerAndGradientsNvme, 3},
        Setting{3, 3, lab::kOptimizerNvme, 1}, Setting{0, 1, lab::kOptimizerNvme, 3}}) {
    SCOPED_TRACE(setting.text());
    Injection faults;
    const Undisturbed& expected = undisturbed(setting.world);
    std::barrier gate(setting.world);
    std::vector<std::int64_t> interruptions(static_cast<std::size_t>(setting.world));
    run_ranks(
        setting.world,
        [&](const ProcessGroup& group) {
          Engine engine(model(), AdamW{.lr = 0.01}, group, setting.options());
          fill(engine);
          for (int t = 0; t < 3; ++t) {
            for (const MicroStep micro : engine.micro_steps(2)) {
              pass(engine, t * 4 + micro.index());
            }
            std::vector<float> unused(5);
            engine.read_gradient("a.b", unused);  // drains: what follows is the step's own
            gate.arrive_and_wait();
            if (group.rank() == 0) {
              // In every four operations one fails; more than the vote's own take without one.
              faults->arm({.kind = Fault::Kind::error,
                           .value = EIO,
                           .only = setting.tiers == lab::kOptimizerNvme ? std::optional<Operation>()
                                                                        : Operation::write,
                           .rank = setting.world - 1,
                           .after = 1,
                           .times = 1,
                           .every = 4});
            }
            gate.arrive_and_wait();
            StepOptions how;
            how.clip_norm = 5.0;
            Outcome end = outcome([&] { engine.step(how); });
            while (end.type == "IoError") {
              ++interruptions[static_cast<std::size_t>(group.rank())];
              end = outcome([&] { engine.resume_step(); });
            }
            EXPECT_EQ(end.type, "nothing") << end.text;
            gate.arrive_and_wait();
            if (group.rank() == 0) faults->clear();
            gate.arrive_and_wait();
          }
          EXPECT_EQ(difference(expected.values, everything(engine)), "");
        },
        {.deadline_seconds = kPatience});
    for (const std::int64_t count : interruptions) {
      EXPECT_EQ(count, interruptions[0]);
      EXPECT_GT(count, 3);
    }
  }
}

// A device that does not answer within the deadline may answer later, into memory that the engine
// would like to use again.
TEST(Offload, ADeviceThatAnswersAfterTheDeadlineSpoilsNothing) {
  struct Row {
    int buffers;
    Operation held;
    int step;            // in which it happens
    std::int64_t after;  // operations that go well first
  };
  // In the first step of the second row what hangs is needed before what is there already.
  for (const Row& row :
       {Row{1, Operation::read, 1, 1}, Row{2, Operation::read, 0, 0}, Row{2, Operation::read, 1, 1},
        Row{2, Operation::write, 1, 1}, Row{1, Operation::write, 1, 1}}) {
    if (row.buffers == 1 && row.held == Operation::write && !exhaustive()) continue;
    SCOPED_TRACE(std::to_string(row.buffers) +
                 (row.held == Operation::read ? " reads" : " writes") + " from " +
                 std::to_string(row.after) + " in step " + std::to_string(row.step));
    Injection faults;
    std::barrier gate(2);
    EngineOptions options = on_disk(1, lab::kOptimizerNvme, row.buffers);
    options.deadline_seconds = 4.0;
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(model(), AdamW{.lr = 0.01}, group, options);
      fill(engine);
      if (row.step == 1) train(engine, 0);
      gate.arrive_and_wait();
      if (group.rank() == 0) {
        faults->arm({.kind = Fault::Kind::held, .only = row.held, .rank = 1, .after = row.after});
      }
      gate.arrive_and_wait();
      const Outcome end = outcome([&] { train(engine, row.step); });
      expect(end, "IoError", {"(rank 1", "has not answered for 2 s"}, "held");
      if (row.held == Operation::read && row.buffers > 1) {
        // Others can be used meanwhile.
        engine.resume_step();
      } else {
        expect(outcome([&] { engine.resume_step(); }), "IoError", {"has not answered"}, "again");
      }
      gate.arrive_and_wait();
      if (group.rank() == 0) faults->clear();
      gate.arrive_and_wait();
      // Until the answer is there.
      for (int i = 0; engine.step_count() == row.step; ++i) {
        const Outcome late = outcome([&] { engine.resume_step(); });
        if (late.type != "IoError" || i == 2000) {
          expect(late, "nothing", {}, "late");
          break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      for (int step = row.step + 1; step < 3; ++step) train(engine, step);
      EXPECT_EQ(difference(undisturbed(2).values, everything(engine)), "");
    });
    expect_all(ends, "nothing", {});
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Offload, AnEngineThatIsInterruptedAndGivenUpEndsAndGivesEverythingBack) {
  Injection faults;
  for (const int stage : {0, 1, 3}) {
    std::barrier gate(2);
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(model(), AdamW{}, group, on_disk(stage, lab::kOptimizerNvme));
      fill(engine);
      gate.arrive_and_wait();
      if (group.rank() == 0) {
        faults->arm({.kind = Fault::Kind::error,
                     .value = ENOSPC,
                     .only = Operation::write,
                     .rank = 1,
                     .times = kLasting});
      }
      gate.arrive_and_wait();
      train(engine, 0);
    });
    faults->clear();
    expect_all(ends, "IoError", {"No space left on device", "(rank 1"});
  }
  EXPECT_EQ(files_in(lab::nvme_directory()), 0);
}

TEST(Offload, ARankThatLeavesWhileAStepIsInterruptedIsNamed) {
  Injection faults;
  std::barrier gate(2);
  const auto ends = outcomes(2, [&](const ProcessGroup& group) {
    Engine engine(model(), AdamW{}, group, on_disk(1, lab::kOptimizerNvme));
    fill(engine);
    gate.arrive_and_wait();
    if (group.rank() == 0) faults->arm({.value = EIO, .only = Operation::write, .rank = 1});
    gate.arrive_and_wait();
    expect(outcome([&] { train(engine, 0); }), "IoError", {"(rank 1"}, "step");
    if (group.rank() == 1) throw std::runtime_error("given up");
    engine.resume_step();
  });
  expect(ends[0], "CommError", {"rank 1"}, "rank 0");
  expect(ends[1], "other", {"given up"}, "rank 1");
}

TEST(Offload, ResumeWithoutAnInterruptionAndMaterializeAreUsageErrors) {
  for (const lab::TierLevel tiers : {lab::kAllDevice, lab::kOptimizerNvme}) {
    run_ranks(2, [&](const ProcessGroup& group) {
      Engine engine(model(), AdamW{.lr = 0.01}, group, on_disk(1, tiers));
      const auto resume = [&] {
        expect(outcome([&] { engine.resume_step(); }), "UsageError", {"no step was interrupted"},
               "resume");
      };
      resume();
      fill(engine);
      engine.begin_micro_steps(1);
      resume();
      engine.step();
      resume();
      engine.materialize(engine.options().offload.optimizer);
      expect(outcome([&] { engine.materialize(Tier::host); }), "UsageError", {"offload.optimizer"},
             "materialize");
      train(engine, 0);
    });
  }
}

}  // namespace
}  // namespace zshard::lab::disk
