// What the system refuses: limits, seccomp, full and foreign file systems, kills. Each in a child
// of its own, with a time limit.
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <limits>

#include "offload/io/lock_limit.hpp"
#include "offload/io/tuner.hpp"
#include "runtime/base/log.hpp"
#include "tests/offload/support.hpp"

namespace {
/// Transfers by pread() and pwrite() of files in this directory take long; null: of none.
std::atomic<const std::string*> slow_directory{nullptr};
}  // namespace

#ifndef ZSHARD_SANITIZER
namespace {
void wait_if_slow(int file) {
  const std::string* directory = slow_directory.load();
  if (directory == nullptr) return;
  std::error_code gone;
  const std::filesystem::path link = "/proc/self/fd/" + std::to_string(file);
  const std::string target = std::filesystem::read_symlink(link, gone).string();
  if (target.rfind(*directory + "/", 0) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}
}  // namespace
extern "C" {
ssize_t pread(int file, void* memory, std::size_t bytes, off_t offset) {
  wait_if_slow(file);
  return syscall(SYS_pread64, file, memory, bytes, offset);
}
ssize_t pwrite(int file, const void* memory, std::size_t bytes, off_t offset) {
  wait_if_slow(file);
  return syscall(SYS_pwrite64, file, memory, bytes, offset);
}
}
#endif

namespace zshard::offload::testing {
namespace {

constexpr uid_t kNobody = 65534;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

StoreOptions options_in(const std::string& directory, std::int64_t bytes,
                        IoBackendKind kind = IoBackendKind::automatic) {
  return {.directories = {directory}, .backend = kind, .bytes = bytes, .deadline_seconds = 30};
}

/// "" if bytes written to the store come back.
std::string round_trip(Store& store, std::span<std::byte> memory) {
  const std::size_t half = memory.size() / 2;
  paint(memory.first(half), 11);
  store.wait(store.write(0, memory.first(half)));
  store.wait(store.read(0, memory.subspan(half, half)));
  return same(memory.first(half), memory.subspan(half, half)) ? "" : "other bits came back";
}

template <class Exception>
std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "threw nothing";
}

/// Makes system calls fail from now on, in this process.
bool refuse(const std::vector<int>& calls, int error) {
  std::vector<sock_filter> program;
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  for (const int call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

/// Makes io_uring_register() with these operations fail from now on, in this process.
bool refuse_registration(const std::vector<unsigned>& operations, int error) {
  std::vector<sock_filter> program;
  const auto count = static_cast<unsigned char>(operations.size());
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_register, 0,
                             static_cast<unsigned char>(1 + 2 * count)));
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])));
  for (const unsigned operation : operations) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, operation, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

/// Log lines of this process, from "info" on.
class Lines {
 public:
  Lines() {
    base::set_log_levels("info");
    base::set_log_sink([this](const base::LogRecord& r) { lines_.emplace_back(r.message); });
  }
  ~Lines() { base::set_log_sink({}); }
  [[nodiscard]] int count(const std::string& part) const {
    return static_cast<int>(std::count_if(lines_.begin(), lines_.end(),
                                          [&](const std::string& l) { return has(l, part); }));
  }

 private:
  std::vector<std::string> lines_;
};

TEST(Refusals, OfIoUringTakePosixWithTheSameBitsAndSaySoOnce) {
  struct Case {
    std::vector<int> calls;
    int error;
  };
  for (const Case& one :
       {Case{{SYS_io_uring_setup}, EPERM}, Case{{SYS_io_uring_setup}, ENOSYS},
        Case{{SYS_io_uring_enter}, EPERM},
        Case{{SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}, EACCES}}) {
    for (const IoBackendKind kind : {IoBackendKind::automatic, IoBackendKind::io_uring}) {
      EXPECT_EQ(in_child([&]() -> std::string {
                  const Lines lines;
                  const Directory directory;
                  if (!refuse(one.calls, one.error)) return "";
                  const Pages pages(kMiB);
                  for (int i = 0; i < 2; ++i) {
                    auto store = Store::make(options_in(directory.path(), kMiB, kind));
                    if (!has(store->backend(), "posix")) return store->backend();
                    const std::string bits = round_trip(*store, pages.bytes());
                    if (!bits.empty()) return bits;
                  }
                  if (lines.count("posix") != 1) return "said not once";
                  if (io_uring_refusal().empty()) return "no reason";
                  return "";
                }),
                "")
          << std::strerror(one.error) << ", " << name_of(kind);
    }
  }
}

