// Tiers on disk: the same bits as in memory whatever lies where, and what a failing disk does to a
// step: nothing at all before the vote, and behind it an interruption that resume_step() makes
// good.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "runtime/memory/arena.hpp"
#include "tests/engine/cases.hpp"
#include "tests/engine/outcomes.hpp"
#include "tests/engine/pairwise.hpp"
#include "tests/offload/fault_driver.hpp"

namespace zshard {
namespace {

using lab::expect;
using lab::expect_all;
using lab::outcome;
using lab::Outcome;
using lab::unit;
using offload::Operation;
using offload::testing::Fault;
using offload::testing::Faults;
using offload::testing::Injection;
using offload::testing::kLasting;
using Values = std::map<std::string, std::vector<float>>;

// A disk that others use stalls for seconds; no error here has to wait for a deadline.
#ifdef ZSHARD_SANITIZER
constexpr double kPatience = 60.0;
constexpr bool kSanitized = true;
#else
constexpr double kPatience = 20.0;
constexpr bool kSanitized = false;
#endif
/// Stages that a test of its own visits; sanitizers are ten times slower.
const std::vector<int> kStages = kSanitized ? std::vector<int>{0, 3} : std::vector<int>{0, 1, 2, 3};
const std::vector<int> kWorlds = kSanitized ? std::vector<int>{2} : std::vector<int>{1, 2, 3};
constexpr std::int64_t kSmallest = 4096;  // sub_group_bytes of the smallest sub-groups

std::vector<Outcome> outcomes(int world, const std::function<void(const ProcessGroup&)>& fn) {
  return lab::outcomes(world, fn, kPatience);
}

bool exhaustive() {
  const char* wanted = std::getenv("ZSHARD_EXHAUSTIVE");
  return wanted != nullptr && std::string(wanted) == "1";
}

// -- a loop --

const UnitSpec& spec_of(const Engine& engine, int u) {
  return engine.spec().units()[static_cast<std::size_t>(u)];
}

int units_of(const Engine& engine) {
  return static_cast<int>(engine.spec().units().size());
}

void fill(Engine& engine) {
  for (int u = 0; u < units_of(engine); ++u) {
    engine.initialize(unit(u), [](const ParameterRange& range, std::span<float> out) {
      const auto values = lab::uniform(1, 0, std::string(range.name), range.count, range.first);
      std::copy(values.begin(), values.end(), out.begin());
    });
  }
}

/// A micro-step whose gradients follow from the parameters; `unused`: a unit left out.
void pass(Engine& engine, int tick, int unused = -1, bool bad = false) {
  for (int u = 0; u < units_of(engine); ++u) {
    if (u != unused) (void)engine.forward(unit(u));
  }
  for (int u = units_of(engine); u-- > 0;) {
    if (u == unused) continue;
    Guard guard = engine.backward(unit(u));
    for (const ParameterSpec& p : spec_of(engine, u).parameters) {
      void* target = guard.gradient(p.id);
      if (target == nullptr || p.count() == 0) continue;
      const auto values = lab::load(guard.pointer(p.id), p.options.dtype, p.count());
      auto g = lab::backward(p, values, engine.rank(), tick * 64 + u, -1);
      if (bad && engine.rank() == 0) g.back() = std::numeric_limits<float>::infinity();
      kernels::narrow(g.data(), p.options.dtype, target, p.count());
    }
    guard.commit();
  }
}

StepReport train(Engine& engine, int tick, int micro_steps = 2, int unused = -1, bool bad = false) {
  for (const MicroStep micro : engine.micro_steps(micro_steps)) {
    pass(engine, tick * 4 + micro.index(), unused, bad);
  }
  StepOptions how;
  how.clip_norm = 5.0;
  return engine.step(how);
}

/// All parameters and states.
Values everything(Engine& engine) {
  Values all;
  for (int u = 0; u < units_of(engine); ++u) {
    for (const ParameterSpec& p : spec_of(engine, u).parameters) {
      const auto count = static_cast<std::size_t>(p.count());
      engine.read_parameter(p.name, all[p.name] = std::vector<float>(count));
      if (p.options.frozen || !p.options.alias.empty()) continue;
      std::vector<std::string> slots = {"exp_avg", "exp_avg_sq"};
      if (p.options.dtype != DType::f32) slots.emplace_back("master");
      for (const std::string& slot : slots) {
        auto& state = all[p.name + "/" + slot];
        state.resize(count);
        engine.read_state(p.name, slot, state);
      }
    }
  }
  return all;
}

std::string difference(const Values& a, const Values& b) {
  lab::Tensors left;
  lab::Tensors right;
  left.values = a;
  right.values = b;
  return lab::difference(left, right);
}

/// Several groups a segment, 16-bit and fp32 parameters, one frozen, one resident, one of one
/// element.
ModelSpec model() {
  ModelSpec spec;
  auto a = spec.unit("a");
  a.parameter("a.w", {9000});
  a.parameter("a.b", {5});
  auto b = spec.unit("b");
  b.parameter("b.w", {7000}, {.dtype = DType::bf16});
  b.parameter("b.frozen", {300}, {.frozen = true});
  auto c = spec.unit("c");
  c.parameter("c.one", {1});
  c.parameter("c.w", {3, 1000}, {.decay = false});
  c.parameter("c.resident", {2500}, {.dtype = DType::bf16, .resident = true});
  return spec;
}

EngineOptions on_disk(int stage, lab::TierLevel tiers, int buffers = 3) {
  EngineOptions options = lab::at_stage(stage);
  options.deadline_seconds = kPatience;
  options.sub_group_bytes = kSmallest;
  options.offload.io_buffers = buffers;
  lab::set_tiers(options, tiers);
  return options;
}

/// What `body` gives on rank 0 of engines with these options.
template <class Body>
auto on_ranks(int world, const ModelSpec& spec, const EngineOptions& options, Body&& body) {
  std::optional<decltype(body(std::declval<Engine&>()))> result;
  run_ranks(world, [&](const ProcessGroup& group) {
    Engine engine(spec, AdamW{.lr = 0.01}, group, options);
    auto mine = body(engine);
    if (group.rank() == 0) result = std::move(mine);
  });
  return std::move(*result);
}

// -- faults in a step --

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

class RecordingDriver final : public offload::Driver {
 public:
  RecordingDriver(std::unique_ptr<Driver> inner, std::shared_ptr<Recorder> recorder, int rank)
      : inner_(std::move(inner)), recorder_(std::move(recorder)), rank_(rank) {}
  void start(const offload::RawRequest& request) override {
    recorder_->saw(request, rank_);
    inner_->start(request);
  }
  std::size_t reap(std::span<offload::RawCompletion> out, std::int64_t microseconds) override {
    return inner_->reap(out, microseconds);
  }
  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] int capacity() const override { return inner_->capacity(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }

 private:
  std::unique_ptr<Driver> inner_;
  std::shared_ptr<Recorder> recorder_;
  int rank_;
};

struct Setting {
  int stage = 3;
  int world = 2;
  lab::TierLevel tiers = lab::kAllNvme;
  int buffers = 3;
  IoBackendKind backend = IoBackendKind::automatic;
  bool verify = false;
  bool inline_queues = false;
  bool gradients_only = false;
  [[nodiscard]] std::string text() const {
    return "stage " + std::to_string(stage) + " world " + std::to_string(world) + " tiers " +
           std::to_string(tiers) + " buffers " + std::to_string(buffers) +
           (inline_queues ? " inline" : "") + (gradients_only ? " gradients only" : "");
  }
  [[nodiscard]] EngineOptions options() const {
    EngineOptions o = on_disk(stage, tiers, buffers);
    o.offload.io_backend = backend;
    o.offload.io_verify = verify;
    o.inline_queues = inline_queues;
    if (gradients_only) o.offload.optimizer = Tier::host;
    return o;
  }
};

/// Bits after three steps in memory, and the norm of the second.
struct Undisturbed {
  Values values;
  double norm = 0.0;
};

const Undisturbed& undisturbed(int world) {
  static std::mutex mutex;  // ranks ask too
  const std::lock_guard<std::mutex> lock(mutex);
  static std::map<int, Undisturbed> known;
  auto [at, added] = known.try_emplace(world);
  if (!added) return at->second;
  at->second = on_ranks(world, model(), lab::at_stage(1), [](Engine& engine) {
    fill(engine);
    Undisturbed result;
    train(engine, 0);
    result.norm = train(engine, 1).norm;
    train(engine, 2);
    result.values = everything(engine);
    return result;
  });
  return at->second;
}

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

// -- equality --

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

constexpr std::array<lab::TierLevel, 5> kTierLevels = {lab::kOptimizerNvme, lab::kHalfOptimizerNvme,
                                                       lab::kOptimizerAndGradientsNvme,
                                                       lab::kAllNvme, lab::kParametersNvme};

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

// -- contents --

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

TEST(Offload, GroupsThatAreInABufferAreNotReadAgain) {
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {20000});
  EngineOptions options = on_disk(1, lab::kOptimizerNvme, 4);
  const auto body = [](Engine& engine) {
    fill(engine);
    std::vector<std::int64_t> read;
    for (int t = 0; t < 5; ++t) read.push_back(train(engine, t).disk_read_bytes);
    return read;
  };
  const auto read = on_ranks(1, spec, options, body);
  const std::int64_t all =
      plan_memory(spec, AdamW{}, 1, options).bytes(Category::moments, Tier::nvme);
  EXPECT_EQ(read[0], all);
  // The next step starts at the other end, with the four groups of 2048 elements that are there.
  for (std::size_t t = 1; t < read.size(); ++t) {
    EXPECT_LT(read[t], all);
    EXPECT_GE(read[t], all - 4 * 2048 * 8);
  }
}

// -- budgets and splits --

TEST(Offload, TheSplitFollowsFromTheBudgetAndStaysBelowIt) {
  ModelSpec spec;
  for (int u = 0; u < 4; ++u) {
    const std::string name = "u" + std::to_string(u);
    spec.unit(name).parameter(name, {300000 + 1000 * u},
                              {.dtype = u % 2 == 0 ? DType::bf16 : DType::f32});
  }
  const auto body = [](Engine& engine) {
    fill(engine);
    train(engine, 0, 1);
    train(engine, 1, 1);
    EXPECT_EQ(engine.ledger(), engine.plan());
    return everything(engine);
  };
  const Values memory = on_ranks(2, spec, lab::at_stage(2), body);
  for (const int stage : kStages) {
    EngineOptions options = on_disk(stage, lab::kOptimizerNvme);
    options.sub_group_bytes = 100000;
    const MemoryPlan least = plan_memory(spec, AdamW{}, 2, options);
    const std::int64_t low = least.arena_bytes(Tier::host);
    const std::int64_t state = least.bytes(Category::moments) + least.bytes(Category::master);
    std::int64_t previous = std::numeric_limits<std::int64_t>::max();
    bool part = false;
    for (int i = 0; i <= 24; ++i) {
      options.host_budget = low + (state + (std::int64_t{10} << 20)) * i / 24;
      const MemoryPlan plan = plan_memory(spec, AdamW{}, 2, options);
      EXPECT_LE(plan.arena_bytes(Tier::host), *options.host_budget) << i;
      const std::int64_t disk =
          plan.bytes(Category::moments, Tier::nvme) + plan.bytes(Category::master, Tier::nvme);
      EXPECT_LE(disk, previous) << "more memory, more on disk";
      previous = disk;
      part = part || (disk > 0 && disk < state);
      if (i == 0 || i == 12 || i == 15 || i == 24) {
        EXPECT_EQ(difference(memory, on_ranks(2, spec, options, body)), "")
            << "stage " << stage << " budget " << *options.host_budget;
      }
    }
    EXPECT_TRUE(part);
    EXPECT_EQ(previous, 0) << "all of it has room";
    options.host_budget = low - 1;
    const auto ends = outcomes(
        2, [&](const ProcessGroup& group) { const Engine engine(spec, AdamW{}, group, options); });
    expect_all(ends, "OutOfMemory", {"host_budget is"});
  }
}

TEST(Offload, AtLeastTheAskedForBytesOfStateLieOnDisk) {
  for (const int stage : kStages) {
    for (const int world : kWorlds) {
      EngineOptions options = on_disk(stage, lab::kOptimizerNvme);
      const MemoryPlan all = plan_memory(model(), AdamW{}, world, options);
      const std::int64_t state = all.bytes(Category::moments) + all.bytes(Category::master);
      for (const std::int64_t wanted :
           {std::int64_t{0}, std::int64_t{1}, state / 3, state / 2, state - 4096, state,
            std::numeric_limits<std::int64_t>::max()}) {
        options.offload.optimizer_nvme_bytes = wanted;
        const MemoryPlan plan = plan_memory(model(), AdamW{}, world, options);
        const std::int64_t disk =
            plan.bytes(Category::moments, Tier::nvme) + plan.bytes(Category::master, Tier::nvme);
        SCOPED_TRACE("stage " + std::to_string(stage) + " world " + std::to_string(world) +
                     " wanted " + std::to_string(wanted));
        // The rounding of the last sub-groups to whole blocks counts as disk, not as state.
        const std::int64_t kept =
            plan.bytes(Category::moments, Tier::host) + plan.bytes(Category::master, Tier::host);
        EXPECT_LE(kept, std::max<std::int64_t>(0, state - wanted));
        EXPECT_EQ(disk == 0, wanted == 0);
        EXPECT_TRUE(wanted != 1 || disk <= 4 * 2048 * 3);
        Values values = on_ranks(world, model(), options, [](Engine& engine) {
          EXPECT_EQ(engine.ledger(), engine.plan());
          fill(engine);
          for (int t = 0; t < 3; ++t) train(engine, t);
          return everything(engine);
        });
        EXPECT_EQ(difference(undisturbed(world).values, values), "");
      }
    }
  }
}

// -- what an engine takes and gives back --

std::int64_t status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1));
  }
  return -1;
}

int descriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

int files_in(const std::string& directory) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::recursive_directory_iterator(directory)) {
    ++count;
  }
  return count;
}

TEST(Offload, TheLedgerIsThePlanWithItsNvmeColumn) {
  for (const int world : kWorlds) {
    for (const int stage : kStages) {
      for (const lab::TierLevel tiers : kTierLevels) {
        for (const bool verify : {false, true}) {
          EngineOptions options = on_disk(stage, tiers, world);
          options.offload.io_verify = verify;
          const MemoryPlan plan = plan_memory(model(), AdamW{}, world, options);
          const bool third = stage == 3;
          SCOPED_TRACE("world " + std::to_string(world) + " stage " + std::to_string(stage) +
                       " tiers " + std::to_string(tiers));
          EXPECT_EQ(plan.bytes(Category::parameters, Tier::nvme) > 0,
                    third && (tiers == lab::kAllNvme || tiers == lab::kParametersNvme));
          EXPECT_EQ(plan.bytes(Category::gradients, Tier::nvme) > 0,
                    tiers == lab::kOptimizerAndGradientsNvme || tiers == lab::kAllNvme);
          EXPECT_EQ(plan.bytes(Category::moments, Tier::nvme) > 0, tiers != lab::kParametersNvme);
          run_ranks(world, [&](const ProcessGroup& group) {
            Engine engine(model(), AdamW{}, group, options);
            EXPECT_EQ(engine.plan(), plan);
            EXPECT_EQ(engine.ledger(), plan) << engine.ledger().to_string() << plan.to_string();
            const StepReport report = train(engine, 0);
            EXPECT_EQ(report.peak_bytes, plan.memory_bytes());
            EXPECT_EQ(engine.ledger(), plan);
          });
        }
      }
    }
  }
  EXPECT_EQ(files_in(lab::nvme_directory()), 0);
}

