#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>

#include "tests/simulator_tests/simulated.hpp"

namespace simulator_tests {
namespace {

/// A communicator of every rank, made by all at once; aborted at the end if it still is there.
ncclComm_t make_communicator(const ncclUniqueId& id, int rank, int world, bool blocking = true) {
  ncclComm_t comm = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking ? 1 : 0;
  const ncclResult_t result = ncclCommInitRankConfig(&comm, world, id, rank, &config);
  EXPECT_EQ(result, blocking ? ncclSuccess : ncclInProgress);
  return comm;
}

ncclUniqueId new_id() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return id;
}

/// Polls until the communicator is not in progress; its state.
ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    std::this_thread::yield();
  }
  return state;
}

/// Polls until there is an error, or for 5 s.
ncclResult_t error_of(ncclComm_t comm) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  ncclResult_t state = ncclSuccess;
  while (std::chrono::steady_clock::now() < end &&
         (state == ncclSuccess || state == ncclInProgress)) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

/// Ranks meet here without the simulator knowing.
class Meeting {
 public:
  explicit Meeting(int world) : world_(world) {}
  void wait() {
    const int round = arrived_.fetch_add(1) / world_;
    while (arrived_.load() < (round + 1) * world_) std::this_thread::yield();
  }

 private:
  const int world_;
  std::atomic<int> arrived_{0};
};

class Nccl : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { simulator::reset(); }
  void TearDown() override { simulator::reset(); }
};
using NcclPlain = Simulated;

INSTANTIATE_TEST_SUITE_P(Worlds, Nccl, testing::Values(1, 2, 3, 4, 8));