// One ring may come to lie where another thread's was: no race for the thread sanitizer.
TEST(Rings, OfManyThreadsBeginAndEndBesideEachOther) {
  if (!io_uring_refusal().empty()) GTEST_SKIP() << "io_uring: " << io_uring_refusal();
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) refused += io_uring_refusal().empty() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused.load(), 0);
}

TEST(Refusals, OfRegistrationGoOnWithoutRegisteredMemory) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  if (!io_uring_refusal().empty()) GTEST_SKIP() << "io_uring: " << io_uring_refusal();
  EXPECT_EQ(in_child([]() -> std::string {
              const rlimit little{64 * 1024, 64 * 1024};
              if (setrlimit(RLIMIT_MEMLOCK, &little) != 0) return "no limit";
              if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0) {
                return "no other user";
              }
              const Lines lines;
              const Directory directory;
              const Pages pages(8 * kMiB);
              StoreOptions wanted = options_in(directory.path(), 8 * kMiB, IoBackendKind::io_uring);
              wanted.buffers = pages.bytes();
              for (int i = 0; i < 2; ++i) {
                auto store = Store::make(wanted);
                // A kernel that counts the ring itself leaves posix.
                if (has(store->backend(), "registered")) return store->backend();
                const std::string bits = round_trip(*store, pages.bytes());
                if (!bits.empty()) return bits;
              }
              if (lines.count("register") + lines.count("posix") != 1) return "said not once";
              return "";
            }),
            "");
}

/// Becomes a user of this process' own, whose locked memory nobody else adds to, with that limit.
/// "" or why not.
std::string lock_at_most(std::int64_t bytes) {
  const auto most = bytes < 0 ? RLIM_INFINITY : static_cast<rlim_t>(bytes);
  const rlimit limit{most, most};
  const auto user = static_cast<uid_t>(200000 + getpid());
  if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "no such limit here";
  if (setgroups(0, nullptr) != 0 || setgid(user) != 0 || setuid(user) != 0) return "no other user";
  return "";
}

