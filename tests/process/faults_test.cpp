// One rank, a process, does something wrong or is no more: every survivor ends in time with an
// error that names the rank and what it waited for.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <array>
#include <atomic>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "offload/io/driver.hpp"
#include "runtime/shard/layout.hpp"
#include "tests/offload/forwarding_driver.hpp"
#include "tests/process/scenario.hpp"

namespace zshard {
namespace {

using lab::at_stage;
using lab::Children;
using lab::Ending;
using lab::expect_error;
using lab::Json;
using lab::kDeadline;
using lab::now;
using lab::outcome;
using lab::Outcome;
using lab::Page;
using lab::run_job;
using lab::say;
using lab::small_model;
using lab::train_step;
using lab::unit;
using lab::write_gradients;
using std::chrono::milliseconds;

constexpr int kWorld = 3;
// Survivors hear of a dead process within 200 ms; the rest is for a loaded machine.
constexpr double kNoticed = lab::kSanitized ? 10.0 : 5.0;
// The deadline of tests that wait for it to pass.
constexpr double kShort = lab::kSanitized ? 8.0 : 4.0;

EngineOptions options_of(const Json& arguments) {
  EngineOptions options = at_stage(arguments.value("stage", 3));
  options.inline_queues = arguments.value("inline", false);
  options.log_dir = arguments.value("log_dir", "");
  options.test_delay_microseconds = arguments.value("delay", 0);
  options.deadline_seconds = arguments.value("deadline", kDeadline);
  return options;
}

/// Marks the time of the fault on the test's page.
void mark(int rank) {
  Children::inherited_page().at[static_cast<std::size_t>(rank)].store(now());
}

/// A step of two micro-steps in which something may happen in the middle of the second.
void train_with(Engine& engine, const std::function<void()>& middle) {
  for (const MicroStep m : engine.micro_steps(2)) {
    for (int u = 0; u < 3; ++u) (void)engine.forward(unit(u));
    for (int u = 3; u-- > 0;) {
      Guard guard = engine.backward(unit(u));
      write_gradients(engine, unit(u), static_cast<float>(engine.rank() + 1));
      if (m.index() == 1 && u == 1) middle();
      guard.commit();
    }
  }
  engine.step();
}

// Two good steps, and the fault of one rank in the third, or between the two.
const lab::Scenario fault("fault", [](const Json& a) {
  const std::string kind = a["kind"];
  const ProcessGroup group = ProcessGroup::from_environment();
  const bool victim = group.rank() == a["victim"];
  const auto is = [&](const char* name) { return victim && kind == name; };
  ModelSpec spec = small_model();
  if (is("other shapes")) spec.unit("more").parameter("more.w", {3});
  Engine engine(spec, AdamW{}, group, options_of(a));
  train_with(engine, [] {});
  train_with(engine, [] {});
  if (victim) mark(group.rank());
  if (is("exception between steps")) throw std::runtime_error("boom");
  if (is("return between steps")) return;
  if (is("another collective")) {
    for ([[maybe_unused]] const MicroStep m : engine.evaluation_passes(1)) {
      for (int u = 0; u < 3; ++u) (void)engine.forward(unit(u));
    }
  }
  if (is("more micro-steps")) {
    for ([[maybe_unused]] const MicroStep m : engine.micro_steps(3)) {
      lab::forward_backward(engine, 1.0f);
    }
    engine.step();
  }
  if (is("a barrier of its own")) {
    group.barrier();
  }
  train_with(engine, [&] {
    if (is("exception")) throw std::runtime_error("boom");
    if (is("_exit 0")) _exit(0);
    if (is("_exit 1")) _exit(1);
    if (is("exit")) std::exit(3);
    if (is("abort")) std::abort();
    if (is("SIGKILL")) raise(SIGKILL);
    if (is("SIGTERM")) raise(SIGTERM);
    if (is("SIGSTOP")) raise(SIGSTOP);
  });
  // Whoever has come this far waits for the others; a victim may have gone a step further.
  train_with(engine, [] {});
  train_with(engine, [] {});
});

/// Stops its process at the first write after arm().
class StoppingDriver final : public offload::testing::ForwardingDriver {
 public:
  explicit StoppingDriver(std::unique_ptr<Driver> inner) : ForwardingDriver(std::move(inner)) {}
  static void arm() { armed().store(true); }
  void start(const offload::RawRequest& request) override {
    if (request.operation == offload::Operation::write && armed().exchange(false)) raise(SIGSTOP);
    ForwardingDriver::start(request);
  }