TEST(Offload, AHundredEnginesOnDiskGiveEverythingBack) {
  const auto once = [&](int i) {
    const int stage = i % 4;
    (void)outcomes(2, [&](const ProcessGroup& group) {
      EngineOptions options = on_disk(stage, stage == 3 ? lab::kAllNvme : lab::kOptimizerNvme);
      options.offload.io_backend = i % 3 == 0 ? IoBackendKind::posix : IoBackendKind::automatic;
      Engine engine(model(), AdamW{}, group, options);
      switch (i % 5) {
        case 0:
          train(engine, 0);
          break;
        case 1:  // inside a range, with reads under way
          engine.begin_micro_steps(1);
          engine.next_micro_step();
          (void)engine.forward(unit(0));
          break;
        case 2:  // poisoned
          for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
            const Guard guard = engine.forward(unit(0));
            if (group.rank() == 0) throw std::runtime_error("boom");
          }
          engine.step();
          break;
        case 3:  // the step's state is read ahead, and nobody steps
          engine.begin_micro_steps(1);
          engine.next_micro_step();
          pass(engine, 0);
          break;
        default:
          break;
      }
    });
  };
  const std::int64_t arenas = memory::arena_bytes_in_process();
  for (int i = 0; i < 10; ++i) once(i);  // what the process takes once
  const std::int64_t threads = status("Threads");
  const int open = descriptors();
  [[maybe_unused]] const std::int64_t memory = status("VmRSS");
  for (int i = 0; i < 100; ++i) {
    once(i);
    EXPECT_EQ(memory::arena_bytes_in_process(), arenas) << i;
  }
  for (int i = 0; i < 100 && status("Threads") != threads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(status("Threads"), threads);
  EXPECT_EQ(descriptors(), open);
#ifndef ZSHARD_SANITIZER
  EXPECT_LE(status("VmRSS"), memory + 8 * 1024);  // KiB
#endif
  EXPECT_EQ(files_in(lab::nvme_directory()), 0);
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

// -- misuse --

void expect_refused(int world, const EngineOptions& options, const std::string& type,
                    const std::vector<std::string>& parts, const std::string& what) {
  const auto ends = outcomes(world, [&](const ProcessGroup& group) {
    const Engine engine(model(), AdamW{}, group, options);
  });
  expect_all(ends, type, parts, what);
}

TEST(Offload, DirectoriesThatCannotServeAreUsageErrorsOnEveryRank) {
  const std::string base = lab::nvme_directory() + "/places";
  std::filesystem::create_directory(base);
  std::ofstream(base + "/file") << "x";
  std::filesystem::create_directory(base + "/real");
  std::filesystem::create_directory_symlink(base + "/real", base + "/link");
  const auto with = [&](const std::string& directory) {
    EngineOptions options = on_disk(1, lab::kOptimizerNvme);
    options.offload.nvme_dir = directory;
    return options;
  };
  expect_refused(2, with(""), "UsageError", {"offload.nvme_dir is not set"}, "unset");
  expect_refused(2, with(base + "/missing"), "UsageError",
                 {"offload.nvme_dir", "missing", "No such file"}, "missing");
  expect_refused(2, with(base + "/file"), "UsageError", {"offload.nvme_dir", "no directory"},
                 "a file");
  expect_refused(2, with(base + "/link"), "UsageError", {"offload.nvme_dir", "symbolic link"},
                 "a link");
  expect_refused(2, with(base + "/link/"), "UsageError", {"offload.nvme_dir", "symbolic link"},
                 "a link with a slash");
  expect_refused(2, with(base + "/real," + base + "/missing"), "UsageError", {"missing"},
                 "the second one is missing");
  expect_refused(2, with(base + "/real,,"), "UsageError", {"offload.nvme_dir"}, "empty names");
  if (geteuid() != 0) {
    std::filesystem::permissions(base + "/real", std::filesystem::perms::owner_read);
    expect_refused(1, with(base + "/real"), "UsageError", {"cannot be written to"}, "read-only");
    std::filesystem::permissions(base + "/real", std::filesystem::perms::owner_all);
  } else if (chown((base + "/real").c_str(), 65534, 65534) == 0) {
    expect_refused(1, with(base + "/real"), "UsageError", {"belongs to uid 65534"}, "another's");
  }
  std::filesystem::remove_all(base);
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

TEST(Offload, OtherTiersOnOneRankAreAUsageErrorOnEveryRank) {
  struct Row {
    std::string what;
    std::function<void(EngineOptions&)> edit;
    std::string part;
  };
  const std::vector<Row> rows = {
      {"optimizer", [](EngineOptions& o) { o.offload.optimizer = Tier::device; }, ""},
      {"gradients", [](EngineOptions& o) { o.offload.gradients = Tier::nvme; }, "gradients"},
      {"parameters", [](EngineOptions& o) { o.offload.parameters = Tier::nvme; }, "parameters"},
      {"buffers", [](EngineOptions& o) { o.offload.io_buffers = 1; }, "io_buffers"},
      {"verification", [](EngineOptions& o) { o.offload.io_verify = true; }, "io_verify"},
      {"sub-groups", [](EngineOptions& o) { o.sub_group_bytes = 1 << 20; }, "sub_group_bytes"},
      {"bytes", [](EngineOptions& o) { o.offload.optimizer_nvme_bytes = 20000; }, "nvme"},
      {"no bytes", [](EngineOptions& o) { o.offload.optimizer_nvme_bytes = 0; }, ""},
      {"budget", [](EngineOptions& o) { o.host_budget = std::int64_t{1} << 40; }, ""},
  };
  for (const Row& row : rows) {
    for (const int other : {0, 1}) {
      const auto ends = outcomes(2, [&](const ProcessGroup& group) {
        EngineOptions options = on_disk(3, lab::kOptimizerNvme);
        if (group.rank() == other) row.edit(options);
        const Engine engine(model(), AdamW{}, group, options);
      });
      expect_all(ends, "UsageError", {"ranks made different engines", row.part}, row.what);
    }
  }
  // What does not shape the store may differ.
  run_ranks(2, [&](const ProcessGroup& group) {
    EngineOptions options = on_disk(3, lab::kAllNvme);
    if (group.rank() == 1) {
      options.offload.io_backend = IoBackendKind::posix;
      options.offload.io_block_bytes = 8192;
      options.offload.io_depth = 2;
    }
    Engine engine(model(), AdamW{.lr = 0.01}, group, options);
    fill(engine);
    for (int t = 0; t < 3; ++t) train(engine, t);
    EXPECT_EQ(difference(undisturbed(2).values, everything(engine)), "");
  });
}

// The same number of bytes on disk, but of other units: ranks would look in the wrong places.
TEST(Offload, AnotherSplitOfTheSameSizeOnOneRankIsAUsageError) {
  // Two sub-groups of 16 KiB a unit and rank.
  ModelSpec spec;
  for (int u = 0; u < 3; ++u) {
    const std::string name = "u" + std::to_string(u);
    spec.unit(name).parameter(name, {8192});
  }
  EngineOptions one = on_disk(3, lab::kOptimizerNvme);
  EngineOptions other = one;
  one.offload.optimizer_nvme_bytes = 16384 * 11 / 10;
  other.offload.optimizer_nvme_bytes = 16384 * 19 / 10;
  ASSERT_EQ(plan_memory(spec, AdamW{}, 2, one), plan_memory(spec, AdamW{}, 2, other));
  const auto ends = outcomes(2, [&](const ProcessGroup& group) {
    const Engine engine(spec, AdamW{}, group, group.rank() == 0 ? one : other);
  });
  expect_all(ends, "UsageError", {"ranks made different engines", "optimizer state in memory"});
}

TEST(Offload, TiersThatDoNotGoTogetherAreUsageErrors) {
  EngineOptions local = on_disk(2, lab::kOptimizerAndGradientsNvme);
  local.accumulation = Accumulation::local;
  expect_refused(2, local, "UsageError", {"offload.gradients = nvme needs accumulation = reduced"},
                 "local");
  for (int stage = 0; stage < 3; ++stage) {
    EngineOptions options = on_disk(stage, lab::kOptimizerNvme);
    options.offload.parameters = Tier::nvme;
    expect_refused(2, options, "UsageError", {"offload.parameters", "nvme needs stage"}, "stage");
  }
  EngineOptions bytes = on_disk(2, lab::kAllDevice);
  bytes.offload.optimizer_nvme_bytes = 1;
  expect_refused(1, bytes, "UsageError", {"needs offload.optimizer = nvme"}, "bytes");
  for (const auto& [name, edit] :
       std::vector<std::pair<std::string, std::function<void(OffloadOptions&)>>>{
           {"io_buffers", [](OffloadOptions& o) { o.io_buffers = 0; }},
           {"io_buffers", [](OffloadOptions& o) { o.io_buffers = -1; }},
           {"io_depth", [](OffloadOptions& o) { o.io_depth = 0; }},
           {"io_block_bytes", [](OffloadOptions& o) { o.io_block_bytes = 0; }},
           {"optimizer_nvme_bytes", [](OffloadOptions& o) { o.optimizer_nvme_bytes = -1; }}}) {
    EngineOptions options = on_disk(2, lab::kOptimizerNvme);
    edit(options.offload);
    expect_refused(1, options, "UsageError", {name}, name);
  }
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
}  // namespace zshard