TEST(Refusals, OfLockedMemoryAreForeseenAndSaidOnce) {
  if (geteuid() != 0 || in_child([] { return lock_at_most(0); }) != "") {
    GTEST_SKIP() << "needs root, to become another user";
  }
  if (!io_uring_refusal().empty()) GTEST_SKIP() << "io_uring: " << io_uring_refusal();
  constexpr unsigned kBuffers = 0;  // IORING_REGISTER_BUFFERS
  constexpr std::int64_t kBytes = 2 * kMiB;
  for (const int ranks : {1, 3}) {
    const StoreOptions plain = options_in("", kBytes);
    const std::int64_t need = ranks * locked_bytes(plain.depth, kBytes);
    for (const std::int64_t limit : {std::int64_t{0}, need - kPage, need, std::int64_t{-1}}) {
      const bool enough = limit < 0 || limit >= need;
      const std::string end = in_child([&]() -> std::string {
        if (std::string why = lock_at_most(limit); !why.empty()) return why;
        const Lines lines;
        const Directory directory;
        const std::int64_t page = sysconf(_SC_PAGESIZE);
        std::vector<Pages> pages;
        std::vector<std::unique_ptr<Store>> stores;
        StoreOptions wanted = options_in(directory.path(), kBytes, IoBackendKind::io_uring);
        wanted.ranks_here = ranks;
        if (page != kPage) return "";
        for (int twice = 0; twice < 2; ++twice) {
          if (Store::may_register(wanted, kBytes) != enough) return "planned otherwise";
        }
        // An attempt would show: by another reason.
        if (!enough && !refuse_registration({kBuffers}, EXDEV)) return "no filter";
        wanted.register_buffers = enough;
        for (int r = 0; r < ranks; ++r) {
          wanted.buffers = pages.emplace_back(kBytes).bytes();
          auto& store = stores.emplace_back(Store::make(wanted));
          if (has(store->backend(), "registered buffers") != enough) return store->backend();
          const std::string bits = round_trip(*store, wanted.buffers);
          if (!bits.empty()) return bits;
        }
        if (lines.count("Invalid cross-device link") != 0) return "attempted";
        if (lines.count("(RLIMIT_MEMLOCK) is") != (enough ? 0 : 1)) return "said not once";
        if (lines.count("raise it (ulimit -l)") != (enough ? 0 : 1)) return "no way out";
        // Where the ring itself is refused, that is what is said.
        const bool ring = has(stores[0]->backend(), "io_uring");
        if (!enough && !ring && lines.count(" bytes would be locked") != 1) return "and the ring?";
        if (!enough && ring && lines.count(std::to_string(need) + " bytes would be locked") != 1) {
          return "said not what is needed";
        }
        if (!enough && lines.count("is " + std::to_string(limit) + " bytes") != 1) {
          return "said not what there is";
        }
        return "";
      });
      if (end == "no such limit here" && limit < 0) continue;
      EXPECT_EQ(end, "") << ranks << " ranks, limit " << limit << " of " << need;
    }
  }
}

TEST(Refusals, OfLockedMemoryCountWhatTheProcessHasAndWhoItIs) {
  if (geteuid() != 0 || in_child([] { return lock_at_most(0); }) != "") {
    GTEST_SKIP() << "needs root, to become another user";
  }
  if (!io_uring_refusal().empty()) GTEST_SKIP() << "io_uring: " << io_uring_refusal();
  EXPECT_TRUE(offload::LockLimit{}.allows(std::numeric_limits<std::int64_t>::max()));
  EXPECT_FALSE((offload::LockLimit{.bytes = 10, .used = 4}.allows(7)));
  EXPECT_TRUE((offload::LockLimit{.bytes = 10, .used = 4}.allows(6)));
  constexpr std::int64_t kBytes = 2 * kMiB;
  // Root may lock as much as it likes.
  EXPECT_EQ(in_child([&]() -> std::string {
              if (!lock_limit().exempt) return "";
              const rlimit none{0, 0};
              setrlimit(RLIMIT_MEMLOCK, &none);
              const Lines lines;
              const Directory directory;
              const Pages pages(kBytes);
              StoreOptions wanted = options_in(directory.path(), kBytes, IoBackendKind::io_uring);
              wanted.buffers = pages.bytes();
              if (!Store::may_register(wanted, kBytes)) return "refused";
              const auto store = Store::make(wanted);
              return has(store->backend(), "registered buffers") ? "" : store->backend();
            }),
            "");
  // What is registered counts, and goes with its store.
  EXPECT_EQ(in_child([&]() -> std::string {
              const StoreOptions plain = options_in("", kBytes);
              const std::int64_t need = locked_bytes(plain.depth, kBytes);
              if (std::string why = lock_at_most(2 * need - kPage); !why.empty()) return why;
              const Directory directory;
              const Pages pages(kBytes);
              StoreOptions wanted = options_in(directory.path(), kBytes, IoBackendKind::io_uring);
              wanted.buffers = pages.bytes();
              if (!Store::may_register(wanted, kBytes)) return "refused the first";
              auto store = Store::make(wanted);
              if (!has(store->backend(), "registered buffers")) return store->backend();
              if (lock_limit().used < kBytes) return std::to_string(lock_limit().used);
              if (Store::may_register(wanted, 2 * kBytes)) return "allowed too much";
              store.reset();
              return lock_limit().used == 0 ? "" : "kept";
            }),
            "");
  // All capabilities, but in a user namespace of one's own: io_uring counts nevertheless.
  EXPECT_EQ(in_child([&]() -> std::string {
              if (std::string why = lock_at_most(64 * 1024); !why.empty()) return why;
              if (unshare(CLONE_NEWUSER) != 0) return "";
              if (lock_limit().exempt) return "exempt";
              StoreOptions wanted = options_in("", kBytes, IoBackendKind::io_uring);
              return Store::may_register(wanted, kBytes) ? "allowed" : "";
            }),
            "");
}

