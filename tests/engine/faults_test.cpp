// Faults at run time: exceptions in every scope, ranks that leave or are slow, numbers that are not
// finite, and what an engine takes from the process and gives back.
#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>

#include "runtime/comm/board.hpp"
#include "runtime/comm/group.hpp"
#include "runtime/memory/arena.hpp"
#include "runtime/shard/layout.hpp"
#include "tests/engine/cases.hpp"
#include "tests/engine/lab.hpp"
#include "tests/engine/outcomes.hpp"

#ifndef ZSHARD_SANITIZER
// Counts the allocations of the whole process while it is on; a sanitizer has its own allocator.
namespace {
std::atomic<bool> counting{false};
std::atomic<std::int64_t> allocations{0};
void count_allocation() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
}
}  // namespace
extern "C" {
void* __libc_malloc(std::size_t);                 // NOLINT(bugprone-reserved-identifier): glibc's
void* __libc_calloc(std::size_t, std::size_t);    // NOLINT(bugprone-reserved-identifier)
void* __libc_realloc(void*, std::size_t);         // NOLINT(bugprone-reserved-identifier)
void* __libc_memalign(std::size_t, std::size_t);  // NOLINT(bugprone-reserved-identifier)
void* malloc(std::size_t bytes) {
  count_allocation();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  count_allocation();
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, std::size_t bytes) {
  count_allocation();
  return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  count_allocation();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  count_allocation();
  return __libc_memalign(alignment, bytes);
}
}
#endif

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
using std::chrono::milliseconds;

void all_forward(Engine& engine) {
  for (int u = 0; u < static_cast<int>(engine.spec().units().size()); ++u) {
    (void)engine.forward(unit(u));
  }
}

// -- exceptions --

struct Scope {
  std::string what;
  std::function<void(Engine&)> body;    // throws `boom`
  std::vector<std::string> kept;        // of what later calls of the rank throw
  std::string kept_type = "Error";      // and its type
  std::function<void(Engine&)> others;  // of the peers, until they hear of it
};

void train_on(Engine& engine) {
  for (int i = 0; i < 3; ++i) train_step(engine, 2);
}

void evaluate_on(Engine& engine) {
  for (int i = 0; i < 3; ++i) {
    for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(2)) all_forward(engine);
  }
  train_on(engine);
}

[[noreturn]] void boom() {
  throw std::runtime_error("boom");
}

std::vector<Scope> scopes() {
  const auto step_before = [](auto&& body) {
    return [body](Engine& e) {
      train_step(e, 2);
      body(e);
    };
  };
  const std::vector<std::string> left = {"rank 1: ", "left by an exception", "step 1"};
  const auto with = [&](const std::string& more) {
    auto parts = left;
    parts.push_back(more);
    return parts;
  };
  return {
      {"forward guard", step_before([](Engine& e) {
         for ([[maybe_unused]] const MicroStep m : e.micro_steps(2)) {
           const Guard guard = e.forward(unit(1));
           boom();
         }
       }),
       with("forward guard of unit u1"), "Error", train_on},
      {"backward guard before commit", step_before([](Engine& e) {
         for ([[maybe_unused]] const MicroStep m : e.micro_steps(2)) {
           all_forward(e);
           const Guard guard = e.backward(unit(2));
           boom();
         }
       }),
       with("backward guard of unit u2"), "Error", train_on},
      {"backward guard after commit", step_before([](Engine& e) {
         for ([[maybe_unused]] const MicroStep m : e.micro_steps(2)) {
           Guard guard = e.backward(unit(1));
           write_gradients(e, unit(1), 1.0f);
           guard.commit();
           boom();
         }
       }),
       with("backward guard of unit u1"), "Error", train_on},
      {"guard of plain calls' range", step_before([](Engine& e) {
         e.begin_micro_steps(2);
         e.next_micro_step();
         const Guard guard = e.forward(unit(0));
         boom();
       }),
       with("forward guard of unit u0"), "Error", train_on},
      {"micro-step between guards", step_before([](Engine& e) {
         for ([[maybe_unused]] const MicroStep m : e.micro_steps(2)) {
           all_forward(e);
           boom();
         }
       }),
       with("range of micro-steps"), "Error", train_on},
      {"second micro-step", step_before([](Engine& e) {
         for (const MicroStep m : e.micro_steps(2)) {
           if (m.index() == 1) boom();
           forward_backward(e, 1.0f);
         }
       }),
       with("range of micro-steps"), "Error", train_on},
      {"evaluation guard", step_before([](Engine& e) {
         for ([[maybe_unused]] const MicroStep m : e.evaluation_passes(2)) {
           const Guard guard = e.forward(unit(2));
           boom();
         }
       }),
       with("forward guard of unit u2"), "Error",
       [](Engine& e) {
         train_step(e, 2);
         evaluate_on(e);
       }},
      {"evaluation between guards", step_before([](Engine& e) {
         for ([[maybe_unused]] const MicroStep m : e.evaluation_passes(2)) {
           all_forward(e);
           boom();
         }
       }),
       with("range of micro-steps"), "Error",
       [](Engine& e) {
         train_step(e, 2);
         evaluate_on(e);
       }},
      {"initializer",
       step_before([](Engine& e) {
         e.initialize(unit(1), [](const ParameterRange&, std::span<float>) { boom(); });
       }),
       {"boom"},
       "other",
       [](Engine& e) {
         train_step(e, 2);
         e.initialize(unit(1), [](const ParameterRange&, std::span<float>) {});
       }},
      {"on_bind as addresses appear",
       step_before([](Engine& e) {
         e.on_bind([](const Binding& b) {
           if (b.data != nullptr) boom();
         });
         e.begin_micro_steps(2);
         e.next_micro_step();
         (void)e.forward(unit(0));
       }),
       {"boom"},
       "other",
       train_on},
      {"on_bind as addresses go",
       step_before([](Engine& e) {
         e.on_bind([](const Binding& b) {
           if (b.data == nullptr) boom();
         });
         e.begin_micro_steps(2);
         e.next_micro_step();
         Guard guard = e.forward(unit(0));
         guard.release();
       }),
       {"boom"},
       "other",
       train_on},
      {"on_bind in a guard's destructor",
       step_before([](Engine& e) {
         e.on_bind([](const Binding& b) {
           if (b.data == nullptr) boom();
         });
         e.begin_micro_steps(2);
         e.next_micro_step();
         { const Guard guard = e.forward(unit(0)); }
         (void)e.forward(unit(1));
       }),
       {"boom"},
       "other",
       train_on},
  };
}

TEST(Faults, AnExceptionInAnyScopePoisonsTheRankAndTellsItsPeers) {
  for (const Scope& scope : scopes()) {
    for (const int stage : {0, 3}) {
      for (const bool inline_queues : {false, true}) {
        const std::string what =
            scope.what + ", stage " + std::to_string(stage) + (inline_queues ? ", inline" : "");
        const Within within(kDeadline);
        const auto ends = outcomes(3, [&](const ProcessGroup& group) {
          EngineOptions options = at_stage(stage);
          options.inline_queues = inline_queues;
          Engine engine(small_model(), AdamW{}, group, options);
          if (group.rank() != 1) {
            const Outcome end = outcome([&] { scope.others(engine); });
            expect(end, "CommError", {"rank 1"}, what);
            EXPECT_EQ(end.state_step, 1) << what;
            // And again, from any call.
            expect(outcome([&] { engine.begin_micro_steps(1); }), "CommError", {end.text}, what);
            expect(outcome([&] { engine.release(unit(0), Pass::forward); }), "CommError",
                   {end.text}, what);
            return;
          }
          expect(outcome([&] { scope.body(engine); }), "other", {"boom"}, what);
          std::string first;
          for (int i = 0; i < 2; ++i) {
            for (const Outcome& later : {
                     outcome([&] { engine.step(); }),
                     outcome([&] { engine.begin_micro_steps(1); }),
                     outcome([&] { engine.next_micro_step(); }),
                     outcome([&] { (void)engine.forward(unit(0)); }),
                     outcome([&] { engine.commit(unit(0)); }),
                     outcome([&] { engine.skip(unit(0)); }),
                     outcome([&] { (void)engine.pointer(ParameterId{0}); }),
                     outcome([&] { contents(engine); }),
                     outcome([&] { engine.set_step_count(0); }),
                     outcome([&] {
                       engine.initialize(unit(0), [](const ParameterRange&, std::span<float>) {});
                     }),
                 }) {
              expect(later, scope.kept_type, scope.kept, what);
              if (first.empty()) first = later.text;
              EXPECT_EQ(later.text, first) << what;
            }
          }
        });
        expect_all(ends, "nothing", {}, what);
      }
    }
  }
}

