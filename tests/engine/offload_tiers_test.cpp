// What lies where: splits and budgets, the plan and the ledger with their nvme column, what an
// engine on disk takes and gives back, and what of it moves when.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <thread>

#include "runtime/memory/arena.hpp"
#include "tests/engine/offload_lab.hpp"
#include "tests/offload/forwarding_driver.hpp"

namespace zshard::lab::disk {
namespace {

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

// -- what moves when --

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

/// What a driver was asked for, in order, and how much of it is under way.
class Journal {
 public:
  struct Entry {
    Operation operation = Operation::read;
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    int phase = 0;  // that enter() has set last
  };
  void enter(int phase) {
    const std::lock_guard<std::mutex> lock(mutex_);
    phase_ = phase;
  }
  void start(const offload::RawRequest& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back({request.operation, request.offset, request.bytes, phase_});
    under_way_[request.tag] = request.operation;
  }
  void end(std::uint64_t tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.erase(tag);
  }

  /// Bytes of operations in [begin, end) of the file, in a phase.
  [[nodiscard]] std::int64_t bytes(Operation operation, int phase, std::int64_t begin,
                                   std::int64_t end) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::int64_t sum = 0;
    for (const Entry& e : entries_) {
      if (e.operation == operation && e.phase == phase && e.offset >= begin && e.offset < end) {
        sum += e.bytes;
      }
    }
    return sum;
  }
  [[nodiscard]] std::vector<Entry> of(Operation operation, int phase) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Entry> all;
    std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(all),
                 [&](const Entry& e) { return e.operation == operation && e.phase == phase; });
    return all;
  }
  /// Of those that are under way.
  [[nodiscard]] std::int64_t under_way(Operation operation) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(under_way_.begin(), under_way_.end(),
                         [&](const auto& one) { return one.second == operation; });
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::map<std::uint64_t, Operation> under_way_;
  int phase_ = 0;
};

class JournalDriver final : public offload::testing::ForwardingDriver {
 public:
  JournalDriver(std::unique_ptr<Driver> inner, std::shared_ptr<Journal> journal)
      : ForwardingDriver(std::move(inner)), journal_(std::move(journal)) {}
  void start(const offload::RawRequest& request) override {
    journal_->start(request);
    ForwardingDriver::start(request);
  }
  std::size_t reap(std::span<offload::RawCompletion> out, std::int64_t microseconds) override {
    const std::size_t count = ForwardingDriver::reap(out, microseconds);
    for (std::size_t i = 0; i < count; ++i) journal_->end(out[i].tag);
    return count;
  }

 private:
  std::shared_ptr<Journal> journal_;
};

/// While it lives, drivers write a journal, and go wrong as `faults` says.
class Observation {
 public:
  Observation() {
    offload::set_driver_decorator([journal = journal_, faults = faults_](
                                      std::unique_ptr<offload::Driver> driver, int rank) {
      auto wrong = std::make_unique<offload::testing::FaultDriver>(std::move(driver), faults, rank);
      return std::unique_ptr<offload::Driver>(
          std::make_unique<JournalDriver>(std::move(wrong), journal));
    });
  }
  ~Observation() { offload::set_driver_decorator({}); }
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;
  Journal* operator->() { return journal_.get(); }
  [[nodiscard]] Faults& faults() { return *faults_; }

 private:
  std::shared_ptr<Journal> journal_ = std::make_shared<Journal>();
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
};

constexpr int kPassing = 1;
constexpr int kStepping = 2;

