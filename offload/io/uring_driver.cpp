#include "offload/io/uring_driver.hpp"

#include "runtime/base/build_config.hpp"

#if ZSHARD_HAS_IO_URING

#include <fmt/format.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <utility>

#include "offload/io/lock_limit.hpp"
#include "runtime/base/descriptor.hpp"
#include "runtime/base/log.hpp"
#include "runtime/base/system_reason.hpp"

namespace zshard::offload {
namespace {

constexpr std::uint64_t kWakeTag = std::numeric_limits<std::uint64_t>::max() - 16;
/// The system registers no larger piece of memory.
constexpr std::size_t kMostRegistered = std::size_t{1} << 30;

/// locked: what the call would lock.
std::string describe_error(int error, std::int64_t locked = 0) {
  std::string text = base::system_reason(error);
  if (error == EPERM || error == EACCES) {
    text += "; kernel.io_uring_disabled or a seccomp filter forbids it";
  } else if (error == ENOSYS) {
    text += "; this kernel or a seccomp filter has no io_uring";
  } else if (const LockLimit limit = lock_limit(); error == ENOMEM && limit.counts()) {
    if (locked > 0) text += fmt::format("; {} bytes would be locked", locked);
    text += "; " + limit.text();
  }
  return text;
}

/// liburing maps and unmaps without libc, which the thread sanitizer does not see: it takes two
/// rings one after the other at one address for one. Counted before a ring ends, read after one
/// began.
std::atomic<std::uint32_t> ended_rings{0};

class UringDriver final : public Driver {
 public:
  UringDriver(int depth, int rank) : depth_(depth), rank_(rank) {}
  ~UringDriver() override {
    if (!open_) return;
    // The end of a ring lets go of these late: the file's space and the locked memory would be
    // missing in what is made next.
    if (fixed_files_) io_uring_unregister_files(&ring_);
    if (!buffers_.empty()) io_uring_unregister_buffers(&ring_);
    ended_rings.fetch_add(1, std::memory_order_acq_rel);
    io_uring_queue_exit(&ring_);
  }

  /// "" if the ring works.
  std::string open() {
    wake_ = base::Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) return "eventfd: " + base::system_reason(errno);
    const auto entries = static_cast<unsigned>(depth_) + kOwnEntries;
    int error = -io_uring_queue_init(entries, &ring_, 0);
    (void)ended_rings.load(std::memory_order_acquire);
    if (error != 0) return "io_uring_setup: " + describe_error(error, locked_bytes(depth_, 0));
    open_ = true;
    if (io_uring_probe* probe = io_uring_get_probe_ring(&ring_); probe != nullptr) {
      const bool has = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                       io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0 &&
                       io_uring_opcode_supported(probe, IORING_OP_POLL_ADD) != 0;
      io_uring_free_probe(probe);
      if (!has) return "this kernel's io_uring cannot read and write";
    } else {
      return "this kernel's io_uring is too old to say what it can do";
    }
    // One round trip: io_uring_enter may be forbidden where io_uring_setup is not.
    io_uring_prep_nop(io_uring_get_sqe(&ring_));
    const int submitted = io_uring_submit(&ring_);
    if (submitted < 0) return "io_uring_enter: " + describe_error(-submitted);
    io_uring_cqe* completion = nullptr;
    __kernel_timespec limit{5, 0};
    error = -io_uring_wait_cqe_timeout(&ring_, &completion, &limit);
    if (error != 0) return "io_uring_enter: " + describe_error(error);
    io_uring_cqe_seen(&ring_, completion);
    return "";
  }

  void register_files(const std::vector<int>& files) {
    files_ = files;
    const int error =
        -io_uring_register_files(&ring_, files.data(), static_cast<unsigned>(files.size()));
    fixed_files_ = error == 0;
    if (error != 0) {
      static std::atomic_flag said;
      if (!said.test_and_set()) {
        base::log_info(base::Topic::offload, rank_, "io_uring does not register files: {}",
                       describe_error(error));
      }
    }
  }

