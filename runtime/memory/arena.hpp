// One mapping of memory for one category and tier. Taken once, returned when the last owner is
// gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "runtime/base/descriptor.hpp"

namespace zshard::memory {

inline constexpr std::int64_t kArenaRounding = std::int64_t{2} << 20;  // bytes: a huge page

/// `bytes` rounded up to whole huge pages; 0 stays 0. Saturates instead of overflowing.
std::int64_t round_to_arena(std::int64_t bytes);

/// Zero-filled memory, 2 MiB aligned, backed by huge pages where the system gives them, touched by
/// the thread that makes it so that nothing faults later. Shared between ranks that read each
/// other's memory, hence the shared_ptr.
class Arena {
 public:
  /// Throws OutOfMemory if the system refuses. 0 bytes: no mapping, data() is null.
  static std::shared_ptr<Arena> make(std::int64_t bytes);
  /// The same in a memfd that other processes can map: sealed against shrinking and growing, its
  /// pages reserved, so that no access ever faults. bytes > 0. Throws OutOfMemory.
  static std::shared_ptr<Arena> make_shared(std::int64_t bytes);
  /// Maps a peer's make_shared arena. Throws OutOfMemory if the system refuses, CommError if the
  /// descriptor is no such memory.
  static std::shared_ptr<Arena> map(base::Descriptor descriptor, std::int64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }                       // asked for
  [[nodiscard]] std::int64_t reserved() const { return reserved_; }                 // rounded up
  [[nodiscard]] const base::Descriptor& descriptor() const { return descriptor_; }  // make_shared

 private:
  Arena(std::byte* data, std::int64_t bytes, std::int64_t reserved)
      : data_(data), bytes_(bytes), reserved_(reserved) {}
  std::byte* data_;
  std::int64_t bytes_;
  std::int64_t reserved_;
  base::Descriptor descriptor_;
  bool counted_ = true;  // false: a peer's memory
};

/// Bytes of all arenas that exist in this process now, rounded: for tests that everything comes
/// back.
std::int64_t arena_bytes_in_process();

/// Bytes that are available without swapping: MemAvailable, or what the memory limit of the
/// process' control group leaves, if that is less; -1 if the system does not say.
std::int64_t available_memory();

}  // namespace zshard::memory