TEST(Faults, AUsageErrorThatACallbackThrowsPoisonsAsWell) {
  // UsageErrors of the engine change nothing; one that comes from the middle of a call does.
  for (const bool initializer : {false, true}) {
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(small_model(), AdamW{}, group, at_stage(3));
      if (group.rank() == 0) {
        const auto fail = [] { throw UsageError("mine"); };
        if (initializer) {
          (void)outcome([&] {
            engine.initialize(unit(0), [&](const ParameterRange&, std::span<float>) { fail(); });
          });
        } else {
          engine.on_bind([&](const Binding&) { fail(); });
          engine.begin_micro_steps(1);
          engine.next_micro_step();
          (void)outcome([&] { (void)engine.forward(unit(0)); });
        }
        engine.step();
      } else {
        if (initializer) {
          engine.initialize(unit(0), [](const ParameterRange&, std::span<float>) {});
        }
        train_step(engine);
      }
    });
    expect(ends[0], "UsageError", {"mine"}, "rank 0");
    expect(ends[1], "CommError", {"rank 0", initializer ? "mine" : ""}, "rank 1");
  }
}

TEST(Faults, CallingTheEngineFromItsOwnCallbackIsAnErrorAndNotAHang) {
  const Within within(kDeadline);
  Engine engine(small_model(), AdamW{}, ProcessGroup::single(), at_stage(3));
  std::vector<Outcome> inside;
  engine.on_bind([&](const Binding&) {
    inside.push_back(outcome([&] { (void)engine.pointer(ParameterId{0}); }));
    inside.push_back(outcome([&] { (void)engine.forward(unit(1)); }));
  });
  engine.initialize(unit(0), [&](const ParameterRange&, std::span<float> out) {
    std::fill(out.begin(), out.end(), 0.0f);
    inside.push_back(outcome([&] { (void)engine.step_count(); }));
  });
  train_step(engine);
  EXPECT_GT(inside.size(), 10U);
  for (const Outcome& end : inside) expect(end, "UsageError", {"own callbacks"}, "");
}

TEST(Faults, PointersOfAGuardThatAnExceptionEndsAreNull) {
  float* data = nullptr;
  float* gradient = nullptr;
  ModelSpec spec;
  spec.unit("u0").parameter("w", {4}, &data, &gradient);
  Engine engine(spec, SGD{}, ProcessGroup::single(), at_stage(3));
  try {
    for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
      const Guard guard = engine.backward(unit(0));
      EXPECT_NE(data, nullptr);
      EXPECT_NE(gradient, nullptr);
      boom();
    }
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(data, nullptr);
  EXPECT_EQ(gradient, nullptr);
}

TEST(Faults, AnExceptionBetweenStepsIsWhatRunRanksReports) {
  // No scope of the engine is open: peers hear of it as the engine goes.
  for (const int stage : {0, 1, 3}) {
    for (int turn = 0; turn < 10; ++turn) {
      const Within within(kDeadline);
      const auto ends = outcomes(3, [&](const ProcessGroup& group) {
        Engine engine(small_model(), AdamW{}, group, at_stage(stage));
        train_step(engine, 2);
        if (group.rank() == 1) boom();
        train_on(engine);
      });
      expect(ends[1], "other", {"boom"}, "rank 1");
      for (const std::size_t r : {0, 2}) expect(ends[r], "CommError", {"rank 1"}, "peers");
      expect(ends[3], "other", {"boom"}, "run_ranks");
    }
  }
}

TEST(Faults, TheCauseIsReportedAlthoughItsRankUnwindsLonger) {
  for (int turn = 0; turn < 5; ++turn) {
    const Within within(kDeadline);
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      struct Slow {
        bool slow;
        ~Slow() {
          if (slow) std::this_thread::sleep_for(milliseconds(60));
        }
      };
      const Slow slow{group.rank() == 1};
      Engine engine(small_model(), AdamW{}, group, at_stage(3));
      for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
        if (group.rank() == 1) boom();
        forward_backward(engine, 1.0f);
      }
      engine.step();
    });
    expect(ends[0], "CommError", {"rank 1"}, "rank 0");
    expect(ends[2], "other", {"boom"}, "run_ranks");
  }
}

TEST(Faults, ARankThatCatchesItsExceptionMayGoOnWithAnotherEngine) {
  std::vector<float> got[2];
  const auto ends = outcomes(2, [&](const ProcessGroup& group) {
    {
      Engine engine(small_model(), AdamW{}, group, at_stage(3));
      const Outcome end = outcome([&] {
        for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
          if (group.rank() == 1) boom();
          forward_backward(engine, 1.0f);
        }
        engine.step();
      });
      EXPECT_EQ(end.type, group.rank() == 1 ? "other" : "CommError") << end.text;
    }
    Engine engine(small_model(), AdamW{}, group, at_stage(2));
    train_step(engine);
    got[group.rank()] = contents(engine);
  });
  expect_all(ends, "nothing", {});
  EXPECT_EQ(got[0], got[1]);
}

// -- ranks that leave or are slow --

TEST(Faults, ARankThatThrowsOrReturnsBeforeItConstructsIsNamed) {
  for (const bool throws : {false, true}) {
    const Within within(kDeadline);
    const auto ends = outcomes(3, [&](const ProcessGroup& group) {
      if (group.rank() == 2) {
        if (throws) boom();
        return;
      }
      Engine engine(small_model(), AdamW{}, group, at_stage(3));
    });
    for (const std::size_t r : {0, 1}) {
      expect(ends[r], "CommError", {"rank 2 is gone", throws ? "boom" : "returned"}, "peers");
    }
    expect(ends[2], throws ? "other" : "nothing", {}, "rank 2");
    expect(ends[3], throws ? "other" : "CommError", {}, "run_ranks");
  }
}

TEST(Faults, ARankThatConstructsTooLateIsNamedAndHearsOfIt) {
  const auto ends = outcomes(
      3,
      [&](const ProcessGroup& group) {
        if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(2000));
        Engine engine(small_model(), AdamW{}, group, at_stage(3));
      },
      1.0);
  for (const std::size_t r : {0, 2}) {
    expect(ends[r], "CommError", {"rank 1 did not arrive within 1 s", "deadline"}, "peers");
  }
  expect(ends[1], "CommError", {"the group has failed", "rank 1 did not arrive"}, "rank 1");
}

