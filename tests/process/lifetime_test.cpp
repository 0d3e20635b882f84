// What processes and groups take from the machine comes back: starts and stops, fork(), engines
// side by side, guards that outlive their engine.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <thread>

#include "runtime/memory/arena.hpp"
#include "tests/process/scenario.hpp"

namespace zshard {
namespace {

using lab::at_stage;
using lab::contents;
using lab::Ending;
using lab::Json;
using lab::outcome;
using lab::Outcome;
using lab::run_job;
using lab::small_model;
using lab::train_step;
using lab::unit;

/// What this process holds of the system.
struct Holdings {
  int threads = 0;
  int descriptors = 0;
  std::int64_t resident_kib = 0;
  std::int64_t arenas = 0;
  int mappings = 0;
};

Holdings holdings() {
  Holdings h;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("Threads:", 0) == 0) h.threads = std::atoi(line.c_str() + 8);
    if (line.rfind("VmRSS:", 0) == 0) h.resident_kib = std::atoll(line.c_str() + 6);
  }
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++h.descriptors;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++h.mappings;
  h.arenas = memory::arena_bytes_in_process();
  return h;
}

Json to_json(const Holdings& h) {
  return {{"threads", h.threads},
          {"descriptors", h.descriptors},
          {"resident_kib", h.resident_kib},
          {"arenas", h.arenas},
          {"mappings", h.mappings}};
}

/// Flat: nothing more than at the first look, but for what allocators and stacks keep.
void expect_flat(const Json& first, const Json& last, const std::string& what) {
  EXPECT_EQ(last["threads"], first["threads"]) << what;
  EXPECT_EQ(last["descriptors"], first["descriptors"]) << what;
  EXPECT_EQ(last["arenas"], first["arenas"]) << what;
  if (!lab::kSanitized) {  // a sanitizer keeps what is freed for a while
    EXPECT_LT(last["mappings"], first["mappings"].get<int>() + 20) << what << first << last;
    EXPECT_LT(last["resident_kib"], first["resident_kib"].get<std::int64_t>() + 8192)
        << what << first << last;
  }
}