TEST(Refusals, OfEachRegistrationAloneGoOnWithoutItAndSaySoOnce) {
  if (!io_uring_refusal().empty()) GTEST_SKIP() << "io_uring: " << io_uring_refusal();
  constexpr unsigned kBuffers = 0;  // IORING_REGISTER_BUFFERS, IORING_REGISTER_FILES
  constexpr unsigned kFiles = 2;
  for (const auto& [operations, name] :
       {std::pair{std::vector{kBuffers}, "io_uring"},
        std::pair{std::vector{kFiles}, "io_uring, registered buffers"},
        std::pair{std::vector{kBuffers, kFiles}, "io_uring"}}) {
    EXPECT_EQ(in_child([&, &operations = operations, &name = name]() -> std::string {
                const Lines lines;
                const Directory directory;
                if (!refuse_registration(operations, ENOMEM)) return "";
                const Pages pages(8 * kMiB);
                StoreOptions wanted = options_in(directory.path(), 8 * kMiB);
                wanted.buffers = pages.bytes();
                for (int i = 0; i < 2; ++i) {
                  auto store = Store::make(wanted);
                  if (store->backend() != name) return store->backend();
                  const std::string bits = round_trip(*store, pages.bytes());
                  if (!bits.empty()) return bits;
                }
                const int told = lines.count("does not register");
                return told == static_cast<int>(operations.size()) ? "" : "said not once";
              }),
              "")
        << name;
  }
}

TEST(Refusals, OfSpaceBySignalsWithoutEndAreErrors) {
  EXPECT_EQ(in_child([]() -> std::string {
              const Directory directory;
              if (!refuse({SYS_fallocate}, EINTR)) return "";
              const std::string text =
                  message<IoError>([&] { Store::make(options_in(directory.path(), kMiB)); });
              return has(text, "cannot reserve") && has(text, "Interrupted") ? "" : text;
            }),
            "");
}

// Where a file system reserves nothing, the zeros do: a disk that has no room for them is told
// before anybody trains.
TEST(Refusals, OfReservationsFillTheFileBeforeAnythingElse) {
  for (const bool fails : {false, true}) {
    EXPECT_EQ(
        in_child([&]() -> std::string {
          const Directory directory;
          Injection faults;
          if (!refuse({SYS_fallocate}, EOPNOTSUPP)) return "";
          if (fails) {
            faults->arm(
                {.value = ENOSPC, .only = Operation::write, .times = kLasting, .from = 24 * kMiB});
          }
          std::unique_ptr<Store> store;
          const std::string text = message<IoError>(
              [&] { store = Store::make(options_in(directory.path(), 32 * kMiB)); });
          if (fails) {
            return store == nullptr && has(text, "first write (zeros)") &&
                           has(text, "No space left")
                       ? ""
                       : text;
          }
          if (store == nullptr) return text;
          const Pages pages(kMiB);
          return round_trip(*store, pages.bytes());
        }),
        "")
        << fails;
  }
}

