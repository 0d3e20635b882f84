// Broken rules of the interface end in the right typed error on every rank, in time, and leave what
// the error says.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "tests/engine/lab.hpp"
#include "tests/engine/outcomes.hpp"

namespace zshard {
namespace {

using lab::at_stage;
using lab::contents;
using lab::expect;
using lab::expect_all;
using lab::forward_backward;
using lab::kDeadline;
using lab::outcome;
using lab::Outcome;
using lab::outcomes;
using lab::small_model;
using lab::train_step;
using lab::unit;
using lab::Within;
using lab::write_gradients;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr int kHugeInt = std::numeric_limits<int>::max();

// -- options --

struct OptionCase {
  std::string what;
  std::function<void(EngineOptions&)> set;
  std::string type;                // "nothing": works
  std::vector<std::string> parts;  // of the message
  bool same_bits = true;           // as without the option
};

std::vector<OptionCase> numeric_options() {
  std::vector<OptionCase> all;
  const auto row = [&](const std::string& name, auto&& assign, auto fine, auto refused) {
    for (const auto value : fine) {
      all.push_back({name + " = " + std::to_string(value),
                     [assign, value](EngineOptions& o) { assign(o, value); },
                     "nothing",
                     {},
                     true});
    }
    for (const auto value : refused) {
      all.push_back({name + " = " + std::to_string(value),
                     [assign, value](EngineOptions& o) { assign(o, value); },
                     "UsageError",
                     {"option " + name, "Allowed:"},
                     true});
    }
  };
  using Ints = std::vector<int>;
  using Bytes = std::vector<std::int64_t>;
  using Numbers = std::vector<double>;
  row(
      "look_ahead", [](EngineOptions& o, int v) { o.look_ahead = v; }, Ints{0, 1, 1 << 20},
      Ints{-1, kHugeInt, -kHugeInt - 1});
  row(
      "behind", [](EngineOptions& o, int v) { o.behind = v; }, Ints{0, 1, 1 << 20},
      Ints{-1, kHugeInt, -kHugeInt - 1});
  row(
      "reduction_group", [](EngineOptions& o, int v) { o.reduction_group = v; },
      Ints{0, 1, 2, 1 << 20}, Ints{-1, kHugeInt});
  row(
      "threads", [](EngineOptions& o, int v) { o.threads = v; }, Ints{0, 1, 1024},
      Ints{-1, kHugeInt});
  row(
      "test_delay_microseconds", [](EngineOptions& o, int v) { o.test_delay_microseconds = v; },
      Ints{0, 1, 300}, Ints{-1, kHugeInt});
  row(
      "gather_budget", [](EngineOptions& o, std::int64_t v) { o.gather_budget = v; }, Bytes{kHuge},
      Bytes{-1});
  for (const std::int64_t small : {0, 1}) {
    all.push_back({"gather_budget = " + std::to_string(small),
                   [small](EngineOptions& o) { o.gather_budget = small; },
                   "UsageError",
                   {"gather", "budget", "minimum"},
                   true});
  }
  row(
      "sub_group_bytes", [](EngineOptions& o, std::int64_t v) { o.sub_group_bytes = v; },
      Bytes{4096, kHuge}, Bytes{0, -1, 1});
  row(
      "device_budget", [](EngineOptions& o, std::int64_t v) { o.device_budget = v; }, Bytes{kHuge},
      Bytes{-1});
  row(
      "host_budget", [](EngineOptions& o, std::int64_t v) { o.host_budget = v; },
      Bytes{0, 1, kHuge}, Bytes{-1});
  row(
      "offload.optimizer_nvme_bytes",
      [](EngineOptions& o, std::int64_t v) {
        o.deadline_seconds = 20;
        o.offload.optimizer = Tier::nvme;
        o.offload.nvme_dir = lab::nvme_directory();
        o.offload.optimizer_nvme_bytes = v;
      },
      Bytes{0, 1, kHuge}, Bytes{-1});
  row(
      "loss_scale", [](EngineOptions& o, double v) { o.loss_scale = v; }, Numbers{1.0, 1024.0},
      Numbers{0.0, -1.0, kNan, kInf, -kInf, 1e31, 1e300});
  row(
      "deadline_seconds", [](EngineOptions& o, double v) { o.deadline_seconds = v; },
      Numbers{20.0, 1e9}, Numbers{0.0, -1.0, kNan, kInf, 1e10});
  for (const std::int64_t small : {0, 1}) {
    const std::string text = std::to_string(small);
    all.push_back({"device_budget = " + text,
                   [small](EngineOptions& o) { o.device_budget = small; },
                   "OutOfMemory",
                   {"device_budget is " + text, "gather slots", "No change of options or number"},
                   true});
    all.push_back({"host_budget = " + text + " with state in host",
                   [small](EngineOptions& o) {
                     o.offload.optimizer = Tier::host;
                     o.host_budget = small;
                   },
                   "OutOfMemory",
                   {"host_budget is " + text, "moments"},
                   true});
  }
  return all;
}

std::vector<OptionCase> enum_options() {
  std::vector<OptionCase> all;
  const auto works = [&](const std::string& what, auto&& set, bool same = true) {
    all.push_back({what, set, "nothing", {}, same});
  };
  const auto refused = [&](const std::string& what, auto&& set, std::vector<std::string> parts) {
    all.push_back({what, set, "UsageError", std::move(parts), true});
  };
  for (int stage = 0; stage < 4; ++stage) {
    works("stage " + std::to_string(stage),
          [stage](EngineOptions& o) { o.stage = static_cast<Stage>(stage); });
  }
  refused("stage 4", [](EngineOptions& o) { o.stage = static_cast<Stage>(4); },
          {"option stage", "Allowed:"});
  works("optimizer in host", [](EngineOptions& o) { o.offload.optimizer = Tier::host; });
  works("gradients in host", [](EngineOptions& o) { o.offload.gradients = Tier::host; });
  works("parameters in host", [](EngineOptions& o) { o.offload.parameters = Tier::host; });
  const auto nvme = [&](const std::string& what, Tier OffloadOptions::*tier) {
    works(what + " on nvme", [tier](EngineOptions& o) {
      o.deadline_seconds = 20;  // a shared disk may stall for a second
      o.offload.*tier = Tier::nvme;
      o.offload.nvme_dir = lab::nvme_directory();
    });
    refused(what + " on nvme without a directory",
            [tier](EngineOptions& o) { o.offload.*tier = Tier::nvme; },
            {"offload.nvme_dir is not set"});
  };
  nvme("optimizer", &OffloadOptions::optimizer);
  nvme("gradients", &OffloadOptions::gradients);
  nvme("parameters", &OffloadOptions::parameters);
  refused("gradients on nvme with local accumulation",
          [](EngineOptions& o) {
            o.offload.gradients = Tier::nvme;
            o.offload.nvme_dir = lab::nvme_directory();
            o.accumulation = Accumulation::local;
          },
          {"offload.gradients", "accumulation = reduced"});
  refused("bytes on nvme without the tier",
          [](EngineOptions& o) { o.offload.optimizer_nvme_bytes = 1; },
          {"offload.optimizer_nvme_bytes needs offload.optimizer = nvme"});
  refused("a directory that is not there",
          [](EngineOptions& o) {
            o.offload.optimizer = Tier::nvme;
            o.offload.nvme_dir = lab::nvme_directory() + "/none";
          },
          {"none", "No such file or directory"});
  refused("tier 9", [](EngineOptions& o) { o.offload.optimizer = static_cast<Tier>(9); },
          {"option offload.optimizer", "Allowed:"});
  for (int stage = 0; stage < 3; ++stage) {
    refused("parameters in host below stage 3",
            [stage](EngineOptions& o) {
              o.stage = static_cast<Stage>(stage);
              o.offload.parameters = Tier::host;
            },
            {"offload.parameters", "stage"});
  }
  works("overwrite", [](EngineOptions& o) { o.gradient_mode = GradientMode::overwrite; });
  refused("gradient_mode 7",
          [](EngineOptions& o) { o.gradient_mode = static_cast<GradientMode>(7); },
          {"option gradient_mode", "Allowed:"});
  works("local", [](EngineOptions& o) { o.accumulation = Accumulation::local; });
  refused("accumulation 7", [](EngineOptions& o) { o.accumulation = static_cast<Accumulation>(7); },
          {"option accumulation", "Allowed:"});
  refused("reduction native", [](EngineOptions& o) { o.reduction = Reduction::native; },
          {"reduction = native", "not served"});
  refused("reduction 7", [](EngineOptions& o) { o.reduction = static_cast<Reduction>(7); },
          {"option reduction", "Allowed:"});
  works("wire f32", [](EngineOptions& o) { o.wire = DType::f32; });
  works(
      "wire bf16", [](EngineOptions& o) { o.wire = DType::bf16; }, false);
  works(
      "wire f16", [](EngineOptions& o) { o.wire = DType::f16; }, false);
  refused("wire 7", [](EngineOptions& o) { o.wire = static_cast<DType>(7); },
          {"option wire", "Allowed:"});
  refused("master remainder", [](EngineOptions& o) { o.master = MasterWeights::remainder; },
          {"master = remainder", "not served"});
  refused("master none", [](EngineOptions& o) { o.master = MasterWeights::none; },
          {"master = none", "not served"});
  refused("master 7", [](EngineOptions& o) { o.master = static_cast<MasterWeights>(7); },
          {"option master", "Allowed:"});
  refused("moments bf16", [](EngineOptions& o) { o.moments = Moments::bf16; },
          {"moments = bf16", "not served"});
  refused("moments q8", [](EngineOptions& o) { o.moments = Moments::q8; },
          {"moments = q8", "not served"});
  refused("moments 7", [](EngineOptions& o) { o.moments = static_cast<Moments>(7); },
          {"option moments", "Allowed:"});
  for (const bool on : {false, true}) {
    works("inline_queues", [on](EngineOptions& o) { o.inline_queues = on; });
    works("poison_slots", [on](EngineOptions& o) { o.poison_slots = on; });
  }
  return all;
}

std::vector<float> trained_with(const ProcessGroup& group, const EngineOptions& options) {
  Engine engine(small_model(), AdamW{.lr = 0.01}, group, options);
  train_step(engine);
  train_step(engine, 1, {.clip_norm = 0.5});
  return contents(engine);
}

void run_option_cases(const std::vector<OptionCase>& cases) {
  std::vector<float> plain;
  run_ranks(2, [&](const ProcessGroup& group) {
    auto values = trained_with(group, at_stage(3));
    if (group.rank() == 0) plain = std::move(values);
  });
  for (const OptionCase& c : cases) {
    const Within within(kDeadline + 2);
    std::vector<float> got[2];
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      EngineOptions options = at_stage(3);
      c.set(options);
      got[group.rank()] = trained_with(group, options);
    });
    expect_all(ends, c.type, c.parts, c.what);
    if (c.type != "nothing") continue;
    EXPECT_EQ(got[0], got[1]) << c.what;
    if (c.same_bits) {
      EXPECT_EQ(got[0], plain) << c.what;
    }
  }
}