 private:
  static std::atomic<bool>& armed() {
    static std::atomic<bool> instance{false};
    return instance;
  }
};

// A group with all the time in the world, an engine without: what waits in neither's queues.
const lab::Scenario patient("patient group", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  const bool victim = group.rank() == 1;
  EngineOptions options = options_of(a);
  if (a["kind"] == "write of the step") {
    offload::set_driver_decorator([](std::unique_ptr<offload::Driver> driver, int) {
      return std::make_unique<StoppingDriver>(std::move(driver));
    });
    options.offload.optimizer = Tier::nvme;
    options.offload.nvme_dir = a["dir"];
  }
  Engine engine(small_model(), AdamW{}, group, options);
  train_with(engine, [] {});
  group.barrier();
  if (victim) mark(group.rank());
  if (a["kind"] == "write of the step") {
    if (victim) StoppingDriver::arm();
    train_with(engine, [] {});
  } else {
    if (victim) raise(SIGSTOP);
    group.barrier();
  }
});

struct Fault {
  std::string kind;
  std::string victim_type;  // what the victim says; "" nothing
  int code = 0;             // its exit code where it ends by itself
  int signal = 0;
  std::vector<std::string> survivors;  // parts of what the others say
  std::string type = "CommError";
};

std::vector<Fault> faults(std::size_t victim) {
  const std::string rank = "rank " + std::to_string(victim);
  const std::vector<std::string> gone = {"cannot complete: " + rank + " is gone (its process",
                                         "has ended)", "of unit u", "micro-step"};
  const std::vector<std::string> left = {"cannot complete: " + rank, "of unit u",
                                         "in micro-step 0 of 2, range 3"};
  return {
      {"exception",
       "other",
       1,
       0,
       {rank + ": a backward guard of unit u1 was left by an exception", "step 2, micro-step 1"}},
      {"exception between steps", "other", 1, 0, left},
      {"return between steps", "", 0, 0, left},
      {"_exit 0", "", 0, 0, gone},
      {"_exit 1", "", 1, 0, gone},
      {"exit", "", 3, 0, gone},
      {"abort", "", -1, SIGABRT, gone},
      {"SIGKILL", "", -1, SIGKILL, gone},
      {"SIGTERM", "", -1, SIGTERM, gone},
      {"another collective",
       "CommError",
       1,
       0,
       {"ranks issued different collectives", rank + ": ", "of unit u", "range 3"}},
      {"more micro-steps",
       "CommError",
       1,
       0,
       {"ranks issued different collectives", rank + ": ", "micro-step 0 of 3", "micro-step 0 of 2",
        "of unit u"}},
      {"other shapes",
       "UsageError",
       1,
       0,
       {"ranks made different engines: rank 0 has", victim == 0 ? "rank 1 has" : rank + " has"},
       "UsageError"},
  };
}

TEST(ProcessFaults, EverySurvivorEndsInTimeAndNamesRankOperationAndUnit) {
  for (const std::size_t victim : {0, 1, 2}) {
    for (const Fault& f : faults(victim)) {
      for (const int stage : lab::kSanitized ? std::vector<int>{3} : std::vector<int>{0, 1, 3}) {
        for (const bool inline_queues : {false, true}) {
          if (lab::kSanitized && inline_queues) continue;
          const std::string what = f.kind + " of rank " + std::to_string(victim) + ", stage " +
                                   std::to_string(stage) + (inline_queues ? ", inline" : "");
          Children children(lab::kJobSeconds);
          lab::start_job(
              children, kWorld, "fault",
              {{"kind", f.kind}, {"victim", victim}, {"stage", stage}, {"inline", inline_queues}});
          const auto ends = children.wait();
          const std::int64_t start = children.page().at[victim].load();
          for (std::size_t r = 0; r < ends.size(); ++r) {
            if (r == victim) continue;
            expect_error(ends[r], f.type, f.survivors, what + ", rank " + std::to_string(r));
            if (start != 0) {
              EXPECT_LT(static_cast<double>(ends[r].time - start) * 1e-9, kNoticed) << what;
              EXPECT_EQ(ends[r].said()["state_step"], 2) << what;
            }
          }
          const Ending& end = ends[victim];
          EXPECT_EQ(end.code(), f.code) << what << ": " << end.text();
          EXPECT_EQ(end.signal(), f.signal) << what << ": " << end.text();
          if (!f.victim_type.empty()) expect_error(end, f.victim_type, {}, what);
        }
      }
    }
  }
}

TEST(ProcessFaults, ARankThatIsStoppedPastTheDeadlineIsNamedAndEndsWithAnErrorAsItGoesOn) {
  for (const bool inline_queues : {false, true}) {
    Children children(lab::kJobSeconds + 2 * kShort);
    lab::start_job(
        children, kWorld, "fault",
        {{"kind", "SIGSTOP"}, {"victim", 1}, {"inline", inline_queues}, {"deadline", kShort}});
    for (const std::size_t r : {0, 2}) {
      const Ending& end = children.wait(r);
      expect_error(end, "CommError", {"rank 1 did not ", "of unit u", "raise deadline_seconds"},
                   "rank " + std::to_string(r));
      const double waited = static_cast<double>(end.time - children.page().at[1].load()) * 1e-9;
      EXPECT_GT(waited, kShort - 0.1);
      EXPECT_LT(waited, kShort + kNoticed);
      EXPECT_EQ(end.said()["state_step"], 2);
    }
    EXPECT_FALSE(children.ended(1));
    const std::int64_t start = now();
    children.signal(1, SIGCONT);
    expect_error(children.wait(1), "CommError", {"rank 1 did not "}, "rank 1");
    EXPECT_LT(static_cast<double>(children.wait(1).time - start) * 1e-9, kNoticed);
  }
}

TEST(ProcessFaults, TheEnginesDeadlineHoldsForTheGroupsCallsAndTheEndOfAStepToo) {
  for (const std::string kind : {"call of the loop", "write of the step"}) {
    const std::string dir = testing::TempDir() + "patient_" + std::to_string(getpid());
    std::filesystem::create_directory(dir);
    Children children(lab::kJobSeconds + 2 * kShort);
    // A disk that others use is waited for as well.
    const double deadline = kind == "write of the step" ? 2 * kShort : kShort;
    lab::start_job(children, kWorld, "patient group",
                   {{"kind", kind}, {"dir", dir}, {"deadline", deadline}},
                   {.deadline = 10.0 * lab::kJobSeconds});
    for (const std::size_t r : {0, 2}) {
      const Ending& end = children.wait(r);
      expect_error(end, "CommError", {"rank 1 did not ", "deadline_seconds"}, kind);
      const double waited = static_cast<double>(end.time - children.page().at[1].load()) * 1e-9;
      EXPECT_GT(waited, deadline - 0.1) << kind;
      EXPECT_LT(waited, deadline + kNoticed) << kind;
    }
    children.signal(1, SIGCONT);
    expect_error(children.wait(1), "CommError", {"rank 1 did not "}, kind + ", rank 1");
    std::filesystem::remove_all(dir);
  }
}

TEST(ProcessFaults, AStopBelowTheDeadlineChangesNothing) {
  Children children(lab::kJobSeconds);
  lab::start_job(children, kWorld, "fault", {{"kind", "SIGSTOP"}, {"victim", 1}});
  for (int i = 0; i < 10'000 && children.page().at[1].load() == 0; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  std::this_thread::sleep_for(milliseconds(300));
  children.signal(1, SIGCONT);
  lab::expect_success(children.wait(), "stopped for 0.3 s");
}

TEST(ProcessFaults, ABarrierOfOneRankAloneIsNamedAtTheDeadline) {
  const auto ends = run_job(
      kWorld, "fault", {{"kind", "a barrier of its own"}, {"victim", 1}, {"deadline", kShort}});
  for (const std::size_t r : {0, 2}) {
    expect_error(ends[r], "CommError", {"cannot complete: rank 1"}, "survivor");
  }
  expect_error(ends[1], "CommError", {"barrier", "rank 0"}, "victim");
}

const lab::Scenario not_a_number("nan", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  Engine engine(small_model(), AdamW{}, group, options_of(a));
  train_step(engine, 2);
  const std::vector<float> before = lab::contents(engine);
  for ([[maybe_unused]] const MicroStep m : engine.micro_steps(2)) {
    for (int u = 3; u-- > 0;) {
      Guard guard = engine.backward(unit(u));
      write_gradients(engine, unit(u), 1.0f);
      if (group.rank() == 1 && u == 1 && m.index() == 1) {
        static_cast<float*>(engine.gradient(ParameterId{2}))[4] =
            std::numeric_limits<float>::quiet_NaN();
      }
      guard.commit();
    }
  }
  const StepReport report = engine.step();
  const bool same = lab::contents(engine) == before;
  const std::int64_t count = engine.step_count();
  train_step(engine, 2);
  say({{"skipped", report.skipped},
       {"first", report.skipped ? engine.describe(*report.first) : ""},
       {"non_finite", report.non_finite},
       {"same", same},
       {"count", count},
       {"after", engine.step_count()}});
});

TEST(ProcessFaults, ANanOnOneRankSkipsTheStepOnAllAndTrainingGoesOn) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto ends = run_job(kWorld, "nan", {{"stage", stage}});
    lab::expect_success(ends, "stage " + std::to_string(stage));
    for (const Ending& end : ends) {
      EXPECT_EQ(end.said(), (Json{{"skipped", true},
                                  {"first", "parameter u1.w (unit u1), element 4"},
                                  {"non_finite", 1},
                                  {"same", true},
                                  {"count", 1},
                                  {"after", 2}}))
          << end.text();
    }
  }
}