TEST(Refusals, OfDirectIoTakeThePageCacheAndSaySoOnce) {
  if (access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  EXPECT_EQ(in_child([]() -> std::string {
              const Lines lines;
              const Directory directory("/dev/shm");
              const Pages pages(8 * kMiB);
              for (const IoBackendKind kind : {IoBackendKind::automatic, IoBackendKind::posix}) {
                auto store = Store::make(options_in(directory.path(), 8 * kMiB, kind));
                if (!has(store->backend(), "page cache")) return store->backend();
                const std::string bits = round_trip(*store, pages.bytes());
                if (!bits.empty()) return bits;
              }
              if (lines.count("page cache") != 1) return "said not once";
              return "";
            }),
            "");
}

class Limits : public ::testing::TestWithParam<IoBackendKind> {
 protected:
  void SetUp() override { ZSHARD_NEED(GetParam()); }
};

TEST_P(Limits, OfFileSizesAreErrorsAndNoSignal) {
  for (const bool before : {true, false}) {
    EXPECT_EQ(in_child([&]() -> std::string {
                const Directory directory;
                const rlimit little{kMiB, kMiB};
                if (before && setrlimit(RLIMIT_FSIZE, &little) != 0) return "no limit";
                const Pages pages(kMiB);
                std::unique_ptr<Store> store;
                const std::string made = message<IoError>([&] {
                  store = Store::make(options_in(directory.path(), 2 * kMiB, GetParam()));
                });
                if (before) return has(made, "RLIMIT_FSIZE") && has(made, "2097152") ? "" : made;
                if (store == nullptr) return made;
                if (setrlimit(RLIMIT_FSIZE, &little) != 0) return "no limit";
                const std::string written =
                    message<IoError>([&] { store->wait(store->write(kMiB, pages.bytes())); });
                return has(written, "ulimit -f") && has(written, "File too large") ? "" : written;
              }),
              "");
  }
}

TEST_P(Limits, OfTheDiskAreToldWithWhatIsNeededAndFree) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to mount a small file system";
  const std::string result = in_child([]() -> std::string {
    const Directory directory;
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=8m,mode=0700") != 0) {
      return "skip";
    }
    base::set_log_levels("off");
    auto one = Store::make(options_in(directory.path(), 6 * kMiB, GetParam()));
    const Pages pages(2 * kMiB);
    std::string text = round_trip(*one, pages.bytes());
    if (!text.empty()) return text;
    StoreOptions two = options_in(directory.path(), 3 * kMiB, GetParam());
    text = message<IoError>([&] { Store::make(two); });
    if (!has(text, "3.00 MiB") || !has(text, "2.00 MiB are free")) return text;
    two.bytes = kMiB;
    two.ranks_here = 3;
    text = message<IoError>([&] { Store::check(two); });
    if (!has(text, "3.00 MiB (1.00 MiB for each of 3 ranks here)")) return text;
    two.ranks_here = 2;
    Store::check(two);
    one.reset();
    // Everything has come back.
    one = Store::make(options_in(directory.path(), 7 * kMiB, GetParam()));
    return "";
  });
  if (result == "skip") GTEST_SKIP() << "no mounts here";
  EXPECT_EQ(result, "");
}

TEST_P(Limits, OfThreadsAreErrors) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
#ifdef ZSHARD_SANITIZER
  GTEST_SKIP() << "sanitizers need threads of their own";
#endif
  EXPECT_EQ(in_child([]() -> std::string {
              const rlimit none{0, 0};
              if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 ||
                  setrlimit(RLIMIT_NPROC, &none) != 0 || setuid(kNobody) != 0) {
                return "no other user";
              }
              const Directory directory;
              const std::string text = message<IoError>(
                  [&] { Store::make(options_in(directory.path(), kMiB, GetParam())); });
              return has(text, "cannot start the threads") ? "" : text;
            }),
            "");
}

TEST_P(Limits, OfDescriptorsAreErrors) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer's check of virtual calls needs descriptors";
#endif
  EXPECT_EQ(in_child([]() -> std::string {
              const Directory directory;
              rlimit few{};
              getrlimit(RLIMIT_NOFILE, &few);
              few.rlim_cur = static_cast<rlim_t>(descriptors());
              setrlimit(RLIMIT_NOFILE, &few);
              std::vector<std::unique_ptr<Store>> stores;
              try {
                for (int i = 0; i < 100; ++i) {
                  stores.push_back(Store::make(options_in(directory.path(), kPage, GetParam())));
                }
              } catch (const Error& error) {
                return has(error.what(), "Too many open files") ? "" : error.what();
              }
              return "no error";
            }),
            "");
}

