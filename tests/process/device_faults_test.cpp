// Ranks as processes on the simulated device: one of them dies, stops or throws, and every survivor
// ends in time with an error that names it and what it waited for; nothing is left of a job that
// was killed.
#if defined(ZSHARD_TEST_SIMULATED)
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "tests/process/simulated.hpp"

namespace zshard {
namespace {

using lab::Children;
using lab::Ending;
using lab::expect_error;
using lab::Json;
using lab::now;
using lab::outcome;
using lab::Outcome;
using lab::say;
using std::chrono::milliseconds;

constexpr int kWorld = 3;
// Survivors hear of a dead process within 200 ms; the rest is for a loaded machine.
constexpr double kNoticed = lab::kSanitized ? 15.0 : 5.0;
// The deadline of tests that wait for it to pass.
constexpr double kShort = lab::kSanitized ? 8.0 : 4.0;

EngineOptions options_of(const Json& a) {
  EngineOptions options = lab::at_stage(a.value("stage", 3));
  options.device = DeviceKind::cuda;
  options.offload.optimizer = a.value("host_optimizer", false) ? Tier::host : Tier::device;
  options.deadline_seconds = a.value("deadline", lab::kDeadline);
  return options;
}

/// A loop on the device of this rank.
class Loop {
 public:
  Loop(const ProcessGroup& group, const EngineOptions& options)
      : engine_(lab::small_model(), AdamW{}, group, options), access_(group.rank()) {}
  Engine& engine() { return engine_; }

  /// A step of two micro-steps in which something may happen in the middle of the second.
  void step(const std::function<void()>& middle) {
    for (const MicroStep m : engine_.micro_steps(2)) {
      for (int u = 0; u < 3; ++u) (void)engine_.forward(lab::unit(u), access_.stream());
      for (int u = 3; u-- > 0;) {
        Guard guard = engine_.backward(lab::unit(u), access_.stream());
        write(lab::unit(u));
        if (m.index() == 1 && u == 1) middle();
        guard.commit();
      }
    }
    engine_.step();
  }

 private:
  void write(UnitId id) {
    for (const ParameterSpec& p :
         engine_.spec().units()[static_cast<std::size_t>(id.value)].parameters) {
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(engine_.rank() + 1) * static_cast<float>(i + 8);
      }
      access_.write(engine_.gradient(p.id), values.data(), p.count() * size_of(p.options.dtype));
    }
  }