TEST(Faults, ASlowRankIsFineBelowTheDeadlineAndNamedAboveIt) {
  for (const int stage : {1, 3}) {
    for (const bool inline_queues : {false, true}) {
      for (const bool late : {false, true}) {
        const Within within(kDeadline + 2);
        const auto ends = outcomes(3, [&](const ProcessGroup& group) {
          EngineOptions options = at_stage(stage);
          options.inline_queues = inline_queues;
          if (late) options.deadline_seconds = 0.5;
          Engine engine(small_model(), AdamW{}, group, options);
          for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
            all_forward(engine);
            if (group.rank() == 1) {
              std::this_thread::sleep_for(milliseconds(late ? 1200 : 100));
            }
            for (int u = 3; u-- > 0;) {
              Guard guard = engine.backward(unit(u));
              write_gradients(engine, unit(u), 1.0f);
              guard.commit();
            }
          }
          engine.step();
        });
        if (!late) {
          expect_all(ends, "nothing", {}, "below the deadline");
          continue;
        }
        expect_all(ends, "CommError",
                   {"rank 1 did not arrive within 0.5", "raise deadline_seconds"}, "above it");
        for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(ends[r].state_step, 0);
      }
    }
  }
}

TEST(Faults, RanksThatWaitLeaveTheCoresToThoseThatCompute) {
  // Processor time of the whole process while one rank does nothing and the queues of the others
  // wait for it in a gather, a reduction or a barrier.
  const auto used = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  for (const std::string where : {"forward", "backward", "step", "barrier"}) {
    for (const bool inline_queues : {false, true}) {
      double spent = -1.0;
      run_ranks(3, [&](const ProcessGroup& group) {
        EngineOptions options = at_stage(3);
        options.inline_queues = inline_queues;
        options.threads = 2;
        Engine engine(small_model(), AdamW{}, group, options);
        train_step(engine);
        const auto pause = [&](const char* here) {
          if (group.rank() != 1 || where != here) return;
          std::this_thread::sleep_for(milliseconds(50));  // until the others wait
          const double before = used();
          std::this_thread::sleep_for(milliseconds(250));
          spent = used() - before;
        };
        pause("barrier");
        group.barrier();
        for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
          pause("forward");
          all_forward(engine);
          pause("backward");
          for (int u = 3; u-- > 0;) {
            Guard guard = engine.backward(unit(u));
            write_gradients(engine, unit(u), 1.0f);
            guard.commit();
          }
        }
        pause("step");
        engine.step();
      });
      EXPECT_GE(spent, 0.0) << where;
      EXPECT_LT(spent, 0.06) << where << (inline_queues ? ", inline" : "");
    }
  }
}

// -- one rank at fault --

/// Two good steps of two micro-steps, and a fault of one rank before or in the third.
void train_and_fail(const ProcessGroup& group, const std::string& kind, int victim,
                    const EngineOptions& options) {
  const auto is = [&](const char* name) { return group.rank() == victim && kind == name; };
  ModelSpec spec = small_model();
  if (is("other shapes")) spec.unit("more").parameter("more.w", {3});
  Engine engine(spec, AdamW{}, group, options);
  const auto step = [&](const std::function<void()>& middle) {
    for (const MicroStep m : engine.micro_steps(2)) {
      all_forward(engine);
      for (int u = 3; u-- > 0;) {
        Guard guard = engine.backward(unit(u));
        write_gradients(engine, unit(u), static_cast<float>(group.rank() + 1));
        if (m.index() == 1 && u == 1) middle();
        guard.commit();
      }
    }
    engine.step();
  };
  step([] {});
  step([] {});
  if (is("exception between steps")) boom();
  if (is("return between steps")) return;
  if (is("another collective")) {
    for ([[maybe_unused]] const MicroStep m : engine.evaluation_passes(1)) all_forward(engine);
  }
  if (is("more micro-steps")) {
    for ([[maybe_unused]] const MicroStep m : engine.micro_steps(3)) forward_backward(engine, 1.0f);
    engine.step();
  }
  step([&] {
    if (is("exception")) boom();
  });
  step([] {});
}

TEST(Faults, EverySurvivorEndsInTimeAndNamesRankOperationAndUnit) {
  struct Fault {
    std::string kind;
    std::string victim_type;
    std::vector<std::string> survivors;  // # stands for the victim
    std::string type = "CommError";
  };
  const std::vector<std::string> left = {"cannot complete: rank #", "of unit u",
                                         "in micro-step 0 of 2, range 3"};
  const std::vector<std::string> different = {"ranks issued different collectives",
                                              "rank #: ", "of unit u", "range 3"};
  const std::vector<Fault> faults = {
      {"exception",
       "other",
       {"rank #: a backward guard of unit u1 was left by an exception", "step 2, micro-step 1"}},
      {"exception between steps", "other", left},
      {"return between steps", "nothing", left},
      {"another collective", "CommError", different},
      {"more micro-steps", "CommError", different},
      {"other shapes",
       "UsageError",
       {"ranks made different engines: rank 0 has", "rank ", " has"},
       "UsageError"},
  };
  for (const Fault& f : faults) {
    for (int victim = 0; victim < 3; ++victim) {
      for (const int stage : {0, 1, 2, 3}) {
        for (const bool inline_queues : {false, true}) {
          const std::string what = f.kind + " of rank " + std::to_string(victim) + ", stage " +
                                   std::to_string(stage) + (inline_queues ? ", inline" : "");
          std::vector<std::string> parts = f.survivors;
          for (std::string& part : parts) {
            const auto at = part.find('#');
            if (at != std::string::npos) part.replace(at, 1, std::to_string(victim));
          }
          const Within within(kDeadline);  // nobody waits for it
          const auto ends = outcomes(3, [&](const ProcessGroup& group) {
            EngineOptions options = at_stage(stage);
            options.inline_queues = inline_queues;
            train_and_fail(group, f.kind, victim, options);
          });
          for (int r = 0; r < 3; ++r) {
            const Outcome& end = ends[static_cast<std::size_t>(r)];
            if (r == victim) {
              expect(end, f.victim_type, {}, what + ", the victim");
              continue;
            }
            expect(end, f.type, parts, what + ", rank " + std::to_string(r));
            if (f.type == "CommError") {
              EXPECT_EQ(end.state_step, 2) << what << ": " << end.text;
            }
          }
        }
      }
    }
  }
}

TEST(Faults, TheReportInTheLogDirectorySaysWhereEveryThreadRankStands) {
  std::string directory = testing::TempDir() + "zshard_test_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const auto ends = outcomes(3, [&](const ProcessGroup& group) {
    EngineOptions options = at_stage(3);
    options.log_dir = directory;
    train_and_fail(group, "more micro-steps", 1, options);
  });
  std::map<int, std::string> reports;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    ASSERT_EQ(name.rfind("zshard-rank", 0), 0U) << name;
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    reports[std::atoi(name.c_str() + 11)] = text.str();
  }
  std::filesystem::remove_all(directory);
  ASSERT_EQ(reports.size(), 3U);
  for (const auto& [r, text] : reports) {
    const std::string own = "last collectives of rank " + std::to_string(r) + " of 3";
    for (const std::string& part :
         {ends[static_cast<std::size_t>(r)].text, own, std::string("gather of unit u0"),
          std::string("vote in micro-step 2 of 2"), std::string("where the ranks stand")}) {
      EXPECT_NE(text.find(part), std::string::npos) << "no `" << part << "` in " << text;
    }
  }
}

// -- behind the vote --