TEST(Misuse, EveryNumericOptionSetInCodeWorksOrIsRefusedWithItsRange) {
  run_option_cases(numeric_options());
}

TEST(Misuse, EveryEnumValueSetInCodeWorksOrIsRefusedByName) {
  run_option_cases(enum_options());
}

TEST(Misuse, ATinyDeadlineStillEndsInTime) {
  // A group deadline that no meeting can keep: a CommError, or luck, but never a hang.
  const Within within(kDeadline + 2);
  for (const double tiny : {5e-324, 1e-6}) {
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      EngineOptions options = at_stage(2);
      options.deadline_seconds = tiny;
      Engine engine(small_model(), SGD{}, group, options);
      for (int i = 0; i < 3; ++i) train_step(engine);
    });
    for (const Outcome& end : ends) {
      if (end.type != "nothing") expect(end, "CommError", {"rank"}, "tiny deadline");
    }
  }
}

// -- arguments of a step --

TEST(Misuse, StepOptionsOutOfRangeAreUsageErrorsThatLeaveTheRangeOpen) {
  struct Bad {
    std::string field;
    std::function<void(StepOptions&, double)> set;
    std::vector<double> values;
  };
  const std::vector<Bad> bad = {
      {"lr", [](StepOptions& o, double v) { o.lr = v; }, {-1, kNan, kInf, 1e39, 1e308}},
      {"weight_decay", [](StepOptions& o, double v) { o.weight_decay = v; }, {-1, kNan, kInf}},
      {"beta1", [](StepOptions& o, double v) { o.beta1 = v; }, {-1, 1, kNan, kInf, 1e300}},
      {"beta2", [](StepOptions& o, double v) { o.beta2 = v; }, {-1, 1, kNan, kInf, 1e300}},
      {"eps", [](StepOptions& o, double v) { o.eps = v; }, {-1, kNan, kInf, 1e300}},
      {"gradient_scale",
       [](StepOptions& o, double v) { o.gradient_scale = v; },
       {kNan, kInf, -kInf, 1e39}},
      {"clip_norm", [](StepOptions& o, double v) { o.clip_norm = v; }, {0, -1, kNan, kInf, -kInf}},
  };
  std::vector<float> clean[2], got[2];
  run_ranks(2, [&](const ProcessGroup& group) {
    clean[group.rank()] = trained_with(group, at_stage(2));
    Engine engine(small_model(), AdamW{.lr = 0.01}, group, at_stage(2));
    for (int step = 0; step < 2; ++step) {
      for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
        forward_backward(engine, static_cast<float>(group.rank() + 1));
      }
      for (const Bad& b : bad) {
        for (const double value : b.values) {
          StepOptions how;
          b.set(how, value);
          expect(outcome([&] { engine.step(how); }), "UsageError", {b.field},
                 b.field + " = " + std::to_string(value));
          StepOptions in_group;
          in_group.groups.push_back({"missing", {.lr = 0.1}});
          expect(outcome([&] { engine.step(in_group); }), "UsageError", {"no group missing"},
                 "unknown group");
        }
      }
      EXPECT_EQ(engine.step_count(), step);
      StepOptions good;
      if (step == 1) good.clip_norm = 0.5;
      engine.step(good);
    }
    got[group.rank()] = contents(engine);
  });
  EXPECT_EQ(got[0], clean[0]);
  EXPECT_EQ(got[1], clean[1]);
}