/// One step, with a journal of its passes and of its update. Between the two it waits for `reads`
/// operations that have begun without it, at most some seconds.
StepReport observed_step(Engine& engine, Observation& journal, int tick, std::size_t reads = 0) {
  journal->enter(kPassing);
  engine.begin_micro_steps(1);
  engine.next_micro_step();
  pass(engine, tick);
  engine.next_micro_step();
  // The passes are over on disk too once the gradients can be read.
  std::vector<float> unused(5);
  engine.read_gradient("a.b", unused);
  for (int i = 0; i < 5000 && journal->of(Operation::read, kPassing).size() < reads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  journal->enter(kStepping);
  return engine.step();
}

TEST(Offload, TheFirstSubGroupsAreReadBeforeTheStepBegins) {
  for (const int stage : kStages) {
    for (const int buffers : {1, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + " buffers " + std::to_string(buffers));
      Observation journal;
      run_ranks(1, [&](const ProcessGroup& group) {
        Engine engine(model(), AdamW{.lr = 0.01}, group,
                      on_disk(stage, lab::kOptimizerNvme, buffers));
        fill(engine);
        observed_step(engine, journal, 0, static_cast<std::size_t>(buffers));
      });
      // Nothing but optimizer state is on disk.
      EXPECT_EQ(journal->of(Operation::read, kPassing).size(), static_cast<std::size_t>(buffers));
      EXPECT_FALSE(journal->of(Operation::read, kStepping).empty());
      EXPECT_TRUE(journal->of(Operation::write, kPassing).empty());
    }
  }
}

// Writes that do not end: the step goes on until the last buffer waits for its own.
TEST(Offload, AStepHasAsManySubGroupsUnderWayAsThereAreBuffers) {
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {30000});
  spec.unit("b").parameter("a.b", {5});
  for (const int buffers : {1, 2, 3, 5}) {
    SCOPED_TRACE(buffers);
    Observation journal;
    std::atomic<std::int64_t> most{0};
    run_ranks(1, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{}, group, on_disk(1, lab::kOptimizerNvme, buffers));
      fill(engine);
      // One transfer of one block each.
      journal.faults().arm({.kind = Fault::Kind::held, .only = Operation::write, .times = buffers});
      std::thread observer([&] {
        for (int i = 0; i < 5000 && most.load() < buffers; ++i) {
          most.store(std::max(most.load(), journal->under_way(Operation::write)));
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        journal.faults().clear();
      });
      const Outcome end = outcome([&] { observed_step(engine, journal, 0); });
      observer.join();
      EXPECT_EQ(end.type, "nothing") << end.text;
    });
    EXPECT_EQ(most.load(), buffers);
  }
}

TEST(Offload, SubGroupsComeInTheOtherDirectionInEachStep) {
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {30000});
  spec.unit("b").parameter("a.b", {5});
  std::vector<std::vector<std::int64_t>> written;
  for (int steps = 1; steps <= 3; ++steps) {
    Observation journal;
    run_ranks(1, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{}, group, on_disk(1, lab::kOptimizerNvme, 1));
      fill(engine);
      for (int t = 0; t + 1 < steps; ++t) train(engine, t);
      observed_step(engine, journal, steps);
    });
    written.emplace_back();
    for (const Journal::Entry& e : journal->of(Operation::write, kStepping)) {
      written.back().push_back(e.offset);
    }
  }
  ASSERT_GT(written[0].size(), 3U);
  EXPECT_TRUE(std::is_sorted(written[0].begin(), written[0].end()));
  EXPECT_EQ(written[2], written[0]);
  std::reverse(written[0].begin(), written[0].end());
  EXPECT_EQ(written[1], written[0]);
}

TEST(Offload, ParametersAreReadOnceAPassInTheirOwnTypeAndWrittenOnceAStep) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(to_string(dtype));
    constexpr int kUnits = 4;
    ModelSpec spec;
    for (int u = 0; u < kUnits; ++u) {
      const std::string name = u == 0 ? "a" : "u" + std::to_string(u);
      spec.unit(name).parameter(name + ".b", {u == 0 ? 5 : 9000}, {.dtype = dtype});
    }
    EngineOptions options = on_disk(3, lab::kAllNvme);
    options.offload.gradients = Tier::device;
    options.gather_budget = minimum_gather_budget(spec, 1);  // one unit at a time
    options.look_ahead = 0;
    const std::int64_t parameters =
        plan_memory(spec, AdamW{}, 1, options).bytes(Category::parameters, Tier::nvme);
    const std::int64_t each = (9000 * size_of(dtype) + 4095) / 4096 * 4096;
    ASSERT_EQ(parameters, 4096 + 3 * each);
    Observation journal;
    run_ranks(1, [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{}, group, options);
      fill(engine);
      observed_step(engine, journal, 0);
    });
    // Forward and backward; at the turn the last unit is still there.
    const std::int64_t passes = 2 * parameters - each;
    const std::int64_t read = journal->bytes(Operation::read, kPassing, 0, parameters);
    const std::int64_t updated = journal->bytes(Operation::read, kStepping, 0, parameters);
    if (dtype == DType::f32) {
      // The update takes them too, the first ones before the step begins.
      EXPECT_GE(read, passes);
      EXPECT_EQ(read + updated, passes + parameters);
    } else {
      // It has masters of its own, which no pass reads.
      EXPECT_EQ(read, passes);
      EXPECT_EQ(updated, 0);
    }
    EXPECT_EQ(journal->bytes(Operation::write, kPassing, 0, parameters), 0);
    EXPECT_EQ(journal->bytes(Operation::write, kStepping, 0, parameters), parameters);
  }
}