/// Passes everything on to another group, and finds the board of the engine that is made with it.
class WatchedGroup final : public comm::Group {
 public:
  explicit WatchedGroup(std::shared_ptr<comm::Group> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  double deadline_seconds() const override { return inner_->deadline_seconds(); }
  void exchange(const comm::ControlSignature& s, const void* mine, void* all) override {
    inner_->exchange(s, mine, all);
  }
  void broadcast(const comm::ControlSignature& s, void* data) override {
    inner_->broadcast(s, data);
  }
  std::shared_ptr<memory::Arena> make_arena(std::int64_t bytes) override {
    return inner_->make_arena(bytes);
  }
  std::vector<std::shared_ptr<memory::Arena>> share(std::shared_ptr<memory::Arena> mine) override {
    auto all = inner_->share(std::move(mine));
    last_ = all[0];  // the board is what an engine shares last
    return all;
  }
  std::optional<std::string> gone(int r) const override { return inner_->gone(r); }
  void fails() noexcept override { inner_->fails(); }
  int ranks_here() const override { return inner_->ranks_here(); }

  /// Its counters and its failure only: where signatures lie is unknown here.
  comm::Board board() const { return {last_, size(), 1, 0}; }

 private:
  std::shared_ptr<comm::Group> inner_;
  std::shared_ptr<memory::Arena> last_;
};

TEST(Faults, GathersRunAheadAndReductionsBehindWhileTheCallerComputes) {
  for (const int delay : {0, 300}) {
    const auto ends = outcomes(3, [&](const ProcessGroup& group) {
      const auto watched = std::make_shared<WatchedGroup>(group.implementation());
      EngineOptions options = at_stage(3);
      options.test_delay_microseconds = delay;
      Engine engine(small_model(), AdamW{}, ProcessGroup(watched), options);
      comm::Board board = watched->board();
      // Without a call to the engine, as a loop that computes makes none.
      const auto comes = [&](comm::Lane lane, std::uint32_t number) {
        const auto end =
            std::chrono::steady_clock::now() + std::chrono::duration<double>(kDeadline);
        while (!board.meeting(lane).arrived.reached(number * 3)) {
          if (std::chrono::steady_clock::now() > end) return false;
          std::this_thread::sleep_for(milliseconds(1));
        }
        return true;
      };
      std::uint32_t gathers = 0;
      std::uint32_t reductions = 0;
      for (int step = 0; step < 2; ++step) {
        for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
          for (int u = 0; u < 3; ++u) {
            const Guard guard = engine.forward(unit(u));
            // The budget holds all units: the next one comes, and backward finds all there.
            EXPECT_TRUE(comes(comm::Lane::gather, gathers += u < 2 ? (u == 0 ? 2 : 1) : 0)) << u;
          }
          for (int u = 3; u-- > 0;) {
            {
              Guard guard = engine.backward(unit(u));
              write_gradients(engine, unit(u), 1.0f);
              guard.commit();
            }
            EXPECT_TRUE(comes(comm::Lane::reduce, ++reductions)) << u;
          }
        }
        engine.step();
        ++reductions;  // the vote
      }
    });
    expect_all(ends, "nothing", {});
  }
}

TEST(Faults, CollectivesThatDifferAreFoundBeforeTheirDataMoves) {
  // A rank counts what it has ended, after it has moved its data.
  for (const comm::Lane lane : {comm::Lane::gather, comm::Lane::reduce}) {
    for (const bool inline_queues : {false, true}) {
      const auto ends = outcomes(2, [&](const ProcessGroup& group) {
        const auto watched = std::make_shared<WatchedGroup>(group.implementation());
        EngineOptions options = at_stage(lane == comm::Lane::gather ? 3 : 2);
        options.inline_queues = inline_queues;
        Engine engine(small_model(), AdamW{}, ProcessGroup(watched), options);
        const auto moved = [&] {
          comm::Board board = watched->board();
          return board.rank(group.rank()).lane[static_cast<std::size_t>(lane)].ended.load();
        };
        train_step(engine, 2);
        const std::uint32_t before = moved();
        EXPECT_GT(before, 0U);
        const Outcome end = outcome([&] { train_step(engine, group.rank() == 0 ? 2 : 3); });
        expect(end, "CommError", {"micro-step 0 of 2", "micro-step 0 of 3"}, "");
        EXPECT_EQ(moved(), before) << (inline_queues ? "inline" : "");
      });
      expect_all(ends, "nothing", {});
    }
  }
}

TEST(Faults, AFailureBehindTheVoteLeavesEveryRankUpdated) {
  for (int stage = 0; stage < 3; ++stage) {
    ModelSpec spec;
    for (int u = 0; u < 4; ++u) {
      spec.unit("u" + std::to_string(u)).parameter("w" + std::to_string(u), {200});
    }
    std::vector<float> updated;
    run_ranks(2, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{.lr = 0.01}, group, at_stage(stage));
      train_step(engine);
      auto values = contents(engine);
      if (group.rank() == 0) updated = std::move(values);
    });
    const Within within(kDeadline + 2);
    std::atomic<int> updates{0};
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      const auto watched = std::make_shared<WatchedGroup>(group.implementation());
      EngineOptions options = at_stage(stage);
      // Pauses of up to 50 ms before each collective: the fault comes well before the last gather.
      options.test_delay_microseconds = 50'000;
      Engine engine(spec, AdamW{.lr = 0.01}, ProcessGroup(watched), options);
      std::vector<const float*> where(4);  // below stage 3 parameters stay where they are
      for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
        forward_backward(engine, static_cast<float>(group.rank() + 1));
        for (int u = 0; u < 4; ++u) {
          const Guard guard = engine.forward(unit(u));
          where[static_cast<std::size_t>(u)] = guard.pointer<float>(ParameterId{u});
        }
      }
      std::thread saboteur([&] {
        if (group.rank() != 0) return;
        comm::Board board = watched->board();
        // Four reductions and the vote.
        while (!board.meeting(comm::Lane::reduce).done.reached(5 * 2)) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        board.fail("rank 0: sabotage");
      });
      const Outcome end = outcome([&] { engine.step(); });
      saboteur.join();
      expect(end, "CommError", {"rank 0: sabotage"}, "stage " + std::to_string(stage));
      EXPECT_EQ(end.state_step, 1);
      EXPECT_EQ(engine.step_count(), 1);
      // Stage 0 updates everything, stages 1 and 2 what the rank owns: 128 and 72 of 200 elements
      // (the quantum is 64, and two ranks share 256).
      for (int u = 0; u < 4; ++u) {
        const int lo = stage == 0 ? 0 : group.rank() * 128;
        const int hi = stage == 0 ? 200 : std::min(200, lo + 128);
        const float* mine = where[static_cast<std::size_t>(u)];
        const float* expected = updated.data() + u * 200;
        const auto bytes = static_cast<std::size_t>(hi - lo) * 4;
        if (std::memcmp(mine + lo, expected + lo, bytes) == 0) ++updates;
      }
    });
    expect_all(ends, "nothing", {}, "stage " + std::to_string(stage));
    EXPECT_EQ(updates.load(), 8) << "stage " << stage;
  }
}

TEST(Faults, AFailureBeforeTheVoteLeavesEveryRankAsItWas) {
  for (int stage = 0; stage < 3; ++stage) {
    const auto ends = outcomes(2, [&](const ProcessGroup& group) {
      const auto watched = std::make_shared<WatchedGroup>(group.implementation());
      EngineOptions options = at_stage(stage);
      options.test_delay_microseconds = 20'000;
      Engine engine(small_model(), AdamW{.lr = 0.01}, ProcessGroup(watched), options);
      const float* where = nullptr;
      for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
        forward_backward(engine, 1.0f);
        const Guard guard = engine.forward(unit(0));
        where = guard.pointer<float>(ParameterId{0});
      }
      watched->board().fail("rank 1: sabotage");
      const Outcome end = outcome([&] { engine.step(); });
      expect(end, "CommError", {"rank 1: sabotage"}, "");
      EXPECT_EQ(end.state_step, 0);
      EXPECT_EQ(engine.step_count(), 0);
      for (int i = 0; i < 7; ++i) EXPECT_EQ(where[i], 0.0f);
    });
    expect_all(ends, "nothing", {});
  }
}