// -- killed at any moment --

const lab::Scenario endless("endless", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  if (a.value("anew", false)) {  // most of the time an engine is being made or destroyed
    Children::inherited_page().ready.fetch_add(1);
    while (true) {
      Engine engine(small_model(), AdamW{}, group, options_of(a));
      train_step(engine);
    }
  }
  Engine engine(small_model(), AdamW{}, group, options_of(a));
  Children::inherited_page().ready.fetch_add(1);
  while (true) {
    train_step(engine, 2);
    if (engine.step_count() % 4 != 0) continue;
    for ([[maybe_unused]] const MicroStep m : engine.evaluation_passes(1)) {
      for (int u = 0; u < 3; ++u) (void)engine.forward(unit(u));
    }
    (void)lab::contents(engine);
    group.barrier();
  }
});

/// What of this machine a job could leave behind.
std::set<std::string> traces() {
  std::set<std::string> found;
  for (const char* directory : {"/dev/shm", "/tmp"}) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
      const std::string name = entry.path().filename();
      if (name.rfind("zshard", 0) == 0 && name.rfind("zshard_test_", 0) != 0) {
        found.insert(entry.path());
      }
    }
  }
  return found;
}

TEST(ProcessFaults, AKillAtAnyMomentLeavesErrorsOnTheSurvivorsAndNothingElse) {
  const int kills = lab::exhaustive() ? 220 : lab::kSanitized ? 12 : 50;
  std::mt19937_64 random(29);
  const auto before = traces();
  std::string pattern = "/tmp/zshard_test_XXXXXX";
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  double slowest = 0.0;
  for (int turn = 0; turn < kills; ++turn) {
    const auto victim = static_cast<std::size_t>(turn % kWorld);
    const int stage = turn % 4;
    const std::string what = "turn " + std::to_string(turn);
    Children children(lab::kJobSeconds);
    const bool starting = turn % 10 == 9;  // while the ranks still meet
    lab::JobOptions options;
    if (starting) options.deadline = kShort;
    for (int r = 0; r < kWorld; ++r) options.of_rank[r] = {{"TMPDIR", pattern}};
    lab::start_job(children, kWorld, "endless",
                   {{"stage", stage},
                    {"inline", turn % 3 == 0},
                    {"delay", turn % 5 == 0 ? 200 : 0},
                    {"anew", turn % 10 == 3 || turn % 10 == 6}},
                   options);
    if (!starting) {
      ASSERT_TRUE(children.wait_ready(kWorld)) << what << children.wait(0).text();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (starting ? 30'000 : 20'000)));
    const std::int64_t start = now();
    children.signal(victim, SIGKILL);
    const auto ends = children.wait();
    EXPECT_EQ(ends[victim].signal(), SIGKILL) << what;
    for (std::size_t r = 0; r < ends.size(); ++r) {
      if (r == victim) continue;
      const double noticed = static_cast<double>(ends[r].time - start) * 1e-9;
      if (starting) {
        // Rank 0 may never have come, or wait for one that did not.
        expect_error(ends[r], "CommError", {"rank"}, what);
        EXPECT_LT(noticed, 2 * kShort + kNoticed) << what;
        continue;
      }
      expect_error(ends[r], "CommError",
                   {"rank " + std::to_string(victim) + " is gone (its process"},
                   what + ", rank " + std::to_string(r));
      EXPECT_LT(noticed, kNoticed) << what;
      slowest = std::max(slowest, noticed);
    }
  }
  EXPECT_EQ(traces(), before);
  EXPECT_TRUE(std::filesystem::is_empty(pattern));
  std::filesystem::remove_all(pattern);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "a child is left";
  std::cout << kills << " kills, slowest survivor " << slowest << " s\n";
}