TEST(Misuse, ExtremeButLegalStepOptionsWork) {
  const std::vector<std::function<void(StepOptions&)>> legal = {
      [](StepOptions& o) { o.lr = 0; },
      [](StepOptions& o) { o.lr = 1; },
      [](StepOptions& o) { o.lr = 1e30; },
      [](StepOptions& o) { o.weight_decay = 0; },
      [](StepOptions& o) { o.weight_decay = 1; },
      [](StepOptions& o) { o.beta1 = 0; },
      [](StepOptions& o) { o.beta2 = 0; },
      [](StepOptions& o) { o.eps = 1; },
      [](StepOptions& o) { o.gradient_scale = 0; },
      [](StepOptions& o) { o.gradient_scale = -1; },
      [](StepOptions& o) { o.gradient_scale = 1e30; },
      [](StepOptions& o) { o.clip_norm = 1e300; },
      [](StepOptions& o) { o.clip_norm = 1e-300; },
      [](StepOptions& o) { o.momentum = kNan; },  // AdamW does not know it
  };
  for (std::size_t i = 0; i < legal.size(); ++i) {
    run_ranks(2, [&](const ProcessGroup& group) {
      Engine engine(small_model(), AdamW{}, group, at_stage(3));
      StepOptions how;
      legal[i](how);
      const StepReport report = train_step(engine, 1, how);
      EXPECT_FALSE(report.skipped) << i;
      EXPECT_EQ(engine.step_count(), 1) << i;
    });
  }
}

TEST(Misuse, OtherStepArgumentsOnOneRankAreACommErrorThatNamesBothBeforeAnythingChanges) {
  const std::vector<std::pair<std::string, std::function<void(StepOptions&)>>> other = {
      {"lr", [](StepOptions& o) { o.lr = 0.5; }},
      {"weight_decay", [](StepOptions& o) { o.weight_decay = 0.5; }},
      {"beta1", [](StepOptions& o) { o.beta1 = 0.5; }},
      {"beta2", [](StepOptions& o) { o.beta2 = 0.5; }},
      {"eps", [](StepOptions& o) { o.eps = 0.5; }},
      {"gradient_scale", [](StepOptions& o) { o.gradient_scale = 0.75; }},
      {"clip_norm", [](StepOptions& o) { o.clip_norm = 0.75; }},
      {"group",
       [](StepOptions& o) {
         o.groups.push_back({"g", {.lr = 0.5}});
       }},
  };
  for (int stage = 0; stage < 3; ++stage) {
    for (const auto& [what, change] : other) {
      const Within within(kDeadline + 1);
      ModelSpec spec = small_model(2);
      spec.unit("last").parameter("grouped", {3}, {.group = "g"});
      spec.group("g", {.lr = 0.25});
      const auto ends = outcomes(3, [&, change = change](const ProcessGroup& group) {
        Engine engine(spec, AdamW{.lr = 0.01}, group, at_stage(stage));
        train_step(engine);
        std::vector<float> before;
        const float* where = nullptr;  // below stage 3 a parameter stays where it is
        for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
          forward_backward(engine, 1.0f);
          const Guard guard = engine.forward(unit(0));
          where = guard.pointer<float>(ParameterId{0});
          before.assign(where, where + 7);
        }
        StepOptions how;
        if (group.rank() == 2) change(how);
        const Outcome end = outcome([&] { engine.step(how); });
        EXPECT_EQ(std::memcmp(before.data(), where, 28), 0);
        EXPECT_EQ(end.state_step, 1);
        EXPECT_EQ(engine.step_count(), 1);
        expect(outcome([&] { engine.begin_micro_steps(1); }), "CommError", {"ranks 0 and 2"},
               "afterwards");
        expect(outcome([&] { contents(engine); }), "CommError", {"ranks 0 and 2"}, "afterwards");
        expect(end, "CommError", {"ranks 0 and 2", "step()", "different arguments"}, what);
      });
      expect_all(ends, "nothing", {}, what);
    }
  }
}

TEST(Misuse, AnotherStepCounterOnOneRankIsFoundByTheNextStep) {
  const auto ends = outcomes(2, [&](const ProcessGroup& group) {
    Engine engine(small_model(), AdamW{}, group, at_stage(3));
    engine.set_step_count(group.rank() == 0 ? 4 : 6);
    train_step(engine);
  });
  expect_all(ends, "CommError", {"ranks 0 and 1", "step counter"});
}

TEST(Misuse, TheStepCounterHasARange) {
  Engine engine(small_model(), AdamW{}, ProcessGroup::single(), at_stage(3));
  for (const std::int64_t step : {std::int64_t{-1}, kHuge, -kHuge, (std::int64_t{1} << 53) + 1}) {
    expect(outcome([&] { engine.set_step_count(step); }), "UsageError", {"set_step_count"}, "");
  }
  engine.set_step_count(std::int64_t{1} << 53);
  train_step(engine);
  engine.set_step_count(0);
  engine.begin_micro_steps(1);
  expect(outcome([&] { engine.set_step_count(1); }), "UsageError", {"between steps"}, "");
}

// -- the order of calls, on one rank and on several --

struct SingleCase {
  std::string what;
  int hold;
  std::function<void(Engine&)> body;  // throws
  std::vector<std::string> parts;
  int n = 1;  // micro-steps of the range that it opens
};

void in_micro_step(Engine& e) {
  e.begin_micro_steps(1);
  e.next_micro_step();
}

void all_forward(Engine& e) {
  for (int u = 0; u < 3; ++u) (void)e.forward(unit(u));
}