  Engine engine_;
  lab::CudaAccess access_;
};

// Two good steps, and the fault of one rank in the third.
const lab::Scenario fault("device fault", [](const Json& a) {
  lab::set_up_machine(a);
  const std::string kind = a["kind"];
  const ProcessGroup group = ProcessGroup::from_environment();
  const bool victim = group.rank() == 1;
  const auto mark = [&] {
    Children::inherited_page().at[static_cast<std::size_t>(group.rank())].store(now());
  };
  Loop loop(group, options_of(a));
  loop.step([] {});
  loop.step([] {});
  if (victim && kind == "return") {
    mark();
    return;
  }
  loop.step([&] {
    if (!victim) return;
    mark();
    if (kind == "exception") throw std::runtime_error("boom");
    if (kind == "_exit") _exit(0);
    if (kind == "SIGKILL") raise(SIGKILL);
    if (kind == "SIGSTOP") raise(SIGSTOP);
    if (kind == "device") simulator::fault(1, cudaErrorECCUncorrectable);
  });
  // Whoever has come this far waits for the others; a victim may have gone a step further.
  loop.step([] {});
  loop.step([] {});
});

bool names_operation(const Ending& end) {
  const std::string text = end.said()["text"];
  for (const char* operation : {"gather", "reduc", "vote", "backward guard", "cuda"}) {
    if (text.find(operation) != std::string::npos) return true;
  }
  return false;
}

struct Fault {
  std::string kind;
  std::string victim_type;  // what the victim says; "" nothing
  std::vector<std::string> survivors;
};

TEST(DeviceProcessFaults, EverySurvivorEndsInTimeAndNamesRankAndOperation) {
  const std::vector<std::string> gone = {"cannot complete: rank 1 is gone (its process"};
  const std::vector<Fault> faults = {
      {"SIGKILL", "", gone},
      {"_exit", "", gone},
      {"exception", "other", {"rank 1: a backward guard of unit u1 was left by an exception"}},
      {"return", "", {"cannot complete: rank 1", "of unit u"}},
      {"device", "DeviceError", {"rank 1", "cudaErrorECCUncorrectable"}},
  };
  for (const Fault& f : faults) {
    for (const bool notices : {true, false}) {
      for (const int stage : lab::kSanitized ? std::vector<int>{3} : std::vector<int>{0, 2, 3}) {
        for (const bool host_optimizer : {false, true}) {
          if (lab::kSanitized && host_optimizer) continue;
          const std::string what = f.kind + (notices ? ", NCCL notices" : ", NCCL does not") +
                                   ", stage " + std::to_string(stage) +
                                   (host_optimizer ? ", optimizer on the host" : "");
          Children children(lab::kJobSeconds);
          lab::start_job(children, kWorld, "device fault",
                         {{"kind", f.kind},
                          {"stage", stage},
                          {"remote_errors", notices},
                          {"host_optimizer", host_optimizer}});
          const auto ends = children.wait();
          const std::int64_t start = children.page().at[1].load();
          ASSERT_NE(start, 0) << what << ": " << ends[1].text();
          for (const std::size_t r : {0, 2}) {
            expect_error(ends[r], "CommError", f.survivors, what + ", rank " + std::to_string(r));
            EXPECT_TRUE(names_operation(ends[r])) << what << ": " << ends[r].text();
            EXPECT_LT(static_cast<double>(ends[r].time - start) * 1e-9, kNoticed) << what;
            // A rank that returns after a step may leave a slower peer in the middle of it.
            if (f.kind != "return") {
              EXPECT_EQ(ends[r].said()["state_step"], 2) << what << ": " << ends[r].text();
            }
          }
          if (!f.victim_type.empty()) expect_error(ends[1], f.victim_type, {}, what);
        }
      }
    }
  }
}

/// By the meeting that it did not come to, or by the collective that waits on the device: whichever
/// a survivor has waited for longer.
bool blames_rank_1(const Ending& end) {
  const std::string text = end.said()["text"];
  return text.find("rank 1 did not ") != std::string::npos ||
         text.find(" waits for rank 1") != std::string::npos;
}

TEST(DeviceProcessFaults, ARankThatIsStoppedPastTheDeadlineEndsAllWithAnError) {
  for (const int stage : lab::kSanitized ? std::vector<int>{3} : std::vector<int>{0, 2, 3}) {
    Children children(lab::kJobSeconds + kShort);
    lab::start_job(children, kWorld, "device fault",
                   {{"kind", "SIGSTOP"}, {"stage", stage}, {"deadline", kShort}});
    const std::string what = "stage " + std::to_string(stage);
    for (const std::size_t r : {0, 2}) {
      const Ending& end = children.wait(r);
      expect_error(end, "CommError", {"of unit u", "raise deadline_seconds"},
                   what + ", rank " + std::to_string(r));
      EXPECT_TRUE(blames_rank_1(end)) << what << ": " << end.text();
      const double waited = static_cast<double>(end.time - children.page().at[1].load()) * 1e-9;
      EXPECT_GT(waited, kShort - 0.1) << what;
      EXPECT_LT(waited, kShort + kNoticed) << what;
    }
    EXPECT_FALSE(children.ended(1));
    const std::int64_t start = now();
    children.signal(1, SIGCONT);
    expect_error(children.wait(1), "CommError", {"of unit u"}, what + ", rank 1");
    EXPECT_TRUE(blames_rank_1(children.wait(1))) << what << ": " << children.wait(1).text();
    EXPECT_LT(static_cast<double>(children.wait(1).time - start) * 1e-9, kNoticed) << what;
  }
}

TEST(DeviceProcessFaults, AStopBelowTheDeadlineChangesNothing) {
  Children children(lab::kJobSeconds);
  lab::start_job(children, kWorld, "device fault", {{"kind", "SIGSTOP"}});
  for (int i = 0; i < 10'000 && children.page().at[1].load() == 0; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  std::this_thread::sleep_for(milliseconds(300));
  children.signal(1, SIGCONT);
  lab::expect_success(children.wait(), "stopped for 0.3 s");
}

// -- killed at any moment --

const lab::Scenario endless("device endless", [](const Json& a) {
  lab::set_up_machine(a);
  const ProcessGroup group = ProcessGroup::from_environment();
  Loop loop(group, options_of(a));
  Children::inherited_page().ready.fetch_add(1);
  while (true) {
    loop.step([] {});
    if (loop.engine().step_count() % 4 == 0) (void)lab::contents(loop.engine());
  }
});

/// What of this machine a job could leave behind.
std::set<std::string> traces(const std::string& own) {
  std::set<std::string> found;
  for (const char* directory : {"/dev/shm", "/tmp"}) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
      const std::string name = entry.path().filename();
      const bool ours = name.rfind("zshard", 0) == 0 || name.rfind("simulated", 0) == 0;
      if (ours && name.rfind("zshard_test_", 0) != 0 && entry.path() != own) {
        found.insert(entry.path());
      }
    }
  }
  return found;
}