// -- the state behind a failure --

constexpr int kStateUnits = 4;
constexpr std::int64_t kStateElements = 30'000;
constexpr int kStateSteps = 20;

ModelSpec state_model() {
  ModelSpec spec;
  for (int u = 0; u < kStateUnits; ++u) {
    spec.unit("u" + std::to_string(u)).parameter("w" + std::to_string(u), {kStateElements});
  }
  return spec;
}

/// Hash of what a rank updates itself: everything at stage 0, else its shard. values: pointers to
/// whole parameters.
std::uint64_t own_hash(int stage, int rank, const std::vector<const float*>& values) {
  const shard::Layout layout = shard::Layout::make(state_model(), kWorld);
  std::uint64_t hash = 1;
  for (std::size_t u = 0; u < values.size(); ++u) {
    const shard::Segment& segment = layout.units()[u].segments[0];
    const shard::Placed& placed = segment.placed[0];
    const shard::Range own = stage == 0 ? shard::Range{placed.start, placed.start + placed.count}
                                        : segment.owned(placed, rank);
    hash = XXH3_64bits_withSeed(values[u] + (own.lo - placed.start),
                                static_cast<std::size_t>(own.count()) * sizeof(float), hash);
  }
  return hash;
}

void state_step(Engine& engine, const std::function<void()>& before_step) {
  for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
    lab::forward_backward(engine, static_cast<float>(engine.rank() + 1 + engine.step_count()));
  }
  before_step();
  engine.step();
}