TEST(Offload, StepReportsTellWhatMovedAndHowLongItTook) {
  for (const lab::TierLevel tiers : {lab::kAllDevice, lab::kOptimizerNvme, lab::kAllNvme}) {
    SCOPED_TRACE(tiers);
    Observation journal;
    run_ranks(1, [&](const ProcessGroup& group) {
      Engine engine(model(), AdamW{.lr = 0.01}, group, on_disk(3, tiers));
      fill(engine);
      train(engine, 0);
      const auto all = std::numeric_limits<std::int64_t>::max();
      const auto moved = [&](Operation operation) {
        return journal->bytes(operation, kPassing, 0, all) +
               journal->bytes(operation, kStepping, 0, all);
      };
      for (int t = 1; t < 3; ++t) {
        const std::int64_t read = moved(Operation::read);
        const std::int64_t written = moved(Operation::write);
        journal.faults().shuffle(1, 2000);
        const auto start = std::chrono::steady_clock::now();
        const StepReport report = observed_step(engine, journal, t);
        const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
        journal.faults().clear();
        const bool disk = tiers != lab::kAllDevice;
        EXPECT_EQ(report.disk_read_bytes, moved(Operation::read) - read);
        EXPECT_EQ(report.disk_written_bytes, moved(Operation::write) - written);
        for (const double seconds :
             {report.read_seconds, report.write_seconds, report.wait_seconds}) {
          EXPECT_EQ(seconds > 0, disk);
          EXPECT_LE(seconds, wall.count());
        }
        EXPECT_EQ(report.disk_written_bytes > 0, disk);
        EXPECT_EQ(report.raw_share > 0, disk);
        EXPECT_LE(report.raw_share, 1.0);
        EXPECT_GT(report.update_seconds, 0);
      }
    });
  }
}

// The table of 2^24 sub-groups alone takes more than a GiB.
TEST(Offload, TooManySubGroupsAreCountedNotMade) {
  std::ofstream peak("/proc/self/clear_refs");
  if (!(peak << "5" << std::flush)) GTEST_SKIP() << "no reset of the process' peak counter here";
  const std::int64_t before = status("VmRSS");
  constexpr std::int64_t kLeast = 2048;  // elements of the smallest sub-group
  for (const std::int64_t groups : {(std::int64_t{1} << 24) + 1, std::int64_t{1} << 40}) {
    ModelSpec spec;
    spec.unit("a").parameter("a", {kLeast + 1}, {.dtype = DType::bf16});
    spec.unit("b").parameter("b", {kLeast * (groups - 2)}, {.dtype = DType::bf16});
    for (const int stage : {0, 1, 2, 3}) {
      for (const auto tiers : {lab::kOptimizerNvme, lab::kAllNvme}) {
        EngineOptions options = on_disk(stage, tiers);
        const Outcome got = lab::outcome([&] { plan_memory(spec, AdamW{}, 1, options); });
        lab::expect(got, "UsageError",
                    {"sub_group_bytes: 4096 cuts this model into " + std::to_string(groups) +
                         " sub-groups a rank",
                     "more than 16777216; raise it"},
                    "stage " + std::to_string(stage));
      }
      // What a step does not move is not cut.
      EXPECT_NO_THROW(plan_memory(spec, AdamW{}, 1, on_disk(stage, lab::kOptimizerHost)));
    }
  }
  EXPECT_LE(status("VmHWM") - before, 64 * 1024) << "kB";
}

#ifndef ZSHARD_SANITIZER  // they keep shadow memory: the process' peak says nothing
TEST(Offload, TheProcessPeaksBelowThePlanInitialisationIncluded) {
  std::ofstream peak("/proc/self/clear_refs");
  if (!(peak << "5" << std::flush)) GTEST_SKIP() << "no reset of the process' peak counter here";
  ModelSpec spec;
  for (int u = 0; u < 6; ++u) {
    spec.unit("u" + std::to_string(u)).parameter("u" + std::to_string(u), {8 << 20});
  }
  // 800 MiB of disk; 3 sub-groups of 4 MiB in memory.
  EngineOptions options = on_disk(3, lab::kAllNvme);
  options.sub_group_bytes = 4 << 20;
  options.gather_budget = minimum_gather_budget(spec, 1);
  const std::int64_t before = status("VmRSS");
  std::int64_t planned = 0;
  run_ranks(1, [&](const ProcessGroup& group) {
    Engine engine(spec, AdamW{}, group, options);
    planned = engine.plan().memory_bytes() / 1024;
    EXPECT_GT(engine.plan().arena_bytes(Tier::nvme), std::int64_t{600} << 20);
    EXPECT_LE(status("VmHWM") - before, planned + 16 * 1024) << "construction";
  });
  EXPECT_GE(status("VmHWM") - before, planned / 2) << "the measure itself does not work";
}
#endif

}  // namespace
}  // namespace zshard::lab::disk