TEST_P(Nccl, AllGatherInPlaceAndNot) {
  const int world = GetParam();
  const ncclUniqueId id = new_id();
  ranks(world, [&](int rank) {
    constexpr std::int64_t kCount = 100;
    ncclComm_t comm = make_communicator(id, rank, world);
    cudaStream_t stream = make_stream("gather");
    auto* all = device_memory<float>(kCount * world);
    auto* other = device_memory<float>(kCount * world);
    EXPECT_CUDA(launch_fill("own", stream, all + rank * kCount, kCount, static_cast<float>(rank)));
    EXPECT_EQ(ncclAllGather(all + rank * kCount, all, kCount, ncclFloat, comm, stream),
              ncclSuccess);
    EXPECT_EQ(ncclAllGather(all + rank * kCount, other, kCount, ncclFloat, comm, stream),
              ncclSuccess);
    for (const float* memory : {all, other}) {
      const std::vector<float> values = fetch(memory, kCount * world);
      for (std::int64_t i = 0; i < kCount * world; ++i) {
        ASSERT_EQ(values[static_cast<std::size_t>(i)], static_cast<float>(i / kCount));
      }
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
  EXPECT_EQ(all_races(), "");
}

TEST_P(Nccl, SendsAndReceivesOfAGroupExchange) {
  const int world = GetParam();
  const ncclUniqueId id = new_id();
  ranks(world, [&](int rank) {
    constexpr std::int64_t kCount = 33;
    ncclComm_t comm = make_communicator(id, rank, world);
    cudaStream_t stream = make_stream("reduce");
    auto* send = device_memory<float>(kCount * world);
    auto* received = device_memory<float>(kCount * world);
    for (int round = 0; round < 5; ++round) {
      for (int peer = 0; peer < world; ++peer) {
        EXPECT_CUDA(launch_fill("piece", stream, send + peer * kCount, kCount,
                                static_cast<float>(100 * round + 10 * rank + peer)));
      }
      EXPECT_EQ(ncclGroupStart(), ncclSuccess);
      for (int peer = 0; peer < world; ++peer) {
        EXPECT_EQ(ncclSend(send + peer * kCount, kCount, ncclFloat, peer, comm, stream),
                  ncclSuccess);
        EXPECT_EQ(ncclRecv(received + peer * kCount, kCount, ncclFloat, peer, comm, stream),
                  ncclSuccess);
      }
      EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    }
    const std::vector<float> values = fetch(received, kCount * world);
    for (int peer = 0; peer < world; ++peer) {
      ASSERT_EQ(values[static_cast<std::size_t>(peer * kCount)],
                static_cast<float>(400 + 10 * peer + rank));
    }
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
  EXPECT_EQ(all_races(), "");
}

TEST_P(Nccl, SumsAreRightAndBroadcastTakesTheRoot) {
  const int world = GetParam();
  const ncclUniqueId id = new_id();
  ranks(world, [&](int rank) {
    constexpr std::int64_t kCount = 10;
    ncclComm_t comm = make_communicator(id, rank, world);
    cudaStream_t stream = make_stream("reduce");
    auto* values = device_memory<float>(kCount * world);
    auto* sum = device_memory<float>(kCount * world);
    EXPECT_CUDA(launch_fill("own", stream, values, kCount * world, static_cast<float>(rank + 1)));
    EXPECT_EQ(ncclReduceScatter(values, sum, kCount, ncclFloat, ncclSum, comm, stream),
              ncclSuccess);
    const auto expected = static_cast<float>(world * (world + 1) / 2);
    EXPECT_EQ(fetch(sum, kCount)[9], expected);
    EXPECT_EQ(ncclAllReduce(values, values, static_cast<std::size_t>(kCount * world), ncclFloat,
                            ncclMax, comm, stream),
              ncclSuccess);
    EXPECT_EQ(fetch(values, kCount * world).back(), static_cast<float>(world));
    EXPECT_CUDA(launch_fill("own", stream, values, kCount, static_cast<float>(rank)));
    EXPECT_EQ(ncclBroadcast(values, values, kCount, ncclFloat, world - 1, comm, stream),
              ncclSuccess);
    EXPECT_EQ(fetch(values, kCount)[0], static_cast<float>(world - 1));
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
  EXPECT_EQ(all_races(), "");
}

TEST_F(NcclPlain, AReductionDoesNotAddInRankOrder) {
  // 1 + 2^24 - 2^24 depends on the order.
  const float values[3] = {1, 16777216, -16777216};
  const ncclUniqueId id = new_id();
  ranks(3, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 3);
    cudaStream_t stream = make_stream("reduce");
    auto* memory = device_memory<float>(3);
    auto* sum = device_memory<float>(1);
    EXPECT_CUDA(launch_fill("own", stream, memory, 3, values[rank]));
    EXPECT_EQ(ncclReduceScatter(memory, sum, 1, ncclFloat, ncclSum, comm, stream), ncclSuccess);
    // In rank order all would be (1 + 2^24) - 2^24 = 0.
    EXPECT_EQ(fetch(sum, 1)[0], rank == 2 ? 0.0F : 1.0F) << rank;
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST_F(NcclPlain, ACollectiveWaitsForTheSlowestRank) {
  const ncclUniqueId id = new_id();
  Meeting meeting(2);
  ranks(2, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 2);
    cudaStream_t stream = make_stream("gather");
    auto* memory = device_memory<int>(2);
    if (rank == 0) {
      EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclInt, comm, stream), ncclSuccess);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    }
    meeting.wait();
    if (rank == 1) {
      EXPECT_EQ(ncclAllGather(memory + 1, memory, 1, ncclInt, comm, stream), ncclSuccess);
    }
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST_F(NcclPlain, AMissingWaitBeforeACollectiveIsFoundOnEveryRank) {
  for (int run = 0; run < 20; ++run) {
    simulator::reset();
    simulator::set_delays(run, static_cast<std::uint64_t>(run));
    const ncclUniqueId id = new_id();
    ranks(2, [&](int rank) {
      ncclComm_t comm = make_communicator(id, rank, 2);
      cudaStream_t compute = make_stream("compute");
      cudaStream_t gather = make_stream("gather");
      auto* memory = device_memory<float>(2);
      EXPECT_CUDA(launch_claim("update", compute, {}, {{memory + rank, 4}}));
      EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, gather), ncclSuccess);
      EXPECT_CUDA(launch_claim("forward", compute, {{memory, 8}}, {{memory, 8}}));
      EXPECT_CUDA(cudaDeviceSynchronize());
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    });
    int of_device[2] = {};
    for (const simulator::Race& race : simulator::races()) {
      ++of_device[race.device];
      EXPECT_TRUE(race.first.operation == "ncclAllGather" ||
                  race.second.operation == "ncclAllGather");
    }
    // update -> gather (own piece); gather's read and write -> forward's write, and its read.
    ASSERT_EQ(of_device[0], 4) << all_races();
    ASSERT_EQ(of_device[1], 4) << all_races();
  }
}

TEST_F(NcclPlain, AMismatchIsAnErrorOnAllRanks) {
  struct Case {
    const char* name;
    std::function<ncclResult_t(float*, ncclComm_t, cudaStream_t)> odd;
  };
  const Case cases[] = {
      {"count", [](float* m, ncclComm_t c,
                   cudaStream_t s) { return ncclAllGather(m, m + 100, 5, ncclFloat, c, s); }},
      {"type", [](float* m, ncclComm_t c,
                  cudaStream_t s) { return ncclAllGather(m, m + 100, 4, ncclInt, c, s); }},
      {"operation",
       [](float* m, ncclComm_t c, cudaStream_t s) {
         return ncclReduceScatter(m, m + 100, 4, ncclFloat, ncclSum, c, s);
       }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    simulator::reset();
    const ncclUniqueId id = new_id();
    ranks(3, [&](int rank) {
      ncclComm_t comm = make_communicator(id, rank, 3);
      cudaStream_t stream = make_stream("gather");
      auto* memory = device_memory<float>(200);
      if (rank == 1) {
        EXPECT_EQ(one.odd(memory, comm, stream), ncclSuccess);
      } else {
        (void)ncclAllGather(memory, memory + 100, 4, ncclFloat, comm, stream);
      }
      EXPECT_EQ(error_of(comm), ncclInvalidUsage);
      EXPECT_NE(std::string(ncclGetLastError(comm)).find("rank 1"), std::string::npos)
          << ncclGetLastError(comm);
      EXPECT_EQ(ncclAllGather(memory, memory + 100, 4, ncclFloat, comm, stream), ncclInvalidUsage);
      EXPECT_EQ(ncclCommDestroy(comm), ncclInvalidUsage);
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    });
  }
}

TEST_F(NcclPlain, SizesOfASendAndItsReceiveMustAgree) {
  const ncclUniqueId id = new_id();
  ranks(2, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 2);
    cudaStream_t stream = make_stream("reduce");
    auto* memory = device_memory<float>(10);
    if (rank == 0) {
      EXPECT_EQ(ncclSend(memory, 10, ncclFloat, 1, comm, stream), ncclSuccess);
    } else {
      (void)ncclRecv(memory, 9, ncclFloat, 0, comm, stream);
    }
    EXPECT_EQ(error_of(comm), ncclInvalidUsage);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  });
}

TEST_F(NcclPlain, AbortEndsAHangOnItsOwnRankOnly) {
  const ncclUniqueId id = new_id();
  Meeting meeting(2);
  simulator::fail({.call = "ncclAllGather", .how = simulator::How::hang, .device = 1});
  ranks(2, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 2);
    cudaStream_t stream = make_stream("gather");
    auto* memory = device_memory<float>(2);
    EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream), ncclSuccess);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    meeting.wait();
    if (rank == 0) {
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    meeting.wait();
    if (rank == 1) {
      EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream), ncclInvalidArgument)
        << "the communicator is gone";
  });
}

