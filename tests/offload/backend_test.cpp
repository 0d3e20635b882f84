// One suite for all drivers, with and without mischief: whatever the system does short of an error,
// the bytes are right; whatever error it reports is told.
#include "offload/io/backend.hpp"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <tuple>

#include "tests/offload/support.hpp"

namespace zshard::offload::testing {
namespace {

enum class Mischief { none, short_counts, interruptions, disorder, everything };

std::string mischief_name(Mischief mischief) {
  switch (mischief) {
    case Mischief::none:
      return "alone";
    case Mischief::short_counts:
      return "short_counts";
    case Mischief::interruptions:
      return "interruptions";
    case Mischief::disorder:
      return "disorder";
    case Mischief::everything:
      return "everything";
  }
  return "";
}

void make_mischief(Faults& faults, Mischief mischief) {
  const bool all = mischief == Mischief::everything;
  if (all || mischief == Mischief::short_counts) {
    std::int64_t after = 0;
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{511}, std::int64_t{-512},
                                     std::int64_t{4096}, std::int64_t{4097}, std::int64_t{-4096}}) {
      faults.arm({.kind = Fault::Kind::short_count, .value = count, .after = after, .every = 11});
      after += 2;
    }
  }
  if (all || mischief == Mischief::interruptions) {
    faults.arm({.value = EINTR, .after = 1, .times = 2, .every = 7});
    faults.arm({.value = EAGAIN, .after = 4, .times = 2, .every = 13});
  }
  if (all || mischief == Mischief::disorder) faults.shuffle(7, 300);
}

class Transfers : public ::testing::TestWithParam<std::tuple<IoBackendKind, Mischief>> {
 protected:
  void SetUp() override {
    ZSHARD_NEED(kind());
    make_mischief(*injection_, std::get<1>(GetParam()));
  }
  static IoBackendKind kind() { return std::get<0>(GetParam()); }
  Injection injection_;
};

TEST_P(Transfers, OfAllSizesComeBack) {
  Rig rig(kind(), 8 * kMiB, 64 * 1024, 8);
  const Pages back(4 * kMiB);
  std::uint64_t seed = 0;
  for (const std::int64_t bytes : {kPage, 2 * kPage, 15 * kPage, 16 * kPage, 17 * kPage,
                                   kMiB - kPage, kMiB, kMiB + kPage, 3 * kMiB + kPage, 4 * kMiB}) {
    for (const std::int64_t offset : {std::int64_t{0}, kPage, 64 * 1024 - kPage, kMiB}) {
      const auto from = rig.memory.bytes().first(static_cast<std::size_t>(bytes));
      const auto to = back.bytes().first(static_cast<std::size_t>(bytes));
      paint(from, ++seed);
      rig.write(offset, from);
      rig.read(offset, to);
      ASSERT_TRUE(same(from, to)) << bytes << " bytes at " << offset;
    }
  }
}

TEST_P(Transfers, ThroughOneSmallBufferFinishALargeShard) {
  // 3 MiB + 28 bytes, in whole pages.
  const std::int64_t bytes = (3 * kMiB + 28 + kPage - 1) / kPage * kPage;
  Rig rig(kind(), bytes, 64 * 1024, 8);
  const Pages shard(bytes);
  const Pages one(kPage);
  paint(shard.bytes(), 1);
  const auto piece = [&](std::int64_t at) {
    return shard.bytes().subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(kPage));
  };
  for (std::int64_t at = 0; at < bytes; at += kPage) {
    std::copy_n(piece(at).begin(), kPage, one.bytes().begin());
    rig.write(at, one.bytes());
  }
  for (std::int64_t at = 0; at < bytes; at += kPage) {
    rig.read(at, one.bytes());
    ASSERT_TRUE(same(one.bytes(), piece(at))) << at;
  }
}

