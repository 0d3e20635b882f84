// Streams sub-groups from disk through a few buffers while a step updates them: reads run ahead of
// the updates, writes behind. Also the book about what of a step is done, from which an interrupted
// step rolls forward. Used by one thread, the one that calls step().
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <vector>

#include "offload/tiers/store.hpp"
#include "runtime/engine/storage.hpp"
#include "runtime/engine/tier_map.hpp"

namespace zshard::engine {

class StateStream {
 public:
  StateStream(const TierMap& map, const Storage& storage, offload::Store& store, int rank);

  /// Starts reading state and parameters of the first groups of a step, before its gradients are
  /// known. groups: indices of sub-groups on disk, in the order of the coming updates. Of failures
  /// fetch() tells.
  void prefetch(std::span<const std::int32_t> groups);
  /// A step over these groups. What is in a buffer already is not read again. Forgets the book of
  /// the step before. Of failures fetch() tells.
  void begin(std::span<const std::int32_t> groups);
  /// The buffer of the next group of begin(), complete; its pieces lie as SubGroup says. It is the
  /// caller's until publish(); of buffers() one at least must not be. Throws IoError.
  std::byte* fetch(std::int32_t group);
  /// The group in its buffer is updated: starts to write it back. Throws IoError of earlier writes.
  void publish(std::int32_t group);
  /// Waits for all writes. Throws IoError.
  void finish();

  /// Marks a group whose pieces are all in memory.
  void set_done(std::int32_t group) { progress_[static_cast<std::size_t>(group)] = Progress::done; }
  /// Updated, whether its bytes are on disk already or not.
  [[nodiscard]] bool updated(std::int32_t group) const {
    return progress_[static_cast<std::size_t>(group)] != Progress::pending;
  }
  /// After an IoError: waits for everything that is under way. Updated buffers whose writes failed
  /// are kept.
  void settle() noexcept;
  /// Writes what settle() kept, and goes on with begin()'s groups from the first that is not
  /// updated. Throws IoError; then settle() and resume() again.
  void resume();
  /// Buffers no longer hold what the disk holds: a tensor was written.
  void forget();

  [[nodiscard]] int buffers() const { return static_cast<int>(buffers_.size()); }
  /// Seconds for which fetch, publish and finish waited for the disk, so far.
  [[nodiscard]] double wait_seconds() const { return wait_seconds_; }

 private:
  enum class Progress : std::uint8_t { pending, updated, done };
  static constexpr std::int32_t kFree = -1;
  static constexpr std::int32_t kHung = -2;  // the device may still write to it
  struct Buffer {
    std::int32_t group = kFree;  // whose pieces it holds or is about to
    bool state = false;          // read, or being read
    bool gradient = false;       // likewise
    bool held = false;           // fetched, not published
    bool dirty = false;          // updated, not yet on disk
    std::exception_ptr failure;  // why it is not
    offload::Ticket reads[3] = {0, 0, 0};
    offload::Ticket writes[2] = {0, 0};
  };

  [[nodiscard]] const SubGroup& group(std::int32_t g) const {
    return map_.groups[static_cast<std::size_t>(g)];
  }
  [[nodiscard]] std::byte* memory(const Buffer& b) const;
  void pump(bool gradients);
  Buffer* find(std::int32_t group);
  /// A buffer for a group; null if all are busy and `wait` is false.
  Buffer* acquire(bool wait);
  void read(Buffer& b, bool gradients);
  void write(Buffer& b);
  void wait_reads(Buffer& b);
  void wait_writes(Buffer& b);
  /// Waits for a transfer that has not answered within a deadline.
  void wait_again(offload::Ticket& ticket);
  [[nodiscard]] bool busy(const Buffer& b) const;
  [[nodiscard]] bool wanted(std::int32_t group) const;

  const TierMap& map_;
  const Storage& storage_;
  offload::Store& store_;
  int rank_;
  std::vector<Buffer> buffers_;
  std::vector<Progress> progress_;      // per group
  std::vector<std::int32_t> sequence_;  // of the step
  std::size_t next_fetch_ = 0;          // in sequence_
  std::size_t next_read_ = 0;
  double wait_seconds_ = 0.0;
};

}  // namespace zshard::engine