TEST_F(NcclPlain, AbortMayComeFromAnotherThread) {
  const ncclUniqueId id = new_id();
  ranks(2, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 2);
    cudaStream_t stream = make_stream("gather");
    auto* memory = device_memory<float>(2);
    if (rank == 0) {
      EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, stream), ncclSuccess);
    }
    std::thread watchdog([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    });
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    watchdog.join();
  });
}

TEST_F(NcclPlain, ARemoteErrorReachesEveryRank) {
  const ncclUniqueId id = new_id();
  simulator::fail({.call = "ncclAllGather",
                   .after = 1,
                   .code = ncclSystemError,
                   .how = simulator::How::fault,
                   .device = 1});
  ranks(3, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 3);
    cudaStream_t stream = make_stream("gather");
    auto* memory = device_memory<float>(3);
    EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream), ncclSuccess);
    EXPECT_CUDA(cudaStreamSynchronize(stream));
    (void)ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream);
    EXPECT_EQ(error_of(comm), rank == 1 ? ncclSystemError : ncclRemoteError);
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  });
}

TEST_F(NcclPlain, ARefusedCallIsRefused) {
  const ncclUniqueId id = new_id();
  simulator::fail({.call = "ncclAllGather", .code = ncclRemoteError});
  ncclComm_t comm = make_communicator(id, 0, 1);
  auto* memory = device_memory<float>(1);
  cudaStream_t stream = make_stream("gather");
  EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, stream), ncclRemoteError);
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, stream), ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

