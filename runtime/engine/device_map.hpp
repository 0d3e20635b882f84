// What a rank on a device takes beside the arenas of a host rank: device memory for pieces that the
// communicator delivers, buffers for what passes between device and host, and pinned host memory. A
// pure value of layout and options.
#pragma once

#include <cstdint>

#include "runtime/engine/tier_map.hpp"
#include "runtime/shard/layout.hpp"
#include "zshard/options.hpp"

namespace zshard::engine {

struct DeviceMap {
  // Device memory of the communicator: the pieces of all ranks of the largest unit's gradients, as
  // they are on the wire, or their sum with `native` reduction. 0 in a world of one rank.
  std::int64_t received_bytes = 0;
  /// Device memory behind it: kPieces buffers of one unit's accumulators, of those that are off the
  /// device. 0: none are.
  std::int64_t piece_bytes = 0;

  // Pinned host memory; offsets follow the tier map's staging memory.
  std::int64_t squares = 0;   // [count of blocks] fp64
  std::int64_t windows = 0;   // kWindows of kWindowBytes: writes and reads of whole tensors
  std::int64_t landings = 0;  // kPieces of piece_bytes: pieces on their way to disk

  /// Whether the update runs on the host's cores. Never with all of the state on the device.
  bool on_host = false;
  /// Both places have their buffers: on_host may change between steps.
  bool either = false;
  /// Of a sub-group what is not where the update runs comes and goes through one of kBuffers
  /// buffers there: first its gradient, fp32, then its parameter, then its state. 0: no group's
  /// passes.
  struct Passing {
    std::int64_t gradient = 0;
    std::int64_t parameter = 0;
    std::int64_t state = 0;
    [[nodiscard]] std::int64_t bytes() const { return gradient + parameter + state; }
  };
  Passing by_host;
  Passing by_device;
  std::int64_t buffers = 0;        // in pinned host memory, of an update on the host
  std::int64_t staging_bytes = 0;  // pinned host memory in all
  std::int64_t upload_bytes = 0;   // device memory in all: the buffers of an update there

  [[nodiscard]] const Passing& passing() const { return on_host ? by_host : by_device; }
  [[nodiscard]] std::int64_t buffer_bytes() const { return passing().bytes(); }
  /// Whether the step moves a group between device and host at all.
  [[nodiscard]] bool staged() const { return buffer_bytes() != 0; }

  static constexpr int kWindows = 2;
  static constexpr std::int64_t kWindowBytes = std::int64_t{1} << 20;
  static constexpr int kBuffers = 3;  // arriving, being updated, leaving
  static constexpr int kPieces = 2;   // being summed, leaving

  /// All zero on a host rank. slots: fp32 state slots of the optimizer.
  static DeviceMap make(const shard::Layout& layout, const TierMap& tiers,
                        const EngineOptions& options, int slots);
  /// Whether sub-groups pass through buffers, so that what is in memory is cut into them too.
  static bool cuts(const EngineOptions& options);
  /// Whether the accumulators' sums are where the update of this stage looks for them: at stage 0
  /// it takes gathered ones.
  static bool gradient_on_device(const EngineOptions& options) {
    return options.stage == Stage::replicated || options.offload.gradients == Tier::device;
  }
  static bool parameter_on_device(const shard::Segment& segment, const EngineOptions& options) {
    return options.stage != Stage::parameters || !segment.gathered() ||
           options.offload.parameters == Tier::device;
  }
};

}  // namespace zshard::engine
