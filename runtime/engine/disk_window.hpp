// Parts of whole tensors on disk, seen through small windows of staging memory: what reads and
// writes by name, and initialisation, work through. A window keeps its bytes until another place is
// asked for, so that neighbouring pieces cost one transfer.
#pragma once

#include <cstdint>

#include "offload/tiers/store.hpp"
#include "runtime/engine/storage.hpp"
#include "runtime/engine/tier_map.hpp"

namespace zshard::engine {

class DiskWindows {
 public:
  /// Most bytes that one call can show.
  static constexpr std::int64_t kMostBytes = kWindowBytes - offload::kAlignment;

  DiskWindows(const TierMap& map, const Storage& storage, offload::Store& store, int rank)
      : map_(map), storage_(storage), store_(store), rank_(rank) {}

  /// Memory that holds [offset, offset + bytes) of this rank's store, until the call after the
  /// next. change: the caller writes to it; flush() brings it to disk. Throws IoError.
  std::byte* access(std::int64_t offset, std::int64_t bytes, bool change);
  /// Brings [offset, offset + bytes) to where every rank can find it: shown(r, offset).
  void show(std::int64_t offset, std::int64_t bytes);
  [[nodiscard]] const std::byte* shown(int r, std::int64_t offset) const;
  /// Writes what was changed, and forgets all. Throws IoError.
  void flush();
  /// Before something else writes to the store; nothing may have been changed since flush().
  void forget();

 private:
  struct Window {
    Extent at;
    bool changed = false;
    std::uint64_t used = 0;
  };
  [[nodiscard]] std::byte* memory(int w) const {
    return storage_.staging(rank_, map_.windows + w * kWindowBytes);
  }
  /// Runs a transfer of the window's memory, after one that did not answer in time.
  void transfer(int w, bool write, std::int64_t offset, std::int64_t bytes);
  void put_back(int w);
  void load(int w, std::int64_t offset);

  const TierMap& map_;
  const Storage& storage_;
  offload::Store& store_;
  int rank_;
  Window windows_[kWindows];
  offload::Ticket under_way_[kWindows] = {};  // the device may still use the window's memory
  std::uint64_t uses_ = 0;
};

}  // namespace zshard::engine