  void register_buffers(std::span<std::byte> buffers) {
    if (buffers.empty()) return;
    std::vector<iovec> pieces;
    for (std::size_t at = 0; at < buffers.size(); at += kMostRegistered) {
      pieces.push_back({buffers.data() + at, std::min(kMostRegistered, buffers.size() - at)});
    }
    const int error =
        -io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
    if (error == 0) {
      buffers_ = buffers;
      return;
    }
    static std::atomic_flag said;
    if (!said.test_and_set()) {
      base::log_info(
          base::Topic::offload, rank_,
          "io_uring does not register buffers of {} bytes: {}. Going on without.", buffers.size(),
          describe_error(error, locked_bytes(depth_, static_cast<std::int64_t>(buffers.size()))));
    }
  }

  void start(const RawRequest& request) override {
    io_uring_sqe* entry = broken_ == 0 ? io_uring_get_sqe(&ring_) : nullptr;
    if (entry == nullptr) {
      refused_.push_back({request.tag, broken_ != 0 ? -std::int64_t{broken_} : -EAGAIN});
      return;
    }
    const int file = fixed_files_ ? request.file : files_[static_cast<std::size_t>(request.file)];
    const auto bytes = static_cast<unsigned>(request.bytes);
    const auto offset = static_cast<std::uint64_t>(request.offset);
    const int buffer = registered(request);
    if (request.operation == Operation::read) {
      if (buffer >= 0) {
        io_uring_prep_read_fixed(entry, file, request.memory, bytes, offset, buffer);
      } else {
        io_uring_prep_read(entry, file, request.memory, bytes, offset);
      }
    } else {
      if (buffer >= 0) {
        io_uring_prep_write_fixed(entry, file, request.memory, bytes, offset, buffer);
      } else {
        io_uring_prep_write(entry, file, request.memory, bytes, offset);
      }
    }
    if (fixed_files_) entry->flags = static_cast<__u8>(entry->flags | IOSQE_FIXED_FILE);
    entry->user_data = request.tag;
    queued_.push_back(request.tag);
  }

  std::size_t reap(std::span<RawCompletion> out, std::int64_t microseconds) override {
    if (broken_ != 0) return reap_broken(out, microseconds);
    arm_wake();
    std::size_t count = collect(out);
    int result = 0;
    if (count > 0 || microseconds <= 0 || !refused_.empty() || woken_) {
      // Nothing to wait for. What is queued still has to go to the system.
      if (!queued_.empty()) result = io_uring_submit(&ring_);
    } else {
      __kernel_timespec limit{microseconds / 1'000'000, microseconds % 1'000'000 * 1000};
      io_uring_cqe* completion = nullptr;
      result = io_uring_submit_and_wait_timeout(&ring_, &completion, 1, &limit, nullptr);
    }
    judge(result);
    count += collect(out.subspan(count));
    while (count < out.size() && !refused_.empty()) {
      out[count++] = refused_.back();
      refused_.pop_back();
    }
    woken_ = false;
    return count;
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    // Fails only when the counter is full: then the wake-up is pending anyway.
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  }

  int capacity() const override { return depth_; }
  std::string name() const override {
    return std::string("io_uring") + (buffers_.empty() ? "" : ", registered buffers");
  }

  /// Reserves what start() and reap() append to.
  void reserve() {
    queued_.reserve(static_cast<std::size_t>(depth_) + kOwnEntries);
    refused_.reserve(static_cast<std::size_t>(depth_) + kOwnEntries);
  }

 private:
  /// The registered piece that the request lies in; -1: none.
  int registered(const RawRequest& request) const {
    if (buffers_.empty() || request.memory < buffers_.data()) return -1;
    const auto begin = static_cast<std::size_t>(request.memory - buffers_.data());
    const std::size_t end = begin + static_cast<std::size_t>(request.bytes);
    if (end > buffers_.size() || begin / kMostRegistered != (end - 1) / kMostRegistered) return -1;
    return static_cast<int>(begin / kMostRegistered);
  }