std::vector<SingleCase> wrong_calls() {
  return {
      {"backward twice",
       1,
       [](Engine& e) {
         in_micro_step(e);
         all_forward(e);
         for (int i = 0; i < 2; ++i) {
           Guard g = e.backward(unit(2));
           g.commit();
         }
       },
       {"behind the cursor", "unit u2", "backward"}},
      {"backward of a unit that was passed over",
       1,
       [](Engine& e) {
         in_micro_step(e);
         Guard g = e.backward(unit(1));
         g.commit();
         g.release();
         (void)e.backward(unit(2));
       },
       {"behind the cursor", "unit u2"}},
      {"missing commit",
       1,
       [](Engine& e) {
         in_micro_step(e);
         all_forward(e);
         (void)e.backward(unit(2));
         (void)e.backward(unit(1));
       },
       {"released without commit()", "unit u2"}},
      {"missing commit before step",
       1,
       [](Engine& e) {
         in_micro_step(e);
         (void)e.backward(unit(0));
         e.step();
       },
       {"released without commit()", "unit u0"}},
      {"missing commit before the next micro-step",
       1,
       [](Engine& e) {
         e.begin_micro_steps(2);
         e.next_micro_step();
         (void)e.backward(unit(0));
         e.next_micro_step();
       },
       {"released without commit()", "unit u0"},
       2},
      {"missing commit before skip",
       1,
       [](Engine& e) {
         in_micro_step(e);
         (void)e.backward(unit(2));
         e.skip(unit(0));
       },
       {"released without commit()", "unit u2"}},
      {"commit twice",
       1,
       [](Engine& e) {
         in_micro_step(e);
         Guard g = e.backward(unit(2));
         g.commit();
         g.commit();
       },
       {"commit() twice", "unit u2"}},
      {"acquire after commit",
       1,
       [](Engine& e) {
         in_micro_step(e);
         Guard g = e.backward(unit(2));
         g.commit();
         (void)e.backward(unit(2));
       },
       {"already handed over", "unit u2"}},
      {"commit without backward", 1, [](Engine& e) { e.commit(unit(1)); }, {"not held", "unit u1"}},
      {"commit of a forward hold",
       1,
       [](Engine& e) {
         in_micro_step(e);
         e.acquire(unit(0), Pass::forward);
         e.commit(unit(0));
       },
       {"not held", "unit u0"}},
      {"commit of a forward guard",
       1,
       [](Engine& e) {
         in_micro_step(e);
         Guard g = e.forward(unit(0));
         g.commit();
       },
       {"commit() of a guard that is not backward"}},
      {"release without acquire",
       1,
       [](Engine& e) {
         in_micro_step(e);
         e.release(unit(1), Pass::forward);
       },
       {"not held", "unit u1"}},
      {"release twice",
       1,
       [](Engine& e) {
         in_micro_step(e);
         e.acquire(unit(0), Pass::forward);
         e.release(unit(0), Pass::forward);
         e.release(unit(0), Pass::forward);
       },
       {"not held", "unit u0"}},
      {"step without a range", 1, [](Engine& e) { e.step(); }, {"step() without micro_steps()"}},
      {"step in an evaluation",
       1,
       [](Engine& e) {
         e.begin_evaluation_passes(1);
         e.next_micro_step();
         e.step();
       },
       {"step() without micro_steps()"}},
      {"step while a unit is held",
       1,
       [](Engine& e) {
         in_micro_step(e);
         const Guard g = e.forward(unit(1));
         e.step();
       },
       {"still held", "unit u1"}},
      {"next micro-step while a unit is held",
       1,
       [](Engine& e) {
         e.begin_micro_steps(2);
         e.next_micro_step();
         const Guard g = e.forward(unit(1));
         e.next_micro_step();
       },
       {"still held", "unit u1"},
       2},
      {"held too long, hold 1",
       1,
       [](Engine& e) {
         in_micro_step(e);
         const Guard g = e.forward(unit(0));
         (void)e.forward(unit(1));
       },
       {"still held", "unit u0", "hold 1"}},
      {"held too long, hold 2",
       2,
       [](Engine& e) {
         in_micro_step(e);
         const Guard a = e.forward(unit(0));
         const Guard b = e.forward(unit(1));
         (void)e.forward(unit(2));
       },
       {"still held", "unit u0", "hold 2"}},
      {"released in the wrong order, hold 2",
       2,
       [](Engine& e) {
         in_micro_step(e);
         const Guard a = e.forward(unit(0));
         Guard b = e.forward(unit(1));
         b.release();
         (void)e.forward(unit(2));
       },
       {"still held", "unit u0", "hold 2"}},
      {"acquire outside a micro-step",
       1,
       [](Engine& e) { (void)e.forward(unit(0)); },
       {"outside a micro-step", "unit u0"}},
      {"acquire in a range without micro-step",
       1,
       [](Engine& e) {
         e.begin_micro_steps(1);
         (void)e.forward(unit(0));
       },
       {"outside a micro-step", "unit u0"}},
      {"acquire after the last micro-step",
       1,
       [](Engine& e) {
         in_micro_step(e);
         e.next_micro_step();
         (void)e.forward(unit(0));
       },
       {"outside a micro-step", "unit u0"}},
      {"backward in an evaluation",
       1,
       [](Engine& e) {
         e.begin_evaluation_passes(1);
         e.next_micro_step();
         (void)e.backward(unit(0));
       },
       {"unit u0", "backward"}},
      {"acquire after skip",
       1,
       [](Engine& e) {
         in_micro_step(e);
         e.skip(unit(1));
         (void)e.forward(unit(1));
       },
       {"declared skipped", "unit u1"}},
      {"skip of a held unit",
       1,
       [](Engine& e) {
         in_micro_step(e);
         const Guard g = e.forward(unit(1));
         e.skip(unit(1));
       },
       {"skip of a unit that is held", "unit u1"}},
      {"skip outside a micro-step",
       1,
       [](Engine& e) { e.skip(unit(1)); },
       {"outside a micro-step"}},
      {"two ranges",
       1,
       [](Engine& e) {
         e.begin_micro_steps(1);
         e.begin_micro_steps(1);
       },
       {"still open", "step()"}},
      {"an evaluation in a range",
       1,
       [](Engine& e) {
         e.begin_micro_steps(1);
         e.begin_evaluation_passes(1);
       },
       {"still open", "step()"}},
      {"a range in an evaluation",
       1,
       [](Engine& e) {
         e.begin_evaluation_passes(1);
         e.begin_micro_steps(1);
       },
       {"still open", "finish_evaluation()"}},
      {"0 micro-steps", 1, [](Engine& e) { e.begin_micro_steps(0); }, {"n < 1", "0"}},
      {"-1 micro-steps", 1, [](Engine& e) { e.begin_micro_steps(-1); }, {"n < 1", "-1"}},
      {"0 passes", 1, [](Engine& e) { e.begin_evaluation_passes(0); }, {"n < 1"}},
      {"next without a range", 1, [](Engine& e) { e.next_micro_step(); }, {"outside a range"}},
      {"finish_evaluation without one",
       1,
       [](Engine& e) { e.finish_evaluation(); },
       {"finish_evaluation()"}},
      {"finish_evaluation in a training range",
       1,
       [](Engine& e) {
         e.begin_micro_steps(1);
         e.finish_evaluation();
       },
       {"finish_evaluation()"}},
      {"unit -1",
       1,
       [](Engine& e) {
         in_micro_step(e);
         (void)e.forward(unit(-1));
       },
       {"unit -1", "3 units"}},
      {"unit 3",
       1,
       [](Engine& e) {
         in_micro_step(e);
         (void)e.backward(unit(3));
       },
       {"unit 3", "3 units"}},
      {"a huge unit", 1, [](Engine& e) { e.release(unit(kHugeInt), Pass::forward); }, {"3 units"}},
      {"commit of unit 9", 1, [](Engine& e) { e.commit(unit(9)); }, {"unit 9"}},
      {"skip of unit 9", 1, [](Engine& e) { e.skip(unit(9)); }, {"unit 9"}},
      {"mode of unit 9", 1, [](Engine& e) { (void)e.gradient_mode(unit(9)); }, {"unit 9"}},
      {"mode of a unit that is not held",
       1,
       [](Engine& e) { (void)e.gradient_mode(unit(0)); },
       {"unit u0", "not held"}},
      {"initialize of unit 9",
       1,
       [](Engine& e) { e.initialize(unit(9), [](const ParameterRange&, std::span<float>) {}); },
       {"unit 9"}},
      {"initialize without a function",
       1,
       [](Engine& e) { e.initialize(unit(0), nullptr); },
       {"no function"}},
      {"initialize in a range",
       1,
       [](Engine& e) {
         in_micro_step(e);
         e.initialize(unit(0), [](const ParameterRange&, std::span<float>) {});
       },
       {"between steps"}},
      {"parameter -1", 1, [](Engine& e) { (void)e.pointer(ParameterId{-1}); }, {"parameter -1"}},
      {"parameter 6", 1, [](Engine& e) { (void)e.gradient(ParameterId{6}); }, {"parameter 6"}},
      {"pointer of a unit that is not held",
       1,
       [](Engine& e) { (void)e.pointer(ParameterId{0}); },
       {"u0.w", "not held"}},
      {"gradient of a unit that is not held",
       1,
       [](Engine& e) { (void)e.gradient(ParameterId{0}); },
       {"u0.w", "not held"}},
      {"a parameter of another unit",
       1,
       [](Engine& e) {
         in_micro_step(e);
         const Guard g = e.forward(unit(0));
         (void)g.pointer(ParameterId{2});
       },
       {"u1.w", "not in the guard's unit"}},
      {"a gradient of another unit",
       1,
       [](Engine& e) {
         in_micro_step(e);
         const Guard g = e.backward(unit(0));
         (void)g.gradient(ParameterId{2});
       },
       {"u1.w", "not in the guard's unit"}},
      {"a parameter that is none",
       1,
       [](Engine& e) {
         in_micro_step(e);
         const Guard g = e.forward(unit(0));
         (void)g.pointer(ParameterId{77});
       },
       {"parameter 77"}},
      {"a guard that was moved from",
       1,
       [](Engine& e) {
         in_micro_step(e);
         Guard g = e.forward(unit(0));
         const Guard other = std::move(g);
         (void)g.pointer(ParameterId{0});  // NOLINT(bugprone-use-after-move): what is tested
       },
       {"holds nothing"}},
      {"release of a guard that was released",
       1,
       [](Engine& e) {
         in_micro_step(e);
         Guard g = e.forward(unit(0));
         g.release();
         g.release();
       },
       {"holds nothing"}},
      {"a default guard",
       1,
       [](Engine&) {
         Guard g;
         g.commit();
       },
       {"holds nothing"}},
      {"gradient of a default guard",
       1,
       [](Engine&) { (void)Guard().gradient(ParameterId{0}); },
       {"holds nothing"}},
      {"mode of a default guard",
       1,
       [](Engine&) { (void)Guard().gradient_mode(); },
       {"holds nothing"}},
      {"read of a name that is none",
       1,
       [](Engine& e) {
         std::vector<float> out(7);
         e.read_parameter("u0.x", out);
       },
       {"u0.x"}},
      {"read past the end",
       1,
       [](Engine& e) {
         std::vector<float> out(7);
         e.read_parameter("u0.w", out, 1);
       },
       {"7 elements"}},
      {"read before the start",
       1,
       [](Engine& e) {
         std::vector<float> out(1);
         e.read_parameter("u0.w", out, -1);
       },
       {"7 elements"}},
      {"read far past the end",
       1,
       [](Engine& e) {
         std::vector<float> out(1);
         e.read_parameter("u0.w", out, kHuge);
       },
       {"7 elements"}},
      {"write of a slot that is none",
       1,
       [](Engine& e) { e.write_state("u0.w", "momentum_buffer", std::vector<float>(7)); },
       {"momentum_buffer", "exp_avg"}},
      {"read of a gradient without a range",
       1,
       [](Engine& e) {
         std::vector<float> out(7);
         e.read_gradient("u0.w", out);
       },
       {"after the last micro-step"}},
      {"read of a parameter in a range",
       1,
       [](Engine& e) {
         std::vector<float> out(7);
         in_micro_step(e);
         e.read_parameter("u0.w", out);
       },
       {"between steps"}},
      {"save", 1, [](Engine& e) { e.save("/tmp/x"); }, {"not served"}},
      {"load", 1, [](Engine& e) { e.load("/tmp/x"); }, {"not served"}},
      {"materialize", 1, [](Engine& e) { e.materialize(Tier::nvme); }, {"not served"}},
      {"resume_step", 1, [](Engine& e) { e.resume_step(); }, {"resume_step"}},
      {"describe of nowhere", 1, [](Engine& e) { (void)e.describe({}); }, {"describe"}},
      {"describe of a parameter that is none",
       1,
       [](Engine& e) {
         (void)e.describe({unit(0), ParameterId{99}, 0});
       },
       {"99"}},
  };
}

