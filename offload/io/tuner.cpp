#include "offload/io/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <iterator>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "offload/io/backend.hpp"
#include "offload/io/driver.hpp"
#include "offload/io/extent_file.hpp"
#include "offload/io/pages.hpp"
#include "offload/io/posix_driver.hpp"
#include "offload/io/thread.hpp"
#include "offload/io/uring_driver.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"

namespace zshard::offload {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kKiB = 1024;
constexpr std::int64_t kMiB = 1024 * kKiB;
constexpr std::int64_t kMostInFlight = 1024 * kMiB;
constexpr int kMostDepth = 4096;
constexpr int kMostThreads = 256;
constexpr double kGoodEnough = 0.95;

struct Setting {
  IoBackendKind backend = IoBackendKind::automatic;
  std::int64_t block = 0;
  int depth = 0;
};

constexpr auto kUring = IoBackendKind::io_uring;
constexpr auto kPosix = IoBackendKind::posix;
/// From few bytes in flight to many, in blocks that real arrays and virtual disks like.
constexpr std::array kSettings = {
    Setting{kUring, 128 * kKiB, 8},  Setting{kUring, 128 * kKiB, 32},
    Setting{kUring, 256 * kKiB, 16}, Setting{kUring, 512 * kKiB, 8},
    Setting{kUring, 1 * kMiB, 4},    Setting{kUring, 1 * kMiB, 8},
    Setting{kUring, 1 * kMiB, 32},   Setting{kUring, 2 * kMiB, 4},
    Setting{kUring, 2 * kMiB, 16},   Setting{kUring, 4 * kMiB, 2},
    Setting{kUring, 4 * kMiB, 8},    Setting{kPosix, 4 * kMiB, 1},
    Setting{kPosix, 4 * kMiB, 2},    Setting{kPosix, 4 * kMiB, 4},
    Setting{kPosix, 4 * kMiB, 8},
};

enum class Pass : std::uint8_t { read, write, mixed };

/// One rank's part: a file, memory for two rounds of `depth` blocks, and a backend over them.
class Stream {
 public:
  Stream(const std::string& directory, std::int64_t bytes)
      : file_(ExtentFile::make(directory, bytes, 0)) {
    if (file_.direct()) return;
    throw UsageError(
        fmt::format("{} cannot be measured: {}, so that this would measure the page cache. Name a "
                    "directory on the disk itself",
                    base::quoted(directory), file_.refusal()));
  }

  /// Name of the driver.
  std::string use(const Setting& setting) {
    backend_.reset();
    block_ = std::min(setting.block, file_.bytes());
    depth_ = setting.depth;
    const std::int64_t wanted = 2 * block_ * depth_;
    if (static_cast<std::int64_t>(pages_.bytes().size()) < wanted) pages_ = Pages(wanted);
    requests_.reserve(static_cast<std::size_t>(depth_));
    try {
      std::unique_ptr<Driver> driver = make(setting);
      std::string name = driver->name();
      backend_ = std::make_unique<IoBackend>(
          std::move(driver), StripeMap(file_.bytes(), block_, {1}),
          BackendOptions{.block_bytes = block_, .deadline_seconds = kDeadline});
      return name;
    } catch (const std::system_error& error) {
      throw IoError(fmt::format(
          "bench io: cannot start the threads of {} x {} bytes: {}. Raise the limit of processes "
          "(ulimit -u), or lower the depth",
          depth_, block_, error.what()));
    }
  }

  void run(Pass pass) {
    // Two rounds in turn: while one is waited for, the other keeps the device busy.
    std::array<IoBackend::Ticket, 2> tickets{};
    const std::int64_t half = file_.bytes() / block_ / 2 * block_;
    std::int64_t at = 0;
    try {
      for (std::size_t round = 0; at < file_.bytes(); round = 1 - round) {
        backend_->wait(std::exchange(tickets[round], 0));
        requests_.clear();
        std::byte* memory =
            pages_.bytes().data() + static_cast<std::int64_t>(round) * block_ * depth_;
        for (int i = 0; i < depth_ && at < file_.bytes(); ++i) {
          const std::int64_t bytes = std::min(block_, file_.bytes() - at);
          const std::int64_t index = at / block_;
          // Mixed: reads of the first half, writes of the second, in turn.
          const bool write = pass == Pass::write || (pass == Pass::mixed && index % 2 == 1);
          std::int64_t offset = at;
          if (pass == Pass::mixed && half > 0) {
            offset = std::min(index / 2 * block_ + (write ? half : 0), file_.bytes() - bytes);
          }
          requests_.push_back({write ? Operation::write : Operation::read, offset / kPage * kPage,
                               bytes, memory + i * block_});
          at += bytes;
        }
        tickets[round] = backend_->submit(requests_);
      }
      for (IoBackend::Ticket& ticket : tickets) backend_->wait(std::exchange(ticket, 0));
    } catch (const IoFailed& failed) {
      backend_->settle();
      throw IoError(failure_text(failed.failure(), file_.directory(), 0, "measuring", kDeadline));
    }
  }

 private:
  static constexpr double kDeadline = 60;

  std::unique_ptr<Driver> make(const Setting& setting) {
    if (setting.backend == kPosix) return make_posix_driver({file_.descriptor()}, setting.depth);
    std::string reason;
    const DriverOptions options{.backend = kUring,
                                .files = {file_.descriptor()},
                                .buffers = pages_.bytes(),
                                .block_bytes = block_,
                                .depth = setting.depth};
    if (auto driver = make_uring_driver(options, reason)) return driver;
    throw UsageError("io_uring cannot be had: " + reason + ". Measure io_backend = posix");
  }