TEST_P(Limits, AKillInTheMiddleOfWritesLeavesNothing) {
  const Directory directory;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    try {
      auto store = Store::make(options_in(directory.path(), 32 * kMiB, GetParam()));
      const Pages pages(8 * kMiB);
      [[maybe_unused]] const ssize_t told = write(ready[1], "x", 1);
      while (true) {
        for (std::int64_t at = 0; at < 32 * kMiB; at += 8 * kMiB) {
          store->wait(store->write(at, pages.bytes()));
        }
      }
    } catch (...) {
    }
    _exit(1);
  }
  close(ready[1]);
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << "it ended by itself";
  EXPECT_TRUE(directory.empty());
}

TEST_P(Limits, OfTimeDoNotCountWhileTheProcessIsStopped) {
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      const Directory directory("/dev/shm");  // no disk, which others may keep busy
      StoreOptions wanted = options_in(directory.path(), kMiB, GetParam());
      wanted.deadline_seconds = 1.0;
      auto store = Store::make(wanted);
      const Pages pages(kMiB);
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (std::chrono::steady_clock::now() < end) {
        store->wait(store->write(0, pages.bytes()));
      }
      code = 0;
    } catch (...) {
    }
    _exit(code);
  }
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    kill(child, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
    kill(child, SIGCONT);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(All, Limits,
                         ::testing::Values(IoBackendKind::io_uring, IoBackendKind::posix),
                         [](const auto& one) { return name_of(one.param); });

// -- directories --

std::string refusal(const std::string& directory) {
  return message<UsageError>([&] { Store::make(options_in(directory, kPage)); });
}

TEST(Directories, ThatAreMissingNoDirectoriesOrLinksAreRefused) {
  const Directory directory;
  EXPECT_TRUE(has(refusal(directory / "none"), "Make the directory"));
  EXPECT_TRUE(has(refusal(""), "empty"));
  std::ofstream(directory / "file") << "text";
  EXPECT_TRUE(has(refusal(directory / "file"), "is no directory"));
  std::filesystem::create_directory(directory / "real");
  std::filesystem::create_directory_symlink(directory / "real", directory / "link");
  EXPECT_TRUE(has(refusal(directory / "link"), "symbolic link"));
  EXPECT_TRUE(has(refusal(directory / "link/"), "symbolic link"));
  EXPECT_NO_THROW(Store::make(options_in(directory / "real/", kPage)));
}

// Who names a disk twice meant another one; half of the speed would be missing silently.
TEST(Directories, NamedTwiceAreRefusedHoweverTheyAreSpelled) {
  const Directory directory;
  std::filesystem::create_directory(directory / "a");
  std::filesystem::create_directory(directory / "b");
  const auto text_of = [&](const std::vector<std::string>& names) {
    StoreOptions wanted = options_in(directory.path(), 16 * kPage);
    wanted.directories.clear();
    for (const std::string& name : names) wanted.directories.push_back(directory / name);
    const std::string made = message<UsageError>([&] { Store::make(wanted); });
    EXPECT_EQ(message<UsageError>([&] { Store::check(wanted); }), made);
    return made;
  };
  EXPECT_TRUE(has(text_of({"a", "a"}), "are the same directory"));
  EXPECT_TRUE(has(text_of({"a", "b", "a/"}), "are the same directory"));
  EXPECT_TRUE(has(text_of({"a", "./a"}), (directory / "./a").c_str()));
  EXPECT_TRUE(has(text_of({"b/../a", "a"}), "are the same directory"));
  EXPECT_EQ(text_of({"a", "b"}), "threw nothing");
}

/// Bytes of the files without a name that this process holds in a directory.
std::int64_t held_in(const std::string& directory) {
  std::int64_t sum = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    struct stat file {};
    if (target.rfind(directory + "/", 0) == 0 && stat(entry.path().c_str(), &file) == 0) {
      sum += file.st_size;
    }
  }
  return sum;
}

