// What a failing disk does to a step: nothing at all before the vote, and behind it an interruption
// that resume_step() makes good.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <iostream>
#include <memory>
#include <stdexcept>

#include "tests/engine/offload_lab.hpp"
#include "tests/offload/forwarding_driver.hpp"

namespace zshard::lab::disk {
namespace {

/// Counts writes beside the accumulators, per rank.
class Recorder {
 public:
  /// gradients: [begin, end) of the store.
  Recorder(std::int64_t begin, std::int64_t end) : begin_(begin), end_(end) {}
  void saw(const offload::RawRequest& request, int rank) {
    if (request.operation != Operation::write) return;
    if (request.offset >= begin_ && request.offset < end_) return;
    writes_[static_cast<std::size_t>(rank)].fetch_add(1);
  }
  [[nodiscard]] std::int64_t writes(int rank) const {
    return writes_[static_cast<std::size_t>(rank)].load();
  }

 private:
  std::int64_t begin_;
  std::int64_t end_;
  std::array<std::atomic<std::int64_t>, 8> writes_{};
};

class RecordingDriver final : public offload::testing::ForwardingDriver {
 public:
  RecordingDriver(std::unique_ptr<Driver> inner, std::shared_ptr<Recorder> recorder, int rank)
      : ForwardingDriver(std::move(inner)), recorder_(std::move(recorder)), rank_(rank) {}
  void start(const offload::RawRequest& request) override {
    recorder_->saw(request, rank_);
    ForwardingDriver::start(request);
  }

