// What of a CUDA rank lives on the host or on disk: reads and writes of it by name, disks that fail
// around a step, and that passes go on while it moves. The bits are those of a host rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/engine/update_trial.hpp"
#include "tests/device_engine/cuda_lab.hpp"
#include "tests/engine/outcomes.hpp"
#include "tests/offload/fault_driver.hpp"

namespace zshard {
namespace {

using lab::Outcome;
using lab::Placement;
using offload::Operation;
using offload::testing::Fault;
using Values = std::map<std::string, std::vector<float>>;

#ifdef ZSHARD_SANITIZER
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
constexpr double kPatience = 60.0;  // a disk that others use may stall

/// Several sub-groups a segment, 16-bit and fp32 parameters, a frozen and a resident one.
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

/// A loop of its own for one rank.
class Trainer {
 public:
  Trainer(const ProcessGroup& group, const EngineOptions& options)
      : engine_(model(), AdamW{.lr = 0.01}, group, options),
        access_(options.device == DeviceKind::host
                    ? nullptr
                    : std::make_unique<lab::CudaAccess>(group.rank() % lab::gpus())) {
    for (int u = 0; u < 3; ++u) {
      engine_.initialize(UnitId{u}, [](const ParameterRange& range, std::span<float> out) {
        const auto values = lab::uniform(1, 0, std::string(range.name), range.count, range.first);
        std::copy(values.begin(), values.end(), out.begin());
      });
    }
  }

  Engine& engine() { return engine_; }

  void passes(int tick, int micro_steps = 2) {
    for (const MicroStep micro : engine_.micro_steps(micro_steps)) {
      for (int u = 0; u < 3; ++u) (void)engine_.forward(UnitId{u}, stream());
      for (int u = 3; u-- > 0;) {
        Guard guard = engine_.backward(UnitId{u}, stream());
        for (const ParameterSpec& p : unit(u).parameters) {
          void* target = guard.gradient(p.id);
          if (target != nullptr) put(guard, p, target, tick * 4 + micro.index(), u);
        }
        guard.commit();
      }
    }
  }

  StepReport step() { return engine_.step({.clip_norm = 5.0}); }

  Values gradients() {
    Values all;
    each([&](const ParameterSpec& p) {
      if (p.options.frozen) return;
      all[p.name].resize(static_cast<std::size_t>(p.count()));
      engine_.read_gradient(p.name, all[p.name]);
    });
    return all;
  }

  Values everything() {
    Values all;
    each([&](const ParameterSpec& p) {
      const auto read = [&](const std::string& slot) {
        auto& out = all[slot.empty() ? p.name : p.name + "/" + slot];
        out.resize(static_cast<std::size_t>(p.count()));
        if (slot.empty()) {
          engine_.read_parameter(p.name, out);
        } else {
          engine_.read_state(p.name, slot, out);
        }
      };
      read("");
      if (p.options.frozen) return;
      read("exp_avg");
      read("exp_avg_sq");
      if (p.options.dtype != DType::f32) read("master");
    });
    return all;
  }

 private:
  const UnitSpec& unit(int u) const { return engine_.spec().units()[static_cast<std::size_t>(u)]; }
  StreamHandle stream() const { return access_ == nullptr ? StreamHandle{} : access_->stream(); }
  template <class Body>
  void each(Body&& body) {
    for (int u = 0; u < 3; ++u) {
      for (const ParameterSpec& p : unit(u).parameters) body(p);
    }
  }
  void put(const Guard& guard, const ParameterSpec& p, void* target, int tick, int u) {
    std::vector<std::byte> raw(static_cast<std::size_t>(p.count() * size_of(p.options.dtype)));
    const auto bytes = static_cast<std::int64_t>(raw.size());
    if (access_ != nullptr) {
      access_->read(raw.data(), guard.pointer(p.id), bytes);
    } else {
      std::memcpy(raw.data(), guard.pointer(p.id), raw.size());
    }
    const auto g = lab::backward(p, lab::load(raw.data(), p.options.dtype, p.count()),
                                 engine_.rank(), tick * 64 + u, -1);
    kernels::narrow(g.data(), p.options.dtype, raw.data(), p.count());
    if (access_ != nullptr) {
      access_->write(target, raw.data(), bytes);
    } else {
      std::memcpy(target, raw.data(), raw.size());
    }
  }

