// What of one rank lies on disk, and where: extents of parameter shards, accumulators and optimizer
// state, the sub-groups that a step streams through memory, and the staging memory for it. A pure
// value of layout and options, the same on every rank, so that a peer's staging is found by
// arithmetic.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/shard/layout.hpp"
#include "zshard/options.hpp"

namespace zshard::engine {

/// A run of elements that the step reads, updates and writes back as one. Elements count within
/// what the rank updates of the segment: its shard, or at stage 0 all of it.
struct SubGroup {
  std::int32_t unit = 0;
  std::int32_t segment = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
  // Pieces on disk: offset in the store, -1 if it is in memory, and bytes, rounded to whole blocks.
  std::int64_t state = -1;  // [master] [slot 0] [slot 1] ..., count fp32 elements each
  std::int64_t state_bytes = 0;
  std::int64_t parameter = -1;  // in the segment's dtype
  std::int64_t parameter_bytes = 0;
  std::int64_t gradient = -1;  // fp32
  std::int64_t gradient_bytes = 0;
  bool reads_parameter = false;  // an fp32 one: it is its own master; 16-bit ones are only written

  [[nodiscard]] bool on_disk() const { return buffer_bytes() != 0; }
  /// In a buffer the pieces follow one another in this order.
  [[nodiscard]] std::int64_t buffer_bytes() const {
    return state_bytes + parameter_bytes + gradient_bytes;
  }
};

/// Bytes [offset, offset + bytes) of the store.
struct Extent {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct TierMap {
  struct Segment {
    std::int64_t kept = 0;  // elements of optimizer state in memory: the first ones
    // Starts within the unit's extents, -1: not on disk.
    std::int64_t parameter = -1;
    std::int64_t gradient = -1;
  };
  struct Unit {
    std::vector<Segment> segments;
    Extent parameters;  // shards of the gathered segments
    Extent gradients;   // accumulators
    std::int32_t first_group = 0;
    std::int32_t groups = 0;
  };

  bool optimizer = false;  // at least one sub-group's state is on disk
  bool gradients = false;
  bool parameters = false;
  std::vector<Unit> units;
  std::vector<SubGroup> groups;  // by unit, segment, first element
  std::int64_t store_bytes = 0;

  // Of the store, by category; rounding to whole blocks included.
  std::int64_t parameter_bytes = 0;
  std::int64_t gradient_bytes = 0;
  std::int64_t master_bytes = 0;
  std::int64_t moment_bytes = 0;

  // Staging memory: offsets in one arena.
  std::int64_t windows = 0;       // kWindows of kWindowBytes: reads and writes of whole tensors
  std::int64_t buffers = 0;       // of sub-groups
  std::int64_t buffer_bytes = 0;  // of one
  int buffer_count = 0;
  std::int64_t ring = 0;  // parameter shards on their way into a gather
  std::int64_t ring_bytes = 0;
  std::int64_t largest_parameters = 0;  // bytes of the largest unit's extent
  std::int64_t accumulators = 0;        // kAccumulatorSlots of accumulator_bytes
  std::int64_t accumulator_bytes = 0;
  std::int64_t checksums = 0;
  std::int64_t checksum_bytes = 0;
  std::int64_t staging_bytes = 0;

  [[nodiscard]] bool uses_store() const { return store_bytes != 0; }
  /// The first part of the staging memory: all but the checksums is the transfers'.
  [[nodiscard]] std::int64_t transfer_bytes() const { return staging_bytes - checksum_bytes; }
  /// What lies at an offset of the store, for messages.
  [[nodiscard]] std::string describe(const shard::Layout& layout, std::int64_t offset) const;
};

inline constexpr int kWindows = 2;
inline constexpr std::int64_t kWindowBytes = std::int64_t{1} << 20;
inline constexpr int kAccumulatorSlots = 2;

struct TierInput {
  Stage stage = Stage::parameters;
  OffloadOptions offload;
  std::int64_t sub_group_bytes = 0;
  int slots = 0;     // fp32 state slots of the optimizer
  bool cut = false;  // into sub-groups also what is in memory
  /// Bytes of optimizer state that may stay in memory, with the optimizer tier nvme; unset: what
  /// OffloadOptions::optimizer_nvme_bytes leaves.
  std::optional<std::int64_t> kept_bytes;
};

TierMap make_tier_map(const shard::Layout& layout, const TierInput& input);

/// Bytes of optimizer state of one rank, master weights included.
std::int64_t state_bytes(const shard::Layout& layout, Stage stage, int slots);

}  // namespace zshard::engine