/// A joined thread may stand in the kernel's list for a moment.
Holdings settled(int threads) {
  for (int i = 0; i < 200 && holdings().threads > threads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return holdings();
}

TEST(Lifetime, StartsAndStopsOfThreadRanksAreFlat) {
  const int starts = lab::exhaustive() ? 1000 : lab::kSanitized ? 40 : 100;
  Holdings first;
  const int threads = holdings().threads;
  for (int i = 0; i < starts; ++i) {
    run_ranks(2, [&](const ProcessGroup& group) {
      EngineOptions options = at_stage(i % 4);
      options.inline_queues = i % 5 == 4;
      Engine engine(small_model(), AdamW{}, group, options);
      train_step(engine);
    });
    if (i == starts / 4) first = settled(threads);
  }
  expect_flat(to_json(first), to_json(settled(threads)), std::to_string(starts) + " starts");
}

const lab::Scenario restarts("restarts", [](const Json& a) {
  const int starts = a["starts"];
  Holdings first;
  for (int i = 0; i < starts; ++i) {
    {
      const ProcessGroup group = ProcessGroup::from_environment();
      for (int k = 0; k < 2; ++k) {
        Engine engine(small_model(), AdamW{}, group, at_stage((i + k) % 4));
        train_step(engine);
      }
    }
    if (i == starts / 4) first = settled(1);
  }
  lab::say({{"first", to_json(first)}, {"last", to_json(settled(1))}});
});

TEST(Lifetime, StartsAndStopsOfGroupsAndEnginesInProcessRanksAreFlat) {
  const int starts = lab::exhaustive() ? 1000 : lab::kSanitized ? 8 : 50;
  const auto ends = run_job(2, "restarts", {{"starts", starts}}, {.seconds = 300.0});
  lab::expect_success(ends, "restarts");
  for (const Ending& end : ends) {
    ASSERT_TRUE(end.said().is_object()) << end.text();
    expect_flat(end.said()["first"], end.said()["last"], "a rank");
  }
}

const lab::Scenario once("once", [](const Json& a) {
  Engine engine(small_model(), AdamW{}, ProcessGroup::from_environment(), at_stage(a["stage"]));
  train_step(engine);
});

TEST(Lifetime, StartsOfProcessesAreFlat) {
  Holdings first;
  const int starts = lab::exhaustive() ? 500 : lab::kSanitized ? 5 : 50;
  for (int i = 0; i < starts; ++i) {
    lab::expect_success(run_job(2, "once", {{"stage", i % 4}}), "start " + std::to_string(i));
    if (i == starts / 4) first = holdings();
  }
  expect_flat(to_json(first), to_json(holdings()), "the test itself");
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

// -- fork --

/// What a forked child finds, by its exit code; destroys its copies of everything on the way.
int in_child(std::unique_ptr<Engine> engine, Guard guard, ProcessGroup group) {
  const auto refused = [](auto&& body) {
    const Outcome end = outcome(body);
    if (end.type == "UsageError" && end.text.find("fork()") != std::string::npos) return true;
    lab::say({{"in_child", end.type}, {"text", end.text}});
    return false;
  };
  if (!refused([&] { (void)engine->forward(unit(1)); })) return 11;
  if (!refused([&] { (void)guard.pointer(ParameterId{0}); })) return 12;
  if (!refused([&] { engine->step(); })) return 13;
  if (!refused([&] { (void)contents(*engine); })) return 14;
  if (!refused([&] { group.barrier(); })) return 15;
  if (!refused([&] { const Engine another(small_model(), AdamW{}, group, at_stage(3)); })) {
    return 16;
  }
  // A child makes its own.
  Engine own(small_model(), AdamW{}, ProcessGroup::single(), at_stage(3));
  train_step(own);
  return 0;
}

int fork_inside(const ProcessGroup& group, int stage, bool inline_queues) {
  EngineOptions options = at_stage(stage);
  options.inline_queues = inline_queues;
  auto engine = std::make_unique<Engine>(small_model(), AdamW{}, group, options);
  train_step(*engine);
  int code = 0;
  for (const MicroStep m : engine->micro_steps(2)) {
    lab::forward_backward(*engine, 1.0f);
    if (m.index() == 0) continue;
    Guard guard = engine->forward(unit(0));
    const pid_t child = fork();
    if (child == 0) _exit(in_child(std::move(engine), std::move(guard), group));
    int status = 0;
    waitpid(child, &status, 0);
    code = WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
  }
  engine->step();
  train_step(*engine, 2);
  if (engine->step_count() != 3) throw Error("the parent has lost a step");
  return code;
}

const lab::Scenario forking("fork", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  lab::say({{"child", fork_inside(group, a["stage"], a["inline"])}});
});

const lab::Scenario forking_threads("fork of threads", [](const Json& a) {
  std::array<int, 2> codes{-1, -1};
  run_ranks(2, [&](const ProcessGroup& group) {
    codes[static_cast<std::size_t>(group.rank())] = fork_inside(group, a["stage"], a["inline"]);
  });
  lab::say({{"child", codes[0] != 0 ? codes[0] : codes[1]}});
});

TEST(Lifetime, AForkedChildGetsUsageErrorsAndItsParentTrainsOn) {
  for (const int stage : {0, 3}) {
    for (const bool inline_queues : {false, true}) {
      // Sanitizers end or hang a child of fork() whose parent had threads that worked meanwhile:
      // theirs is the heap, and its locks stay as they were.
      if (lab::kSanitized && !inline_queues) continue;
      const Json how = {{"stage", stage}, {"inline", inline_queues}};
      auto ends = run_job(2, "fork", how);
      if (!lab::kSanitized) {
        const auto of_threads = run_job(1, "fork of threads", how);
        ends.insert(ends.end(), of_threads.begin(), of_threads.end());
      }
      lab::expect_success(ends, "stage " + std::to_string(stage));
      for (const Ending& end : ends) EXPECT_EQ(end.said()["child"], 0) << end.text();
    }
  }
}

// -- several engines, and ends out of order --

const lab::Scenario side_by_side("side by side", [](const Json&) {
  const ProcessGroup group = ProcessGroup::from_environment();
  const auto alone = [&](int units, int steps) {
    Engine engine(small_model(units), AdamW{}, group, at_stage(3));
    for (int i = 0; i < steps; ++i) train_step(engine, 2);
    return contents(engine);
  };
  const std::vector<float> a = alone(3, 4);
  const std::vector<float> b = alone(2, 4);
  {
    Engine one(small_model(3), AdamW{}, group, at_stage(3));
    Engine two(small_model(2), AdamW{}, group, at_stage(1));
    for (int i = 0; i < 4; ++i) {
      one.begin_micro_steps(2);  // both ranges are open at once
      for (int m = 0; m < 2; ++m) {
        one.next_micro_step();
        lab::forward_backward(one, static_cast<float>(group.rank() + 1));
        if (m == 0) train_step(two, 2);
      }
      one.step();
    }
    if (contents(one) != a || contents(two) != b) throw Error("engines disturb each other");
  }
  {
    Engine one(small_model(3), AdamW{}, group, at_stage(2));
    Engine two(small_model(2), AdamW{}, group, at_stage(3));
    std::thread beside([&] {
      for (int i = 0; i < 4; ++i) train_step(two, 2);
    });
    for (int i = 0; i < 4; ++i) train_step(one, 2);
    beside.join();
    if (contents(one) != a || contents(two) != b) throw Error("engines of two threads differ");
  }
  // A guard and a range that outlive their engine only throw.
  auto engine = std::make_unique<Engine>(small_model(), AdamW{}, group, at_stage(3));
  train_step(*engine);
  engine->begin_micro_steps(1);
  engine->next_micro_step();
  Guard guard = engine->forward(unit(0));
  group.barrier();
  engine.reset();
  const Outcome end = outcome([&] { (void)guard.pointer(ParameterId{0}); });
  if (end.type != "UsageError" || end.text.find("is destroyed") == std::string::npos) {
    throw Error("a guard of no engine: " + end.type + " " + end.text);
  }
  guard = Guard();
  // And the group serves the next engine.
  Engine next(small_model(), AdamW{}, group, at_stage(2));
  train_step(next);
});

TEST(Lifetime, EnginesSideBySideAndGuardsWithoutEngineInProcessRanks) {
  lab::expect_success(run_job(3, "side by side", nullptr), "side by side");
}

}  // namespace
}  // namespace zshard
