// What goes wrong on a device ends in one error on every rank, within the deadline, and a wait that
// is missing between two queues is found by name. Simulated device only: nothing else can be made
// to fail on demand.
#if defined(ZSHARD_TEST_SIMULATED)
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <tuple>

#include "tests/device_engine/cuda_lab.hpp"
#include "tests/engine/outcomes.hpp"

namespace zshard {
namespace {

using lab::Outcome;

class CudaFaults : public testing::Test {
 protected:
  void SetUp() override {
    lab::open_plugin();
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
  }
  void TearDown() override {
    for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << leak;
  }

  static lab::Case example(int stage, int world = 2, int steps = 3) {
    lab::Case c;
    for (int u = 0; u < 4; ++u) {
      const std::string name = "u" + std::to_string(u);
      auto unit = c.spec.unit(name);
      unit.parameter(name + ".w", {3000});
      unit.parameter(name + ".h", {1000}, {.dtype = DType::bf16});
      unit.parameter(name + ".r", {40}, {.resident = true});
    }
    c.world = world;
    c.options.stage = static_cast<Stage>(stage);
    c.options.deadline_seconds = lab::kDeadline;
    c.clip = 1.0;
    std::mt19937_64 random(3);
    c.uses = lab::random_uses(random, c.spec, world, steps, 2, 100);
    if (stage == 3) c.options.gather_budget = minimum_gather_budget(c.spec, world);
    lab::on_cuda(c);
    return c;
  }

  /// Steps of a loop that queues kernels and never waits itself.
  static void run_ahead(const lab::Case& c, const ProcessGroup& group) {
    const lab::CudaAccess mine(group.rank());
    auto* stream = static_cast<cudaStream_t>(mine.stream().handle);
    Engine engine(c.spec, c.optimizer, group, c.options);
    const auto use = [&](UnitId id, bool backward) {
      simulator::Ranges reads;
      simulator::Ranges writes;
      for (const ParameterSpec& p : c.spec.units()[static_cast<std::size_t>(id.value)].parameters) {
        const std::int64_t bytes = p.count() * size_of(p.options.dtype);
        reads.push_back({engine.pointer(p.id), bytes});
        if (backward) writes.push_back({engine.gradient(p.id), bytes});
      }
      simulator::launch(backward ? "user_backward" : "user_forward", stream, reads, writes, [] {});
    };
    const auto units = static_cast<std::int32_t>(c.spec.units().size());
    for (int step = 0; step < 3; ++step) {
      for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(2)) {
        for (std::int32_t u = 0; u < units; ++u) {
          const Guard guard = engine.forward(UnitId{u}, mine.stream());
          use(UnitId{u}, false);
        }
        for (std::int32_t u = units; u-- > 0;) {
          Guard guard = engine.backward(UnitId{u}, mine.stream());
          use(UnitId{u}, true);
          guard.commit();
        }
      }
      engine.step({.clip_norm = 1.0});
    }
    std::vector<float> values(3000);
    engine.read_parameter("u0.w", values);
    for ([[maybe_unused]] const MicroStep micro : engine.evaluation_passes(1)) {
      for (std::int32_t u = 0; u + 1 < units; ++u) {  // the last one is gathered and not used
        const Guard guard = engine.forward(UnitId{u}, mine.stream());
        use(UnitId{u}, false);
      }
    }
    // The user's stream may still read the one, a gather the other.
    engine.write_parameter("u3.w", values);
    engine.write_parameter("u0.w", values);
  }

  static lab::Tensors without_hash(lab::Tensors tensors) {
    tensors.forward_hash = 0;  // the oracle has none
    return tensors;
  }

  static std::vector<Outcome> ends(const lab::Case& c) {
    return lab::outcomes(c.world, [&](const ProcessGroup& group) { run_ahead(c, group); });
  }

  /// A disk that others use may stall for longer than a test of collectives waits.
  static constexpr double kPatience = 10 * lab::kDeadline;

