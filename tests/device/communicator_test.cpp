// NcclCommunicator over the simulated NCCL: 1 to 4 ranks as threads, each with a device.
#include <atomic>
#include <barrier>
#include <cstdint>

#include "tests/device/lab.hpp"

namespace zshard::lab {
namespace {

/// A rank's device, stream and communicator.
struct Rank {
  Rank(const comm::CommunicatorId& id, int rank, int world, double deadline = kPatience)
      : gpu(simulated().open(rank, rank)),
        queue(std::make_unique<Queue>(*gpu, "gather")),
        communicator(simulated().make_communicator(*gpu, id, rank, world, deadline)) {}
  // In this order: the communicator and the stream need the device.
  std::unique_ptr<device::Device> gpu;
  std::unique_ptr<Queue> queue;
  std::unique_ptr<comm::Communicator> communicator;
};

std::uint8_t byte_of(int rank, int piece, std::int64_t i) {
  return static_cast<std::uint8_t>(rank * 101 + piece * 29 + i * 7 + 1);
}

class CommunicatorTest : public SimulatedTest, public ::testing::WithParamInterface<int> {
 protected:
  [[nodiscard]] int world() const { return GetParam(); }
  /// body(Rank&, int rank) on all ranks.
  template <class Body>
  void together(const Body& body) {
    const comm::CommunicatorId id = simulated().make_id();
    on_ranks(world(), [&](int rank) {
      Rank self(id, rank, world());
      body(self, rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(World, CommunicatorTest, ::testing::Values(1, 2, 3, 4));

TEST_P(CommunicatorTest, AllGatherInPlace) {
  together([&](Rank& self, int rank) {
    for (const std::int64_t bytes : {0, 1, 256, 5003}) {
      const Block block(*self.gpu, bytes * world());
      std::vector<std::uint8_t> own(static_cast<std::size_t>(bytes));
      for (std::int64_t i = 0; i < bytes; ++i) {
        own[static_cast<std::size_t>(i)] = byte_of(rank, 0, i);
      }
      self.gpu->copy(block.get() + rank * bytes, own.data(), bytes, self.queue->stream());
      self.communicator->all_gather(block.get(), bytes, self.queue->stream());
      const auto all = from_device<std::uint8_t>(*self.gpu, *self.queue, block.get(),
                                                 static_cast<std::size_t>(bytes * world()));
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        if (all[i] != byte_of(static_cast<int>(at / bytes), 0, at % bytes)) ++wrong;
      }
      EXPECT_EQ(wrong, 0) << bytes << " bytes";
    }
    EXPECT_EQ(self.communicator->failure(), std::nullopt);
  });
}

TEST_P(CommunicatorTest, AllToAll) {
  together([&](Rank& self, int rank) {
    for (const std::int64_t bytes : {0, 1, 256, 5003}) {
      const Block send(*self.gpu, bytes * world());
      const Block received(*self.gpu, bytes * world());
      std::vector<std::uint8_t> pieces(static_cast<std::size_t>(bytes * world()));
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        pieces[i] = byte_of(rank, static_cast<int>(at / bytes), at % bytes);
      }
      to_device(*self.gpu, *self.queue, send.get(), pieces);
      self.communicator->all_to_all(send.get(), received.get(), bytes, self.queue->stream());
      const auto got =
          from_device<std::uint8_t>(*self.gpu, *self.queue, received.get(), pieces.size());
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        if (got[i] != byte_of(static_cast<int>(at / bytes), rank, at % bytes)) ++wrong;
      }
      EXPECT_EQ(wrong, 0) << bytes << " bytes";
    }
  });
}

/// Whole numbers that every type holds, so that the order of the sum does not matter.
TEST_P(CommunicatorTest, ReduceScatter) {
  constexpr std::int64_t kCount = 37;
  const auto value = [](int rank, std::int64_t i) {
    return static_cast<int>((rank + 1) * (i % 8));
  };
  together([&](Rank& self, int rank) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const std::int64_t size = size_of(dtype);
      const auto bits = [&](int whole) -> std::uint32_t {
        const float wide = static_cast<float>(whole);
        std::uint32_t word = 0;
        std::memcpy(&word, &wide, sizeof word);
        if (dtype == DType::f32) return word;
        if (dtype == DType::bf16) return word >> 16;
        if (whole == 0) return 0;
        return ((word >> 23) - 127 + 15) << 10 | (word >> 13 & 0x3ff);
      };
      std::vector<std::uint8_t> terms(static_cast<std::size_t>(kCount * world() * size));
      for (std::int64_t i = 0; i < kCount * world(); ++i) {
        const std::uint32_t word = bits(value(rank, i));
        std::memcpy(terms.data() + i * size, &word, static_cast<std::size_t>(size));
      }
      const Block send(*self.gpu, kCount * world() * size);
      const Block received(*self.gpu, kCount * size);
      to_device(*self.gpu, *self.queue, send.get(), terms);
      self.communicator->reduce_scatter(send.get(), received.get(), kCount, dtype,
                                        self.queue->stream());
      const auto got = from_device<std::uint8_t>(*self.gpu, *self.queue, received.get(),
                                                 static_cast<std::size_t>(kCount * size));
      for (std::int64_t i = 0; i < kCount; ++i) {
        int sum = 0;
        for (int r = 0; r < world(); ++r) sum += value(r, rank * kCount + i);
        const std::uint32_t expected = bits(sum);
        EXPECT_EQ(std::memcmp(got.data() + i * size, &expected, static_cast<std::size_t>(size)), 0)
            << to_string(dtype) << " element " << i;
      }
    }
  });
}

TEST_P(CommunicatorTest, GroupsNest) {
  together([&](Rank& self, int rank) {
    const Block a(*self.gpu, 64 * world());
    const Block b(*self.gpu, 64 * world());
    const Block c(*self.gpu, 64 * world());
    for (int turn = 1; turn < 4; ++turn) {
      const device::NativeStream stream = self.queue->stream();
      self.gpu->fill(a.get() + 64 * rank, turn + rank, 64, stream);
      self.gpu->fill(b.get(), 2 * turn + rank, 64 * world(), stream);
      self.communicator->group_start();
      self.communicator->all_gather(a.get(), 64, stream);
      self.communicator->group_start();
      self.communicator->all_to_all(b.get(), c.get(), 64, stream);
      self.communicator->group_end();
      self.communicator->group_end();
      const auto size = static_cast<std::size_t>(64 * world());
      const auto gathered = from_device<std::uint8_t>(*self.gpu, *self.queue, a.get(), size);
      const auto swapped = from_device<std::uint8_t>(*self.gpu, *self.queue, c.get(), size);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(gathered[i], turn + static_cast<int>(i) / 64);
        ASSERT_EQ(swapped[i], 2 * turn + static_cast<int>(i) / 64);
      }
    }
  });
}

/// Two communicators of a rank, on two streams, as the engine has them.
TEST_P(CommunicatorTest, TwoCommunicators) {
  const comm::CommunicatorId first_id = simulated().make_id();
  const comm::CommunicatorId second_id = simulated().make_id();
  on_ranks(world(), [&](int rank) {
    Rank self(first_id, rank, world());
    Queue reduce(*self.gpu, "reduce");
    const auto second =
        simulated().make_communicator(*self.gpu, second_id, rank, world(), kPatience);
    const Block a(*self.gpu, 128 * world());
    const Block b(*self.gpu, 128 * world());
    const Block c(*self.gpu, 128 * world());
    for (int turn = 1; turn < 20; ++turn) {
      self.gpu->fill(a.get() + 128 * rank, turn + rank, 128, self.queue->stream());
      self.communicator->all_gather(a.get(), 128, self.queue->stream());
      self.gpu->fill(b.get(), turn * 3 + rank, 128 * world(), reduce.stream());
      second->all_to_all(b.get(), c.get(), 128, reduce.stream());
      const auto size = static_cast<std::size_t>(128 * world());
      const auto gathered = from_device<std::uint8_t>(*self.gpu, *self.queue, a.get(), size);
      const auto swapped = from_device<std::uint8_t>(*self.gpu, reduce, c.get(), size);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(gathered[i], turn + static_cast<int>(i) / 128);
        ASSERT_EQ(swapped[i], turn * 3 + static_cast<int>(i) / 128);
      }
    }
  });
}

