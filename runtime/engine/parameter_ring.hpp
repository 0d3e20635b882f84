// Parameter shards on their way from disk into gathers: read ahead in the order of the schedule
// into one ring of staging memory, from which the ranks copy. Where an entry lies follows from the
// sequence of gathers alone, so every rank knows where its peers' entries are. Used by the gather
// queue's thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "offload/tiers/store.hpp"
#include "runtime/engine/storage.hpp"
#include "runtime/engine/tier_map.hpp"

namespace zshard::engine {

class ParameterRing {
 public:
  ParameterRing(const TierMap& map, const Storage& storage, offload::Store& store, int rank);

  /// The next gather is of this unit; upcoming: those that will follow it for certain, as far as
  /// known. Waits until the unit's shard is in memory, and starts to read others. Throws IoError.
  void begin(std::int32_t unit, std::span<const std::int32_t> upcoming,
             std::span<const std::int32_t> later);
  /// All ranks have met for this gather: nobody copies the one before any more.
  void met();
  /// Rank r's shard of a segment of the present unit.
  [[nodiscard]] const std::byte* shard(int r, int segment) const;
  /// Whether the ranks must meet once more before the next gather, since it may need the place of
  /// this one. The same on every rank.
  [[nodiscard]] bool must_finish() const;
  /// They have.
  void finished();

 private:
  struct Entry {
    std::int32_t unit = -1;
    std::int64_t offset = 0;  // in the ring
    std::int64_t bytes = 0;
    offload::Ticket ticket = 0;
  };
  static constexpr std::size_t kMostEntries = 64;

  [[nodiscard]] Entry& entry(std::uint64_t index) { return entries_[index % kMostEntries]; }
  [[nodiscard]] const Entry& present() const { return entries_[present_ % kMostEntries]; }
  bool push(std::int32_t unit);
  void read_ahead();

  const TierMap& map_;
  const Storage& storage_;
  offload::Store& store_;
  int rank_;
  std::vector<Entry> entries_;
  // Entries [live_, end_) may not be overwritten; present_ is being gathered.
  std::uint64_t live_ = 0;
  std::uint64_t present_ = 0;
  std::uint64_t end_ = 0;
  std::uint64_t begun_ = 0;  // gathers so far
  std::int64_t next_ = 0;    // where the next entry goes if it fits
  std::span<const std::int32_t> upcoming_;
  std::span<const std::int32_t> later_;
};

}  // namespace zshard::engine