/// Abstract sockets of this user's jobs whose name has `part`.
int sockets_with(const std::string& part) {
  std::ifstream all("/proc/net/unix");
  int count = 0;
  for (std::string line; std::getline(all, line);) count += line.find(part) != std::string::npos;
  return count;
}

TEST(DeviceProcessFaults, AKillAtAnyMomentLeavesErrorsOnTheSurvivorsAndNothingElse) {
  const int kills = lab::exhaustive() ? 200 : lab::kSanitized ? 10 : 50;
  std::mt19937_64 random(31);
  std::string pattern = "/tmp/zshard_test_XXXXXX";
  ASSERT_NE(mkdtemp(pattern.data()), nullptr);
  const auto before = traces(pattern);
  double slowest = 0.0;
  for (int turn = 0; turn < kills; ++turn) {
    const auto victim = static_cast<std::size_t>(turn % kWorld);
    const std::string what = "turn " + std::to_string(turn);
    Children children(lab::kJobSeconds);
    const bool starting = turn % 10 == 9;  // while the ranks still meet
    lab::JobOptions options;
    if (starting) options.deadline = kShort;
    for (int r = 0; r < kWorld; ++r) options.of_rank[r] = {{"TMPDIR", pattern}};
    lab::start_job(children, kWorld, "device endless",
                   {{"stage", turn % 4},
                    {"remote_errors", turn % 2 == 0},
                    {"host_optimizer", turn % 3 == 0},
                    {"delay", turn % 5 == 0 ? 200 : 5}},
                   options);
    if (!starting) {
      ASSERT_TRUE(children.wait_ready(kWorld)) << what << ": " << children.wait(0).text();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (starting ? 30'000 : 60'000)));
    const std::int64_t start = now();
    children.signal(victim, SIGKILL);
    const auto ends = children.wait();
    const std::string culprit = "rank " + std::to_string(victim) + " is gone (its process";
    bool named = starting;
    for (std::size_t r = 0; r < kWorld; ++r) {
      if (r == victim) continue;
      const double noticed = static_cast<double>(ends[r].time - start) * 1e-9;
      if (starting) {
        // Before the ranks have met nobody knows who the other is: the deadline counts.
        expect_error(ends[r], "CommError", {"rank"}, what);
        EXPECT_LT(noticed, 2 * kShort + kNoticed) << what;
        continue;
      }
      expect_error(ends[r], "CommError", {"rank ", " is gone ("},
                   what + ", rank " + std::to_string(r));
      // A survivor that comes late may find the other one gone, which named the victim.
      named = named || ends[r].output.find(culprit) != std::string::npos;
      EXPECT_LT(noticed, kNoticed) << what;
      slowest = std::max(slowest, noticed);
    }
    EXPECT_TRUE(named) << what << ": nobody says that " << culprit;
  }
  EXPECT_EQ(traces(pattern), before);
  EXPECT_TRUE(std::filesystem::is_empty(pattern));
  EXPECT_EQ(sockets_with("test-" + std::to_string(getpid())), 0);
  std::filesystem::remove_all(pattern);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "a child is left";
  std::cout << kills << " kills, slowest survivor " << slowest << " s\n";
}

}  // namespace
}  // namespace zshard
#endif