  /// Every rank ended with one of these types; the text of one of them has `part`.
  static void expect_ends(const std::vector<Outcome>& got, const std::vector<std::string>& types,
                          const std::string& part, const std::string& what) {
    bool named = false;
    for (const Outcome& end : got) {
      EXPECT_NE(std::find(types.begin(), types.end(), end.type), types.end())
          << what << ": " << end.type << ": " << end.text;
      named = named || end.text.find(part) != std::string::npos;
    }
    EXPECT_TRUE(named) << what << ": nobody says `" << part << "`, but " << got.back().type << ": "
                       << got.back().text;
  }
};

// Each row is one kind of wait that the plane puts between two queues. Without it the clocks know
// of no order; with it no run has a race.
TEST_F(CudaFaults, AMissingWaitIsFoundByNameInEveryQueue) {
  struct Row {
    const char* waiting;  // null: any, the user's stream among them
    const char* recorded;
    int stage;
    lab::Placement where;
    std::string named;  // in the race
  };
  const lab::Placement gpu;
  const lab::Placement state{.optimizer = Tier::host};
  const lab::Placement sums{.gradients = Tier::host};
  const lab::Placement shards{.parameters = Tier::host};
  const lab::Placement through{.optimizer = Tier::host, .update_on = UpdateOn::device};
  const lab::Placement disk{.gradients = Tier::nvme};
  const Row rows[] = {
      {"user", "zshard gather", 3, gpu, "zshard gather"},
      {"user", "zshard reduce", 3, gpu, "zshard reduce"},
      {"zshard gather", "user", 3, gpu, "zshard gather"},
      {"zshard reduce", "user", 3, gpu, "zshard reduce"},
      {"zshard gather", "zshard reduce", 2, gpu, "zshard gather"},
      {"zshard reduce", "zshard gather", 0, gpu, "zshard reduce"},
      {"zshard download", "zshard reduce", 2, state, "zshard download"},
      // Accumulators on the host: up, summed, down, and the next pass's.
      {"zshard download", "zshard reduce", 3, sums, "zshard download"},
      {"zshard reduce", "zshard upload", 3, sums, "zshard upload"},
      {"zshard upload", "zshard download", 3, sums, "zshard upload"},
      {"zshard reduce", "zshard download", 3, sums, "zshard download"},
      {"zshard reduce", "zshard download", 0, sums, "zshard download"},  // the vote, for gathers
      // On disk: the keeper waits for what lands by the host.
      {"zshard download", "zshard reduce", 2, disk, "zshard download"},
      // State and parameters through the device: up, updated, down, and the next group's.
      {"zshard reduce", "zshard upload", 2, through, "zshard upload"},
      {"zshard download", "zshard reduce", 2, through, "zshard download"},
      {"zshard upload", "zshard download", 2, through, "zshard upload"},
      {"zshard reduce", "zshard upload", 3, shards, "zshard upload"},
      {"zshard gather", "zshard download", 3, shards, "zshard gather"},
      // Parameters that the caller writes while passes may still read them.
      {"zshard download", "user", 2, gpu, "zshard download"},
      {"zshard download", "zshard gather", 3, gpu, "zshard download"},
  };
  for (const Row& row : rows) {
    for (const bool removed : {false, true}) {
      SCOPED_TRACE(std::string(row.waiting) + " for " + row.recorded + ", " + row.where.text() +
                   (removed ? ", removed" : ", there"));
      simulator::reset();
      simulator::set_device_memory(std::int64_t{64} << 20);
      lab::Case c = example(row.stage);
      c.options.sub_group_bytes = 4096;
      c.options.deadline_seconds = kPatience;
      lab::place(c.options, row.where);
      if (removed) simulator::ignore_waits(row.waiting, row.recorded);
      run_ranks(c.world, [&](const ProcessGroup& group) { run_ahead(c, group); });
      const auto races = simulator::races();
      if (!removed) {
        for (const simulator::Race& race : races) ADD_FAILURE() << race.text();
        continue;
      }
      EXPECT_GT(simulator::ignored_waits(), 0);
      const bool found = std::any_of(races.begin(), races.end(), [&](const simulator::Race& race) {
        return race.first.stream == row.named || race.second.stream == row.named;
      });
      EXPECT_TRUE(found) << races.size() << " races";
    }
  }
}

TEST_F(CudaFaults, ASteadyStepTakesNoMemoryAndWaitsOnlyForTheNorm) {
  int kind = 0;
  for (const lab::Placement& where : lab::placements(Stage::parameters, Accumulation::reduced)) {
    const int stage = where.parameters != Tier::device ? 3 : kind++ % 4;
    SCOPED_TRACE("stage " + std::to_string(stage) + ", " + where.text());
    const char* const forbidden[] = {"cudaMalloc",
                                     "cudaFree",
                                     "cudaHostRegister",
                                     "cudaHostUnregister",
                                     "cudaMallocHost",
                                     "cudaFreeHost",
                                     "cudaStreamCreateWithPriority",
                                     "cudaStreamDestroy",
                                     "cudaEventCreateWithFlags",
                                     "cudaEventDestroy",
                                     "cudaDeviceSynchronize",
                                     "cudaStreamSynchronize",
                                     "cudaEventSynchronize",
                                     "cudaMemcpy",
                                     "cudaMemset",
                                     "pageable copy"};
    lab::Case c = example(stage, 2, 1);
    c.options.sub_group_bytes = 4096;
    c.options.deadline_seconds = kPatience;
    lab::place(c.options, where);
    std::vector<std::int64_t> before;
    std::vector<std::int64_t> after;
    run_ranks(c.world, [&](const ProcessGroup& group) {
      Engine engine(c.spec, c.optimizer, group, c.options);
      cudaStream_t stream = nullptr;
      ASSERT_EQ(cudaSetDevice(group.rank()), cudaSuccess);
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      const auto step = [&] {
        for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(2)) {
          for (int u = 0; u < 4; ++u) (void)engine.forward(UnitId{u}, {stream});
          for (int u = 4; u-- > 0;) {
            Guard guard = engine.backward(UnitId{u}, {stream});
            guard.commit();
          }
        }
        engine.step();
      };
      step();
      group.barrier();
      if (group.rank() == 0) {
        for (const char* call : forbidden) before.push_back(simulator::calls(call));
      }
      group.barrier();
      for (int k = 0; k < 3; ++k) step();
      group.barrier();
      if (group.rank() == 0) {
        for (const char* call : forbidden) after.push_back(simulator::calls(call));
      }
      group.barrier();
      (void)cudaStreamDestroy(stream);
    });
    EXPECT_EQ(before, after);
  }
}