// -- failures --

class CommunicatorFailure : public SimulatedTest {};

TEST_F(CommunicatorFailure, PeerThatNeverComesIsAnErrorByTheDeadline) {
  const comm::CommunicatorId id = simulated().make_id();
  const double begin = now();
  const std::string said = thrown<CommError>([&] { const Rank self(id, 0, 2, 0.3); });
  EXPECT_TRUE(contains(said, "ncclCommInitRankConfig"));
  EXPECT_TRUE(contains(said, "rank 0"));
  EXPECT_TRUE(contains(said, "within 0.3 s"));
  EXPECT_GE(now() - begin, 0.3);
  EXPECT_LT(now() - begin, kPatience);
}

TEST_F(CommunicatorFailure, BadArguments) {
  const auto gpu = simulated().open(0, 0);
  const comm::CommunicatorId id = simulated().make_id();
  EXPECT_THROW((void)simulated().make_communicator(*gpu, id, 2, 2, 1), UsageError);
  EXPECT_THROW((void)simulated().make_communicator(*gpu, id, -1, 2, 1), UsageError);
  EXPECT_THROW((void)simulated().make_communicator(*gpu, id, 0, 2, 0), UsageError);
  EXPECT_THROW((void)simulated().make_communicator(*gpu, id, 0, 0, 1), UsageError);
}

