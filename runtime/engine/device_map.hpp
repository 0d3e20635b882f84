// What a rank on a device takes beside the arenas of a host rank: device memory for pieces that the
// communicator delivers, and pinned host memory for what passes between device and host. A pure
// value of layout and options.
#pragma once

#include <cstdint>

#include "runtime/engine/tier_map.hpp"
#include "runtime/shard/layout.hpp"
#include "zshard/options.hpp"

namespace zshard::engine {

struct DeviceMap {
  // Device memory: the pieces of all ranks of the largest unit's gradients, as they are on the
  // wire, or their sum with `native` reduction. 0 in a world of one rank.
  std::int64_t received_bytes = 0;

  // Pinned host memory; offsets follow the tier map's staging memory.
  std::int64_t squares = 0;  // [count of blocks] fp64
  std::int64_t windows = 0;  // kWindows of kWindowBytes: writes and reads of whole tensors
  /// Whether the optimizer's state is on the host: the update runs there, and gradients and
  /// parameters of a sub-group come and go through one of kBuffers buffers.
  bool staged = false;
  std::int64_t buffers = 0;
  std::int64_t gradient_bytes = 0;  // of one buffer: first the gradient, fp32
  std::int64_t buffer_bytes = 0;
  std::int64_t staging_bytes = 0;

  static constexpr int kWindows = 2;
  static constexpr std::int64_t kWindowBytes = std::int64_t{1} << 20;
  static constexpr int kBuffers = 3;  // arriving, being updated, leaving

  /// All zero on a host rank.
  static DeviceMap make(const shard::Layout& layout, const TierMap& tiers,
                        const EngineOptions& options);
};

}  // namespace zshard::engine