// -- numbers that are not finite --

struct Bits {
  DType dtype;
  std::uint32_t one;
  std::vector<std::uint32_t> bad;  // +inf, -inf, NaN
};

void put(void* to, DType dtype, std::int64_t element, std::uint32_t bits) {
  auto* at = static_cast<std::byte*>(to) + element * size_of(dtype);
  std::memcpy(at, &bits, static_cast<std::size_t>(size_of(dtype)));  // little-endian
}

StepReport step_with(Engine& engine, const Bits& bits, int bad_rank, std::uint32_t bad) {
  for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
    for (int u = 2; u-- > 0;) {
      Guard guard = engine.backward(unit(u));
      void* gradient = guard.gradient(ParameterId{u});
      for (int i = 0; i < 7; ++i) put(gradient, bits.dtype, i, bits.one);
      if (u == 1 && engine.rank() == bad_rank) put(gradient, bits.dtype, 5, bad);
      guard.commit();
    }
  }
  return engine.step({.clip_norm = 1.0});
}

std::vector<float> everything(Engine& engine) {
  std::vector<float> all = contents(engine);
  for (const UnitSpec& u : engine.spec().units()) {
    for (const ParameterSpec& p : u.parameters) {
      std::vector<std::string> slots = {"exp_avg", "exp_avg_sq"};
      if (p.options.dtype != DType::f32) slots.push_back("master");
      for (const std::string& slot : slots) {
        std::vector<float> values(static_cast<std::size_t>(p.count()));
        engine.read_state(p.name, slot, values);
        all.insert(all.end(), values.begin(), values.end());
      }
    }
  }
  return all;
}

TEST(Faults, OneElementThatIsNotFiniteOnOneRankSkipsTheStepOnAll) {
  const std::vector<Bits> dtypes = {
      {DType::f32, 0x3F800000, {0x7F800000, 0xFF800000, 0x7FC00001}},
      {DType::bf16, 0x3F80, {0x7F80, 0xFF80, 0x7FC1}},
      {DType::f16, 0x3C00, {0x7C00, 0xFC00, 0x7E01}},
  };
  for (const Bits& bits : dtypes) {
    ModelSpec spec;
    for (const char* name : {"a", "b"}) {
      spec.unit(std::string("unit_") + name).parameter(name, {7}, {.dtype = bits.dtype});
    }
    for (int stage = 0; stage < 4; ++stage) {
      std::vector<float> without[3], with[3];
      run_ranks(3, [&](const ProcessGroup& group) {
        const std::string what =
            std::string(to_string(bits.dtype)) + ", stage " + std::to_string(stage);
        const auto r = static_cast<std::size_t>(group.rank());
        Engine plain(spec, AdamW{.lr = 0.01}, group, at_stage(stage));
        for (int i = 0; i < 2; ++i) step_with(plain, bits, -1, 0);
        without[r] = everything(plain);

        Engine engine(spec, AdamW{.lr = 0.01}, group, at_stage(stage));
        EXPECT_FALSE(step_with(engine, bits, -1, 0).skipped) << what;
        const std::vector<float> before = everything(engine);
        for (const std::uint32_t bad : bits.bad) {
          const StepReport report = step_with(engine, bits, 1, bad);
          EXPECT_TRUE(report.skipped) << what;
          EXPECT_EQ(report.step, 1) << what;
          EXPECT_EQ(report.non_finite, 1) << what;
          EXPECT_FALSE(std::isfinite(report.norm)) << what;
          EXPECT_EQ(report.factor, 0.0) << what;
          if (report.first) {
            EXPECT_EQ(engine.describe(*report.first), "parameter b (unit unit_b), element 5");
          } else {
            ADD_FAILURE() << what << ": no first offender";
          }
          EXPECT_EQ(engine.step_count(), 1) << what;
          const std::vector<float> after = everything(engine);
          EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * 4), 0) << what;
        }
        const StepReport next = step_with(engine, bits, -1, 0);
        EXPECT_FALSE(next.skipped) << what;
        EXPECT_EQ(next.step, 1) << what;
        EXPECT_EQ(next.non_finite, 0) << what;
        EXPECT_FALSE(next.first.has_value()) << what;
        with[r] = everything(engine);
      });
      for (std::size_t r = 0; r < 3; ++r) {
        EXPECT_EQ(with[r], without[r]);
        EXPECT_EQ(with[r], with[0]);
      }
    }
  }
}

TEST(Faults, ASumOfFiniteGradientsThatOverflowsSkipsToo) {
  run_ranks(2, [&](const ProcessGroup& group) {
    ModelSpec spec;
    spec.unit("u").parameter("w", {7});
    Engine engine(spec, AdamW{}, group, at_stage(3));
    for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
      Guard guard = engine.backward(unit(0));
      guard.gradient<float>(ParameterId{0})[2] = 3e38f;
      guard.commit();
    }
    const StepReport report = engine.step();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.non_finite, 1);
    EXPECT_EQ(engine.describe(*report.first), "parameter w (unit u), element 2");
  });
}

TEST(Faults, AConstantLossScaleIsTakenOutAgain) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    std::vector<float> values[2];
    double norms[2] = {};
    for (int scaled = 0; scaled < 2; ++scaled) {
      run_ranks(2, [&](const ProcessGroup& group) {
        EngineOptions options = at_stage(3);
        options.loss_scale = scaled == 1 ? 1024.0 : 1.0;
        ModelSpec spec;
        spec.unit("u").parameter("w", {7}, {.dtype = dtype});
        Engine engine(spec, AdamW{}, group, options);
        double norm = 0.0;
        for (int step = 0; step < 3; ++step) {
          for (const MicroStep m : engine.micro_steps(1)) {
            Guard guard = engine.backward(unit(0));
            // 1 or 1024, in each dtype.
            const std::uint32_t bits = dtype == DType::f32    ? (scaled ? 0x44800000 : 0x3F800000)
                                       : dtype == DType::bf16 ? (scaled ? 0x4480 : 0x3F80)
                                                              : (scaled ? 0x6400 : 0x3C00);
            EXPECT_EQ(m.loss_scale(), scaled == 1 ? 1024.0 : 1.0);
            for (int i = 0; i < 7; ++i) put(guard.gradient(ParameterId{0}), dtype, i, bits);
            guard.commit();
          }
          norm = engine.step({.clip_norm = 0.5}).norm;
        }
        const std::vector<float> mine = everything(engine);
        if (group.rank() == 0) {
          values[scaled] = mine;
          norms[scaled] = norm;
        }
      });
    }
    EXPECT_EQ(values[0], values[1]) << to_string(dtype);
    EXPECT_EQ(norms[0], norms[1]) << to_string(dtype);
  }
}

// -- memory --

ModelSpec mixed_model(int hold) {
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {65, 3});
  auto b = spec.unit("b");
  b.parameter("b.w", {130}, {.dtype = DType::bf16});
  b.parameter("b.scale", {}, {.dtype = DType::f16});
  b.parameter("b.frozen", {33}, {.frozen = true});
  auto c = spec.unit("c");
  c.parameter("c.norm", {7}, {.resident = true});
  c.parameter("c.w", {257});
  c.parameter("c.none", {0});
  spec.hold(hold);
  return spec;
}