  Engine engine_;
  std::unique_ptr<lab::CudaAccess> access_;
};

EngineOptions options_of(int stage, const Placement& where, bool cuda = true) {
  EngineOptions options;
  options.stage = static_cast<Stage>(stage);
  options.deadline_seconds = kPatience;
  options.sub_group_bytes = 4096;
  options.gradient_mode = GradientMode::overwrite;
  if (cuda) options.device = DeviceKind::cuda;
  lab::place(options, where);
  return options;
}

std::string difference(const Values& a, const Values& b) {
  lab::Tensors left;
  lab::Tensors right;
  left.values = a;
  right.values = b;
  return lab::difference(left, right);
}

class CudaTiers : public testing::Test {
 protected:
  void SetUp() override {
    lab::open_plugin();
#if defined(ZSHARD_TEST_SIMULATED)
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
#else
    if (lab::gpus() == 0) GTEST_SKIP() << "no GPU is visible";
#endif
  }
  void TearDown() override {
#if defined(ZSHARD_TEST_SIMULATED)
    for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << race.text();
    for (const std::string& fault : simulator::faults()) ADD_FAILURE() << fault;
    for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << leak;
#endif
  }
  static int world() {
    return std::min(lab::gpus(), 2);
  }

  static std::vector<int> stages() {
    return kSanitized ? std::vector<int>{0, 3} : std::vector<int>{0, 1, 2, 3};
  }
};

/// What a run reads on the way, which rank 0 keeps.
struct Seen {
  Values gradients;
  Values changed;
  Values last;
  double norm = 0.0;
};

Seen read_and_write(int world, const EngineOptions& options) {
  Seen seen;
  std::mutex mutex;
  run_ranks(world, [&](const ProcessGroup& group) {
    Trainer trainer(group, options);
    Engine& engine = trainer.engine();
    trainer.passes(0);
    trainer.step();
    trainer.passes(1);
    Seen mine;
    mine.gradients = trainer.gradients();
    engine.write_gradient("a.w", std::vector<float>(3000, 0.25f), 2500);
    engine.write_gradient("b.w", std::vector<float>(100, -0.5f), 6900);
    mine.changed = trainer.gradients();
    mine.norm = trainer.step().norm;
    engine.write_parameter("a.w", std::vector<float>(4000, 2.0f), 1000);
    engine.write_parameter("b.w", std::vector<float>(4000, -2.0f), 1000);
    engine.write_state("c.w", "exp_avg", std::vector<float>(1500, 1e-3f), 700);
    trainer.passes(2);
    trainer.step();
    mine.last = trainer.everything();
    const std::lock_guard<std::mutex> lock(mutex);
    if (group.rank() == 0) seen = std::move(mine);
  });
  return seen;
}

TEST_F(CudaTiers, ReadsAndWritesByNameAreThoseOfAHostRank) {
  const Seen want = read_and_write(world(), options_of(1, {}, false));
  EXPECT_NE(difference(want.gradients, want.changed), "");
  for (const int stage : stages()) {
    for (const Placement& where :
         lab::placements(static_cast<Stage>(stage), Accumulation::reduced)) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ", " + where.text());
      const Seen got = read_and_write(world(), options_of(stage, where));
      EXPECT_EQ(difference(want.gradients, got.gradients), "");
      EXPECT_EQ(difference(want.changed, got.changed), "");
      EXPECT_EQ(difference(want.last, got.last), "");
      EXPECT_EQ(want.norm, got.norm);
      if (HasFailure()) return;
    }
  }
}