 private:
  std::shared_ptr<Recorder> recorder_;
  int rank_;
};

enum class Ending { fine, before, after };

/// Every call of an engine that is between error and resume.
std::vector<std::pair<std::string, std::function<void(Engine&)>>> calls() {
  const auto buffer = std::make_shared<std::vector<float>>(5);
  return {
      {"forward", [](Engine& e) { (void)e.forward(unit(0)); }},
      {"acquire", [](Engine& e) { e.acquire(unit(0), Pass::backward); }},
      {"commit", [](Engine& e) { e.commit(unit(0)); }},
      {"release", [](Engine& e) { e.release(unit(0), Pass::forward); }},
      {"skip", [](Engine& e) { e.skip(unit(0)); }},
      {"pointer", [](Engine& e) { (void)e.pointer(ParameterId{0}); }},
      {"gradient", [](Engine& e) { (void)e.gradient(ParameterId{0}); }},
      {"gradient_mode", [](Engine& e) { (void)e.gradient_mode(unit(0)); }},
      {"micro_steps", [](Engine& e) { e.begin_micro_steps(1); }},
      {"evaluation_passes", [](Engine& e) { e.begin_evaluation_passes(1); }},
      {"next_micro_step", [](Engine& e) { e.next_micro_step(); }},
      {"finish_evaluation", [](Engine& e) { e.finish_evaluation(); }},
      {"step", [](Engine& e) { e.step(); }},
      {"initialize",
       [](Engine& e) { e.initialize(unit(0), [](const ParameterRange&, std::span<float>) {}); }},
      {"read_parameter", [buffer](Engine& e) { e.read_parameter("a.b", *buffer); }},
      {"write_parameter", [buffer](Engine& e) { e.write_parameter("a.b", *buffer); }},
      {"read_gradient", [buffer](Engine& e) { e.read_gradient("a.b", *buffer); }},
      {"write_gradient", [buffer](Engine& e) { e.write_gradient("a.b", *buffer); }},
      {"read_state", [buffer](Engine& e) { e.read_state("a.b", "exp_avg", *buffer); }},
      {"write_state", [buffer](Engine& e) { e.write_state("a.b", "exp_avg", *buffer); }},
      {"set_step_count", [](Engine& e) { e.set_step_count(7); }},
      {"on_bind", [](Engine& e) { e.on_bind({}); }},
  };
}

/// Trains three steps; in the second the faults strike, and are cured after `tries` vain attempts
/// to resume. Returns how that step ended.
Ending strike(const Setting& setting, const std::vector<Fault>& armed, int tries,
              const std::string& what) {
  SCOPED_TRACE(setting.text() + ", " + what);
  const EngineOptions options = setting.options();
  const Undisturbed& expected = undisturbed(setting.world);
  const MemoryPlan plan = plan_memory(model(), AdamW{}, setting.world, options);
  const std::int64_t parameters = plan.bytes(Category::parameters, Tier::nvme);
  const auto recorder = std::make_shared<Recorder>(
      parameters, parameters + plan.bytes(Category::gradients, Tier::nvme));
  const auto faults = std::make_shared<Faults>();
  offload::set_driver_decorator([&](std::unique_ptr<offload::Driver> driver, int rank) {
    return std::make_unique<RecordingDriver>(
        std::make_unique<offload::testing::FaultDriver>(std::move(driver), faults, rank), recorder,
        rank);
  });
  std::barrier gate(setting.world);
  std::vector<Outcome> first(static_cast<std::size_t>(setting.world));
  std::vector<std::string> problems(first.size());
  const auto problem = [&](int rank, const std::string& text) {
    problems[static_cast<std::size_t>(rank)] += text + "; ";
  };
  run_ranks(setting.world,
            [&](const ProcessGroup& group) {
              const int rank = group.rank();
              Engine engine(model(), AdamW{.lr = 0.01}, group, options);
              fill(engine);
              train(engine, 0);
              gate.arrive_and_wait();
              if (rank == 0) {
                for (const Fault& fault : armed) faults->arm(fault);
              }
              const std::int64_t writes = recorder->writes(rank);
              gate.arrive_and_wait();
              Outcome& mine = first[static_cast<std::size_t>(rank)];
              mine = outcome([&] { train(engine, 1); });
              const bool after = mine.type == "IoError" && !mine.state_step;
              if (mine.type != "nothing" && !after) {
                // Nothing of step 1 is on disk or in memory, as far as this rank can tell.
                if (recorder->writes(rank) != writes) problem(rank, "wrote state before the vote");
                if (engine.step_count() != 1) problem(rank, "counted a step");
              }
              if (mine.type != "nothing") {
                // Poisoned or interrupted: every call tells the same.
                for (const auto& [name, call] : calls()) {
                  const Outcome again = outcome([&, &call = call] { call(engine); });
                  if (again.type != mine.type || again.text != mine.text) {
                    problem(rank, name + " gave " + again.type + ": " + again.text);
                  }
                }
              }
              if (mine.type != "nothing" && !after) {
                const Outcome again = outcome([&] { engine.resume_step(); });
                if (again.type != mine.type || again.text != mine.text) {
                  problem(rank, "resume_step of a poisoned engine gave " + again.type);
                }
              }
              for (int i = 0; after && i < tries; ++i) {
                const Outcome vain = outcome([&] { engine.resume_step(); });
                if (vain.type != "IoError")
                  problem(rank, "vain resume gave " + vain.type + vain.text);
              }
              gate.arrive_and_wait();
              if (rank == 0) faults->clear();
              gate.arrive_and_wait();
              if (mine.type != "nothing" && !after) return;
              const Outcome rest = outcome([&] {
                if (after) {
                  const StepReport report = engine.resume_step();
                  if (report.step != 1 || report.norm != expected.norm)
                    problem(rank, "another report");
                  const Outcome twice = outcome([&] { engine.resume_step(); });
                  if (twice.type != "UsageError")
                    problem(rank, "a second resume gave " + twice.type);
                }
                if (engine.step_count() != 2) problem(rank, "another step counter");
                train(engine, 2);
                const std::string wrong = difference(expected.values, everything(engine));
                if (!wrong.empty()) problem(rank, "other bits: " + wrong);
              });
              if (rest.type != "nothing")
                problem(rank, "goes on with " + rest.type + ": " + rest.text);
            },
            {.deadline_seconds = kPatience});
  offload::set_driver_decorator({});
  const auto is = [](const Outcome& o, const char* type) { return o.type == type; };
  const bool fine = is(first[0], "nothing");
  const bool after = is(first[0], "IoError") && !first[0].state_step;
  EXPECT_EQ(fine, faults->happened() == 0);
  bool named = false;
  for (int r = 0; r < setting.world; ++r) {
    const Outcome& mine = first[static_cast<std::size_t>(r)];
    const std::string who = "rank " + std::to_string(r) + ": " + mine.type + ": " + mine.text;
    EXPECT_EQ(problems[static_cast<std::size_t>(r)], "") << who;
    EXPECT_EQ(fine, is(mine, "nothing")) << who;
    if (fine) continue;
    const bool victim = std::any_of(armed.begin(), armed.end(),
                                    [&](const Fault& f) { return f.rank == r || f.rank < 0; });
    if (after) {
      EXPECT_TRUE(is(mine, "IoError") && !mine.state_step) << who;
    } else {
      EXPECT_TRUE(is(mine, victim && armed.size() == 1 ? "IoError" : "CommError") ||
                  (victim && is(mine, "IoError")))
          << who;
      EXPECT_EQ(mine.state_step, 1) << who;
    }
    // The text of the disk that failed, whoever tells it; no deadline had to pass.
    for (const char* part : {"of the extent file in", "failed", "errno 5", "rank "}) {
      EXPECT_NE(mine.text.find(part), std::string::npos) << part << " is not in " << who;
    }
    for (const Fault& fault : armed) {
      named = named || mine.text.find("(rank " + std::to_string(fault.rank)) != std::string::npos;
    }
  }
  EXPECT_TRUE(fine || named);
  return fine ? Ending::fine : after ? Ending::after : Ending::before;
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (int stage = 0; stage < 4; ++stage) {
    for (const lab::TierLevel tiers : {lab::kOptimizerNvme, lab::kOptimizerAndGradientsNvme,
                                       lab::kAllNvme, lab::kHalfOptimizerNvme}) {
      if (tiers == lab::kAllNvme && stage != 3) continue;
      for (int world = 1; world <= 3; ++world) {
        for (const int buffers : {1, 3}) all.push_back({stage, world, tiers, buffers});
      }
    }
    all.push_back({stage, 2, lab::kOptimizerAndGradientsNvme, 2});
    all.back().gradients_only = true;
  }
  return all;
}

// Each setting is visited with every operation of a step; without ZSHARD_EXHAUSTIVE with every
// seventh one or so.
TEST(Offload, EveryOperationOfAStepMayFailOnceOrUntilItIsCured) {
  std::map<Ending, int> seen;
  std::map<Ending, int> parameters_seen;
  int number = 0;
  for (Setting setting : settings()) {
    ++number;
    if (!exhaustive() && number % (kSanitized ? 5 : 2) != 0) continue;
    setting.backend = number % 3 == 0 ? IoBackendKind::posix : IoBackendKind::automatic;
    setting.verify = number % 4 == 0;
    setting.inline_queues = number % 5 == 0;
    const int stride = exhaustive() ? 1 : 7;
    for (std::int64_t n = exhaustive() ? 0 : number % stride; n < 400; n += stride) {
      const bool lasting = (n + number) % 2 == 0;
      const int victim = static_cast<int>((n + number) % setting.world);
      bool over = false;
      for (int mode = 0; mode < (exhaustive() ? 2 : 1); ++mode) {
        const bool last = mode == 0 ? lasting : !lasting;
        const Ending end =
            strike(setting,
                   {{.kind = Fault::Kind::error,
                     .value = EIO,
                     .rank = victim,
                     .after = n,
                     .times = last ? kLasting : 1}},
                   last ? 2 : 0,
                   "operation " + std::to_string(n) + (last ? " and all later" : "") + " of rank " +
                       std::to_string(victim));
        if (testing::Test::HasFailure()) return;
        over = end == Ending::fine;
        ++seen[end];
        if (setting.tiers == lab::kAllNvme) ++parameters_seen[end];
        // State alone is touched behind the vote only, or read ahead of it.
        EXPECT_FALSE(setting.tiers == lab::kOptimizerNvme && end == Ending::before);
      }
      if (over) break;
    }
  }
  EXPECT_GT(seen[Ending::after], 10);
  EXPECT_GT(seen[Ending::before], 5);
  EXPECT_GT(parameters_seen[Ending::before], 0);
  EXPECT_GT(parameters_seen[Ending::after], 0);
  std::cout << seen[Ending::before] << " before the vote, " << seen[Ending::after] << " behind\n";
}

TEST(Offload, EveryWriteOfAStepMayFailAndTheLastOneToo) {
  for (const Setting& setting :
       {Setting{1, 2, lab::kOptimizerNvme, 3}, Setting{0, 3, lab::kOptimizerNvme, 1},
        Setting{3, 2, lab::kAllNvme, 3}, Setting{0, 2, lab::kOptimizerAndGradientsNvme, 3}}) {
    int after = 0;
    for (std::int64_t n = 0; n < 200; n += exhaustive() ? 1 : 3) {
      const bool lasting = n % 2 == 1;
      const int victim = static_cast<int>(n % setting.world);
      const Ending end = strike(setting,
                                {{.kind = Fault::Kind::error,
                                  .value = EIO,
                                  .only = Operation::write,
                                  .rank = victim,
                                  .after = n,
                                  .times = lasting ? kLasting : 1}},
                                lasting ? 1 : 0, "write " + std::to_string(n));
      if (testing::Test::HasFailure()) return;
      if (end == Ending::fine) break;
      after += end == Ending::after ? 1 : 0;
    }
    EXPECT_GT(after, 0) << setting.text();
  }
}

TEST(Offload, DisksOfTwoRanksMayFailAtOnceAndAgainWhileTheStepIsResumed) {
  for (const Setting& setting :
       {Setting{2, 3, lab::kOptimizerNvme, 3}, Setting{0, 3, lab::kOptimizerNvme, 3},
        Setting{0, 2, lab::kOptimizerAndGradientsNvme, 1}, Setting{3, 3, lab::kAllNvme, 1},
        Setting{3, 2, lab::kOptimizerAndGradientsNvme, 3}}) {
    const auto error = [](int rank, Operation only, std::int64_t after, std::int64_t times) {
      return Fault{.kind = Fault::Kind::error,
                   .value = EIO,
                   .only = only,
                   .rank = rank,
                   .after = after,
                   .times = times};
    };
    strike(setting, {error(0, Operation::write, 2, kLasting), error(1, Operation::write, 3, 1)}, 2,
           "two ranks, one of them lasting");
    strike(setting, {error(0, Operation::read, 1, 1), error(1, Operation::write, 1, 1)}, 0,
           "a read here, a write there");
    strike(setting, {error(1, Operation::write, 0, kLasting), error(1, Operation::read, 0, 1)}, 1,
           "all writes and one read of one rank");
    if (testing::Test::HasFailure()) return;
  }
}

// Reading a tensor changes nothing: when it fails, the engine goes on.
TEST(Offload, AFailedReadOfATensorLeavesTheEngineAsItWasAndAFailedWriteEndsIt) {
  for (const int stage : {0, 1, 3}) {
    for (const bool write : {false, true}) {
      Injection faults;
      std::barrier gate(2);
      const Setting setting{stage, 2, stage == 3 ? lab::kAllNvme : lab::kOptimizerNvme, 3};
      const auto ends = outcomes(2, [&](const ProcessGroup& group) {
        Engine engine(model(), AdamW{.lr = 0.01}, group, setting.options());
        fill(engine);
        train(engine, 0);
        const Values before = everything(engine);
        std::vector<float> values(9000);
        gate.arrive_and_wait();
        if (group.rank() == 0) {
          faults->arm({.kind = Fault::Kind::error, .value = EIO, .rank = 1, .times = 1});
        }
        gate.arrive_and_wait();
        const auto use = [&] {
          if (write) {
            engine.write_state("a.w", "exp_avg", values);
          } else {
            engine.read_state("a.w", "exp_avg", values);
          }
        };
        const Outcome end = outcome(use);
        expect(end, "IoError", {"rank 1", "optimizer state of unit a"}, "first");
        if (write) {
          expect(outcome(use), "IoError", {"rank 1"}, "second");
          return;
        }
        EXPECT_EQ(difference(before, everything(engine)), "");
        train(engine, 1);
        train(engine, 2);
        EXPECT_EQ(difference(undisturbed(2).values, everything(engine)), "");
      });
      expect_all(ends, "nothing", {}, "stage " + std::to_string(stage));
    }
  }
}

// Outside a step too a disk that fails ends every rank with its name, and nothing hangs.
TEST(Offload, AFailedReadInAnEvaluationPassEndsEveryRank) {
  EngineOptions options = on_disk(3, lab::kAllNvme);
  options.gather_budget = minimum_gather_budget(model(), 2);
  int struck = 0;
  for (int n = 0; n < 4; ++n) {
    Injection faults;
    std::barrier gate(2);
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(model(), AdamW{.lr = 0.01}, group, options);
      fill(engine);
      train(engine, 0);
      gate.arrive_and_wait();
      if (group.rank() == 0) {
        faults->arm({.value = EIO, .only = Operation::read, .rank = 1, .after = n});
      }
      gate.arrive_and_wait();
      const auto evaluate = [&] {
        for ([[maybe_unused]] const MicroStep micro : engine.evaluation_passes(1)) {
          for (int u = 0; u < units_of(engine); ++u) const Guard guard = engine.forward(unit(u));
        }
        engine.begin_micro_steps(1);
      };
      const Outcome end = outcome(evaluate);
      if (end.type == "nothing") return;
      const Outcome again = outcome(evaluate);
      EXPECT_EQ(again.type, end.type);
      EXPECT_EQ(again.text, end.text);
      expect(end, group.rank() == 1 ? "IoError" : "CommError",
             {"(rank 1, parameters of unit", "errno 5"}, "evaluation");
      throw std::runtime_error("struck");
    });
    struck += ends[1].type == "other" ? 1 : 0;
    EXPECT_EQ(ends[0].type, ends[1].type);
  }
  EXPECT_GE(struck, 2);
}