TEST_F(CudaFaults, NoMemoryAtConstructionIsOneErrorOnEveryRank) {
  const lab::Case c = example(3);
  simulator::fail({.call = "cudaMalloc",
                   .after = 0,
                   .code = cudaErrorMemoryAllocation,
                   .how = simulator::How::refused,
                   .device = 1});
  const std::vector<Outcome> got = ends(c);
  expect_ends(got, {"OutOfMemory"}, "rank 1", "cudaMalloc");
  // With the plan's table, on the rank itself and on its peer.
  for (const Outcome& end : got) {
    for (const char* part : {"cudaMalloc of ", "gather slots", "master", "device_budget"}) {
      EXPECT_NE(end.text.find(part), std::string::npos) << part << ": " << end.text;
    }
  }
}

TEST_F(CudaFaults, APlanThatTheDeviceCannotHoldIsRefusedWithItsTable) {
  lab::Case c = example(0);
  c.spec.unit("big").parameter("big", {std::int64_t{32} << 20});
  c.uses.clear();
  for (const Outcome& end : ends(c)) {
    EXPECT_EQ(end.type, "OutOfMemory");
    for (const char* part : {"bytes free of", "gather slots", "master", "device_budget"}) {
      EXPECT_NE(end.text.find(part), std::string::npos) << part << ": " << end.text;
    }
  }
}