std::vector<std::pair<std::string, EngineOptions>> memory_options(const ModelSpec& spec, int world,
                                                                  int stage) {
  std::vector<std::pair<std::string, EngineOptions>> all;
  const auto add = [&](const std::string& what, auto&& edit) {
    EngineOptions options = at_stage(stage);
    options.poison_slots = false;
    edit(options);
    all.emplace_back(what, options);
  };
  add("plain", [](EngineOptions&) {});
  add("wire bf16", [](EngineOptions& o) { o.wire = DType::bf16; });
  add("local", [](EngineOptions& o) { o.accumulation = Accumulation::local; });
  add("host", [](EngineOptions& o) {
    o.offload.optimizer = Tier::host;
    o.offload.gradients = Tier::host;
  });
  add("minimum, behind 0", [&](EngineOptions& o) {
    o.gather_budget = minimum_gather_budget(spec, world);
    o.behind = 0;
    if (stage == 3) o.offload.parameters = Tier::host;
  });
  add("optimizer on nvme", [](EngineOptions& o) {
    lab::set_tiers(o, lab::kOptimizerNvme);
    o.deadline_seconds = 60;  // of disks that others use
  });
  add("all on nvme, verified", [&](EngineOptions& o) {
    lab::set_tiers(o, lab::kAllNvme);
    o.sub_group_bytes = 4096;
    o.offload.io_buffers = 2;
    o.offload.io_verify = true;
    o.deadline_seconds = 60;
    o.gather_budget = minimum_gather_budget(spec, world);
  });
  add("behind 2, overwrite, inline", [](EngineOptions& o) {
    o.behind = 2;
    o.gradient_mode = GradientMode::overwrite;
    o.inline_queues = true;
  });
  return all;
}

TEST(Faults, TheLedgerIsThePlanToTheByte) {
  for (const int hold : {1, 2}) {
    const ModelSpec spec = mixed_model(hold);
    for (const int world : {1, 2, 3, 4}) {
      for (int stage = 0; stage < 4; ++stage) {
        for (const auto& [what, options] : memory_options(spec, world, stage)) {
          const MemoryPlan plan = plan_memory(spec, AdamW{}, world, options);
          run_ranks(world, [&, &what = what, &options = options](const ProcessGroup& group) {
            Engine engine(spec, AdamW{}, group, options);
            EXPECT_EQ(engine.plan(), plan) << what;
            EXPECT_EQ(engine.ledger(), plan) << what << engine.ledger().to_string();
            engine.begin_micro_steps(2);
            const StepReport report = engine.step();
            EXPECT_EQ(report.peak_bytes, plan.memory_bytes()) << what;
            EXPECT_EQ(engine.ledger(), plan) << what;
          });
        }
      }
    }
  }
}

/// Applies "key = value, key = value" as a person would.
void apply(EngineOptions& options, std::string text) {
  const std::string note = " (changes bits)";
  for (auto at = text.find(note); at != std::string::npos; at = text.find(note)) {
    text.erase(at, note.size());
  }
  std::stringstream in(text);
  for (std::string item; std::getline(in, item, ',');) {
    const auto equal = item.find(" = ");
    ASSERT_NE(equal, std::string::npos) << text;
    const auto begin = item.find_first_not_of(' ');
    set_option(options, item.substr(begin, equal - begin), item.substr(equal + 3));
  }
}

TEST(Faults, StagingMemoryThatIsTooLargeForABudgetHasASmallerSetting) {
  ModelSpec spec;
  spec.unit("u").parameter("w", {std::int64_t{1} << 23});
  EngineOptions options;
  options.offload.optimizer = Tier::nvme;
  options.offload.nvme_dir = lab::nvme_directory();
  const auto advised = [&](std::int64_t budget) {
    options.host_budget = budget;
    const Outcome end = outcomes(1, [&](const ProcessGroup& group) {
      const Engine engine(spec, AdamW{}, group, options);
    })[0];
    expect(end, "OutOfMemory", {"I/O staging", "The cheapest change that fits: "}, "staging");
    const auto begin = end.text.find("fits: ") + 6;
    EngineOptions changed = options;
    apply(changed, end.text.substr(begin, end.text.rfind('.') - begin));
    EXPECT_LE(plan_memory(spec, AdamW{}, 1, changed).arena_bytes(Tier::host), budget);
    return changed;
  };
  EXPECT_EQ(advised(16 << 20).offload.optimizer, Tier::nvme);
  EXPECT_LE(advised(16 << 20).offload.io_buffers, 3);
  EXPECT_EQ(advised(1 << 20).offload.optimizer, Tier::device);
}

TEST(Faults, TheChangeThatARefusalNamesReallyConstructs) {
  ModelSpec spec;
  for (int u = 0; u < 6; ++u) {
    spec.unit("u" + std::to_string(u))
        .parameter("w" + std::to_string(u), {1 << 18}, {.dtype = DType::bf16});
  }
  std::mt19937_64 random(3);
  int advised = 0;
  int more_ranks = 0;
#ifdef ZSHARD_SANITIZER
  constexpr int kTurns = 50;
#else
  constexpr int kTurns = 150;
#endif
  for (int turn = 0; turn < kTurns; ++turn) {
    EngineOptions options;
    const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    options.offload.nvme_dir = lab::nvme_directory();
    options.stage = static_cast<Stage>(pick(4));
    if (pick(2) == 0) options.wire = DType::f32;
    if (pick(2) == 0) options.accumulation = Accumulation::local;
    options.behind = pick(3);
    const int world = 1 + pick(3);
    const std::int64_t whole = plan_memory(spec, AdamW{}, world, options).memory_bytes();
    options.device_budget = whole * (1 + pick(20)) / 21;
    if (pick(3) == 0) options.host_budget = whole * pick(20) / 21;
    const auto ends = outcomes(1, [&](const ProcessGroup&) {
      // The plan of `world` ranks, on as many.
      run_ranks(world, [&](const ProcessGroup& group) {
        const Engine engine(spec, AdamW{}, group, options);
      });
    });
    const Outcome& end = ends[0];
    if (end.type == "nothing") continue;
    const std::string& text = end.text;
    expect(end, "OutOfMemory", {"category", "gather slots", "a rank, the plan takes"}, "refusal");
    const std::string fits = "The cheapest change that fits: ";
    EngineOptions changed = options;
    if (const auto at = text.find(fits); at != std::string::npos) {
      ++advised;
      const auto begin = at + fits.size();
      apply(changed, text.substr(begin, text.rfind('.') - begin));
      run_ranks(world, [&](const ProcessGroup& group) {
        const Engine engine(spec, AdamW{}, group, changed);
        EXPECT_EQ(engine.ledger(), engine.plan());
      });
    } else if (const auto ranks = text.find(" ranks; "); ranks != std::string::npos) {
      ++more_ranks;
      const int more = std::atoi(text.c_str() + ranks + 8);
      EXPECT_GT(more, world);
      if (const auto with = text.find(" ranks with "); text.find("same options") == text.npos) {
        const auto begin = with + 12;
        apply(changed, text.substr(begin, text.rfind(" would.") - begin));
      }
      const MemoryPlan plan = plan_memory(spec, AdamW{}, more, changed);
      EXPECT_LE(plan.arena_bytes(Tier::device), *changed.device_budget) << text;
      if (changed.host_budget) {
        EXPECT_LE(plan.arena_bytes(Tier::host), *changed.host_budget) << text;
      }
    } else {
      expect(end, "OutOfMemory", {"split the unit"}, "nothing fits");
    }
  }
  EXPECT_GT(advised, kTurns / 8);
  EXPECT_GT(more_ranks, 0);
}

int threads_now() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("Threads:", 0) == 0) return std::atoi(line.c_str() + 8);
  }
  return -1;
}