TEST_F(CommunicatorFailure, IdIsRefused) {
  simulator::fail({.call = "ncclGetUniqueId", .code = ncclSystemError});
  EXPECT_TRUE(contains(thrown<CommError>([] { (void)simulated().make_id(); }), "ncclGetUniqueId"));
}

TEST_F(CommunicatorFailure, InitIsRefused) {
  const comm::CommunicatorId id = simulated().make_id();
  simulator::fail({.call = "ncclCommInitRankConfig", .code = ncclInvalidUsage});
  const std::string said = thrown<CommError>([&] { const Rank self(id, 0, 2, 5); });
  EXPECT_TRUE(contains(said, "ncclCommInitRankConfig failed: "));
  EXPECT_TRUE(contains(said, "(GPU 0, rank 0, runtime/comm/nccl_communicator.cpp:"));
  EXPECT_TRUE(contains(said, "NCCL_DEBUG"));
}

TEST_F(CommunicatorFailure, TwoRanksOnOneGpuAreRefused) {
  const comm::CommunicatorId id = simulated().make_id();
  std::atomic<int> refused{0};
  on_ranks(2, [&](int rank) {
    const auto gpu = simulated().open(0, rank);
    try {
      (void)simulated().make_communicator(*gpu, id, rank, 2, kPatience);
    } catch (const CommError& error) {
      refused += contains(error.what(), "uplicate GPU") ? 1 : 0;
    }
  });
  EXPECT_EQ(refused, 2);
}