TEST(Misuse, EveryWrongCallOnEveryRankIsAUsageErrorThatNamesIt) {
  for (const SingleCase& c : wrong_calls()) {
    for (const int stage : {0, 2, 3}) {
      for (const bool inline_queues : {false, true}) {
        if (inline_queues && stage != 3) continue;
        ModelSpec spec = small_model();
        spec.hold(c.hold);
        const auto ends = outcomes(2, [&](const ProcessGroup& group) {
          EngineOptions options = at_stage(stage);
          options.inline_queues = inline_queues;
          if (stage == 3) options.gather_budget = minimum_gather_budget(spec, 2);
          Engine engine(spec, AdamW{}, group, options);
          const Outcome end = outcome([&] { c.body(engine); });
          expect(end, "UsageError", c.parts, c.what);
        });
        expect_all(ends, "nothing", {}, c.what);
      }
    }
  }
}

TEST(Misuse, AWrongCallOnOneRankLeavesTheOthersInACommErrorThatNamesIt) {
  for (const SingleCase& c : wrong_calls()) {
    ModelSpec spec = small_model();
    spec.hold(c.hold);
    const Within within(kDeadline + 2);
    const auto ends = outcomes(3, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{}, group, at_stage(3));
      if (group.rank() == 1) c.body(engine);
      // A wrong call to a guard or a fact needs no peer: those ranks meet below.
      train_step(engine, c.n);
      if (group.rank() != 1) train_step(engine, c.n);
      group.barrier();
    });
    expect(ends[0], "CommError", {"rank 1"}, c.what + " rank 0");
    expect(ends[1], "UsageError", c.parts, c.what + " rank 1");
    expect(ends[2], "CommError", {"rank 1"}, c.what + " rank 2");
    expect(ends[3], "UsageError", c.parts, c.what + " run_ranks");
  }
}