TEST(Directories, TakeBytesInProportionToTheirSpeed) {
#ifdef ZSHARD_SANITIZER
  GTEST_SKIP() << "sanitizers bring their own pread() and pwrite()";
#endif
  const Directory fast;
  const Directory slow;
  const auto shares = [&](const std::vector<std::string>& directories) {
    StoreOptions wanted = options_in(fast.path(), 80 * kMiB);
    wanted.directories = directories;
    const auto store = Store::make(wanted);
    const std::pair held(held_in(fast.path()), held_in(slow.path()));
    EXPECT_EQ(held.first + held.second, wanted.bytes);
    return held;
  };
  slow_directory.store(&slow.path());
  const auto one = shares({fast.path(), slow.path()});
  const auto other = shares({slow.path(), fast.path()});
  slow_directory.store(nullptr);
  EXPECT_LT(2 * one.second, one.first);
  EXPECT_LT(2 * other.second, other.first);
}

TEST(Directories, OfOthersAreRefused) {
  if (geteuid() != 0) {
    EXPECT_TRUE(has(refusal("/"), "belongs to uid 0"));
    return;
  }
  const Directory directory;
  ASSERT_EQ(chown(directory.path().c_str(), kNobody, kNobody), 0);
  EXPECT_TRUE(has(refusal(directory.path()), "belongs to uid 65534"));
}

TEST(Directories, ThatCannotBeWrittenAreRefused) {
  EXPECT_EQ(in_child([]() -> std::string {
              if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) {
                return "no other user";
              }
              const Directory directory;
              chmod(directory.path().c_str(), 0500);
              const std::string text = refusal(directory.path());
              return has(text, "chmod") ? "" : text;
            }),
            "");
}

TEST(Directories, OnReadOnlyFileSystemsAreRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to mount a file system";
  const std::string result = in_child([]() -> std::string {
    const Directory directory;
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", directory.path().c_str(), "tmpfs", MS_RDONLY, "size=1m") != 0) {
      return "skip";
    }
    const std::string text = refusal(directory.path());
    return has(text, "read-only") ? "" : text;
  });
  if (result == "skip") GTEST_SKIP() << "no mounts here";
  EXPECT_EQ(result, "");
}

TEST(Directories, WithoutNamelessFilesGetAPrivateOneForAnInstant) {
  // As on file systems without O_TMPFILE: the flag is refused, the rest is as always. The flag
  // contains O_DIRECTORY, and only its own bit tells it apart.
  EXPECT_EQ(in_child([]() -> std::string {
              const Directory directory;
              constexpr unsigned kOwnBit = O_TMPFILE & ~O_DIRECTORY;
              std::vector<sock_filter> program{
                  BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
                  BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
                  BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kOwnBit, 0, 1),
                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
              const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
              if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
                  prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
                return "";
              }
              auto store = Store::make(options_in(directory.path(), kMiB));
              if (!directory.empty()) return "a name is left";
              const Pages pages(kMiB);
              return round_trip(*store, pages.bytes());
            }),
            "");
}

// -- tuner --

