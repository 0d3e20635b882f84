// One rank's bytes on disk: a file of extents striped over directories, behind an I/O backend.
// Knows ranges of bytes, not tensors or ranks' affairs; the engine decides what lies where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "offload/io/traffic.hpp"
#include "zshard/options.hpp"

namespace zshard::offload {

/// Offsets, sizes and addresses of everything that touches the disk are multiples of this.
inline constexpr std::int64_t kAlignment = 4096;

/// A transfer under way; 0: none, complete.
using Ticket = std::uint64_t;

struct StoreOptions {
  std::vector<std::string> directories;  // at least one; bytes are striped over them
  IoBackendKind backend = IoBackendKind::automatic;
  std::int64_t block_bytes = std::int64_t{1} << 20;  // of one request
  int depth = 8;                                     // requests in flight
  std::int64_t bytes = 0;                            // size of the store, a multiple of kAlignment
  int rank = 0;
  int ranks_here = 1;             // ranks that take as much from the same file systems
  double deadline_seconds = 600;  // longest wait for one transfer
  /// What lies at an offset, for messages: "moments of unit h.0".
  std::function<std::string(std::int64_t offset)> describe;
  /// Memory of most transfers, to be registered; kAlignment. make() reads zeros into it.
  std::span<std::byte> buffers;
  bool register_buffers = true;  // as may_register() says
  /// Where the checksums are kept; empty: no verification. verify_words(bytes) elements.
  std::span<std::uint64_t> checksums;
  /// Owns the memory of transfers: kept where a device does not answer, as long as it may still
  /// write there. May be null.
  std::shared_ptr<const void> owner;
};

/// Words that verification of a store of `bytes` takes.
constexpr std::int64_t verify_words(std::int64_t bytes) {
  return 2 * (bytes / kAlignment);
}

/// All methods may be called from any thread; none allocates after construction unless it throws.
/// Transfers that overlap must be ordered by the caller (wait before the next).
class Store {
 public:
  /// Makes the file, which has no name, reserves its space, and begins to write zeros to it in the
  /// background, so that later writes overwrite in place. Throws UsageError for a directory that
  /// cannot be used, IoError (with the bytes that are needed and free) for a disk that is too
  /// small.
  static std::unique_ptr<Store> make(StoreOptions options);
  /// Throws what make() would throw for these directories, and IoError if they have no room for all
  /// ranks_here; makes nothing. For all ranks before any of them makes its store: afterwards free
  /// space and what ranks still need do not compare.
  static void check(const StoreOptions& options);
  /// Whether the system lets all ranks_here lock what io_uring would have of each: the ring and
  /// `buffers` bytes. If not, says once a process what is needed. Before any rank makes its store,
  /// since what ranks have locked counts.
  [[nodiscard]] static bool may_register(const StoreOptions& options, std::int64_t buffers);
  /// Waits for what is under way; after the deadline it says so, and keeps what the device may
  /// still use.
  virtual ~Store() = default;

  /// Starts one transfer of a contiguous range. Blocks only while too many are under way.
  /// memory stays the transfer's until wait() has returned or thrown.
  virtual Ticket read(std::int64_t offset, std::span<std::byte> memory) = 0;
  virtual Ticket write(std::int64_t offset, std::span<const std::byte> memory) = 0;
  /// Returns once the transfer is complete; throws IoError if it failed, once, after all its
  /// requests have ended.
  virtual void wait(Ticket ticket) = 0;
  /// True once wait() would not block.
  [[nodiscard]] virtual bool done(Ticket ticket) const = 0;
  /// Waits for everything that is under way, and forgets errors.
  virtual void settle() noexcept = 0;

  [[nodiscard]] virtual IoTraffic traffic() const = 0;
  [[nodiscard]] virtual std::int64_t bytes() const = 0;  // really reserved
  /// Bytes a second that this store reached alone, in a short probe at construction.
  [[nodiscard]] virtual double raw_read() const = 0;
  [[nodiscard]] virtual double raw_write() const = 0;
  [[nodiscard]] virtual std::string backend() const = 0;  // "io_uring, registered buffers"
};

}  // namespace zshard::offload
