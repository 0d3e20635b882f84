// Collectives between devices, on a stream: NCCL behind a seam. Every rank issues the same calls in
// the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "runtime/device/device.hpp"
#include "zshard/types.hpp"

namespace zshard::comm {

/// Calls queue work and return; they throw CommError (call, file, line, rank) if NCCL refuses.
/// All pointers are device memory.
class Communicator {
 public:
  virtual ~Communicator() = default;

  /// In place: this rank's piece lies at buffer + rank * bytes already; the others arrive beside
  /// it. bytes: of one rank's piece.
  virtual void all_gather(void* buffer, std::int64_t bytes, device::NativeStream stream) = 0;
  /// Piece r of `send` goes to rank r; received + r * bytes is what rank r sent to this one. bytes:
  /// of a piece. Own pieces are copied.
  virtual void all_to_all(const void* send, void* received, std::int64_t bytes,
                          device::NativeStream stream) = 0;
  /// Piece r of `send` goes to rank r; received = the ranks' sum, in the communicator's own order,
  /// rounded to `dtype` after each addition: the bits depend on its algorithm. Both are of `dtype`.
  /// count: elements of a piece.
  virtual void reduce_scatter(const void* send, void* received, std::int64_t count, DType dtype,
                              device::NativeStream stream) = 0;
  /// Calls between group_start() and group_end() are issued as one.
  virtual void group_start() = 0;
  virtual void group_end() = 0;

  /// Why the communicator cannot be used any more, or null; polls, does not wait. From any thread.
  [[nodiscard]] virtual std::optional<std::string> failure() = 0;
  /// Ends what is under way on this rank, so that its streams go on. From any thread, any number of
  /// times. Never throws.
  virtual void abort() noexcept = 0;
};

/// What rank 0 makes and every rank of a communicator needs.
struct CommunicatorId {
  std::byte bytes[128] = {};
};

}  // namespace zshard::comm