TEST(Tuner, MeasuresWhatItIsAskedFor) {
  const Directory directory;
  for (const IoBackendKind kind : {IoBackendKind::automatic, IoBackendKind::posix}) {
    for (const int threads : {1, 2}) {
      Measurement result;
      try {
        result = measure({.directory = directory.path(),
                          .bytes = 3 * kMiB + 1,
                          .block_bytes = 100'000,
                          .depth = 3,
                          .backend = kind,
                          .threads = threads,
                          .repeats = 1});
      } catch (const UsageError& error) {
        GTEST_SKIP() << error.what();  // a temporary directory in memory
      }
      EXPECT_GT(result.read, 0);
      EXPECT_GT(result.write, 0);
      EXPECT_GT(result.mixed, 0);
      EXPECT_EQ(result.threads, threads);
      EXPECT_EQ(result.depth, 3);
      EXPECT_EQ(result.block_bytes, 25 * kPage);
      EXPECT_GE(score(result), std::min({result.read, result.write, result.mixed}));
      EXPECT_LE(score(result), std::max({result.read, result.write, result.mixed}));
    }
  }
  EXPECT_TRUE(directory.empty());
}

TEST(Tuner, RecommendsAGoodSettingOfItsTable) {
  const Directory directory;
  int calls = 0;
  Tuning tuning;
  try {
    tuning = tune({.directory = directory.path(),
                   .bytes = 8 * kMiB,
                   .repeats = 1,
                   .progress = [&](int done, int all, const Measurement&) {
                     EXPECT_EQ(done, ++calls);
                     EXPECT_LE(done, all);
                   }});
  } catch (const UsageError& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(static_cast<std::size_t>(calls), tuning.table.size());
  double best = 0;
  for (const Measurement& one : tuning.table) best = std::max(best, score(one));
  EXPECT_GE(score(tuning.recommended), 0.95 * best);
  const bool uring = std::any_of(tuning.table.begin(), tuning.table.end(), [](const auto& one) {
    return one.backend == IoBackendKind::io_uring;
  });
  EXPECT_EQ(uring, tuning.io_uring_refusal.empty());
}

TEST(Tuner, SaysThatThreadsCannotBeStarted) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
#ifdef ZSHARD_SANITIZER
  GTEST_SKIP() << "sanitizers need threads of their own";
#endif
  for (const IoBackendKind kind : {IoBackendKind::automatic, IoBackendKind::posix}) {
    EXPECT_EQ(in_child([&]() -> std::string {
                const rlimit none{0, 0};
                if (setgroups(0, nullptr) != 0 || setgid(kNobody) != 0 ||
                    setrlimit(RLIMIT_NPROC, &none) != 0 || setuid(kNobody) != 0) {
                  return "no other user";
                }
                const Directory directory;
                const std::string text = message<IoError>([&] {
                  measure({.directory = directory.path(), .bytes = kMiB, .backend = kind});
                });
                return has(text, "cannot start the threads") && has(text, "ulimit -u") ? "" : text;
              }),
              "");
  }
}

TEST(Tuner, RefusesThePageCacheAndBadNumbers) {
  const Directory directory;
  if (access("/dev/shm", W_OK) == 0) {
    const Directory memory("/dev/shm");
    EXPECT_TRUE(
        has(message<UsageError>([&] { measure({.directory = memory.path()}); }), "page cache"));
    EXPECT_TRUE(
        has(message<UsageError>([&] { tune({.directory = memory.path()}); }), "page cache"));
  }
  const auto with = [&](auto change) {
    MeasureOptions options{.directory = directory.path(), .bytes = kMiB, .repeats = 1};
    change(options);
    return message<UsageError>([&] { measure(options); });
  };
  EXPECT_TRUE(has(with([](auto& o) { o.depth = 0; }), "depth"));
  EXPECT_TRUE(has(with([](auto& o) { o.block_bytes = 1; }), "block"));
  EXPECT_TRUE(has(with([](auto& o) { o.block_bytes = std::int64_t{1} << 40; }), "block"));
  EXPECT_TRUE(has(with([](auto& o) { o.threads = 0; }), "threads"));
  EXPECT_TRUE(has(with([](auto& o) { o.bytes = 10; }), "size"));
  EXPECT_TRUE(has(with([](auto& o) { o.repeats = 0; }), "repeats"));
  EXPECT_TRUE(has(with([](auto& o) { o.directory = "/none"; }), "Make the directory"));
}

}  // namespace
}  // namespace zshard::offload::testing