/// The system kills this process after so many nanoseconds.
void kill_after(std::int64_t nanoseconds) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer{};
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) throw Error("no timer");
  itimerspec when{};
  when.it_value.tv_nsec = std::max<std::int64_t>(1, nanoseconds % 1'000'000'000);
  when.it_value.tv_sec = nanoseconds / 1'000'000'000;
  timer_settime(timer, 0, &when, nullptr);
}

const lab::Scenario killed_in_step("killed in step", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  const int stage = a["stage"];
  Engine engine(state_model(), AdamW{.lr = 0.01}, group, options_of(a));
  std::vector<const float*> values;  // below stage 3 parameters stay where they are
  const Outcome end = outcome([&] {
    std::int64_t lasted = 0;  // of the step before
    for (int step = 0; step < kStateSteps; ++step) {
      std::int64_t begun = 0;
      state_step(engine, [&] {
        begun = now();
        if (step == a["step"] && group.rank() == a["victim"]) {
          kill_after(
              static_cast<std::int64_t>(a["share"].get<double>() * static_cast<double>(lasted)));
        }
      });
      lasted = now() - begun;
      if (!values.empty()) continue;
      for ([[maybe_unused]] const MicroStep m : engine.evaluation_passes(1)) {
        for (int u = 0; u < kStateUnits; ++u) {
          const Guard guard = engine.forward(unit(u));
          values.push_back(guard.pointer<float>(ParameterId{u}));
        }
      }
    }
  });
  Json said = lab::to_json(end);
  said["count"] = engine.step_count();
  said["hash"] = own_hash(stage, group.rank(), values);
  say(said);
});

TEST(ProcessFaults, StateStepSaysWhichParametersARankHoldsWheneverAPeerDies) {
  // hashes[stage][step][rank], of ranks as threads.
  std::vector<std::vector<std::vector<std::uint64_t>>> hashes(3);
  for (int stage = 0; stage < 3; ++stage) {
    auto& of_stage = hashes[static_cast<std::size_t>(stage)];
    of_stage.assign(kStateSteps + 1, std::vector<std::uint64_t>(kWorld));
    run_ranks(kWorld, [&](const ProcessGroup& group) {
      Engine engine(state_model(), AdamW{.lr = 0.01}, group, at_stage(stage));
      for (int step = 0; step <= kStateSteps; ++step) {
        const std::vector<float> all = lab::contents(engine);
        std::vector<const float*> values;
        for (int u = 0; u < kStateUnits; ++u) values.push_back(all.data() + u * kStateElements);
        of_stage[static_cast<std::size_t>(step)][static_cast<std::size_t>(group.rank())] =
            own_hash(stage, group.rank(), values);
        if (step < kStateSteps) state_step(engine, [] {});
      }
    });
  }
  const int turns = lab::exhaustive() ? 240 : lab::kSanitized ? 6 : 48;
  constexpr int kStep = 3;
  int before = 0;
  int behind = 0;
  int both = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const int stage = turn % 3;
    const auto victim = static_cast<std::size_t>(turn / 3 % kWorld);
    // The sweep covers the drain of the queues, the vote, and the update with its gathers.
    const double share = 1.4 * turn / turns;
    const auto ends = run_job(kWorld, "killed in step",
                              {{"stage", stage},
                               {"victim", victim},
                               {"step", kStep},
                               {"share", share},
                               {"delay", turn % 4 == 3 ? 300 : 0}});
    std::set<std::int64_t> seen;
    for (std::size_t r = 0; r < kWorld; ++r) {
      if (r == victim) continue;
      const std::string what = "turn " + std::to_string(turn) + ", rank " + std::to_string(r);
      expect_error(ends[r], "CommError", {"rank " + std::to_string(victim)}, what);
      const Json said = ends[r].said();
      const std::int64_t at = said.value("state_step", std::int64_t{-1});
      // A kill at 1.4 of a slow step's time may come a few quicker steps later.
      ASSERT_TRUE(at >= kStep && at <= kStateSteps) << what << ": " << ends[r].text();
      EXPECT_EQ(said["count"], at) << what;
      EXPECT_EQ(said["hash"].get<std::uint64_t>(),
                hashes[static_cast<std::size_t>(stage)][static_cast<std::size_t>(at)][r])
          << what << " says step " << at << " and holds another";
      seen.insert(at);
      ++(at == kStep ? before : behind);
    }
    both += seen.size() > 1;
  }
  std::cout << before << " survivors before the update, " << behind << " behind it, " << both
            << " jobs with both\n";
  if (!lab::kSanitized) {
    EXPECT_GT(before, 0);
    EXPECT_GT(behind, 0);
  }
}

