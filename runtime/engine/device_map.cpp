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

DeviceMap DeviceMap::make(const shard::Layout& layout, const TierMap& tiers,
                          const EngineOptions& options) {
  DeviceMap map;
  if (options.device == DeviceKind::host) return map;
  std::int64_t blocks = 0;
  for (int r = 0; r < layout.world(); ++r) blocks = std::max(blocks, count_blocks(layout, r));
  for (const shard::UnitLayout& unit : layout.units()) {
    std::int64_t received = 0;
    for (const shard::Segment& s : unit.segments) {
      if (!s.trained()) continue;
      const DType wire =
          options.accumulation == Accumulation::local ? DType::f32 : options.wire.value_or(s.dtype);
      const bool native = options.reduction == Reduction::native;
      received += (native ? s.shard : s.padded) * size_of(wire);
    }
    map.received_bytes = std::max(map.received_bytes, received);
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
  map.staged = options.offload.optimizer != Tier::device;
  if (map.staged) {
    std::int64_t parameter = 0;
    for (const SubGroup& g : tiers.groups) {
      const shard::Segment& s = layout.units()[static_cast<std::size_t>(g.unit)]
                                    .segments[static_cast<std::size_t>(g.segment)];
      map.gradient_bytes = std::max(map.gradient_bytes, rounded(4 * g.count));
      parameter = std::max(parameter, rounded(size_of(s.dtype) * g.count));
    }
    map.buffer_bytes = map.gradient_bytes + parameter;
    map.buffers = take(kBuffers * map.buffer_bytes);
  }
  map.staging_bytes = end - tiers.staging_bytes;
  return map;
}

}  // namespace zshard::engine
