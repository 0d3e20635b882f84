#include "offload/tiers/store.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <system_error>
#include <utility>

#include "offload/io/backend.hpp"
#include "offload/io/driver.hpp"
#include "offload/io/extent_file.hpp"
#include "offload/io/failure.hpp"
#include "offload/io/lock_limit.hpp"
#include "offload/io/pages.hpp"
#include "offload/io/stripe.hpp"
#include "offload/io/thread.hpp"
#include "offload/io/verifier.hpp"
#include "runtime/base/fork.hpp"
#include "runtime/base/log.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"

namespace zshard::offload {
namespace {

static_assert(Verifier::kPage == kAlignment);

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kMostBlock = 1024 * kMiB;  // one piece of registered memory
/// What is written and read back while the store is made; what lies behind is filled beside the
/// caller's work.
constexpr std::int64_t kLeastProbe = 4 * kMiB;
constexpr std::int64_t kMostProbe = 64 * kMiB;
constexpr std::int64_t kProbeShare = 16;
// Memory of its own for that, beside the caller's buffers: plans leave room for little.
constexpr std::int64_t kMostZeros = 4 * kMiB;
constexpr std::int64_t kOwnReadBack = 8 * kMiB;
/// Below this the speeds of several directories are not worth measuring.
constexpr std::int64_t kLeastMeasured = 64 * kMiB;
constexpr std::int64_t kMeasured = 16 * kMiB;  // of each directory

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void check_options(const StoreOptions& options) {
  const auto refuse = [](const std::string& what) { throw UsageError("nvme tier: " + what); };
  if (options.directories.empty()) {
    refuse("no directory. Set offload.nvme_dir to a directory on the disk that is to be used");
  }
  if (options.bytes < 0 || options.bytes % kAlignment != 0) {
    refuse(
        fmt::format("a store of {} bytes, which is no multiple of {}", options.bytes, kAlignment));
  }
  if (options.block_bytes < 1) refuse(fmt::format("io_block_bytes = {}", options.block_bytes));
  if (options.depth < 1) refuse(fmt::format("io_depth = {}", options.depth));
  if (!options.checksums.empty() &&
      static_cast<std::int64_t>(options.checksums.size()) < verify_words(options.bytes)) {
    refuse(fmt::format("{} words for checksums, {} are needed", options.checksums.size(),
                       verify_words(options.bytes)));
  }
  check_directories(options.directories);
}

/// Bytes a second of writing and reading back, one block at a time.
double measure(const std::string& directory, int rank) {
  const ExtentFile file = ExtentFile::make(directory, kMeasured, rank);
  const Pages pages(kMeasured / 4);
  const std::span<std::byte> block = pages.bytes();
  const auto bytes = static_cast<std::int64_t>(block.size());
  const FileSizeSignalGuard guard;
  const auto pass = [&](Operation operation) {
    for (std::int64_t at = 0; at < kMeasured; at += bytes) {
      const ssize_t moved = operation == Operation::read
                                ? pread(file.descriptor(), block.data(), block.size(), at)
                                : pwrite(file.descriptor(), block.data(), block.size(), at);
      if (moved == bytes) continue;
      throw IoError(
          failure_text({.kind = moved < 0 ? IoFailure::Kind::system : IoFailure::Kind::no_progress,
                        .operation = operation,
                        .offset = at,
                        .bytes = bytes,
                        .error = moved < 0 ? errno : 0},
                       directory, rank, "measuring its speed", 0));
    }
  };
  pass(Operation::write);
  const auto start = std::chrono::steady_clock::now();
  pass(Operation::write);
  pass(Operation::read);
  return 2.0 * static_cast<double>(kMeasured) / std::max(seconds_since(start), 1e-9);
}

StripeMap make_map(const StoreOptions& options, std::int64_t stripe) {
  std::vector<int> weights(options.directories.size(), 1);
  if (weights.size() > 1 && options.bytes >= kLeastMeasured) {
    std::vector<double> speeds;
    for (const std::string& directory : options.directories) {
      speeds.push_back(measure(directory, options.rank));
    }
    weights = StripeMap::weights_of(speeds);
  }
  return {options.bytes, stripe, std::move(weights)};
}

std::int64_t block_of(const StoreOptions& options) {
  const std::int64_t most = std::min(options.block_bytes, kMostBlock);
  return (most + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<SpaceWanted> space_of(const StoreOptions& options, const StripeMap& map) {
  std::vector<SpaceWanted> wanted;
  for (int i = 0; i < map.files(); ++i) {
    wanted.push_back({options.directories[static_cast<std::size_t>(i)], map.file_bytes(i)});
  }
  return wanted;
}

/// Everything that a device that never answers may still use.
struct State {
  StoreOptions options;
  std::vector<ExtentFile> files;
  std::unique_ptr<Verifier> verifier;
  Pages zeros;  // of prepare()
  Pages back;
  std::unique_ptr<IoBackend> backend;
};

/// What a device still uses after its store is gone.
class Remains {
 public:
  void keep(std::unique_ptr<State> state) {
    const std::lock_guard lock(mutex_);
    states_.push_back(std::move(state));
  }
  /// Gives back what has been answered in the meantime.
  void sweep() {
    const std::lock_guard lock(mutex_);
    std::erase_if(states_, [](const auto& state) { return state->backend->ended(); });
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<State>> states_;
};

/// Outlives all static objects: a device may answer after main().
Remains& remains() {
  static auto* const instance = new Remains;
  return *instance;
}

class DiskStore final : public Store {
 public:
  explicit DiskStore(StoreOptions options) : state_(std::make_unique<State>()) {
    state_->options = std::move(options);
    try {
      open();
      prepare();
    } catch (...) {
      end();
      throw;
    }
  }
  ~DiskStore() override { end(); }

  Ticket read(std::int64_t offset, std::span<std::byte> memory) override {
    return submit(Operation::read, offset, memory);
  }
  Ticket write(std::int64_t offset, std::span<const std::byte> memory) override {
    // The driver only reads the memory of a write.
    return submit(Operation::write, offset, {const_cast<std::byte*>(memory.data()), memory.size()});
  }
  void wait(Ticket ticket) override {
    try {
      io().wait(ticket);
    } catch (const IoFailed& failed) {
      fail(failed.failure());
    }
  }
  bool done(Ticket ticket) const override { return state_->backend->poll(ticket); }
  void settle() noexcept override { io().settle(); }

  IoTraffic traffic() const override { return state_->backend->traffic(); }
  std::int64_t bytes() const override { return options().bytes; }
  double raw_read() const override { return raw_read_; }
  double raw_write() const override { return raw_write_; }
  std::string backend() const override { return name_; }

 private:
  [[nodiscard]] const StoreOptions& options() const { return state_->options; }
  IoBackend& io() { return *state_->backend; }

  void open() {
    const std::int64_t block = block_of(options());
    StripeMap map = make_map(options(), block);
    DriverOptions driver{
        .backend = options().backend,
        .buffers = options().register_buffers ? options().buffers : std::span<std::byte>{},
        .block_bytes = block,
        .depth = options().depth,
        .rank = options().rank};
    // Before the files: reserving space that is not there would take what is left from others
    // first.
    check_space(space_of(options(), map), options().rank, 1);
    bool direct = true;
    for (int i = 0; i < map.files(); ++i) {
      const std::string& directory = options().directories[static_cast<std::size_t>(i)];
      state_->files.push_back(ExtentFile::make(directory, map.file_bytes(i), options().rank));
      const ExtentFile& file = state_->files.back();
      driver.files.push_back(file.descriptor());
      direct = direct && file.direct();
      if (!file.direct()) say_buffered(file);
    }
    ChosenDriver chosen = make_driver(driver);
    name_ = chosen.driver->name() + (direct ? "" : ", page cache");
    state_->backend =
        std::make_unique<IoBackend>(std::move(chosen.driver), std::move(map),
                                    BackendOptions{.block_bytes = chosen.block_bytes,
                                                   .deadline_seconds = options().deadline_seconds});
  }

  void say_buffered(const ExtentFile& file) const {
    static std::atomic_flag said;
    if (said.test_and_set()) return;
    base::log_warning(base::Topic::offload, options().rank,
                      "I/O in {} goes through the page cache, which takes memory and time: {}",
                      base::quoted(file.directory()), file.refusal());
  }

  /// Writes the first zeros, reads them back, and leaves the rest to the backend.
  void prepare() {
    const std::int64_t bytes = options().bytes;
    if (bytes > 0) {
      const bool reserved = std::all_of(state_->files.begin(), state_->files.end(),
                                        [](const ExtentFile& file) { return file.reserved(); });
      const std::int64_t probe = std::min(
          bytes,
          std::clamp(bytes / kProbeShare / kAlignment * kAlignment, kLeastProbe, kMostProbe));
      Pages& zeros = state_->zeros = Pages(std::min({io().block_bytes(), probe, kMostZeros}));
      // As much as is in flight, so that no two reads have the same memory. Nobody uses the buffers
      // yet, and what comes there are zeros.
      Pages& back = state_->back;
      std::span<std::byte> target = options().buffers;
      if (static_cast<std::int64_t>(target.size()) < std::min(probe, kOwnReadBack)) {
        back = Pages(std::min(probe, kOwnReadBack));
        target = back.bytes();
      }
      raw_write_ = pass(Operation::write, probe, zeros.bytes());
      // Fresh extents are slower than those that are overwritten, which is what steps do.
      if (bytes > kLeastProbe) raw_write_ = pass(Operation::write, probe, zeros.bytes());
      raw_read_ = pass(Operation::read, probe, target);
      io().fill(probe, std::move(zeros));
      // Nothing is set aside there: a full disk has to show now, not in the middle of training.
      if (!reserved && probe < bytes) {
        const IoRequest last{Operation::read, bytes - kAlignment, kAlignment, target.data()};
        run(io().submit({&last, 1}));
      }
      back = Pages();
    }
    io().clear_traffic();
    if (options().checksums.empty()) return;
    state_->verifier = std::make_unique<Verifier>(
        options().checksums.first(static_cast<std::size_t>(verify_words(bytes))));
    io().set_verifier(state_->verifier.get());
  }

  /// Bytes a second of one pass over the first `bytes`, its blocks in turn in the blocks of
  /// `memory`; writes may have one for all.
  double pass(Operation operation, std::int64_t bytes, std::span<std::byte> memory) {
    const std::int64_t room = static_cast<std::int64_t>(memory.size()) / kAlignment * kAlignment;
    const std::int64_t block = std::min({io().block_bytes(), bytes, room});
    const std::int64_t places = std::min<std::int64_t>(room / block, options().depth);
    const std::int64_t in_flight =
        operation == Operation::read ? places : std::int64_t{options().depth};
    std::vector<Ticket> tickets(static_cast<std::size_t>(in_flight), 0);
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t at = 0, i = 0; at < bytes; at += block, ++i) {
      Ticket& ticket = tickets[static_cast<std::size_t>(i % in_flight)];
      run(std::exchange(ticket, 0));
      const IoRequest request{operation, at, std::min(block, bytes - at),
                              memory.data() + i % places * block};
      ticket = io().submit({&request, 1});
    }
    for (Ticket& ticket : tickets) run(std::exchange(ticket, 0));
    return static_cast<double>(bytes) / std::max(seconds_since(start), 1e-9);
  }

  /// Waits for a part of prepare().
  void run(Ticket ticket) {
    try {
      io().wait(ticket);
    } catch (const IoFailed& failed) {
      IoFailure failure = failed.failure();
      failure.filling = failure.operation == Operation::write;
      fail(failure);
    }
  }

  Ticket submit(Operation operation, std::int64_t offset, std::span<std::byte> memory) {
    const auto bytes = static_cast<std::int64_t>(memory.size());
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    if (offset < 0 || offset % kAlignment != 0 || bytes % kAlignment != 0 ||
        address % static_cast<std::uintptr_t>(kAlignment) != 0 || bytes > options().bytes ||
        offset > options().bytes - bytes) {
      throw UsageError(fmt::format(
          "nvme tier: {} of {} bytes at offset {} of {}, memory at {}: all are multiples of {}",
          operation == Operation::read ? "read" : "write", bytes, offset, options().bytes,
          fmt::ptr(memory.data()), kAlignment));
    }
    if (bytes == 0) return 0;
    const IoRequest request{operation, offset, bytes, memory.data()};
    try {
      return io().submit({&request, 1});
    } catch (const IoFailed& failed) {
      fail(failed.failure());
    }
  }

  [[noreturn]] void fail(const IoFailure& failure) const {
    const std::string what = options().describe ? options().describe(failure.offset) : "";
    throw IoError(failure_text(failure,
                               state_->files[static_cast<std::size_t>(failure.file)].directory(),
                               options().rank, what, options().deadline_seconds));
  }

  void end() noexcept {
    if (state_ == nullptr) return;
    if (!mark_.here()) {
      // A forked child: the thread is the parent's.
      static_cast<void>(state_.release());
      return;
    }
    if (state_->backend == nullptr || state_->backend->stop()) return;
    base::log_error(
        base::Topic::offload, options().rank,
        "transfers in {} have not ended within {} s; their memory and files are kept as "
        "long as the device may use them",
        base::quoted(options().directories.front()), options().deadline_seconds);
    remains().keep(std::move(state_));
  }

  const base::ProcessMark mark_;
  std::unique_ptr<State> state_;
  std::string name_;
  double raw_read_ = 0.0;
  double raw_write_ = 0.0;
};

}  // namespace

void Store::check(const StoreOptions& options) {
  check_options(options);
  // Speeds are not known here: equal shares.
  const StripeMap map(options.bytes, block_of(options),
                      std::vector<int>(options.directories.size(), 1));
  check_space(space_of(options, map), options.rank, std::max(1, options.ranks_here));
}

bool Store::may_register(const StoreOptions& options, std::int64_t buffers) {
  if (options.backend == IoBackendKind::posix) return true;
  const std::int64_t each = locked_bytes(options.depth, buffers);
  const int ranks = std::max(1, options.ranks_here);
  std::int64_t all = 0;
  if (__builtin_mul_overflow(each, std::int64_t{ranks}, &all)) {
    all = std::numeric_limits<std::int64_t>::max();
  }
  const LockLimit limit = lock_limit();
  if (limit.allows(all)) return true;
  // Where there is no ring at all, make() says so.
  if (!io_uring_refusal().empty()) return false;
  static std::atomic_flag said;
  if (!said.test_and_set()) {
    base::log_info(base::Topic::offload, options.rank,
                   "io_uring will not register buffers: {} bytes would be locked, {} for each of "
                   "{} rank(s) here, and {}. Going on without: same bits.",
                   all, each, ranks, limit.text());
  }
  return false;
}

std::unique_ptr<Store> Store::make(StoreOptions options) {
  check_options(options);
  const int rank = options.rank;
  remains().sweep();
  try {
    return std::make_unique<DiskStore>(std::move(options));
  } catch (const std::system_error& error) {
    throw IoError(
        fmt::format("cannot start the threads of the nvme tier: {} (rank {}). Raise the "
                    "limit of processes (ulimit -u), or take io_backend = io_uring",
                    error.what(), rank));
  }
}

}  // namespace zshard::offload
