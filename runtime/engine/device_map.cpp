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
  map.on_host =
      options.offload.optimizer != Tier::device && options.offload.update_on != UpdateOn::device;
  for (const SubGroup& g : tiers.groups) {
    const shard::Segment& s = layout.units()[static_cast<std::size_t>(g.unit)]
                                  .segments[static_cast<std::size_t>(g.segment)];
    const auto pass = [&](std::int64_t& bytes, bool on_device, std::int64_t each) {
      if (on_device == map.on_host) bytes = std::max(bytes, rounded(each * g.count));
    };
    pass(map.gradient_bytes, gradient_on_device(options), 4);
    pass(map.parameter_bytes, parameter_on_device(s, options), size_of(s.dtype));
    if (map.on_host) continue;  // state is never brought to the host
    pass(map.state_bytes, options.offload.optimizer == Tier::device,
         std::int64_t{4} * (slots + (s.dtype == DType::f32 ? 0 : 1)));
  }
  const std::int64_t buffers = kBuffers * map.buffer_bytes();
  if (map.on_host) {
    map.buffers = take(buffers);
  } else {
    map.upload_bytes = buffers;
  }
  map.staging_bytes = end - tiers.staging_bytes;
  return map;
}

}  // namespace zshard::engine