/// A rank's collective never ends: its peers' neither. All end when they are told to.
TEST_F(CommunicatorFailure, HangEndsByAbort) {
  const comm::CommunicatorId id = simulated().make_id();
  simulator::fail({.call = "ncclAllGather", .how = simulator::How::hang, .device = 1});
  std::barrier<> all(3);
  on_ranks(3, [&](int rank) {
    Rank self(id, rank, 3);
    all.arrive_and_wait();  // a peer's end would otherwise meet this rank's beginning
    const Block block(*self.gpu, 3 * 256);
    self.communicator->all_gather(block.get(), 256, self.queue->stream());
    EXPECT_FALSE(self.queue->ends(0.2));
    EXPECT_EQ(self.communicator->failure(), std::nullopt);
    all.arrive_and_wait();
    // From another thread, as a watchdog does, more than once.
    std::thread([&] { self.communicator->abort(); }).join();
    self.communicator->abort();
    EXPECT_TRUE(self.queue->ends());
    ASSERT_NE(self.communicator->failure(), std::nullopt);
    EXPECT_TRUE(contains(*self.communicator->failure(), "aborted"));
    EXPECT_TRUE(contains(thrown<CommError>([&] {
                           self.communicator->all_gather(block.get(), 256, self.queue->stream());
                         }),
                         "aborted"));
    EXPECT_THROW(self.communicator->group_start(), CommError);
  });
}

TEST_F(CommunicatorFailure, ErrorOfOneRankReachesAll) {
  const comm::CommunicatorId id = simulated().make_id();
  simulator::fail({.call = "ncclAllGather",
                   .code = ncclSystemError,
                   .how = simulator::How::fault,
                   .device = 1});
  std::barrier<> all(2);
  on_ranks(2, [&](int rank) {
    Rank self(id, rank, 2);
    all.arrive_and_wait();  // a peer's end would otherwise meet this rank's beginning
    const Block block(*self.gpu, 2 * 256);
    // The error may be there before the call returns.
    try {
      self.communicator->all_gather(block.get(), 256, self.queue->stream());
    } catch (const CommError&) {
    }
    EXPECT_TRUE(comes_true([&] { return self.communicator->failure().has_value(); }));
    const std::string said = self.communicator->failure().value_or("");
    EXPECT_TRUE(contains(said, ncclGetErrorString(rank == 1 ? ncclSystemError : ncclRemoteError)));
    EXPECT_TRUE(contains(said, "nccl_communicator.cpp:"));
    EXPECT_EQ(thrown<CommError>([&] {
                self.communicator->reduce_scatter(block.get(), block.get(), 64, DType::f32,
                                                  self.queue->stream());
              }),
              said);
    self.communicator->abort();
    EXPECT_TRUE(self.queue->ends());
    EXPECT_EQ(self.communicator->failure(), said);
  });
}

TEST_F(CommunicatorFailure, FailedCommunicatorEndsWithItsObject) {
  const comm::CommunicatorId id = simulated().make_id();
  simulator::fail({.call = "ncclAllGather",
                   .code = ncclSystemError,
                   .how = simulator::How::fault,
                   .device = 1});
  std::barrier<> all(2);
  on_ranks(2, [&](int rank) {
    Rank self(id, rank, 2);
    const Block block(*self.gpu, 2 * 256);
    all.arrive_and_wait();
    try {
      self.communicator->all_gather(block.get(), 256, self.queue->stream());
    } catch (const CommError&) {
    }
    EXPECT_TRUE(comes_true([&] { return self.communicator->failure().has_value(); }));
    self.communicator.reset();
    EXPECT_TRUE(self.queue->ends());
  });
}

/// A refused call inside a group leaves the group, so that the thread can go on with others.
TEST_F(CommunicatorFailure, RefusedCallInAGroup) {
  const comm::CommunicatorId id = simulated().make_id();
  const comm::CommunicatorId other_id = simulated().make_id();
  simulator::fail({.call = "ncclSend", .code = ncclInvalidArgument, .times = 2});
  on_ranks(2, [&](int rank) {
    Rank self(id, rank, 2);
    const auto other = simulated().make_communicator(*self.gpu, other_id, rank, 2, kPatience);
    const Block a(*self.gpu, 512);
    const Block b(*self.gpu, 512);
    self.communicator->group_start();
    EXPECT_TRUE(contains(thrown<CommError>([&] {
                           self.communicator->all_to_all(a.get(), b.get(), 256,
                                                         self.queue->stream());
                         }),
                         "ncclSend failed"));
    EXPECT_THROW(self.communicator->group_end(), CommError);
    self.communicator->abort();
    self.gpu->fill(a.get() + 256 * rank, rank + 1, 256, self.queue->stream());
    other->all_gather(a.get(), 256, self.queue->stream());
    const auto seen = from_device<std::uint8_t>(*self.gpu, *self.queue, a.get(), 512);
    EXPECT_EQ(seen[0], 1);
    EXPECT_EQ(seen[256], 2);
    EXPECT_THROW(other->group_end(), UsageError);
  });
}