// Host ranks have no such bound to their parameters' tier: nor has a device.
TEST_F(CudaTiers, HostRanksTakeParametersOffTheDeviceAlone) {
  const Seen want = read_and_write(world(), options_of(1, {}, false));
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    const Placement where{.parameters = tier};
    EXPECT_EQ(difference(want.last, read_and_write(world(), options_of(3, where, false)).last), "");
  }
}

// Padding between parameters is zero at birth, and no update leaves anything there.
TEST_F(CudaTiers, PaddingOfParametersStaysZero) {
  ModelSpec spec;
  auto unit = spec.unit("u");
  std::vector<ParameterId> ids;
  for (const DType dtype : {DType::f32, DType::bf16}) {  // as they are laid out
    for (int i = 0; i < 3; ++i) {
      const std::string name = std::string(to_string(dtype)) + std::to_string(i);
      ids.push_back(unit.parameter(name, {5 + 100 * i}, {.dtype = dtype}));
    }
  }
  for (const Placement& where : lab::placements(Stage::parameters, Accumulation::reduced)) {
    SCOPED_TRACE(where.text());
    EngineOptions options = options_of(3, where);
    options.offload.io_buffers = 1;
    run_ranks(world(), [&](const ProcessGroup& group) {
      Engine engine(spec, AdamW{.lr = 0.01}, group, options);
      lab::CudaAccess access(group.rank());
      engine.initialize(UnitId{0}, [](const ParameterRange&, std::span<float> out) {
        std::fill(out.begin(), out.end(), 1.5f);
      });
      for (int step = 0; step < 9; ++step) {
        for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
          Guard guard = engine.backward(UnitId{0}, access.stream());
          for (const ParameterId id : ids) {
            const ParameterSpec& p = engine.spec().parameter(id);
            std::vector<std::byte> ones(
                static_cast<std::size_t>(p.count() * size_of(p.options.dtype)), std::byte{0x3F});
            access.write(guard.gradient(id), ones.data(), static_cast<std::int64_t>(ones.size()));
          }
          guard.commit();
        }
        engine.step();
      }
      for ([[maybe_unused]] const MicroStep micro : engine.evaluation_passes(1)) {
        const Guard guard = engine.forward(UnitId{0}, access.stream());
        for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
          const ParameterSpec& p = engine.spec().parameter(ids[i]);
          const auto* begin = static_cast<const std::byte*>(guard.pointer(ids[i])) +
                              p.count() * size_of(p.options.dtype);
          const auto* end = static_cast<const std::byte*>(guard.pointer(ids[i + 1]));
          ASSERT_LT(begin, end);
          std::vector<std::byte> gap(static_cast<std::size_t>(end - begin));
          access.read(gap.data(), begin, end - begin);
          EXPECT_EQ(std::count(gap.begin(), gap.end(), std::byte{0}), end - begin) << p.name;
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST_F(CudaTiers, AnUpdateOnTheHostNeedsStateThere) {
  EngineOptions options = options_of(2, {});
  options.offload.update_on = UpdateOn::host;
  const auto got = lab::outcomes(1, [&](const ProcessGroup& group) { Trainer(group, options); });
  lab::expect(got[0], "UsageError", {"update_on = host needs offload.optimizer"}, "update_on");
  options.device = DeviceKind::host;  // where the device is the host
  lab::expect_all(lab::outcomes(1, [&](const ProcessGroup& group) { Trainer(group, options); }),
                  "nothing", {});
}

#if defined(ZSHARD_TEST_SIMULATED)

// With one rank nothing asks the device anything but a wait.
TEST_F(CudaTiers, ThePassesWaitForNothingOfTheDevice) {
  for (const int stage : stages()) {
    for (const auto& [tier, on] :
         {std::pair{Tier::device, UpdateOn::device}, std::pair{Tier::host, UpdateOn::host},
          std::pair{Tier::host, UpdateOn::device}}) {
      SCOPED_TRACE(stage);
      const Placement where{tier, tier, stage == 3 ? tier : Tier::device, on};
      run_ranks(1, [&](const ProcessGroup& group) {
        Engine engine(model(), AdamW{.lr = 0.01}, group, options_of(stage, where));
        const lab::CudaAccess mine(0);
        for (int step = 0; step < 3; ++step) {
          const std::int64_t asked = simulator::calls("cudaEventQuery");
          for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(3)) {
            for (int u = 0; u < 3; ++u) (void)engine.forward(UnitId{u}, mine.stream());
            for (int u = 3; u-- > 0;) {
              Guard guard = engine.backward(UnitId{u}, mine.stream());
              guard.commit();
            }
          }
          EXPECT_EQ(simulator::calls("cudaEventQuery"), asked);
          EXPECT_TRUE(tier == Tier::device || simulator::calls("cudaMemcpyAsync") > 0);
          engine.step();
        }
      });
    }
  }
}

// A device with half a millisecond before each of its tasks cannot win.
TEST_F(CudaTiers, AutoUpdatesInEachPlaceInTurnAndThenWhereItWasFaster) {
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    for (const int stage : stages()) {
      SCOPED_TRACE("state on " + std::string(to_string(tier)) + ", stage " + std::to_string(stage));
      const auto run = [&](UpdateOn on, std::vector<bool>* by_device) {
        simulator::reset();
        simulator::set_device_memory(std::int64_t{64} << 20);
        simulator::set_delays(on == UpdateOn::automatic ? 500.0 : 0.0, 3);
        Values values;
        run_ranks(1, [&](const ProcessGroup& group) {
          Trainer trainer(group, options_of(stage, {.optimizer = tier, .update_on = on}));
          for (int step = 0; step < engine::UpdateTrial::kSteps + 2; ++step) {
            trainer.passes(step);
            const std::int64_t before = simulator::calls("adamw");
            trainer.step();
            if (by_device != nullptr) by_device->push_back(simulator::calls("adamw") > before);
          }
          EXPECT_EQ(trainer.engine().plan(), trainer.engine().ledger());
          values = trainer.everything();
        });
        for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << race.text();
        return values;
      };
      std::vector<bool> by_device;
      const Values values = run(UpdateOn::automatic, &by_device);
      EXPECT_EQ(by_device, (std::vector{false, true, false, true, false, true, false, false}));
      EXPECT_EQ(difference(run(UpdateOn::host, nullptr), values), "");
    }
  }
}

// -- disks that fail --

struct Ended {
  std::vector<Outcome> first;  // of each rank's second step
  std::vector<std::string> problems;
  std::int64_t happened = 0;
};

/// Trains three steps; in the second the fault strikes, and is cured before resume_step().
Ended strike(int stage, const Placement& where, int buffers, const Fault& fault,
             const Values& undisturbed) {
  constexpr int kWorld = 2;
  EngineOptions options = options_of(stage, where);
  options.offload.io_buffers = buffers;
  const auto faults = std::make_shared<offload::testing::Faults>();
  offload::set_driver_decorator([&](std::unique_ptr<offload::Driver> driver, int rank) {
    return std::make_unique<offload::testing::FaultDriver>(std::move(driver), faults, rank);
  });
  Ended ended{std::vector<Outcome>(kWorld), std::vector<std::string>(kWorld), 0};
  run_ranks(kWorld,
            [&](const ProcessGroup& group) {
              const auto rank = static_cast<std::size_t>(group.rank());
              std::string& problem = ended.problems[rank];
              Trainer trainer(group, options);
              Engine& engine = trainer.engine();
              trainer.passes(0);
              trainer.step();
              group.barrier();
              if (rank == 0) faults->arm(fault);
              group.barrier();
              Outcome& mine = ended.first[rank];
              mine = lab::outcome([&] {
                trainer.passes(1);
                trainer.step();
              });
              const bool interrupted = mine.type == "IoError" && !mine.state_step;
              if (mine.type != "nothing") {
                const Outcome again = lab::outcome([&] { engine.begin_micro_steps(1); });
                if (again.text != mine.text)
                  problem += "goes on with " + again.type + again.text + "; ";
              }
              if (mine.type != "nothing" && engine.step_count() != 1) problem += "counted a step; ";
              // A rank that heard of the failure from another one has no call of the group's left.
              if (mine.type != "nothing" && !interrupted) return;
              const Outcome rest = lab::outcome([&] {
                group.barrier();
                if (rank == 0) faults->clear();
                group.barrier();
                if (interrupted) engine.resume_step();
                if (engine.step_count() != 2) problem += "another step counter; ";
                trainer.passes(2);
                trainer.step();
                const std::string wrong = difference(undisturbed, trainer.everything());
                if (!wrong.empty()) problem += "other bits: " + wrong;
              });
              if (rest.type != "nothing") problem += "ends with " + rest.type + ": " + rest.text;
            },
            {.deadline_seconds = kPatience});
  offload::set_driver_decorator({});
  ended.happened = faults->happened();
  return ended;
}

TEST_F(CudaTiers, ADiskThatFailsBehindTheVoteInterruptsAndTheStepIsResumed) {
  Values undisturbed;
  run_ranks(2, [&](const ProcessGroup& group) {
    Trainer trainer(group, options_of(1, {}, false));
    for (int step = 0; step < 3; ++step) {
      trainer.passes(step);
      trainer.step();
    }
    Values mine = trainer.everything();
    if (group.rank() == 0) undisturbed = std::move(mine);
  });
  int before = 0;
  int behind = 0;
  int fine = 0;
  int kind = 0;
  for (const int stage : stages()) {
    for (Placement where : lab::placements(static_cast<Stage>(stage), Accumulation::reduced)) {
      if (where.optimizer != Tier::nvme && where.gradients != Tier::nvme &&
          where.parameters != Tier::nvme) {
        continue;
      }
      for (const std::int64_t after : {0, 3, 11, 26}) {
        ++kind;
        if (kSanitized && kind % 3 != 0) continue;
        const Operation only = kind % 2 == 0 ? Operation::write : Operation::read;
        const int buffers = 1 + kind % 5;
        // The second step is the device's turn, and the third the host's.
        if (where.update_on != UpdateOn::host && where.optimizer != Tier::device) {
          where.update_on = kind % 2 == 0 ? UpdateOn::automatic : UpdateOn::device;
        }
        SCOPED_TRACE("stage " + std::to_string(stage) + ", " + where.text() + ", " +
                     (only == Operation::read ? "read " : "write ") + std::to_string(after) +
                     ", buffers " + std::to_string(buffers));
        const Fault fault{.kind = Fault::Kind::error,
                          .value = EIO,
                          .only = only,
                          .rank = 1,
                          .after = after,
                          .times = offload::testing::kLasting};
        const Ended ended = strike(stage, where, buffers, fault, undisturbed);
        for (const std::string& problem : ended.problems) EXPECT_EQ(problem, "");
        const Outcome& own = ended.first[1];
        const Outcome& peer = ended.first[0];
        if (own.type == "nothing") {
          EXPECT_EQ(ended.happened, 0);
          EXPECT_EQ(peer.type, "nothing") << peer.text;
          ++fine;
        } else {
          EXPECT_EQ(own.type, "IoError") << own.text;
          EXPECT_NE(own.text.find("Input/output error"), std::string::npos) << own.text;
          EXPECT_NE(peer.text.find("rank 1"), std::string::npos) << peer.type << ": " << peer.text;
          ++(own.state_step ? before : behind);
        }
        if (HasFailure()) return;
      }
    }
  }
  std::cout << before << " before the vote, " << behind << " behind it, " << fine << " not hit\n";
  EXPECT_GT(before, 0);
  EXPECT_GT(behind, kSanitized ? 5 : 20);
}

#endif

}  // namespace
}  // namespace zshard