TEST_F(CudaFaults, EveryCallThatARefusalCanHitEndsOnEveryRank) {
  const char* const calls[] = {
      "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord", "cudaStreamWaitEvent",
      "ncclAllGather",   "ncclSend",        "ncclRecv"};
  int failed = 0;
  for (int stage = 0; stage < 4; ++stage) {
    for (const char* call : calls) {
      for (const int after : {0, 7, 60}) {
        simulator::reset();
        simulator::set_device_memory(std::int64_t{64} << 20);
        const lab::Case c = example(stage, 2, 2);
        const bool nccl = std::string(call).starts_with("nccl");
        simulator::fail({.call = call,
                         .after = after,
                         .code = nccl ? static_cast<int>(ncclSystemError)
                                      : static_cast<int>(cudaErrorInvalidValue),
                         .how = simulator::How::refused,
                         .device = 1});
        const std::vector<Outcome> got = ends(c);
        const std::string what = std::string(call) + " after " + std::to_string(after) +
                                 " at stage " + std::to_string(stage);
        if (got[0].type == "nothing" && got[1].type == "nothing") continue;  // fewer calls
        ++failed;
        expect_ends(got, {"DeviceError", "CommError"}, call, what);
        for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << what << ": " << leak;
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(failed, 40);
}

// What moves between device and host, wherever it lives.
TEST_F(CudaFaults, ARefusedCallEndsOnEveryRankInEveryPlacement) {
  const char* const calls[] = {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord",
                               "cudaStreamWaitEvent", "cudaEventQuery"};
  const int afters[] = {3, 40, 130, 400};
  int failed = 0;
  int kind = 0;
  for (const int stage : {0, 2, 3}) {
    for (const lab::Placement& where :
         lab::placements(static_cast<Stage>(stage), Accumulation::reduced)) {
      simulator::reset();
      simulator::set_device_memory(std::int64_t{64} << 20);
      const char* call = calls[kind % 5];
      const int after = afters[kind++ / 5 % 4];
      lab::Case c = example(stage, 2, 2);
      c.options.sub_group_bytes = 4096;
      lab::place(c.options, where);
      c.options.deadline_seconds = kPatience;
      simulator::fail({.call = call,
                       .after = after,
                       .code = static_cast<int>(cudaErrorInvalidValue),
                       .how = simulator::How::refused,
                       .device = 1});
      const lab::Within limit(kPatience);
      const std::vector<Outcome> got = ends(c);
      const std::string what = std::string(call) + " after " + std::to_string(after) +
                               " at stage " + std::to_string(stage) + ", " + where.text();
      if (got[0].type == "nothing" && got[1].type == "nothing") continue;  // fewer calls
      ++failed;
      expect_ends(got, {"DeviceError", "CommError"}, call, what);
      for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << what << ": " << leak;
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(failed, 40);
}

TEST_F(CudaFaults, AKernelThatFaultsIsADeviceErrorAndTheEngineIsPoisoned) {
  const lab::Case c = example(2);
  simulator::fail({.call = "reduce_add",
                   .after = 3,
                   .code = cudaErrorIllegalAddress,
                   .how = simulator::How::fault,
                   .device = 1,
                   .times = -1});
  std::vector<Outcome> kept(2);
  const auto got = lab::outcomes(c.world, [&](const ProcessGroup& group) {
    Engine engine(c.spec, c.optimizer, group, c.options);
    const lab::CudaAccess mine(group.rank());
    const Outcome first = lab::outcome([&] {
      for (int step = 0; step < 100; ++step) {
        for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
          for (std::int32_t u = 4; u-- > 0;) {
            Guard guard = engine.backward(UnitId{u}, mine.stream());
            guard.commit();
          }
        }
        engine.step();
      }
    });
    // Whatever is called then says the same; the engine ends without a further word.
    std::vector<float> one(1);
    EXPECT_EQ(lab::outcome([&] { engine.begin_micro_steps(1); }).text, first.text);
    EXPECT_EQ(lab::outcome([&] { engine.step(); }).text, first.text);
    EXPECT_EQ(lab::outcome([&] { (void)engine.forward(UnitId{0}, mine.stream()); }).text,
              first.text);
    EXPECT_EQ(lab::outcome([&] { engine.read_parameter("u0.w", one); }).text, first.text);
    EXPECT_TRUE(group.rank() == 0 || first.type == "DeviceError") << first.text;
    kept[static_cast<std::size_t>(group.rank())] = first;
  });
  lab::expect_all(got, "nothing", {});
  expect_ends(kept, {"DeviceError", "CommError"}, "cudaErrorIllegalAddress", "kernel");
}

// What failed, and where: call, GPU, rank, file and line, and the unit that was on its way.
TEST_F(CudaFaults, ARefusedCallNamesRankPlaceAndUnit) {
  struct Row {
    const char* call;
    int code;
    const char* type;
    std::vector<std::string> parts;
  };
  const Row rows[] = {{"cudaMemcpyAsync",
                       cudaErrorInvalidValue,
                       "DeviceError",
                       {"gather of unit u", "cudaErrorInvalidValue",
                        "(GPU 1, rank 1, runtime/device/cuda_device.cpp:"}},
                      {"reduce_add",
                       cudaErrorLaunchOutOfResources,
                       "DeviceError",
                       {"reduce of unit u", "reduce_add", "GPU 1, rank 1, runtime/kernels/"}},
                      {"ncclAllGather",
                       ncclSystemError,
                       "CommError",
                       {"gather of unit u", "ncclAllGather failed",
                        "(GPU 1, rank 1, runtime/comm/nccl_communicator.cpp:"}},
                      {"ncclSend",
                       ncclSystemError,
                       "CommError",
                       {"reduce of unit u", "ncclSend failed",
                        "(GPU 1, rank 1, runtime/comm/nccl_communicator.cpp:"}}};
  for (const Row& row : rows) {
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
    const lab::Case c = example(3);
    const auto got = lab::outcomes(c.world, [&](const ProcessGroup& group) {
      Engine engine(c.spec, c.optimizer, group, c.options);
      const lab::CudaAccess mine(group.rank());
      group.barrier();
      if (group.rank() == 1) {
        simulator::fail({.call = row.call,
                         .code = row.code,
                         .how = simulator::How::refused,
                         .device = 1,
                         .times = -1});
      }
      group.barrier();
      engine.begin_micro_steps(1);
      while (engine.next_micro_step()) {
        for (std::int32_t u = 0; u < 4; ++u) (void)engine.forward(UnitId{u}, mine.stream());
        for (std::int32_t u = 4; u-- > 0;) {
          Guard guard = engine.backward(UnitId{u}, mine.stream());
          guard.commit();
        }
      }
      engine.step();
    });
    EXPECT_EQ(got[1].type, row.type) << got[1].text;
    for (const std::string& part : row.parts) {
      EXPECT_NE(got[1].text.find(part), std::string::npos) << part << ": " << got[1].text;
    }
    EXPECT_EQ(got[0].type, "CommError") << row.call << ": " << got[0].text;
  }
}

// Without an order of launches over communicators, gathers and reductions have one communicator:
// two would wait for each other as soon as ranks differ in timing.
TEST_F(CudaFaults, OneCommunicatorServesWhereNcclKeepsNoOrderOfTwo) {
  const char* const name = "NCCL_LAUNCH_ORDER_IMPLICIT";
  for (const auto& [version, order, expected] :
       {std::tuple{22800, "1", 2}, std::tuple{22800, "0", 1}, std::tuple{22500, "1", 1}}) {
    for (int stage = 0; stage < 4; ++stage) {
      SCOPED_TRACE("NCCL " + std::to_string(version) + ", order " + order + ", stage " +
                   std::to_string(stage));
      simulator::reset();
      simulator::set_device_memory(std::int64_t{64} << 20);
      simulator::set_nccl_version(version);
      simulator::set_serial_collectives(expected == 2);
      simulator::set_delays(20, static_cast<std::uint64_t>(stage));
      setenv(name, order, 1);
      lab::Case c = example(stage, 3);
      const std::string wrong = lab::difference(lab::oracle(c), without_hash(lab::train(c)));
      setenv(name, "1", 1);
      EXPECT_EQ(wrong, "");
      EXPECT_EQ(simulator::calls("ncclCommInitRankConfig"), expected * c.world);
      for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << race.text();
    }
  }
}

// Behind the vote nothing is guarded by the collectives of the pass: the update tells by itself.
TEST_F(CudaFaults, ADeviceThatFailsInTheUpdatePoisonsItsEngineAndEndsPeers) {
  for (const lab::Placement& where : lab::placements(Stage::parameters, Accumulation::reduced)) {
    SCOPED_TRACE(where.text());
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
    // All on the host but the parameters: only those are moved, behind the vote.
    const bool by_host = where.optimizer != Tier::device && where.update_on == UpdateOn::host;
    if (by_host && where.parameters != Tier::device) continue;
    lab::Case c = example(3, 2, 1);
    lab::place(c.options, where);
    c.options.deadline_seconds = kPatience;
    const auto got = lab::outcomes(c.world, [&](const ProcessGroup& group) {
      Engine engine(c.spec, c.optimizer, group, c.options);
      const lab::CudaAccess mine(group.rank());
      engine.begin_micro_steps(1);
      while (engine.next_micro_step()) {
        for (std::int32_t u = 4; u-- > 0;) {
          Guard guard = engine.backward(UnitId{u}, mine.stream());
          guard.commit();
        }
      }
      group.barrier();
      if (group.rank() == 1) {
        // The norm's blocks come first, where the device sums them.
        simulator::fail({.call = by_host ? "cudaMemcpyAsync" : "adamw",
                         .after = by_host && where.gradients != Tier::nvme ? 1 : 0,
                         .code = cudaErrorInvalidValue,
                         .how = simulator::How::refused,
                         .device = 1});
      }
      group.barrier();
      const lab::Within limit(kPatience);
      const Outcome first = lab::outcome([&] { engine.step(); });
      const Outcome again = lab::outcome([&] { engine.begin_micro_steps(1); });
      EXPECT_EQ(first.type, group.rank() == 1 ? "DeviceError" : "CommError") << first.text;
      EXPECT_EQ(first.text, again.text);
    });
    lab::expect_all(got, "nothing", {});
  }
}

TEST_F(CudaFaults, ARemoteErrorOfNcclEndsEveryRank) {
  for (const char* call : {"ncclAllGather", "ncclSend"}) {
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
    const lab::Case c = example(3, 3);
    simulator::fail({.call = call,
                     .after = 4,
                     .code = static_cast<int>(ncclRemoteError),
                     .how = simulator::How::fault,
                     .device = 2});
    expect_ends(ends(c), {"CommError", "DeviceError", "std::exception"}, "NCCL", call);
  }
}

TEST_F(CudaFaults, ACollectiveThatHangsEndsWithinTheDeadline) {
  const std::string gathers = "ncclAllGather";
  for (const std::string& call : {gathers, std::string("ncclSend")}) {
    simulator::reset();
    simulator::set_device_memory(std::int64_t{64} << 20);
    lab::Case c = example(3);
    c.options.deadline_seconds = 1.5;  // sat out, also under sanitizers
    simulator::fail({.call = call,
                     .after = 4,
                     .code = 0,
                     .how = simulator::How::hang,
                     .device = 1,
                     .times = -1});
    const lab::Within limit(4 * lab::kDeadline + 10);
    const auto got = ends(c);
    const std::string hung = call == gathers ? "gather of unit " : "reduce of unit ";
    for (const std::string& part :
         {std::string("the device has not finished "), std::string(" within 1.5 s: "), hung,
          std::string(" is not complete"), std::string("raise deadline_seconds")}) {
      expect_ends(got, {"CommError", "DeviceError", "std::exception"}, part, call);
    }
  }
}

TEST_F(CudaFaults, OptionsThatADeviceDoesNotServeAreRefused) {
  const auto refuse = [](auto&& edit, const std::string& part) {
    lab::Case c = example(3, 1);
    edit(c.options);
    const std::vector<Outcome> got = ends(c);
    lab::expect(got[0], "UsageError", {part}, part);
  };
  refuse([](EngineOptions& o) { o.offload.update_on = UpdateOn::host; }, "update_on = host");
  refuse([](EngineOptions& o) { o.device_index = 8; }, "there are 8 GPUs");
}

TEST_F(CudaFaults, AStreamMayGoBeforeTheEngineAndAnotherMayFollow) {
  const lab::Case c = example(3, 2, 1);
  run_ranks(c.world, [&](const ProcessGroup& group) {
    Engine engine(c.spec, c.optimizer, group, c.options);
    for (int k = 0; k < 4; ++k) {
      const lab::CudaAccess mine(group.rank());
      for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
        for (int u = 0; u < 4; ++u) (void)engine.forward(UnitId{u}, mine.stream());
        for (int u = 4; u-- > 0;) {
          Guard guard = engine.backward(UnitId{u}, mine.stream());
          guard.commit();
        }
      }
      if (k % 2 == 0) engine.step();
      if (k % 2 == 1) {
        engine.step();
        std::vector<float> values(3000);
        engine.read_parameter("u0.w", values);
      }
    }
  });
  for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << race.text();
  for (const std::string& fault : simulator::faults()) ADD_FAILURE() << fault;
}

}  // namespace
}  // namespace zshard
#endif
