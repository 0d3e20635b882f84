// Bytes by category of one rank, from layout and schedule: the arithmetic of spec/memory_plan.py.
// Pure.
#pragma once

#include <optional>
#include <vector>

#include "runtime/engine/schedule.hpp"
#include "runtime/engine/tier_map.hpp"
#include "zshard/memory_plan.hpp"

namespace zshard::engine {

struct PlanInput {
  std::vector<DType> moments;  // storage of each state slot
  MasterWeights master = MasterWeights::f32;
  Accumulation accumulation = Accumulation::reduced;
  std::optional<DType> wire;           // unset: the gradient's dtype
  Tier optimizer_tier = Tier::device;  // master and moments
  Tier gradient_tier = Tier::device;   // accumulators, full and local gradient buffers
  bool kernels = false;                // on a device, where those buffers are its kernels'
  Tier parameter_tier = Tier::device;  // shards of stage 3
  const TierMap* tiers = nullptr;      // what lies on nvme; null: nothing
};

/// With the tier nvme, what the tier map leaves of optimizer state in memory lies on the host, and
/// gradient buffers that the loop or the wire uses stay on the device, where `kernels` use them
/// with the tier host too. Staging lies on the host. All categories without a tier of their own lie
/// on the device.
MemoryPlan make_plan(const shard::Layout& layout, const Schedule& schedule, const PlanInput& input);

/// Square-sum blocks of one rank: blocks of 1024 elements of its owned ranges.
std::int64_t count_blocks(const shard::Layout& layout, int rank);

}  // namespace zshard::engine