// -- limits of memory and descriptors --

std::int64_t status_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::atoll(line.c_str() + field.size() + 1);
  }
  return -1;
}

int descriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count - 1;  // the listing's own
}

int open_null() {
  return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/// While it lives the process may take so much more of one resource.
class Limit {
 public:
  Limit(const std::string& what, std::int64_t more) {
    if (what == "AS") set(RLIMIT_AS, status_kib("VmSize") * 1024 + more);
    if (what == "FSIZE") set(RLIMIT_FSIZE, more);
    if (what == "NPROC") set(RLIMIT_NPROC, more);
    if (what == "NOFILE") {
      // What the process inherited has holes, and a new descriptor takes the lowest free number:
      // without filling them the limit allows more than 'more'.
      for (int next = open_null(); next < descriptors() - 1; next = open_null()) {
      }
      set(RLIMIT_NOFILE, descriptors() + more);
    }
  }
  ~Limit() {
    if (which_ >= 0) setrlimit(static_cast<__rlimit_resource>(which_), &old_);
  }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  void set(int which, std::int64_t value) {
    which_ = which;
    getrlimit(static_cast<__rlimit_resource>(which), &old_);
    rlimit lower = old_;
    lower.rlim_cur = static_cast<rlim_t>(value);
    setrlimit(static_cast<__rlimit_resource>(which), &lower);
  }
  int which_ = -1;
  rlimit old_{};
};

/// Root has no limit of threads.
void become_nobody() {
  if (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0 ||
      prctl(PR_SET_DUMPABLE, 1) != 0) {  // which a sanitizer needs
    throw Error("cannot become another user");
  }
}

const lab::Scenario limited("limited", [](const Json& a) {
  const std::string what = a["limit"];
  const std::int64_t more = a["more"];
  if (what == "NPROC") become_nobody();
  ModelSpec spec;
  for (int u = 0; u < 4; ++u) {
    spec.unit("u" + std::to_string(u)).parameter("w" + std::to_string(u), {500'000});
  }
  std::unique_ptr<Limit> limit;
  const Outcome end = outcome([&] {
    if (a["rank"] == std::atoi(std::getenv("RANK")) && a["before"] == "group") {
      limit = std::make_unique<Limit>(what, more);
    }
    const ProcessGroup group = ProcessGroup::from_environment();
    if (a["rank"] == group.rank() && a["before"] == "engine") {
      limit = std::make_unique<Limit>(what, more);
    }
    const Outcome inner = outcome([&] {
      Engine engine(spec, AdamW{}, group, options_of(a));
      limit.reset();
      train_step(engine);
    });
    limit.reset();
    if (inner.type == "nothing") return;
    // The group outlives an engine that could not be made.
    group.barrier();
    Engine engine(small_model(), AdamW{}, group, options_of(a));
    train_step(engine);
    say(lab::to_json(inner));
    _exit(4);
  });
  limit.reset();
  say(lab::to_json(end));
});

TEST(ProcessFaults, ALimitOfMemoryOrDescriptorsIsAnErrorOnEveryRankThatSaysWhatToRaise) {
  struct Case {
    std::string limit;
    std::string before;
    std::vector<std::int64_t> more;
    std::string remedy;
  };
  constexpr std::int64_t kMiB = 1 << 20;
  const std::vector<Case> cases = {
      {"NOFILE", "group", {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12}, "ulimit -n"},
      {"NOFILE", "engine", {0, 1, 2, 3, 4, 5, 6, 8}, "ulimit -n"},
      {"FSIZE", "group", {0, 4096, 4 * kMiB}, "ulimit -f"},
      {"FSIZE", "engine", {0, 4096, 8 * kMiB, 512 * kMiB}, "ulimit -f"},
      {"AS", "group", {2 * kMiB, 4 * kMiB, 8 * kMiB}, "ulimit -v"},
      {"AS",
       "engine",
       {kMiB / 4, 2 * kMiB, 8 * kMiB, 20 * kMiB, 40 * kMiB, 60 * kMiB, 80 * kMiB, 100 * kMiB,
        120 * kMiB, 160 * kMiB, 4096 * kMiB},
       "ulimit -v"},
      {"NPROC", "engine", {1}, "ulimit -u"},
  };
  int refused = 0;
  int served = 0;
  for (const Case& c : cases) {
    if (c.limit == "NPROC" && getuid() != 0) continue;  // it takes root to become another user
    if (lab::kSanitized && c.limit == "AS") continue;   // a sanitizer reserves terabytes
#ifdef __SANITIZE_ADDRESS__
    if (c.limit == "NOFILE") continue;  // its check of virtual calls needs descriptors
#endif
    for (const std::int64_t more : c.more) {
      for (const int rank : {0, 1}) {
        const std::string what = c.limit + " + " + std::to_string(more) + " before the " +
                                 c.before + " on rank " + std::to_string(rank);
        const auto ends =
            run_job(2, "limited",
                    {{"limit", c.limit}, {"more", more}, {"rank", rank}, {"before", c.before}},
                    {.deadline = kShort});
        const auto kind = [&](const Ending& end) {
          const Json said = end.said();
          return said.is_object() ? said["type"].get<std::string>() : end.text();
        };
        if (kind(ends[0]) == "nothing" && kind(ends[1]) == "nothing") {
          ++served;
          continue;
        }
        ++refused;
        bool remedy = false;
        for (std::size_t r = 0; r < 2; ++r) {
          const std::string type = kind(ends[r]);
          EXPECT_TRUE(type == "OutOfMemory" || type == "CommError")
              << what << ", rank " << r << ": " << ends[r].text();
          EXPECT_FALSE(ends[r].stopped) << what;
          EXPECT_EQ(ends[r].signal(), 0) << what << ": " << ends[r].text();
          if (c.before == "engine") {
            EXPECT_EQ(ends[r].code(), 4) << what << ends[r].text();
          }
          remedy = remedy || ends[r].output.find("ulimit -") != std::string::npos;
          if (static_cast<int>(r) == rank) {
            EXPECT_NE(ends[r].output.find(c.remedy), std::string::npos)
                << what << ": " << ends[r].text();
            EXPECT_TRUE(c.limit != "FSIZE" || ends[r].output.find("ulimit -v") == std::string::npos)
                << what << ": " << ends[r].text();
          } else if (c.before == "engine") {
            EXPECT_NE(ends[r].output.find("rank " + std::to_string(rank)), std::string::npos)
                << what << ": " << ends[r].text();
            EXPECT_NE(ends[r].output.find(c.remedy), std::string::npos)
                << what << ": " << ends[r].text();
          }
        }
        EXPECT_TRUE(remedy) << what;
      }
    }
  }
  EXPECT_GE(refused, lab::kSanitized ? 8 : 30);
  EXPECT_GT(served, 0);
  std::cout << refused << " limits refused, " << served << " were enough\n";
}

// Ranks as threads of one process, whose memory or threads end while their engine is made.
const lab::Scenario limited_threads("limited threads", [](const Json& a) {
  const std::string what = a["limit"];
  if (what == "NPROC") become_nobody();
  ModelSpec spec;
  spec.unit("u").parameter("w", {2'000'000});
  std::array<Outcome, 2> ends;
  run_ranks(2, [&](const ProcessGroup& group) {
    std::unique_ptr<Limit> limit;
    group.barrier();
    if (group.rank() == 0) limit = std::make_unique<Limit>(what, a["more"].get<std::int64_t>());
    group.barrier();
    ends[static_cast<std::size_t>(group.rank())] = outcome([&] {
      Engine engine(spec, AdamW{}, group, options_of(a));
      group.barrier();
      limit.reset();
      group.barrier();
      train_step(engine);
    });
    group.barrier();
    limit.reset();
    group.barrier();
    // The group outlives an engine that could not be made.
    Engine engine(small_model(), AdamW{}, group, options_of(a));
    train_step(engine);
  });
  say({{"rank 0", lab::to_json(ends[0])}, {"rank 1", lab::to_json(ends[1])}});
});

TEST(ProcessFaults, ALimitOfMemoryOrThreadsIsAnErrorOnEveryThreadRankThatSaysWhatToRaise) {
  struct Case {
    std::string limit;
    std::vector<std::int64_t> more;
    std::string remedy;
  };
  constexpr std::int64_t kMiB = 1 << 20;
  std::vector<Case> cases;
  if (getuid() == 0) cases.push_back({"NPROC", {1}, "ulimit -u"});
  if (!lab::kSanitized) {  // a sanitizer reserves terabytes
    cases.push_back({"AS",
                     {kMiB / 4, 2 * kMiB, 6 * kMiB, 10 * kMiB, 20 * kMiB, 30 * kMiB, 40 * kMiB,
                      60 * kMiB, 100 * kMiB, 160 * kMiB, 240 * kMiB, 4096 * kMiB},
                     "ulimit -v"});
  }
  int refused = 0;
  int served = 0;
  for (const Case& c : cases) {
    for (const std::int64_t more : c.more) {
      for (const int stage : {0, 3}) {
        const std::string what =
            c.limit + " + " + std::to_string(more) + ", stage " + std::to_string(stage);
        Children children(lab::kJobSeconds);
        children.start(lab::command_of("limited threads",
                                       {{"limit", c.limit}, {"more", more}, {"stage", stage}}),
                       {});
        const Ending& end = children.wait(0);
        ASSERT_EQ(end.code(), 0) << what << ": " << end.text();
        const Json said = end.said();
        if (said["rank 0"]["type"] == "nothing" && said["rank 1"]["type"] == "nothing") {
          ++served;
          continue;
        }
        ++refused;
        for (const char* rank : {"rank 0", "rank 1"}) {
          EXPECT_EQ(said[rank]["type"], "OutOfMemory") << what << ": " << end.text();
          EXPECT_NE(said[rank]["text"].get<std::string>().find(c.remedy), std::string::npos)
              << what << ": " << end.text();
        }
      }
    }
  }
  EXPECT_GE(refused, lab::kSanitized ? (getuid() == 0 ? 2 : 0) : 6);
  if (!lab::kSanitized) {
    EXPECT_GT(served, 0);
  }
  std::cout << refused << " limits refused, " << served << " were enough\n";
}

// -- the watchdog's report --

TEST(ProcessFaults, TheReportInTheLogDirectorySaysWhereEveryRankStands) {
  std::string directory = "/tmp/zshard_test_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  for (const std::string kind : {"SIGKILL", "more micro-steps"}) {
    const auto ends =
        run_job(kWorld, "fault", {{"kind", kind}, {"victim", 1}, {"log_dir", directory}});
    std::map<int, std::string> reports;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      const std::string name = entry.path().filename();
      ASSERT_EQ(name.rfind("zshard-rank", 0), 0U) << name;
      std::ifstream file(entry.path());
      std::stringstream text;
      text << file.rdbuf();
      reports[std::atoi(name.c_str() + 11)] = text.str();
      std::filesystem::remove(entry.path());
    }
    EXPECT_EQ(reports.size(), kind == "SIGKILL" ? 2U : 3U);
    for (const int r : {0, 2}) {
      const std::string& text = reports[r];
      const Json said = ends[static_cast<std::size_t>(r)].said();
      EXPECT_NE(text.find(said["text"].get<std::string>()), std::string::npos) << text;
      EXPECT_NE(text.find("last collectives of rank " + std::to_string(r) + " of 3"),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("vote in micro-step 2 of 2"), std::string::npos) << text;
      EXPECT_NE(text.find("gather of unit u0"), std::string::npos) << text;
      EXPECT_NE(text.find("reduce of unit u2"), std::string::npos) << text;
      if (kind == "SIGKILL") {
        EXPECT_NE(text.find("gone: its process"), std::string::npos) << text;
      }
      EXPECT_NE(
          ends[static_cast<std::size_t>(r)].output.find("the last collectives are in " + directory),
          std::string::npos);
    }
    if (kind == "SIGKILL") std::cout << reports[0];
  }
  std::filesystem::remove_all(directory);
}

TEST(ProcessFaults, ALogDirectoryThatIsNotThereIsRefused) {
  const auto ends = run_job(2, "fault", {{"kind", ""}, {"victim", 1}, {"log_dir", "/nowhere/x"}});
  for (const Ending& end : ends) {
    expect_error(end, "UsageError", {"log_dir", "/nowhere/x", "No such file"}, "");
  }
}

}  // namespace
}  // namespace zshard