TEST(Misuse, AUsageErrorCanBeCaughtAndTheStepGoesOn) {
  std::vector<float> clean, got;
  run_ranks(2, [&](const ProcessGroup& group) {
    auto values = trained_with(group, at_stage(3));
    if (group.rank() == 0) clean = std::move(values);
    Engine engine(small_model(), AdamW{.lr = 0.01}, group, at_stage(3));
    for (int step = 0; step < 2; ++step) {
      for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
        for (int u = 0; u < 3; ++u) {
          const Guard guard = engine.forward(unit(u));
          // Only rank 1 errs; peers notice nothing.
          if (group.rank() == 1 && u < 2) {
            expect(outcome([&] { (void)engine.forward(unit(u + 1)); }), "UsageError", {}, "");
            expect(outcome([&] { engine.commit(unit(u)); }), "UsageError", {"not held"}, "");
            expect(outcome([&] { engine.step({.lr = kNan}); }), "UsageError", {"lr"}, "");
            expect(outcome([&] { engine.step(); }), "UsageError", {"still held"}, "");
          }
        }
        for (int u = 3; u-- > 0;) {
          Guard guard = engine.backward(unit(u));
          write_gradients(engine, unit(u), static_cast<float>(group.rank() + 1));
          guard.commit();
          expect(outcome([&] { guard.commit(); }), "UsageError", {"commit() twice"}, "");
        }
      }
      StepOptions how;
      if (step == 1) how.clip_norm = 0.5;
      engine.step(how);
    }
    values = contents(engine);
    if (group.rank() == 0) got = std::move(values);
  });
  EXPECT_EQ(got, clean);
}

TEST(Misuse, AStepThatNobodyTouchedChangesNothing) {
  for (int stage = 0; stage < 4; ++stage) {
    run_ranks(3, [&](const ProcessGroup& group) {
      Engine engine(small_model(), AdamW{.weight_decay = 0.5}, group, at_stage(stage));
      train_step(engine, 2);
      const std::vector<float> before = contents(engine);
      engine.begin_micro_steps(2);
      if (group.rank() == 1) {
        engine.next_micro_step();
        (void)engine.forward(unit(1));
      }
      const StepReport report = engine.step();
      EXPECT_FALSE(report.skipped);
      EXPECT_EQ(report.touched_units, 0);
      EXPECT_EQ(report.norm, 0.0);
      EXPECT_EQ(engine.step_count(), 2);
      EXPECT_EQ(contents(engine), before);
    });
  }
}

TEST(Misuse, AModelWithoutUnitsOrParametersStillSteps) {
  for (int stage = 0; stage < 4; ++stage) {
    run_ranks(2, [&](const ProcessGroup& group) {
      Engine none(ModelSpec(), AdamW{}, group, at_stage(stage));
      for (int i = 0; i < 2; ++i) train_step(none);
      EXPECT_EQ(none.step_count(), 2);
      ModelSpec spec;
      spec.unit("empty");
      spec.unit("zero").parameter("nothing", {0, 5});
      Engine empty(spec, AdamW{}, group, at_stage(stage));
      for (int i = 0; i < 2; ++i) train_step(empty, 2);
      EXPECT_EQ(empty.step_count(), 2);
    });
  }
}

// -- guards and ranges that outlive --

TEST(Misuse, AGuardAndARangeThatOutliveTheEngineOnlyThrow) {
  for (int stage = 0; stage < 4; ++stage) {
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      auto bound = std::make_unique<float*>(nullptr);
      ModelSpec spec;
      spec.unit("u0").parameter("w", {7}, bound.get());
      auto engine = std::make_unique<Engine>(spec, AdamW{}, group, at_stage(stage));
      auto nulls = std::make_unique<int>(0);
      engine->on_bind([&nulls](const Binding& b) { *nulls += b.data == nullptr ? 1 : 0; });
      {
        MicroSteps range = engine->micro_steps(2);
        MicroSteps::Iterator at = range.begin();
        Guard guard = engine->forward(unit(0));
        EXPECT_NE(*bound, nullptr);
        engine.reset();
        EXPECT_EQ(*bound, nullptr);
        EXPECT_EQ(*nulls, 1);
        bound.reset();  // what the last guard would null is gone as well
        nulls.reset();
        const auto gone = [&](auto&& body) {
          expect(outcome(body), "UsageError", {"engine is destroyed"}, "");
        };
        gone([&] { (void)guard.pointer(ParameterId{0}); });
        gone([&] { ++at; });
        Guard other = std::move(guard);
        gone([&] { other.release(); });
      }
    });
    // A rank that destroys its engine inside a range tells its peers, who did the same.
    expect_all(ends, "nothing", {});
  }
}

TEST(Misuse, AnEngineDestroyedInsideARangeIsACommErrorOnItsPeers) {
  for (const bool evaluation : {false, true}) {
    const Within within(kDeadline + 1);
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(small_model(), AdamW{}, group, at_stage(3));
      if (group.rank() == 0) {
        if (evaluation) {
          engine.begin_evaluation_passes(2);
        } else {
          engine.begin_micro_steps(2);
        }
        engine.next_micro_step();
        return;
      }
      if (evaluation) {
        engine.begin_evaluation_passes(2);
        while (engine.next_micro_step()) all_forward(engine);
      } else {
        train_step(engine, 2);
      }
    });
    expect(ends[0], "nothing", {}, "rank 0");
    expect(ends[1], "CommError", {"rank 0"}, "rank 1");
  }
}

TEST(Misuse, ARankMayLeaveAfterAnEvaluationThatItTookNoPartIn) {
  // What it passed over is still gathered by its peers, which are slower.
  for (int i = 0; i < 10; ++i) {
    const auto ends = outcomes(3, [&](const ProcessGroup& group) {
      EngineOptions options = at_stage(3);
      options.gather_budget = minimum_gather_budget(small_model(), 3);
      options.look_ahead = 0;
      Engine engine(small_model(), AdamW{}, group, options);
      for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(3)) {
        if (group.rank() != 1) continue;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        all_forward(engine);
      }
    });
    expect_all(ends, "nothing", {}, "evaluation");
  }
}

TEST(Misuse, ContentsMaySetRightAfterAnEvaluationThatSomeRanksTookNoPartIn) {
  for (int i = 0; i < 5; ++i) {
    run_ranks(3, [&](const ProcessGroup& group) {
      EngineOptions options = at_stage(3);
      options.poison_slots = false;
      options.test_delay_microseconds = 500;
      Engine engine(small_model(), AdamW{}, group, options);
      for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(3)) {
        if (group.rank() == 1) (void)engine.forward(unit(0));
      }
      engine.write_parameter("u0.w", std::vector<float>(7, 2.0f));
      for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(3)) {
      }
      engine.initialize(unit(1), [](const ParameterRange&, std::span<float> out) {
        std::fill(out.begin(), out.end(), 3.0f);
      });
      std::vector<float> got(7);
      engine.read_parameter("u1.w", got);
      EXPECT_EQ(got, std::vector<float>(7, 3.0f));
      engine.read_parameter("u0.w", got);
      EXPECT_EQ(got, std::vector<float>(7, 2.0f));
    });
  }
}

