#include "runtime/engine/device_map.hpp"

#include <algorithm>

#include "runtime/engine/plan.hpp"

namespace zshard::engine {
namespace {

constexpr std::int64_t kAligned = 4096;

std::int64_t rounded(std::int64_t bytes) {
  return (bytes + kAligned - 1) / kAligned * kAligned;
}

}  // namespace

bool DeviceMap::cuts(const EngineOptions& options) {
  if (options.device == DeviceKind::host) return false;
  return options.offload.optimizer != Tier::device || options.offload.parameters != Tier::device ||
         !gradient_on_device(options);
}

DeviceMap DeviceMap::make(const shard::Layout& layout, const TierMap& tiers,
                          const EngineOptions& options, int slots) {
  DeviceMap map;
  if (options.device == DeviceKind::host) return map;
  std::int64_t blocks = 0;
  for (int r = 0; r < layout.world(); ++r) blocks = std::max(blocks, count_blocks(layout, r));
  const bool leave = options.offload.gradients != Tier::device;
  for (const shard::UnitLayout& unit : layout.units()) {
    std::int64_t received = 0;
    std::int64_t piece = 0;
    for (const shard::Segment& s : unit.segments) {
      if (!s.trained()) continue;
      const DType wire =
          options.accumulation == Accumulation::local ? DType::f32 : options.wire.value_or(s.dtype);
      const bool native = options.reduction == Reduction::native;
      received += (native ? s.shard : s.padded) * size_of(wire);
      piece += s.shard * size_of(DType::f32);
    }
    map.received_bytes = std::max(map.received_bytes, received);
    if (leave) map.piece_bytes = std::max(map.piece_bytes, rounded(piece));
  }
  if (layout.world() == 1) map.received_bytes = 0;
  std::int64_t end = tiers.staging_bytes;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t at = rounded(end);
    end = at + bytes;
    return at;
  };
  map.squares = take(8 * blocks);
  map.windows = take(kWindows * kWindowBytes);
  if (options.offload.gradients == Tier::nvme) map.landings = take(kPieces * map.piece_bytes);
  const bool state_leaves = options.offload.optimizer != Tier::device;
  map.on_host = state_leaves && options.offload.update_on != UpdateOn::device;
  map.either = state_leaves && options.offload.update_on == UpdateOn::automatic;
  const bool host = map.on_host;
  const bool device = !map.on_host || map.either;
  for (const SubGroup& g : tiers.groups) {
    const shard::Segment& s = layout.units()[static_cast<std::size_t>(g.unit)]
                                  .segments[static_cast<std::size_t>(g.segment)];
    const auto pass = [&](std::int64_t& bytes, bool passes, std::int64_t each) {
      if (passes) bytes = std::max(bytes, rounded(each * g.count));
    };
    const bool gradient = gradient_on_device(options);
    const bool parameter = parameter_on_device(s, options);
    pass(map.by_host.gradient, host && gradient, 4);
    pass(map.by_host.parameter, host && parameter, size_of(s.dtype));
    // State is never brought to the host: it is there.
    pass(map.by_device.gradient, device && !gradient, 4);
    pass(map.by_device.parameter, device && !parameter, size_of(s.dtype));
    pass(map.by_device.state, device && state_leaves,
         std::int64_t{4} * (slots + (s.dtype == DType::f32 ? 0 : 1)));
  }
  if (host) map.buffers = take(kBuffers * map.by_host.bytes());
  if (device) map.upload_bytes = kBuffers * map.by_device.bytes();
  map.staging_bytes = end - tiers.staging_bytes;
  return map;
}

}  // namespace zshard::engine