int descriptors_now() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST(Faults, ElementLoopsHaveTheCoresOfOneRankByDefault) {
  const auto threads_with = [](int ranks, int wanted) {
    int most = 0;
    const int before = threads_now();
    run_ranks(ranks, [&](const ProcessGroup& group) {
      EngineOptions options = at_stage(3);
      options.threads = wanted;
      const Engine engine(small_model(), AdamW{}, group, options);
      group.barrier();
      if (group.rank() == 0) most = threads_now();
      group.barrier();
    });
    for (int i = 0; i < 200 && threads_now() > before; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    return most;
  };
  cpu_set_t mine;
  ASSERT_EQ(sched_getaffinity(0, sizeof mine, &mine), 0);
  const int cores = CPU_COUNT(&mine);
  for (const int ranks : {1, 2, 3}) {
    const int share = std::max(1, cores / ranks);
    EXPECT_EQ(threads_with(ranks, 0), threads_with(ranks, share)) << ranks;
    EXPECT_EQ(threads_with(ranks, share + 2), threads_with(ranks, share) + 2 * ranks) << ranks;
  }
}

TEST(Faults, AHundredEnginesGiveEverythingBack) {
  const std::int64_t bytes = memory::arena_bytes_in_process();
  const int threads = threads_now();
  const int descriptors = descriptors_now();
  ASSERT_GT(threads, 0);
  for (int i = 0; i < 50; ++i) {
    const int stage = i % 4;
    (void)outcomes(2, [&](const ProcessGroup& group) {
      Engine engine(mixed_model(1), AdamW{}, group, at_stage(stage));
      EXPECT_GT(memory::arena_bytes_in_process(), bytes);
      switch (i % 5) {
        case 0:
          engine.begin_micro_steps(1);
          engine.step();
          break;
        case 1:  // inside a range
          engine.begin_micro_steps(1);
          engine.next_micro_step();
          (void)engine.forward(unit(0));
          break;
        case 2:  // poisoned, by itself or by the peer
          for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
            const Guard guard = engine.forward(unit(0));
            if (group.rank() == 0) boom();
          }
          engine.step();
          break;
        case 3:  // with gathers that nobody waits for
          engine.begin_evaluation_passes(3);
          engine.finish_evaluation();
          break;
        default:
          break;
      }
    });
    EXPECT_EQ(memory::arena_bytes_in_process(), bytes) << i;
  }
  // A joined thread may stand in the kernel's list for a moment.
  for (int i = 0; i < 100 && threads_now() != threads; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(threads_now(), threads);
  EXPECT_EQ(descriptors_now(), descriptors);
}

#ifndef ZSHARD_SANITIZER
/// All ranks of a process, without a call to zshard or to the allocator.
class Gate {
 public:
  explicit Gate(int ranks) : ranks_(ranks) {}
  void pass() {
    const int mine = arrived_.fetch_add(1);
    while (arrived_.load() < (mine / ranks_ + 1) * ranks_) std::this_thread::yield();
  }

 private:
  const int ranks_;
  std::atomic<int> arrived_{0};
};

void use(Engine& engine, Pass pass) {
  const auto units = static_cast<int>(engine.spec().units().size());
  for (int k = 0; k < units; ++k) {
    const int u = pass == Pass::backward ? units - 1 - k : k;
    engine.acquire(unit(u), pass);
    if (pass == Pass::backward) engine.commit(unit(u));
    engine.release(unit(u), pass);
    // And again as a guard, where the program allows it.
    if (pass == Pass::forward) (void)engine.forward(unit(u));
  }
}

void step_and_evaluate(Engine& engine, const StepOptions& how) {
  for (const MicroStep m : engine.micro_steps(3)) {
    use(engine, Pass::forward);
    if (m.index() == 1) engine.skip(unit(0));
    for (int u = 2; u > 0; --u) {
      Guard guard = engine.backward(unit(u));
      guard.commit();
    }
  }
  engine.step(how);
  for ([[maybe_unused]] const MicroStep pass : engine.evaluation_passes(2)) {
    use(engine, Pass::forward);
  }
}

TEST(Faults, NothingIsAllocatedAfterTheFirstStepAndEvaluation) {
  for (int stage = 0; stage < 4; ++stage) {
    const ModelSpec spec = mixed_model(1);
    auto all = memory_options(spec, 2, stage);
    EngineOptions delayed = at_stage(stage);
    delayed.test_delay_microseconds = 200;
    all.emplace_back("with pauses and poison", delayed);
    for (const auto& [what, options] : all) {
      Gate gate(2);
      run_ranks(2, [&, &options = options](const ProcessGroup& group) {
        float* bound = nullptr;
        ModelSpec mine = mixed_model(1);
        mine.unit("bound").parameter("bound", {9}, &bound, {}, {.group = "g"});
        mine.group("g", {.lr = 0.1});
        Engine engine(mine, AdamW{}, group, options);
        std::int64_t binds = 0;
        engine.on_bind([&](const Binding&) { ++binds; });
        StepOptions how;
        how.clip_norm = 1.0;
        how.groups.push_back({"g", {.lr = 0.2}});
        step_and_evaluate(engine, how);
        gate.pass();
        if (group.rank() == 0) {
          allocations.store(0);
          counting.store(true);
        }
        gate.pass();
        for (int i = 0; i < 3; ++i) step_and_evaluate(engine, how);
        gate.pass();
        if (group.rank() == 0) counting.store(false);
        gate.pass();
        EXPECT_GT(binds, 0);
      });
      EXPECT_EQ(allocations.load(), 0) << what << ", stage " << stage;
    }
  }
  // The counter counts.
  counting.store(true);
  allocations.store(0);
  std::free(std::malloc(100));
  const auto p = std::make_unique<std::array<char, 100>>();
  counting.store(false);
  EXPECT_GE(allocations.load(), 1);
}
#endif

// -- models larger than any machine --

TEST(Faults, TensorsPastThirtyTwoBitsArePlannedAndRefusedByTheMachineCheck) {
  const std::int64_t billion2 = (std::int64_t{1} << 31) + 5;
  const std::int64_t billion4 = (std::int64_t{1} << 32) + 7;
  ModelSpec spec;
  spec.unit("first").parameter("a", {billion2}, {.dtype = DType::bf16});
  auto second = spec.unit("second");
  second.parameter("b", {billion4});
  second.parameter("c", {(std::int64_t{1} << 20) + 1, 1 << 13}, {.dtype = DType::f16});
  for (int world = 1; world <= 8; ++world) {
    const shard::Layout layout = shard::Layout::make(spec, world);
    std::int64_t elements = 0;
    for (const shard::UnitLayout& u : layout.units()) {
      for (const shard::Segment& s : u.segments) {
        EXPECT_EQ(s.shard * world, s.padded);
        for (const shard::Placed& p : s.placed) {
          std::int64_t owned = 0;
          for (int r = 0; r < world; ++r) {
            const shard::Range own = s.owned(p, r);
            EXPECT_GE(own.count(), 0);
            owned += own.count();
          }
          EXPECT_EQ(owned, p.count);
          elements += owned;
        }
      }
    }
    EXPECT_EQ(elements, billion2 + billion4 + (((std::int64_t{1} << 20) + 1) << 13));
    for (int stage = 0; stage < 4; ++stage) {
      const MemoryPlan plan = plan_memory(spec, AdamW{}, world, at_stage(stage));
      // fp32 moments of every element, in shards from stage 1 on.
      const std::int64_t part = stage == 0 ? elements : elements / world;
      EXPECT_GE(plan.bytes(Category::moments), part * 8);
      EXPECT_LT(plan.bytes(Category::moments), part * 8 + 8 * 4096);
      EXPECT_GT(plan.memory_bytes(), plan.bytes(Category::moments));
    }
  }
}

TEST(Faults, AModelThatFitsNoMachineIsRefusedWithItsTable) {
  for (const int shift : {44, 50, 58}) {
    ModelSpec spec;
    spec.unit("u").parameter("w", {(std::int64_t{1} << shift) + 3}, {.dtype = DType::bf16});
    for (const int world : {1, 3}) {
      const Within within(kDeadline + 1);
      const auto ends = outcomes(world, [&](const ProcessGroup& group) {
        const Engine engine(spec, SGD{}, group, at_stage(3));
      });
      expect_all(ends, "OutOfMemory", {"this machine has", "gather slots"}, "virtual model");
    }
    EXPECT_EQ(memory::arena_bytes_in_process(), 0);
  }
  // Sums past 2^63 bytes are no plan at all, or a saturated one; never a wrapped one.
  for (const int shift : {59, 60, 61, 62}) {
    ModelSpec spec;
    for (int u = 0; u < 4; ++u) {
      spec.unit("u" + std::to_string(u))
          .parameter("w" + std::to_string(u), {std::int64_t{1} << shift}, {.frozen = true});
    }
    try {
      const MemoryPlan plan = plan_memory(spec, SGD{}, 2, at_stage(3));
      EXPECT_GT(plan.memory_bytes(), std::int64_t{1} << 61) << shift;
      EXPECT_FALSE(plan.to_string().empty());
      for (int c = 0; c < kCategories; ++c) {
        EXPECT_GE(plan.bytes(static_cast<Category>(c)), 0) << shift;
      }
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("2^63"), std::string::npos) << error.what();
    }
  }
}