// -- construction --

struct Arguments {
  ModelSpec spec = small_model();
  Optimizer optimizer = AdamW{.lr = 0.01};
  EngineOptions options = at_stage(3);
};

ModelSpec model_with(const std::string& last, Shape shape, ParameterOptions options,
                     UnitOptions unit_options = {}) {
  ModelSpec spec = small_model(2);
  spec.unit("tail", std::move(unit_options)).parameter(last, std::move(shape), options);
  return spec;
}

TEST(Misuse, AnotherRegistrationOnOneRankIsAUsageErrorWithBothLinesOnEveryRank) {
  struct Case {
    std::string what;
    std::function<void(Arguments&)> mine;    // ranks 0 and 2
    std::function<void(Arguments&)> others;  // rank 1
    std::vector<std::string> parts;
  };
  const auto nothing = [](Arguments&) {};
  const auto tail = [](Shape shape, ParameterOptions options) {
    return [=](Arguments& s) { s.spec = model_with("t", shape, options); };
  };
  const auto program = [](std::vector<Position> positions) {
    return [=](Arguments& s) { s.spec.program(positions); };
  };
  using enum Pass;
  const std::vector<Case> cases = {
      {"swapped order",
       nothing,
       [](Arguments& s) {
         s.spec = ModelSpec();
         for (const int u : {1, 0, 2}) {
           auto unit = s.spec.unit("u" + std::to_string(u));
           unit.parameter("u" + std::to_string(u) + ".w", {7});
           unit.parameter("u" + std::to_string(u) + ".b", {5});
         }
       },
       {"u0", "u1"}},
      {"one unit more", nothing, [](Arguments& s) { s.spec = small_model(4); }, {"rank 1 has `"}},
      {"one unit less", nothing, [](Arguments& s) { s.spec = small_model(2); }, {"rank 1 has `"}},
      {"another shape", tail({6}, {}), tail({2, 3}, {}), {"t"}},
      {"another size", tail({6}, {}), tail({5}, {}), {"t"}},
      {"another dtype", tail({6}, {}), tail({6}, {.dtype = DType::bf16}), {"bf16"}},
      {"frozen", tail({6}, {}), tail({6}, {.frozen = true}), {"frozen"}},
      {"resident", tail({6}, {}), tail({6}, {.resident = true}), {"resident"}},
      {"decay", tail({6}, {}), tail({6}, {.decay = false}), {"decay"}},
      {"learning rate scale", tail({6}, {}), tail({6}, {.lr_scale = 0.5}), {"lr"}},
      {"alias", tail({7}, {}), tail({7}, {.alias = "u0.w"}), {"u0.w"}},
      {"name",
       [](Arguments& s) { s.spec = model_with("a", {6}, {}); },
       [](Arguments& s) { s.spec = model_with("b", {6}, {}); },
       {"a", "b"}},
      {"group",
       [](Arguments& s) {
         s.spec = model_with("t", {6}, {});
         s.spec.group("g", {});
       },
       [](Arguments& s) {
         s.spec = model_with("t", {6}, {.group = "g"});
         s.spec.group("g", {});
       },
       {"g"}},
      {"hyper-parameters of a group",
       [](Arguments& s) { s.spec.group("g", {.lr = 0.1}); },
       [](Arguments& s) { s.spec.group("g", {.lr = 0.2}); },
       {"group g", "lr="}},
      {"blocks", nothing, [](Arguments& s) { s.spec.block_quantised(true); }, {"rank 1 has `"}},
      {"hold", nothing, [](Arguments& s) { s.spec.hold(2); }, {"rank 1 has `"}},
      {"program",
       nothing,
       program({{unit(0), forward},
                {unit(1), forward},
                {unit(2), forward},
                {unit(0), backward},
                {unit(1), backward},
                {unit(2), backward}}),
       {"rank 1 has `"}},
      {"program with recomputation",
       nothing,
       program({{unit(0), forward},
                {unit(1), forward},
                {unit(2), forward},
                {unit(2), backward},
                {unit(1), recompute},
                {unit(1), backward},
                {unit(0), backward}}),
       {"rank 1 has `"}},
      {"optimizer",
       nothing,
       [](Arguments& s) { s.optimizer = Adam{.lr = 0.01}; },
       {"rank 1 has `"}},
      {"optimizer's state",
       nothing,
       [](Arguments& s) { s.optimizer = SGD{.lr = 0.01}; },
       {"rank 1 has `"}},
      {"nesterov",
       [](Arguments& s) { s.optimizer = SGD{.lr = 0.01, .momentum = 0.5}; },
       [](Arguments& s) { s.optimizer = SGD{.lr = 0.01, .momentum = 0.5, .nesterov = true}; },
       {"rank 1 has `"}},
      {"lr", nothing, [](Arguments& s) { s.optimizer = AdamW{.lr = 0.02}; }, {"lr="}},
      {"beta1",
       nothing,
       [](Arguments& s) { s.optimizer = AdamW{.lr = 0.01, .beta1 = 0.5}; },
       {"beta1="}},
      {"eps",
       nothing,
       [](Arguments& s) { s.optimizer = AdamW{.lr = 0.01, .eps = 1e-6}; },
       {"eps="}},
      {"stage",
       nothing,
       [](Arguments& s) { s.options.stage = Stage::gradients; },
       {"rank 1 has `"}},
      {"gather budget",
       nothing,
       [](Arguments& s) { s.options.gather_budget = minimum_gather_budget(s.spec, 3); },
       {"rank 1 has `"}},
      {"look_ahead", nothing, [](Arguments& s) { s.options.look_ahead = 0; }, {"rank 1 has `"}},
      {"loss_scale", nothing, [](Arguments& s) { s.options.loss_scale = 2.0; }, {"loss_scale"}},
      {"accumulation",
       nothing,
       [](Arguments& s) { s.options.accumulation = Accumulation::local; },
       {"accumulation", "local"}},
      {"wire", nothing, [](Arguments& s) { s.options.wire = DType::f16; }, {"wire", "f16"}},
      {"reduction_group",
       nothing,
       [](Arguments& s) { s.options.reduction_group = 2; },
       {"reduction_group 2"}},
  };
  for (const Case& c : cases) {
    const Within within(kDeadline + 1);
    const auto ends = outcomes(3, [&](const ProcessGroup& group) {
      Arguments setup;
      (group.rank() == 1 ? c.others : c.mine)(setup);
      Engine engine(setup.spec, setup.optimizer, group, setup.options);
    });
    std::vector<std::string> parts = {"ranks made different engines", "rank 0 has `",
                                      "rank 1 has `"};
    parts.insert(parts.end(), c.parts.begin(), c.parts.end());
    expect_all(ends, "UsageError", parts, c.what);
  }
}