TEST_P(Transfers, OfMoreRequestsThanTheTablesHoldFinish) {
  constexpr std::int64_t kRequests = 1000;
  Rig rig(kind(), kRequests * kPage, 16 * kPage, 4);
  paint(rig.memory.bytes(), 2);
  const Pages back(kRequests * kPage);
  std::vector<IoRequest> batch;
  std::vector<IoBackend::Ticket> tickets;
  for (std::int64_t i = 0; i < kRequests; ++i) {
    batch.push_back({Operation::write, i * kPage, kPage, rig.memory.bytes().data() + i * kPage});
  }
  rig.backend->wait(rig.backend->submit(batch));
  for (std::int64_t i = 0; i < kRequests; ++i) {
    const auto at = back.bytes().subspan(static_cast<std::size_t>(i * kPage), kPage);
    tickets.push_back(rig.start(Operation::read, i * kPage, at));
  }
  // In any order, also those whose place in the tables has been used again.
  std::shuffle(tickets.begin(), tickets.end(), std::mt19937(3));
  for (const auto ticket : tickets) rig.backend->wait(ticket);
  for (const auto ticket : tickets) EXPECT_TRUE(rig.backend->poll(ticket));
  EXPECT_TRUE(
      same(rig.memory.bytes().first(kRequests * kPage), back.bytes().first(kRequests * kPage)));
}

TEST_P(Transfers, OverSeveralFilesKeepTheirPlaces) {
  const std::int64_t block = 8 * kPage;
  for (const std::vector<int>& weights : {std::vector{1, 1}, {3, 1}, {2, 5, 1}}) {
    const std::int64_t bytes = 4 * kMiB + 3 * kPage;
    Rig rig(kind(), bytes, block, 8, 0, 30, weights);
    const auto all = rig.memory.bytes().first(static_cast<std::size_t>(bytes));
    paint(all, 4);
    const Pages back(bytes);
    rig.write(0, all);
    std::mt19937_64 random(5);
    for (int i = 0; i < 50; ++i) {
      const std::int64_t offset = static_cast<std::int64_t>(random() % 1024) * kPage;
      const std::int64_t size = std::min<std::int64_t>(
          bytes - offset, static_cast<std::int64_t>(random() % 99 + 1) * kPage);
      const auto to = back.bytes().first(static_cast<std::size_t>(size));
      rig.read(offset, to);
      ASSERT_TRUE(same(to, all.subspan(static_cast<std::size_t>(offset), to.size())))
          << size << " at " << offset;
    }
  }
}