TEST(Offload, InitializeOnAFailingDiskIsAnIoErrorOnEveryRank) {
  Injection faults;
  std::barrier gate(2);
  const auto ends = outcomes(2, [&](const ProcessGroup& group) {
    Engine engine(model(), AdamW{}, group, on_disk(0, lab::kOptimizerNvme));
    gate.arrive_and_wait();
    if (group.rank() == 0) {
      faults->arm({.kind = Fault::Kind::error, .value = EIO, .rank = 1, .after = 1});
    }
    gate.arrive_and_wait();
    fill(engine);
  });
  expect_all(ends, "IoError", {"rank 1", "optimizer state of unit b"}, "initialize");
}

// A rank that passes over a backward pass waits for the gathers of its peers, which wait for a
// reduction that its disk has spoilt: it has to tell them at once.
TEST(Offload, ADiskThatFailsBehindTheCallersBackEndsItsPeersAtOnce) {
  ModelSpec spec;
  for (int u = 0; u < 8; ++u) {
    spec.unit("u" + std::to_string(u)).parameter("u" + std::to_string(u), {3000});
  }
  EngineOptions options = on_disk(3, lab::kAllNvme);
  options.gather_budget = minimum_gather_budget(spec, 2);
  options.look_ahead = 0;
  options.behind = 0;
  const MemoryPlan plan = plan_memory(spec, AdamW{}, 2, options);
  const std::int64_t gradients = plan.bytes(Category::parameters, Tier::nvme);
  for (int n = 0; n < 8; ++n) {
    Injection faults;
    std::barrier gate(2);
    const lab::Within limit(kPatience / 2);
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{}, group, options);
      gate.arrive_and_wait();
      if (group.rank() == 0) {
        faults->arm({.value = EIO,
                     .only = Operation::read,
                     .rank = 0,
                     .after = n,
                     .from = gradients,
                     .below = gradients + plan.bytes(Category::gradients, Tier::nvme)});
      }
      gate.arrive_and_wait();
      for (const MicroStep micro : engine.micro_steps(2)) {
        if (micro.index() == 0 || group.rank() == 1) pass(engine, micro.index());
      }
      engine.step();
    });
    expect(ends[0], "IoError", {"(rank 0, gradients of unit u", "errno 5"}, "rank 0");
    expect(ends[1], "CommError", {"(rank 0, gradients of unit u", "errno 5"}, "rank 1");
  }
}

}  // namespace
}  // namespace zshard::lab::disk