TEST(Misuse, OptionsThatDoNotChangeBitsMayDifferBetweenRanks) {
  std::vector<float> got[2], plain[2];
  run_ranks(2, [&](const ProcessGroup& group) {
    plain[group.rank()] = trained_with(group, at_stage(3));
    EngineOptions options = at_stage(3);
    if (group.rank() == 1) {
      options.inline_queues = true;
      options.poison_slots = false;
      options.threads = 2;
      options.sub_group_bytes = 4096;
      options.deadline_seconds = 2 * kDeadline;
      options.offload.optimizer = Tier::host;
      options.gradient_mode = GradientMode::overwrite;
    }
    got[group.rank()] = trained_with(group, options);
  });
  for (int r = 0; r < 2; ++r) EXPECT_EQ(got[r], plain[r]);
}

TEST(Misuse, ARankWhoseOwnArgumentsAreRefusedTellsItsPeersTheSame) {
  struct Case {
    std::string what;
    std::function<void(Arguments&)> others;  // rank 1
    std::string type;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"option", [](Arguments& s) { s.options.look_ahead = -1; }, "UsageError", {"look_ahead"}},
      {"nvme",
       [](Arguments& s) { s.options.offload.optimizer = Tier::nvme; },
       "UsageError",
       {"nvme"}},
      {"spec",
       [](Arguments& s) { s.spec = model_with("u0.w", {7}, {}); },
       "UsageError",
       {"registered twice"}},
      {"shape", [](Arguments& s) { s.spec = model_with("t", {-1}, {}); }, "UsageError", {"t"}},
      {"group",
       [](Arguments& s) { s.spec = model_with("t", {1}, {.group = "g"}); },
       "UsageError",
       {"no group g"}},
      {"axis",
       [](Arguments& s) { s.spec = model_with("t", {1}, {.tensor_axis = "x"}); },
       "UsageError",
       {"tensor_axis"}},
      {"shard axis",
       [](Arguments& s) { s.spec = model_with("t", {1}, {}, {.shard_axis = "experts"}); },
       "UsageError",
       {"axis experts"}},
      {"hyper-parameters of a group",
       [](Arguments& s) { s.spec.group("g", {.lr = -1}); },
       "UsageError",
       {"lr"}},
      {"budget",
       [](Arguments& s) { s.options.device_budget = 1; },
       "OutOfMemory",
       {"device_budget is 1", "category"}},
      {"machine",
       [](Arguments& s) { s.spec = model_with("t", {std::int64_t{1} << 44}, {}); },
       "OutOfMemory",
       {"this machine has", "category"}},
      {"largest",
       [](Arguments& s) { s.spec = model_with("t", {std::int64_t{1} << 62}, {}); },
       "UsageError",
       {"2^63"}},
  };
  for (const Case& c : cases) {
    const Within within(kDeadline + 1);
    const auto ends = outcomes(3, [&](const ProcessGroup& group) {
      Arguments setup;
      if (group.rank() == 1) c.others(setup);
      Engine engine(setup.spec, setup.optimizer, group, setup.options);
    });
    for (const std::size_t r : {0, 2}) {
      std::vector<std::string> parts = {"rank 1 could not make its engine"};
      parts.insert(parts.end(), c.parts.begin(), c.parts.end());
      expect(ends[r], c.type, parts, c.what);
    }
    expect(ends[1], c.type, c.parts, c.what);
  }
}

// -- other numbers of calls --

TEST(Misuse, AnotherNumberOfCallsOnOneRankIsACommErrorThatNamesIt) {
  struct Case {
    std::string what;
    std::function<void(Engine&, bool)> loop;  // true: the odd rank
    int lowest_stage = 0;  // below it such calls have no collective, and differ without harm
  };
  const std::vector<Case> cases = {
      {"micro-steps", [](Engine& e, bool odd) { train_step(e, odd ? 3 : 2); }},
      {"a stray evaluation",
       [](Engine& e, bool odd) {
         if (odd) {
           for ([[maybe_unused]] const MicroStep m : e.evaluation_passes(1)) all_forward(e);
         }
         train_step(e);
       }},
      {"another number of evaluation passes",
       [](Engine& e, bool odd) {
         for ([[maybe_unused]] const MicroStep m : e.evaluation_passes(odd ? 2 : 1)) {
           all_forward(e);
         }
         train_step(e);
       },
       3},
  };
  for (const Case& c : cases) {
    for (int stage = c.lowest_stage; stage < 4; ++stage) {
      for (const bool inline_queues : {false, true}) {
        const std::string what = c.what + " at stage " + std::to_string(stage);
        const Within within(kDeadline + 1);
        const auto ends = outcomes(3, [&](const ProcessGroup& group) {
          EngineOptions options = at_stage(stage);
          options.inline_queues = inline_queues;
          Engine engine(small_model(), AdamW{}, group, options);
          c.loop(engine, group.rank() == 1);
        });
        expect_all(ends, "CommError", {"rank 1: ", "range "}, what);
      }
    }
  }
}

TEST(Misuse, AStepMoreOnOneRankIsACommErrorOnceTheOthersHaveLeft) {
  for (int stage = 0; stage < 4; ++stage) {
    for (const bool inline_queues : {false, true}) {
      const Within within(kDeadline);  // nobody waits for it
      const auto ends = outcomes(3, [&](const ProcessGroup& group) {
        EngineOptions options = at_stage(stage);
        options.inline_queues = inline_queues;
        Engine engine(small_model(), AdamW{}, group, options);
        train_step(engine);
        if (group.rank() == 1) train_step(engine);
      });
      expect(ends[1], "CommError", {"on rank 1 cannot complete: rank "}, "rank 1");
      EXPECT_EQ(ends[1].state_step, 1);
      for (const std::size_t r : {0, 2}) {
        // One that was still at the end of its own step may have heard of it.
        if (ends[r].type == "nothing") continue;
        expect(ends[r], "CommError", {"on rank 1 cannot complete: rank "}, "others");
        EXPECT_EQ(ends[r].state_step, 1);
      }
    }
  }
}

TEST(Misuse, AStepMoreWhileTheOthersWaitElsewhereIsACommErrorAtTheDeadline) {
  constexpr double kWait = 2.0;  // also under sanitizers, since it is sat out
  const Within within(2 * kWait + 2);
  const auto ends = outcomes(
      3,
      [&](const ProcessGroup& group) {
        EngineOptions options = at_stage(3);
        options.deadline_seconds = kWait;
        Engine engine(small_model(), AdamW{}, group, options);
        train_step(engine);
        if (group.rank() != 1) train_step(engine);
        group.barrier();
      },
      kWait);
  for (const std::size_t r : {0, 2}) expect(ends[r], "CommError", {"rank 1"}, "others");
  expect(ends[1], "CommError", {"rank"}, "rank 1");
}

}  // namespace
}  // namespace zshard