  void arm_wake() {
    if (armed_) return;
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return;
    io_uring_prep_poll_add(entry, wake_.get(), POLLIN);
    entry->user_data = kWakeTag;
    queued_.push_back(kWakeTag);
    armed_ = true;
  }

  std::size_t collect(std::span<RawCompletion> out) {
    std::size_t count = 0;
    io_uring_cqe* completion = nullptr;
    while (count < out.size() && io_uring_peek_cqe(&ring_, &completion) == 0) {
      const std::uint64_t tag = completion->user_data;
      const std::int64_t result = completion->res;
      io_uring_cqe_seen(&ring_, completion);
      if (tag != kWakeTag) {
        out[count++] = {tag, result};
        continue;
      }
      std::uint64_t times = 0;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &times, sizeof times);
      armed_ = false;
      woken_ = true;
    }
    return count;
  }

  /// What a submit returned: how far the queue went, or why not.
  void judge(int result) {
    const std::size_t left = std::min<std::size_t>(io_uring_sq_ready(&ring_), queued_.size());
    queued_.erase(queued_.begin(), queued_.end() - static_cast<std::ptrdiff_t>(left));
    if (left == 0) return;
    if (result >= 0 || result == -EINTR || result == -ETIME) return;
    if (result == -EAGAIN || result == -EBUSY || result == -ENOMEM) {
      // Short of memory for requests: completions free some.
      usleep(100);
      return;
    }
    // The ring takes nothing any more. What it has taken still completes; the entries it has not
    // are never submitted again.
    broken_ = -result;
    for (const std::uint64_t tag : queued_) {
      if (tag != kWakeTag) refused_.push_back({tag, result});
    }
    queued_.clear();
    base::log_error(base::Topic::offload, rank_, "io_uring_enter: {}", describe_error(broken_));
  }

  std::size_t reap_broken(std::span<RawCompletion> out, std::int64_t microseconds) {
    constexpr std::int64_t kPause = 1000;
    std::size_t count = collect(out);
    while (count < out.size() && !refused_.empty()) {
      out[count++] = refused_.back();
      refused_.pop_back();
    }
    if (count == 0 && microseconds > 0) {
      usleep(static_cast<useconds_t>(std::min(microseconds, kPause)));
      count = collect(out);
    }
    return count;
  }

  io_uring ring_{};
  bool open_ = false;
  int depth_;
  int rank_;
  base::Descriptor wake_;
  std::vector<int> files_;
  bool fixed_files_ = false;
  std::span<std::byte> buffers_;        // registered
  std::vector<std::uint64_t> queued_;   // tags that the system has not yet taken
  std::vector<RawCompletion> refused_;  // requests that it did not take
  int broken_ = 0;                      // errno of a ring that takes nothing any more
  bool armed_ = false;                  // the wake-up is in the ring
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Driver> make_uring_driver(const DriverOptions& options, std::string& reason) {
  auto driver = std::make_unique<UringDriver>(options.depth, options.rank);
  reason = driver->open();
  if (!reason.empty()) return nullptr;
  driver->reserve();
  driver->register_files(options.files);
  driver->register_buffers(options.buffers);
  return driver;
}

std::string io_uring_refusal() {
  UringDriver driver(1, 0);
  return driver.open();
}

}  // namespace zshard::offload

#else

namespace zshard::offload {
namespace {

constexpr char kMissing[] = "this build has no liburing (ZSHARD_IO_URING)";

}  // namespace

std::unique_ptr<Driver> make_uring_driver(const DriverOptions&, std::string& reason) {
  reason = kMissing;
  return nullptr;
}

std::string io_uring_refusal() {
  return kMissing;
}

}  // namespace zshard::offload

#endif