/// Rank 0 issues on communicator a then b, rank 1 the same or the other way round; true if all
/// streams came to an end by themselves.
bool both_orders(bool crossed, bool one_stream) {
  const ncclUniqueId ids[2] = {new_id(), new_id()};
  std::atomic<int> finished{0};
  Meeting meeting(2);
  ranks(2, [&](int rank) {
    ncclComm_t comms[2] = {make_communicator(ids[0], rank, 2), make_communicator(ids[1], rank, 2)};
    cudaStream_t streams[2] = {make_stream("gather"), nullptr};
    streams[1] = one_stream ? streams[0] : make_stream("reduce");
    float* memory[2] = {device_memory<float>(2), device_memory<float>(2)};
    for (int i = 0; i < 2; ++i) {
      const int which = crossed && rank == 1 ? 1 - i : i;
      EXPECT_EQ(ncclAllGather(memory[which] + rank, memory[which], 1, ncclFloat, comms[which],
                              streams[which]),
                ncclSuccess);
    }
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(crossed ? 50 : 5000);
    const auto done = [&] {
      return cudaStreamQuery(streams[0]) == cudaSuccess &&
             cudaStreamQuery(streams[1]) == cudaSuccess;
    };
    while (!done() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    if (done()) ++finished;
    meeting.wait();
    for (ncclComm_t comm : comms) EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    for (cudaStream_t stream : streams) EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  });
  return finished == 2;
}

TEST_F(NcclPlain, TwoCommunicatorsInAnotherOrderOnAnotherRankDeadlock) {
  EXPECT_TRUE(both_orders(false, false));
  EXPECT_TRUE(both_orders(false, true));
  EXPECT_FALSE(both_orders(true, true));
  EXPECT_FALSE(both_orders(true, false));
  simulator::set_serial_collectives(false);
  EXPECT_TRUE(both_orders(true, false));
}

TEST_F(NcclPlain, CommunicatorsThatDoNotBlockSayWhenTheyAreReady) {
  const ncclUniqueId id = new_id();
  Meeting meeting(2);
  ranks(2, [&](int rank) {
    auto* memory = device_memory<float>(2);
    cudaStream_t stream = make_stream("gather");
    if (rank == 1) meeting.wait();
    ncclComm_t comm = make_communicator(id, rank, 2, false);
    if (rank == 0) {
      ncclResult_t state = ncclSuccess;
      EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
      EXPECT_EQ(state, ncclInProgress);
      EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, stream), ncclInvalidArgument);
      meeting.wait();
    }
    EXPECT_EQ(settled(comm), ncclSuccess);
    for (int i = 0; i < 6; ++i) {
      EXPECT_CUDA(launch_fill("own", stream, memory + rank, 1, static_cast<float>(i + rank)));
      EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream), ncclInProgress);
      EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream),
                ncclInvalidArgument)
          << "the call before is not finished";
      EXPECT_EQ(settled(comm), ncclSuccess);
      EXPECT_EQ(fetch(memory, 2)[static_cast<std::size_t>(1 - rank)],
                static_cast<float>(i + 1 - rank));
    }
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    for (int i = 0; i < 2; ++i) {
      const ncclResult_t result = ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream);
      EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
    }
    EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
    EXPECT_EQ(settled(comm), ncclSuccess);
    EXPECT_EQ(ncclCommFinalize(comm), ncclInProgress);
    EXPECT_EQ(settled(comm), ncclSuccess);
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  });
}

TEST_F(NcclPlain, AnEventBeforeTheLaunchWasToldMissesTheCollective) {
  for (const bool patient : {false, true}) {
    simulator::reset();
    ncclComm_t comm = make_communicator(new_id(), 0, 1, false);
    EXPECT_EQ(settled(comm), ncclSuccess);
    cudaStream_t gather = make_stream("gather");
    cudaStream_t compute = make_stream("compute");
    auto* memory = device_memory<float>(2);
    cudaEvent_t event = make_event();
    EXPECT_EQ(ncclAllGather(memory, memory + 1, 1, ncclFloat, comm, gather), ncclInProgress);
    if (patient) {
      EXPECT_EQ(settled(comm), ncclSuccess);
    }
    CHECK_CUDA(cudaEventRecord(event, gather));
    EXPECT_EQ(settled(comm), ncclSuccess);
    CHECK_CUDA(cudaStreamWaitEvent(compute, event, 0));
    CHECK_CUDA(launch_claim("forward", compute, {}, {{memory + 1, 4}}));
    EXPECT_EQ(simulator::races().size(), patient ? 0U : 1U) << all_races();
  }
}