// -- several threads and several engines --

TEST(Faults, TwoThreadsMayShareTheCallsOfOneEngine) {
  std::vector<float> alone, shared;
  for (const bool two : {false, true}) {
    run_ranks(2, [&](const ProcessGroup& group) {
      Engine engine(small_model(), AdamW{.lr = 0.01}, group, at_stage(3));
      for (int step = 0; step < 5; ++step) {
        for ([[maybe_unused]] const MicroStep m : engine.micro_steps(2)) {
          if (!two) {
            forward_backward(engine, 3.0f);
            continue;
          }
          std::atomic<int> at{0};
          const auto meet = [&] {
            const int mine = at.fetch_add(1);
            while (at.load() < (mine / 2 + 1) * 2) std::this_thread::yield();
          };
          // Both hold each unit; each adds its part of the gradient and commits.
          const auto work = [&](float part) {
            for (int u = 0; u < 3; ++u) {
              engine.acquire(unit(u), Pass::forward);
              EXPECT_NE(engine.pointer(ParameterId{2 * u}), nullptr);
              engine.release(unit(u), Pass::forward);
              meet();
            }
            for (int u = 3; u-- > 0;) {
              engine.acquire(unit(u), Pass::backward);
              meet();
              if (part == 1.0f) write_gradients(engine, unit(u), 3.0f);
              engine.commit(unit(u));
              engine.release(unit(u), Pass::backward);
              meet();
            }
          };
          std::thread other(work, 2.0f);
          work(1.0f);
          other.join();
        }
        engine.step();
      }
      auto values = contents(engine);
      if (group.rank() == 0) (two ? shared : alone) = std::move(values);
    });
  }
  EXPECT_EQ(alone, shared);
}

TEST(Faults, EnginesOnOneGroupAndItsCopiesDoNotDisturbEachOther) {
  std::vector<float> alone[3], together[3], parallel[3];
  run_ranks(2, [&](const ProcessGroup& group) {
    const auto make = [&](int stage) {
      const ProcessGroup copy = group;
      return std::make_unique<Engine>(small_model(2 + stage), AdamW{.lr = 0.01}, copy,
                                      at_stage(stage));
    };
    for (int e = 0; e < 3; ++e) {
      const auto engine = make(e + 1);
      for (int i = 0; i < 4; ++i) train_step(*engine, 2);
      auto values = contents(*engine);
      if (group.rank() == 0) alone[e] = std::move(values);
    }
    const std::unique_ptr<Engine> alternating[3] = {make(1), make(2), make(3)};
    for (int i = 0; i < 4; ++i) {
      for (const auto& engine : alternating) {
        train_step(*engine, 2);
        group.barrier();
      }
    }
    for (int e = 0; e < 3; ++e) {
      auto values = contents(*alternating[e]);
      if (group.rank() == 0) together[e] = std::move(values);
    }
    const std::unique_ptr<Engine> threaded[3] = {make(1), make(2), make(3)};
    std::vector<std::thread> threads;
    for (const auto& engine : threaded) {
      threads.emplace_back([&engine] {
        for (int i = 0; i < 4; ++i) train_step(*engine, 2);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int e = 0; e < 3; ++e) {
      auto values = contents(*threaded[e]);
      if (group.rank() == 0) parallel[e] = std::move(values);
    }
  });
  for (int e = 0; e < 3; ++e) {
    EXPECT_EQ(alone[e], together[e]) << e;
    EXPECT_EQ(alone[e], parallel[e]) << e;
  }
}

TEST(Faults, EnginesMayDieAtDifferentTimesOnTheRanks) {
  // A rank that is done leaves while its peers still read its memory.
  for (int turn = 0; turn < 20; ++turn) {
    for (const int stage : {0, 1, 3}) {
      (void)outcomes(3, [&](const ProcessGroup& group) {
        EngineOptions options = at_stage(stage);
        options.test_delay_microseconds = 200 * group.rank();
        auto engine = std::make_unique<Engine>(small_model(), AdamW{}, group, options);
        train_step(*engine);
        if (turn % 2 == 0 && group.rank() == turn % 3) {
          engine->begin_micro_steps(1);
          engine->next_micro_step();
          all_forward(*engine);
        }
        engine.reset();
      });
      EXPECT_EQ(memory::arena_bytes_in_process(), 0);
    }
  }
}

TEST(Faults, QueuesAndPausesChangeNoBit) {
  for (int stage = 0; stage < 4; ++stage) {
    std::vector<float> plain;
    for (int how = 0; how < 4; ++how) {
      run_ranks(3, [&](const ProcessGroup& group) {
        EngineOptions options = at_stage(stage);
        options.gather_budget = minimum_gather_budget(mixed_model(1), 3);
        options.inline_queues = how == 1 || (how == 2 && group.rank() == 1);
        options.test_delay_microseconds = how >= 2 ? 300 : 0;
        Engine engine(mixed_model(1), AdamW{.lr = 0.01}, group, options);
        for (int i = 0; i < 3; ++i) {
          for ([[maybe_unused]] const MicroStep m : engine.micro_steps(2)) {
            all_forward(engine);
            for (int u = 3; u-- > 0;) {
              if (u == group.rank()) continue;  // other skips on every rank
              Guard guard = engine.backward(unit(u));
              for (const ParameterSpec& p :
                   engine.spec().units()[static_cast<std::size_t>(u)].parameters) {
                void* gradient = guard.gradient(p.id);
                if (gradient == nullptr) continue;
                const std::uint32_t one = p.options.dtype == DType::f32    ? 0x3F800000
                                          : p.options.dtype == DType::bf16 ? 0x3F80
                                                                           : 0x3C00;
                for (std::int64_t e = 0; e < p.count(); ++e) {
                  put(gradient, p.options.dtype, e, one);
                }
              }
              guard.commit();
            }
          }
          engine.step();
        }
        auto values = contents(engine);
        if (group.rank() != 0) return;
        if (how == 0) plain = values;
        EXPECT_EQ(values, plain) << "stage " << stage << ", variant " << how;
      });
    }
  }
}

}  // namespace
}  // namespace zshard