/// What an error left half issued is not closed in an orderly way: that would wait for peers.
TEST_F(CommunicatorFailure, AGroupThatAnErrorLeftEndsItsCommunicatorsByAbort) {
  const comm::CommunicatorId id = simulated().make_id();
  const double begin = now();
  simulator::fail({.call = "cudaMemcpyAsync", .code = cudaErrorInvalidValue, .times = 2});
  on_ranks(2, [&](int rank) {
    Rank self(id, rank, 2);
    const Block block(*self.gpu, 512);
    const Block other(*self.gpu, 512);
    self.communicator->group_start();
    self.communicator->all_gather(block.get(), 256, self.queue->stream());
    EXPECT_THROW(self.communicator->all_to_all(block.get(), other.get(), 256, self.queue->stream()),
                 DeviceError);
    ASSERT_NE(self.communicator->failure(), std::nullopt);
    EXPECT_TRUE(contains(*self.communicator->failure(), "an error left a group"));
  });
  EXPECT_EQ(simulator::calls("ncclCommFinalize"), 0);
  EXPECT_EQ(simulator::calls("ncclCommAbort"), 2);
  EXPECT_LT(now() - begin, kPatience);
}

TEST_F(CommunicatorFailure, AbortFromManyThreadsWhileCallsAreIssued) {
  const comm::CommunicatorId id = simulated().make_id();
  std::barrier<> all(2);
  on_ranks(2, [&](int rank) {
    Rank self(id, rank, 2);
    all.arrive_and_wait();  // a peer's end would otherwise meet this rank's beginning
    const Block block(*self.gpu, 2 * 256);
    std::vector<std::thread> watchdogs;
    for (int i = 0; i < 3; ++i) {
      watchdogs.emplace_back([&, i] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5 * (i + 1)));
        (void)self.communicator->failure();
        self.communicator->abort();
      });
    }
    const std::string said = thrown<CommError>([&] {
      const double end = now() + kPatience;
      while (now() < end) {
        self.communicator->all_gather(block.get(), 256, self.queue->stream());
        self.communicator->group_start();
        self.communicator->all_gather(block.get(), 256, self.queue->stream());
        self.communicator->group_end();
      }
    });
    EXPECT_FALSE(said.empty());
    for (std::thread& watchdog : watchdogs) watchdog.join();
    EXPECT_TRUE(self.queue->ends());
  });
}

TEST_F(CommunicatorFailure, LostDeviceIsSaidAsSuch) {
  faults_expected_ = true;
  const comm::CommunicatorId id = simulated().make_id();
  std::barrier<> all(2);
  on_ranks(2, [&](int rank) {
    Rank self(id, rank, 2);
    all.arrive_and_wait();  // a peer's end would otherwise meet this rank's beginning
    Block block(*self.gpu, 512);
    if (rank == 1) {
      simulator::fault(1, cudaErrorECCUncorrectable);
      const std::string first = thrown<DeviceError>([&] { self.queue->mark(); });
      EXPECT_TRUE(contains(first, "cudaErrorECCUncorrectable"));
      EXPECT_EQ(thrown<DeviceError>(
                    [&] { self.communicator->all_gather(block.get(), 256, self.queue->stream()); }),
                first);
    }
    self.communicator->abort();
  });
  simulator::reset();
}

}  // namespace
}  // namespace zshard::lab