TEST_P(Transfers, OfSeveralThreadsDoNotDisturbEachOther) {
  constexpr int kThreads = 4;
  constexpr std::int64_t kShare = kMiB;
  Rig rig(kind(), kThreads * kShare, 32 * 1024, 8);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&rig, &wrong, t] {
      const std::int64_t base = t * kShare;
      std::mt19937_64 random(static_cast<std::uint64_t>(t));
      std::vector<std::byte> model(static_cast<std::size_t>(kShare));
      const Pages buffer(kShare);
      for (int i = 0; i < 60; ++i) {
        const std::int64_t offset = static_cast<std::int64_t>(random() % 256) * kPage;
        const std::int64_t size = std::min<std::int64_t>(
            kShare - offset, static_cast<std::int64_t>(random() % 64 + 1) * kPage);
        const auto at = buffer.bytes().first(static_cast<std::size_t>(size));
        const auto known = std::span(model).subspan(static_cast<std::size_t>(offset), at.size());
        if (random() % 2 == 0) {
          paint(at, random());
          std::copy(at.begin(), at.end(), known.begin());
          rig.write(base + offset, at);
        } else {
          rig.read(base + offset, at);
          if (!same(at, known)) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, Transfers,
    ::testing::Combine(::testing::Values(IoBackendKind::io_uring, IoBackendKind::posix),
                       ::testing::Values(Mischief::none, Mischief::short_counts,
                                         Mischief::interruptions, Mischief::disorder,
                                         Mischief::everything)),
    [](const auto& one) {
      return name_of(std::get<0>(one.param)) + "_" + mischief_name(std::get<1>(one.param));
    });

class Failures : public ::testing::TestWithParam<IoBackendKind> {
 protected:
  void SetUp() override { ZSHARD_NEED(GetParam()); }
  using Kind = IoFailure::Kind;
  Injection faults_;
};

TEST_P(Failures, EveryErrnoIsToldOnceAndTheNextTransferIsGood) {
  Rig rig(GetParam(), kMiB, 16 * kPage, 4);
  const auto memory = rig.memory.bytes().first(static_cast<std::size_t>(kMiB));
  for (int error = 1; error <= EHWPOISON; ++error) {
    if (error == EINTR || error == EAGAIN) continue;
    for (const Operation operation : {Operation::read, Operation::write}) {
      faults_->arm({.value = error, .only = operation, .after = error % 16});
      const IoFailure failure = rig.failure(operation, 0, memory);
      ASSERT_EQ(failure.kind, Kind::system);
      ASSERT_EQ(failure.error, error);
      ASSERT_EQ(failure.operation, operation);
      ASSERT_EQ(failure.bytes, 16 * kPage);
      ASSERT_EQ(failure.offset, error % 16 * 16 * kPage);
      ASSERT_EQ(rig.failure(operation, 0, memory).bytes, -1) << "told twice";
      faults_->clear();
    }
  }
}

TEST_P(Failures, OfAnyBlockLeaveNothingUnderWay) {
  constexpr std::int64_t kBlocks = 32;
  Rig rig(GetParam(), kBlocks * kPage, kPage, 8);
  const auto memory = rig.memory.bytes().first(static_cast<std::size_t>(kBlocks * kPage));
  for (std::int64_t n = 0; n < kBlocks; ++n) {
    faults_->shuffle(static_cast<std::uint64_t>(n), 500);
    faults_->arm({.value = EIO, .after = n});
    const IoFailure failure = rig.failure(Operation::write, 0, memory);
    EXPECT_EQ(faults_->outstanding(), 0);
    EXPECT_EQ(failure.kind, Kind::system);
    EXPECT_EQ(failure.offset, n * kPage);
    faults_->clear();
  }
}

TEST_P(Failures, BelongToTheirOwnBatch) {
  Rig rig(GetParam(), 64 * kPage, kPage, 4);
  faults_->arm({.value = EIO, .times = kLasting, .from = 16 * kPage, .below = 17 * kPage});
  std::vector<IoBackend::Ticket> tickets;
  for (std::int64_t i = 0; i < 64; ++i) {
    tickets.push_back(
        rig.start(Operation::write, i * kPage,
                  rig.memory.bytes().subspan(static_cast<std::size_t>(i * kPage), kPage)));
  }
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    if (i == 16) {
      EXPECT_THROW(rig.backend->wait(tickets[i]), IoFailed);
      EXPECT_NO_THROW(rig.backend->wait(tickets[i])) << "told twice";
    } else {
      EXPECT_NO_THROW(rig.backend->wait(tickets[i])) << i;
    }
  }
}

TEST_P(Failures, ThatNobodyWaitsForAreForgottenBySettleOrToldByALaterSubmit) {
  Rig rig(GetParam(), kMiB, kPage, 4);
  const auto memory = rig.memory.bytes().first(kPage);
  faults_->arm({.value = EIO, .times = kLasting});
  for (int i = 0; i < 100; ++i) rig.start(Operation::write, 0, memory);
  EXPECT_TRUE(rig.backend->settle());
  faults_->clear();
  EXPECT_EQ(rig.failure(Operation::write, 0, memory).bytes, -1);
  faults_->arm({.value = EIO, .times = kLasting});
  bool told = false;
  for (int i = 0; i < 400 && !told; ++i) {
    try {
      rig.start(Operation::write, 0, memory);
    } catch (const IoFailed& failed) {
      told = failed.failure().error == EIO;
    }
  }
  EXPECT_TRUE(told);
}

TEST_P(Failures, WithoutProgressEndAfterABoundedNumberOfTries) {
  Rig rig(GetParam(), kMiB, 16 * kPage, 2);
  const auto memory = rig.memory.bytes().first(static_cast<std::size_t>(16 * kPage));
  struct Case {
    Fault::Kind kind;
    std::int64_t value;
    int error;
  };
  for (const Case& one :
       {Case{Fault::Kind::error, EINTR, EINTR}, Case{Fault::Kind::error, EAGAIN, EAGAIN},
        Case{Fault::Kind::short_count, 1, 0}, Case{Fault::Kind::short_count, 511, 0}}) {
    faults_->arm({.kind = one.kind, .value = one.value, .times = kLasting});
    const std::int64_t before = faults_->operations();
    const IoFailure failure = rig.failure(Operation::write, 0, memory);
    EXPECT_EQ(failure.kind, Kind::no_progress);
    EXPECT_EQ(failure.error, one.error);
    EXPECT_LE(faults_->operations() - before, 64);
    faults_->clear();
  }
}

TEST_P(Failures, AReadPastTheEndIsAnErrorAndNoLoop) {
  Rig rig(GetParam(), kMiB, 16 * kPage, 4);
  const auto memory = rig.memory.bytes().first(static_cast<std::size_t>(kMiB));
  paint(memory, 1);
  rig.write(0, memory);
  ASSERT_EQ(ftruncate(rig.extents[0].descriptor(), kMiB / 2 + kPage), 0);
  const IoFailure failure = rig.failure(Operation::read, 0, memory);
  EXPECT_EQ(failure.kind, Kind::end_of_file);
  EXPECT_GE(failure.offset + failure.bytes, kMiB / 2 + kPage);
}

TEST_P(Failures, ACountBeyondTheRequestIsAnError) {
  Rig rig(GetParam(), kMiB, 16 * kPage, 4);
  faults_->arm({.kind = Fault::Kind::overcount, .value = 1});
  const IoFailure failure =
      rig.failure(Operation::read, 0, rig.memory.bytes().first(static_cast<std::size_t>(kPage)));
  EXPECT_EQ(failure.kind, Kind::bad_count);
  EXPECT_EQ(failure.done, kPage + 1);
}

TEST_P(Failures, ADeviceThatNeverAnswersIsToldWithinTheDeadline) {
  Rig rig(GetParam(), kMiB, kPage, 4, 1, 0.2);
  const auto memory = rig.memory.bytes().first(static_cast<std::size_t>(kPage));
  faults_->arm({.kind = Fault::Kind::held, .only = Operation::write});
  const auto start = std::chrono::steady_clock::now();
  const auto held = rig.start(Operation::write, 0, memory);
  // Others go on, which does not help the one that hangs.
  std::thread others([&] {
    for (int i = 0; i < 20; ++i) {
      rig.read(8 * kPage, rig.memory.bytes().subspan(static_cast<std::size_t>(8 * kPage), kPage));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  try {
    rig.backend->wait(held);
    ADD_FAILURE() << "the write came back";
  } catch (const IoFailed& failed) {
    EXPECT_EQ(failed.failure().kind, Kind::no_answer);
    EXPECT_EQ(failed.failure().bytes, kPage);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  others.join();
  EXPECT_FALSE(rig.backend->poll(held));
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  EXPECT_FALSE(rig.backend->settle());
  faults_->release();
  while (!rig.backend->poll(held)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_NO_THROW(rig.backend->wait(held));
  EXPECT_TRUE(rig.backend->settle());
}

TEST_P(Failures, ReadsAndWritesShareTheDevice) {
  // With one kind waiting in hundreds, the other is not left to the end.
  Rig rig(GetParam(), 400 * kPage, kPage, 2);
  rig.write(0, rig.memory.bytes());
  faults_->shuffle(1, 200);
  for (const auto& [busy, other] : {std::pair{Operation::write, Operation::read},
                                    std::pair{Operation::read, Operation::write}}) {
    std::vector<IoRequest> requests;
    for (std::int64_t i = 0; i < 200; ++i) {
      requests.push_back({busy, i * kPage, kPage, rig.memory.bytes().data() + i * kPage});
    }
    const auto many = rig.backend->submit(requests);
    const auto place = rig.memory.bytes().subspan(static_cast<std::size_t>(300 * kPage), kPage);
    rig.backend->wait(rig.start(other, 300 * kPage, place));
    EXPECT_FALSE(rig.backend->poll(many));
    rig.backend->wait(many);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Failures,
                         ::testing::Values(IoBackendKind::io_uring, IoBackendKind::posix),
                         [](const auto& one) { return name_of(one.param); });

TEST(Drivers, OfThreadsMoveLargerBlocksWithAsMuchInFlight) {
  const Directory directory;
  const ExtentFile file = ExtentFile::make(directory.path(), kMiB, 0);
  const auto made = [&](std::int64_t block, int depth) {
    const ChosenDriver chosen = make_driver({.backend = IoBackendKind::posix,
                                             .files = {file.descriptor()},
                                             .block_bytes = block,
                                             .depth = depth});
    int threads = 0;
    EXPECT_EQ(std::sscanf(chosen.driver->name().c_str(), "posix, %d thread", &threads), 1);
    EXPECT_EQ(chosen.driver->capacity(), 2 * threads);  // each one's next lies ready
    return std::pair(chosen.block_bytes, threads);
  };
  EXPECT_EQ(made(kMiB, 8), std::pair(4 * kMiB, 2));
  EXPECT_EQ(made(kMiB, 32), std::pair(4 * kMiB, 8));
  EXPECT_EQ(made(kMiB, 4096), std::pair(4 * kMiB, 16));
  EXPECT_EQ(made(8 * kMiB, 4), std::pair(8 * kMiB, 4));
  EXPECT_EQ(made(kPage, 8), std::pair(4 * kMiB, 2));
  EXPECT_EQ(made(kMiB, 1), std::pair(4 * kMiB, 1));
}

TEST(Stripes, DealEveryPageToItsOwnPlace) {
  for (const std::vector<int>& weights :
       {std::vector{1}, {1, 1}, {8, 7}, {1, 8}, {3, 2, 5}, {1, 1, 1, 1}}) {
    for (const std::int64_t stripe : {kPage, 3 * kPage}) {
      for (const std::int64_t pages : {std::int64_t{0}, std::int64_t{1}, std::int64_t{77}}) {
        const StripeMap map(pages * kPage, stripe, weights);
        std::vector<std::vector<int>> hits(weights.size());
        std::int64_t total = 0;
        for (int file = 0; file < map.files(); ++file) {
          total += map.file_bytes(file);
          hits[static_cast<std::size_t>(file)].resize(
              static_cast<std::size_t>(map.file_bytes(file) / kPage));
        }
        EXPECT_EQ(total, pages * kPage);
        for (std::int64_t page = 0; page < pages; ++page) {
          const auto place = map.place(page * kPage, kPage);
          ASSERT_EQ(place.bytes, kPage);
          ++hits[static_cast<std::size_t>(place.file)].at(
              static_cast<std::size_t>(place.offset / kPage));
        }
        for (const auto& file : hits) {
          for (const int hit : file) EXPECT_EQ(hit, 1);
        }
      }
    }
  }
}

TEST(Stripes, WeightsFollowTheSpeeds) {
  EXPECT_EQ(StripeMap::weights_of({2e9}), std::vector<int>({1}));
  EXPECT_EQ(StripeMap::weights_of({2e9, 2e9}), std::vector<int>({1, 1}));
  EXPECT_EQ(StripeMap::weights_of({4e9, 1e9}), std::vector<int>({4, 1}));
  EXPECT_EQ(StripeMap::weights_of({1e9, 3e9}), std::vector<int>({3, 8}));
  EXPECT_EQ(StripeMap::weights_of({1e12, 1e3}), std::vector<int>({8, 1}));
}

TEST(Stripes, ShareInProportion) {
  const StripeMap map(1000 * kPage, kPage, {3, 1});
  EXPECT_EQ(map.file_bytes(0), 750 * kPage);
  EXPECT_EQ(map.file_bytes(1), 250 * kPage);
}

}  // namespace
}  // namespace zshard::offload::testing