TEST_F(NcclPlain, TwoRanksOnOneDeviceAreRefusedUntilNcclAllowsIt) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  for (const bool recent : {false, true}) {
    simulator::reset();
    if (recent) simulator::set_nccl_version(NCCL_VERSION(2, 30, 3));
    const ncclUniqueId id = new_id();
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        ncclComm_t comm = nullptr;
        const ncclResult_t result = ncclCommInitRank(&comm, 2, id, rank);
        EXPECT_EQ(result, recent ? ncclSuccess : ncclInvalidUsage);
        if (result != ncclSuccess) return;
        cudaStream_t stream = make_stream("gather");
        auto* memory = device_memory<float>(2);
        EXPECT_EQ(ncclAllGather(memory + rank, memory, 1, ncclFloat, comm, stream), ncclSuccess);
        EXPECT_CUDA(cudaStreamSynchronize(stream));
        EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
        ++good;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(good.load(), recent ? 2 : 0);
  }
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

TEST_F(NcclPlain, BadArgumentsAreRefused) {
  ncclComm_t comm = make_communicator(new_id(), 0, 1);
  cudaStream_t stream = make_stream("gather");
  auto* memory = device_memory<float>(10);
  float host = 0;
  EXPECT_EQ(ncclAllGather(&host, memory, 1, ncclFloat, comm, stream), ncclInvalidArgument);
  EXPECT_EQ(ncclAllGather(memory, memory, 11, ncclFloat, comm, stream), ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(memory, memory + 1, 4, ncclFloat, ncclSum, comm, stream),
            ncclInvalidArgument)
      << "overlap";
  EXPECT_EQ(ncclSend(memory, 1, ncclFloat, 1, comm, stream), ncclInvalidArgument);
  CHECK_CUDA(cudaSetDevice(1));
  cudaStream_t elsewhere = make_stream("elsewhere");
  EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, elsewhere), ncclInvalidArgument);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  int value = -1;
  EXPECT_EQ(ncclCommCount(comm, &value), ncclSuccess);
  EXPECT_EQ(value, 1);
  EXPECT_EQ(ncclCommCuDevice(comm, &value), ncclSuccess);
  EXPECT_EQ(value, 0);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(comm), ncclInvalidArgument);
}

TEST_F(NcclPlain, ACommunicatorThatIsLeftIsALeak) {
  ncclComm_t comm = make_communicator(new_id(), 0, 1);
  EXPECT_NE(all_lines(simulator::leaks()).find("communicator, rank 0 of 1 on device 0"),
            std::string::npos);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  EXPECT_EQ(all_lines(simulator::leaks()), "");
}

TEST_F(NcclPlain, AFaultOfADeviceEndsItsCollective) {
  const ncclUniqueId id = new_id();
  Meeting meeting(2);
  ranks(2, [&](int rank) {
    ncclComm_t comm = make_communicator(id, rank, 2);
    cudaStream_t stream = make_stream("gather");
    auto* memory = device_memory<float>(2);
    if (rank == 0) {
      EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, stream), ncclSuccess);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      simulator::fault(0, cudaErrorLaunchFailure);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
      EXPECT_EQ(ncclAllGather(memory, memory, 1, ncclFloat, comm, stream), ncclUnhandledCudaError);
    }
    meeting.wait();
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  });
}

TEST_F(NcclPlain, AGroupOnTwoStreamsOrdersBoth) {
  ncclComm_t comm = make_communicator(new_id(), 0, 1);
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(8);
  CHECK_CUDA(launch_fill("one", a, memory, 1, 1));
  CHECK_CUDA(launch_fill("two", b, memory + 2, 1, 2));
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclAllGather(memory, memory + 4, 1, ncclFloat, comm, a), ncclSuccess);
  EXPECT_EQ(ncclAllGather(memory + 2, memory + 6, 1, ncclFloat, comm, b), ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  CHECK_CUDA(launch_increment("three", b, memory + 4, memory + 4, 1));
  EXPECT_EQ(all_races(), "");
  const std::vector<float> values = fetch(memory, 8);
  EXPECT_EQ(values[4], 2);
  EXPECT_EQ(values[6], 2);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
}

}  // namespace
}  // namespace simulator_tests