  ExtentFile file_;
  Pages pages_;
  std::int64_t block_ = 0;
  int depth_ = 0;
  std::vector<IoRequest> requests_;
  std::unique_ptr<IoBackend> backend_;
};

class Streams {
 public:
  Streams(const std::string& directory, std::int64_t bytes, int threads) {
    check_directory(directory);
    const std::int64_t each = (bytes / threads + kPage - 1) / kPage * kPage;
    bytes_ = each * threads;
    check_space({{directory, each}}, 0, threads);
    for (int i = 0; i < threads; ++i) {
      streams_.push_back(std::make_unique<Stream>(directory, each));
    }
  }

  Measurement measure(const Setting& setting, int repeats) {
    Measurement result{.backend = setting.backend,
                       .block_bytes = setting.block,
                       .depth = setting.depth,
                       .threads = static_cast<int>(streams_.size()),
                       .bytes = bytes_};
    for (const auto& stream : streams_) result.driver = stream->use(setting);
    if (!std::exchange(written_, true)) run(Pass::write);
    for (int i = 0; i < repeats; ++i) {
      result.read = std::max(result.read, run(Pass::read));
      result.write = std::max(result.write, run(Pass::write));
      result.mixed = std::max(result.mixed, run(Pass::mixed));
    }
    return result;
  }

 private:
  /// Bytes a second.
  double run(Pass pass) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::exception_ptr> errors(streams_.size());
    std::vector<std::thread> threads;
    const auto run_one = [this, pass, &errors](std::size_t i) {
      try {
        streams_[i]->run(pass);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    };
    threads.reserve(streams_.size());
    for (std::size_t i = 1; i < streams_.size(); ++i) {
      try {
        threads.push_back(start_thread("zshard-bench", [&run_one, i] { run_one(i); }));
      } catch (const std::system_error& error) {
        errors[i] = std::make_exception_ptr(IoError(
            fmt::format("bench io: cannot start {} threads: {}", streams_.size(), error.what())));
        break;
      }
    }
    run_one(0);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    for (const std::exception_ptr& error : errors) {
      if (error != nullptr) std::rethrow_exception(error);
    }
    return static_cast<double>(bytes_) / std::max(seconds.count(), 1e-9);
  }

  std::vector<std::unique_ptr<Stream>> streams_;
  std::int64_t bytes_ = 0;
  bool written_ = false;
};

void check_numbers(std::int64_t bytes, int threads, int repeats) {
  const auto refuse = [](const std::string& what) { throw UsageError("bench io: " + what); };
  if (threads < 1 || threads > kMostThreads) {
    refuse(fmt::format("threads = {}, it takes 1 to {}", threads, kMostThreads));
  }
  if (bytes / threads < kPage) {
    refuse(fmt::format("size = {} bytes, it takes at least {} a thread", bytes, kPage));
  }
  if (repeats < 1) refuse(fmt::format("repeats = {}, it takes at least 1", repeats));
}

std::int64_t in_flight(const Measurement& measurement) {
  return measurement.block_bytes * measurement.depth;
}

}  // namespace

Measurement measure(const MeasureOptions& options) {
  check_numbers(options.bytes, options.threads, options.repeats);
  if (options.depth < 1 || options.depth > kMostDepth) {
    throw UsageError(
        fmt::format("bench io: depth = {}, it takes 1 to {}", options.depth, kMostDepth));
  }
  if (options.block_bytes < kPage || options.block_bytes > kMostInFlight / options.depth) {
    throw UsageError(fmt::format(
        "bench io: block = {} bytes with depth {}: a block has at least {} bytes, and block times "
        "depth is at most {}. Lower --block or --depth",
        options.block_bytes, options.depth, kPage, kMostInFlight));
  }
  Setting setting{.backend = options.backend,
                  .block = (options.block_bytes + kPage - 1) / kPage * kPage,
                  .depth = options.depth};
  if (setting.backend == IoBackendKind::automatic) {
    setting.backend = io_uring_refusal().empty() ? kUring : kPosix;
  }
  const std::int64_t whole = (options.bytes + setting.block - 1) / setting.block * setting.block;
  return Streams(options.directory, whole, options.threads).measure(setting, options.repeats);
}

Tuning tune(const TuneOptions& options) {
  check_numbers(options.bytes, options.threads, options.repeats);
  Tuning tuning{.io_uring_refusal = io_uring_refusal()};
  std::vector<Setting> settings;
  std::copy_if(kSettings.begin(), kSettings.end(), std::back_inserter(settings),
               [&](const Setting& setting) {
                 return setting.backend == kPosix || tuning.io_uring_refusal.empty();
               });
  Streams streams(options.directory, options.bytes, options.threads);
  for (const Setting& setting : settings) {
    tuning.table.push_back(streams.measure(setting, options.repeats));
    if (!options.progress) continue;
    options.progress(static_cast<int>(tuning.table.size()), static_cast<int>(settings.size()),
                     tuning.table.back());
  }
  double best = 0.0;
  for (const Measurement& one : tuning.table) best = std::max(best, score(one));
  const Measurement* chosen = nullptr;
  for (const Measurement& one : tuning.table) {
    if (score(one) < kGoodEnough * best) continue;
    // The table has io_uring first, which wins where they are equal.
    if (chosen == nullptr || in_flight(one) < in_flight(*chosen)) chosen = &one;
  }
  tuning.recommended = *chosen;
  return tuning;
}

double score(const Measurement& measurement) {
  if (measurement.read <= 0 || measurement.write <= 0 || measurement.mixed <= 0) return 0.0;
  return 3.0 / (1.0 / measurement.read + 1.0 / measurement.write + 1.0 / measurement.mixed);
}

}  // namespace zshard::offload
