// One rank's store: places, messages, verification, first zeros, striping, and what ends with it.
#include "offload/tiers/store.hpp"

#include <cerrno>

#include "runtime/base/log.hpp"
#include "tests/offload/support.hpp"

namespace zshard::offload::testing {
namespace {

class Stores : public ::testing::TestWithParam<IoBackendKind> {
 protected:
  void SetUp() override { ZSHARD_NEED(GetParam()); }

  StoreOptions options(std::int64_t bytes) const {
    return {.directories = {directory_.path()},
            .backend = GetParam(),
            .bytes = bytes,
            .deadline_seconds = 30};
  }
  /// The message of the IoError that a call throws; "" if it throws none.
  template <class Call>
  static std::string message(Call&& call) {
    try {
      call();
    } catch (const IoError& error) {
      return error.what();
    }
    return "";
  }
  static void write(Store& store, std::int64_t offset, std::span<const std::byte> memory) {
    store.wait(store.write(offset, memory));
  }
  static void read(Store& store, std::int64_t offset, std::span<std::byte> memory) {
    store.wait(store.read(offset, memory));
  }

  Directory directory_;
  Injection faults_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_P(Stores, GiveBackWhatWasWrittenAndZerosBefore) {
  // Larger than what is written while it is made.
  const std::int64_t bytes = 24 * kMiB + kPage;
  auto store = Store::make(options(bytes));
  EXPECT_EQ(store->bytes(), bytes);
  EXPECT_GT(store->raw_read(), 0);
  EXPECT_GT(store->raw_write(), 0);
  EXPECT_EQ(store->backend().rfind(name_of(GetParam()), 0), 0U) << store->backend();
  const Pages back(bytes);
  const auto all = back.bytes().first(static_cast<std::size_t>(bytes));
  paint(all, 1);
  read(*store, 0, all);
  EXPECT_TRUE(zeros(all));
  const Pages data(5 * kMiB);
  paint(data.bytes(), 2);
  const auto some = data.bytes().first(static_cast<std::size_t>(5 * kMiB - kPage));
  write(*store, 3 * kPage, some);
  read(*store, 0, all);
  EXPECT_TRUE(same(all.subspan(3 * kPage, some.size()), some));
  EXPECT_TRUE(zeros(all.first(3 * kPage)));
  EXPECT_TRUE(zeros(all.subspan(3 * kPage + some.size())));
}

TEST_P(Stores, CountTheTrafficOfTransfersOnly) {
  auto store = Store::make(options(kMiB));
  EXPECT_EQ(store->traffic().read_bytes, 0);
  EXPECT_EQ(store->traffic().written_bytes, 0);
  const Pages pages(kMiB);
  for (int i = 0; i < 3; ++i) write(*store, 0, pages.bytes().first(8 * kPage));
  read(*store, 0, pages.bytes().first(kPage));
  const IoTraffic traffic = store->traffic();
  EXPECT_EQ(traffic.read_bytes, kPage);
  EXPECT_EQ(traffic.written_bytes, 24 * kPage);
  EXPECT_GT(traffic.read_seconds, 0);
  EXPECT_GT(traffic.write_seconds, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(store->traffic().write_seconds, traffic.write_seconds);
  faults_->arm({.value = EIO});
  EXPECT_THROW(read(*store, 0, pages.bytes().first(kPage)), IoError);
  EXPECT_EQ(store->traffic().read_bytes, kPage);
}

TEST_P(Stores, OfNoBytesAndTransfersOfNoBytesAreFine) {
  auto store = Store::make(options(0));
  EXPECT_EQ(store->bytes(), 0);
  EXPECT_EQ(store->read(0, {}), 0U);
  store->wait(0);
  EXPECT_TRUE(store->done(0));
  store->settle();
}

TEST_P(Stores, RefuseWhatIsNotAlignedOrLiesOutside) {
  auto store = Store::make(options(8 * kPage));
  const Pages pages(16 * kPage);
  const auto memory = pages.bytes();
  EXPECT_THROW(store->read(1, memory.first(kPage)), UsageError);
  EXPECT_THROW(store->read(0, memory.first(100)), UsageError);
  EXPECT_THROW(store->read(0, memory.subspan(8, kPage)), UsageError);
  EXPECT_THROW(store->read(8 * kPage, memory.first(kPage)), UsageError);
  EXPECT_THROW(store->read(0, memory.first(9 * kPage)), UsageError);
  EXPECT_THROW(store->write(-kPage, memory.first(kPage)), UsageError);
  EXPECT_THROW(Store::make(options(100)), UsageError);
  StoreOptions none = options(kPage);
  none.directories.clear();
  EXPECT_THROW(Store::make(none), UsageError);
}

TEST_P(Stores, ErrorsSayWhatWhereWhyAndWhatToDo) {
  StoreOptions wanted = options(kMiB);
  wanted.rank = 3;
  wanted.describe = [](std::int64_t offset) {
    return offset >= 16 * kPage ? "moments of unit h.3" : "masters";
  };
  auto store = Store::make(wanted);
  const Pages pages(kMiB);
  faults_->arm({.value = ENOSPC, .only = Operation::write});
  const std::string text =
      message([&] { write(*store, 16 * kPage, pages.bytes().first(2 * kPage)); });
  for (const std::string part :
       {"write of 8192 bytes", "offset 65536", "rank 3", "moments of unit h.3",
        "No space left on device", "errno 28", "Free space"}) {
    EXPECT_TRUE(has(text, part)) << part << " in: " << text;
  }
  EXPECT_TRUE(has(text, directory_.path())) << text;
  faults_->arm({.value = EIO, .only = Operation::read});
  EXPECT_TRUE(has(message([&] { read(*store, 0, pages.bytes().first(kPage)); }),
                  "read of 4096 bytes at offset 0"));
  EXPECT_EQ(message([&] { read(*store, 0, pages.bytes().first(kPage)); }), "");
}

TEST_P(Stores, AnErrorWhileTheyAreMadeIsAnError) {
  for (std::int64_t n = 0; n < 2; ++n) {
    faults_->arm({.value = EIO, .after = n});
    EXPECT_TRUE(has(message([&] { Store::make(options(kMiB)); }), "Input/output error")) << n;
    faults_->clear();
  }
  EXPECT_TRUE(directory_.empty());
  EXPECT_NE(Store::make(options(kMiB)), nullptr);
}

TEST_P(Stores, FirstZerosNeverWinOverData) {
  // Zeros come late and in disorder; data is written to the far end, the middle and the start
  // before they are there.
  const std::int64_t bytes = 48 * kMiB;
  faults_->shuffle(3, 2000);
  auto store = Store::make(options(bytes));
  const Pages data(kMiB);
  paint(data.bytes(), 4);
  std::vector<Ticket> tickets;
  for (std::int64_t at = bytes - kMiB; at >= 0; at -= 6 * kMiB) {
    tickets.push_back(store->write(at, data.bytes()));
  }
  for (const Ticket ticket : tickets) store->wait(ticket);
  const Pages back(kMiB);
  for (std::int64_t at = bytes - kMiB; at >= 0; at -= kMiB) {
    read(*store, at, back.bytes());
    ASSERT_TRUE((bytes - kMiB - at) % (6 * kMiB) == 0 ? same(back.bytes(), data.bytes())
                                                      : zeros(back.bytes()))
        << at;
  }
}

TEST_P(Stores, TransfersWaitForZerosThatAreUnderWayWhereverLaterOnesAre) {
  // The first block behind what is written while the store is made.
  faults_->arm({.kind = Fault::Kind::held, .from = 4 * kMiB});
  auto store = Store::make(options(32 * kMiB));
  const Pages data(kMiB);
  paint(data.bytes(), 8);
  const Ticket ticket = store->write(4 * kMiB, data.bytes());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(store->done(ticket));
  faults_->release();
  store->wait(ticket);
  const Pages back(kMiB);
  read(*store, 4 * kMiB, back.bytes());
  EXPECT_TRUE(same(back.bytes(), data.bytes()));
}

TEST_P(Stores, AnErrorOfTheFirstZerosIsToldToTransfersBehindIt) {
  const std::int64_t bytes = 64 * kMiB;
  // Beyond what is written while the store is made.
  faults_->arm({.value = EIO, .times = kLasting, .from = 32 * kMiB});
  auto store = Store::make(options(bytes));
  const Pages pages(kPage);
  EXPECT_EQ(message([&] { write(*store, 0, pages.bytes()); }), "");
  const std::string text = message([&] { write(*store, bytes - kPage, pages.bytes()); });
  EXPECT_TRUE(has(text, "first write (zeros)")) << text;
  EXPECT_TRUE(has(text, "Input/output error")) << text;
}

TEST_P(Stores, EndAtOnceWhileZerosAreStillWritten) {
  faults_->shuffle(1, 20'000);
  const auto start = std::chrono::steady_clock::now();
  Store::make(options(512 * kMiB)).reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
}

TEST_P(Stores, InOneDirectoryNeverMeet) {
  auto one = Store::make(options(64 * kPage));
  auto two = Store::make(options(64 * kPage));
  const Pages data(2 * 64 * kPage);
  const Pages back(64 * kPage);
  paint(data.bytes(), 5);
  const auto first = data.bytes().first(64 * kPage);
  const auto second = data.bytes().subspan(64 * kPage, 64 * kPage);
  write(*one, 0, first);
  write(*two, 0, second);
  read(*one, 0, back.bytes().first(64 * kPage));
  EXPECT_TRUE(same(back.bytes().first(64 * kPage), first));
  two.reset();
  read(*one, 0, back.bytes().first(64 * kPage));
  EXPECT_TRUE(same(back.bytes().first(64 * kPage), first));
}

TEST_P(Stores, LeaveNoNameInTheDirectory) {
  {
    auto store = Store::make(options(kMiB));
    EXPECT_TRUE(directory_.empty());
  }
  EXPECT_TRUE(directory_.empty());
}

TEST_P(Stores, GoOnWhenTheirDirectoryIsRemoved) {
  auto gone = std::make_unique<Directory>();
  StoreOptions wanted = options(64 * kPage);
  wanted.directories = {gone->path()};
  auto store = Store::make(wanted);
  ASSERT_EQ(rmdir(gone->path().c_str()), 0) << "a file with a name lies in it";
  const Pages data(2 * 64 * kPage);
  paint(data.bytes(), 6);
  write(*store, 0, data.bytes().first(64 * kPage));
  const auto back = data.bytes().subspan(64 * kPage, 64 * kPage);
  read(*store, 0, back);
  EXPECT_TRUE(same(back, data.bytes().first(64 * kPage)));
  EXPECT_THROW(Store::make(wanted), UsageError);
}

TEST_P(Stores, StripeOverDirectories) {
  const Directory second;
  const Directory third;
  for (const bool measured : {false, true}) {
    StoreOptions wanted = options(measured ? 65 * kMiB + kPage : 100 * kPage);
    wanted.directories = {directory_.path(), second.path(), third.path()};
    wanted.block_bytes = measured ? kMiB : kPage;
    auto store = Store::make(wanted);
    const Pages data(2 * kMiB);
    const auto all = data.bytes().first(100 * kPage);
    paint(all, 7);
    const std::int64_t base = wanted.bytes - 100 * kPage;
    write(*store, base, all);
    const auto back = data.bytes().subspan(static_cast<std::size_t>(kMiB), all.size());
    read(*store, base, back);
    EXPECT_TRUE(same(back, all));
    faults_->arm({.value = EIO});
    const std::string text = message([&] { read(*store, base, back); });
    EXPECT_TRUE(has(text, directory_.path()) || has(text, second.path()) || has(text, third.path()))
        << text;
  }
}

// -- verification --

class Verified : public Stores {
 protected:
  void SetUp() override {
    Stores::SetUp();
    if (IsSkipped()) return;
    words_.assign(static_cast<std::size_t>(verify_words(kBytes)), 0xDEAD);
    StoreOptions wanted = options(kBytes);
    wanted.checksums = words_;
    wanted.describe = [](std::int64_t) { return "moments of unit h.1"; };
    store_ = Store::make(wanted);
  }
  std::span<std::byte> part(std::int64_t offset, std::int64_t bytes) const {
    return data_.bytes().subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes));
  }
  std::string read_error(std::int64_t offset, std::int64_t bytes) {
    return message(
        [&] { read(*store_, offset, back_.bytes().first(static_cast<std::size_t>(bytes))); });
  }

  static constexpr std::int64_t kBytes = 128 * kPage;
  std::vector<std::uint64_t> words_;
  const Pages data_{kBytes};
  const Pages back_{kBytes};
  std::unique_ptr<Store> store_;
};

TEST_P(Verified, GoodTransfersPass) {
  EXPECT_EQ(read_error(0, kBytes), "") << "zeros before the first write";
  std::mt19937_64 random(1);
  for (int i = 0; i < 60; ++i) {
    const std::int64_t offset = static_cast<std::int64_t>(random() % 100) * kPage;
    const std::int64_t bytes = static_cast<std::int64_t>(random() % 28 + 1) * kPage;
    paint(part(0, bytes), static_cast<std::uint64_t>(i % 5));
    write(*store_, offset, part(0, bytes));
    EXPECT_EQ(read_error(0, kBytes), "");
  }
}

TEST_P(Verified, ALostWriteIsNamed) {
  for (const bool first : {true, false}) {
    paint(part(0, 8 * kPage), first ? 1 : 2);
    faults_->arm({.kind = Fault::Kind::lost, .only = Operation::write});
    write(*store_, 16 * kPage, part(0, 8 * kPage));
    const std::string text = read_error(16 * kPage, 8 * kPage);
    EXPECT_TRUE(has(text, "8 of 8 pages")) << text;
    EXPECT_TRUE(has(text, "was lost")) << text;
    EXPECT_TRUE(has(text, "offset 65536")) << text;
    EXPECT_TRUE(has(text, "moments of unit h.1")) << text;
    // Written again, as after any failure, it is good.
    write(*store_, 16 * kPage, part(0, 8 * kPage));
    EXPECT_EQ(read_error(16 * kPage, 8 * kPage), "");
  }
}

TEST_P(Verified, ALostWriteIsStillNamedWhenItsRepetitionIsLost) {
  paint(part(0, kPage), 1);
  write(*store_, 0, part(0, kPage));
  paint(part(0, kPage), 2);
  faults_->arm({.kind = Fault::Kind::lost, .only = Operation::write, .times = 2});
  write(*store_, 0, part(0, kPage));
  write(*store_, 0, part(0, kPage));
  EXPECT_TRUE(has(read_error(0, kPage), "was lost"));
}

TEST_P(Verified, ATornWriteIsNamed) {
  paint(part(0, 8 * kPage), 1);
  faults_->arm({.kind = Fault::Kind::torn, .only = Operation::write});
  write(*store_, 0, part(0, 8 * kPage));
  const std::string text = read_error(0, 8 * kPage);
  EXPECT_TRUE(has(text, "4 of 8 pages from offset 16384 on")) << text;
  EXPECT_TRUE(has(text, "torn")) << text;
}

TEST_P(Verified, AMisplacedWriteAndReadAreNamed) {
  paint(part(0, kBytes), 1);
  write(*store_, 0, part(0, kBytes));
  paint(part(0, 2 * kPage), 2);
  faults_->arm({.kind = Fault::Kind::misplaced, .value = 32 * kPage, .only = Operation::write});
  write(*store_, 4 * kPage, part(0, 2 * kPage));
  const std::string there = read_error(36 * kPage, 2 * kPage);
  EXPECT_TRUE(has(there, "belongs to offset 16384")) << there;
  EXPECT_TRUE(has(read_error(4 * kPage, 2 * kPage), "lost")) << there;
  faults_->arm({.kind = Fault::Kind::misplaced, .value = 8 * kPage, .only = Operation::read});
  const std::string text = read_error(64 * kPage, 2 * kPage);
  EXPECT_TRUE(has(text, "2 of 2 pages from offset 262144 on")) << text;
  EXPECT_TRUE(has(text, "belongs to offset 294912")) << text;
  EXPECT_EQ(read_error(64 * kPage, 2 * kPage), "") << "the disk is good";
}

TEST_P(Verified, AFailedWriteIsFoundUntilItIsRepeated) {
  paint(part(0, 4 * kPage), 1);
  write(*store_, 0, part(0, 4 * kPage));
  paint(part(0, 4 * kPage), 2);
  faults_->arm({.value = EIO, .only = Operation::write});
  EXPECT_THROW(write(*store_, 0, part(0, 4 * kPage)), IoError);
  EXPECT_TRUE(has(read_error(0, 4 * kPage), "before"));
  write(*store_, 0, part(0, 4 * kPage));
  EXPECT_EQ(read_error(0, 4 * kPage), "");
}

TEST_P(Verified, DamagedBytesAreFound) {
  // Without verification the same fault passes: what the option is for.
  paint(part(0, kPage), 1);
  write(*store_, 0, part(0, kPage));
  words_[0] ^= 1;
  const std::string text = read_error(0, kPage);
  EXPECT_TRUE(has(text, "neither")) << text;
  auto plain = Store::make(options(kBytes));
  faults_->arm({.kind = Fault::Kind::lost, .only = Operation::write});
  write(*plain, 0, part(0, kPage));
  EXPECT_EQ(message([&] { read(*plain, 0, back_.bytes().first(kPage)); }), "");
}

// -- resources --

#ifdef ZSHARD_SANITIZER
constexpr std::int64_t kMostGrowth = 256 * 1024;  // KiB; sanitizers keep what is freed for a while
#else
constexpr std::int64_t kMostGrowth = 1024;
#endif

TEST_P(Stores, KeepDescriptorsThreadsAndMemoryFlatOverTenThousandTransfers) {
  auto store = Store::make(options(256 * kPage));
  const Pages pages(4 * kPage);
  const auto loop = [&](int times) {
    for (int i = 0; i < times; ++i) {
      const std::int64_t offset = i % 256 * kPage;
      if (i % 50 == 0) faults_->arm({.value = EIO});
      try {
        if (i % 2 == 0) {
          write(*store, offset, pages.bytes().first(kPage));
        } else {
          read(*store, offset, pages.bytes().first(kPage));
        }
      } catch (const IoError&) {
      }
      if (i % 50 == 0) faults_->clear();
    }
  };
  loop(500);
  const int open = descriptors();
  const std::int64_t threads = process_status("Threads");
  const std::int64_t memory = process_status("VmRSS");
  loop(10'000);
  EXPECT_EQ(descriptors(), open);
  EXPECT_EQ(process_status("Threads"), threads);
  EXPECT_LT(process_status("VmRSS") - memory, kMostGrowth) << "KiB";
}

TEST_P(Stores, GiveEverythingBackWhenTheyEnd) {
  const auto one = [&] {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(verify_words(64 * kPage)));
    const Pages buffers(64 * kPage);
    StoreOptions wanted = options(64 * kPage);
    wanted.buffers = buffers.bytes();
    wanted.checksums = words;
    auto store = Store::make(wanted);
    // Ends with transfers under way.
    store->write(0, buffers.bytes().first(32 * kPage));
    store->read(32 * kPage, buffers.bytes().subspan(32 * kPage));
  };
  for (int i = 0; i < 10; ++i) one();
  const int open = descriptors();
  const std::int64_t threads = process_status("Threads");
  const std::int64_t memory = process_status("VmRSS");
  for (int i = 0; i < 100; ++i) one();
  EXPECT_EQ(descriptors(), open);
  EXPECT_EQ(process_status("Threads"), threads);
  EXPECT_LT(process_status("VmRSS") - memory, kMostGrowth) << "KiB";
  EXPECT_TRUE(directory_.empty());
}

TEST_P(Stores, EndWithinTheDeadlineAndKeepTheMemoryOfADeviceThatHangs) {
  std::vector<std::string> lines;
  const auto before = base::set_log_sink(
      [&](const base::LogRecord& record) { lines.emplace_back(record.message); });
  auto owner = std::make_shared<Pages>(64 * kPage);
  const std::weak_ptr<Pages> watch = owner;
  {
    StoreOptions wanted = options(64 * kPage);
    wanted.deadline_seconds = 0.2;
    wanted.buffers = owner->bytes();
    wanted.owner = owner;
    auto store = Store::make(wanted);
    faults_->arm({.kind = Fault::Kind::held});
    const Ticket ticket = store->read(0, owner->bytes().first(kPage));
    owner.reset();
    const std::string text = message([&] { store->wait(ticket); });
    EXPECT_TRUE(has(text, "has not answered for 0.2 s")) << text;
  }
  EXPECT_FALSE(watch.expired());
  base::set_log_sink(before);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(has(lines[0], "have not ended")) << lines[0];
  // The device comes back, and writes to memory that is still there.
  faults_->release();
  while (!watch.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Store::make(options(kPage));  // gives back what it finds
  }
}

TEST_P(Stores, CanBeDestroyedInAForkedChild) {
  auto store = Store::make(options(64 * kPage));
  EXPECT_EQ(in_child([&] {
              store.reset();
              return std::string();
            }),
            "");
  const Pages pages(kPage);
  EXPECT_EQ(message([&] { write(*store, 0, pages.bytes()); }), "");
}

INSTANTIATE_TEST_SUITE_P(All, Stores,
                         ::testing::Values(IoBackendKind::io_uring, IoBackendKind::posix),
                         [](const auto& one) { return name_of(one.param); });
INSTANTIATE_TEST_SUITE_P(All, Verified,
                         ::testing::Values(IoBackendKind::io_uring, IoBackendKind::posix),
                         [](const auto& one) { return name_of(one.param); });

}  // namespace
}  // namespace zshard::offload::testing
