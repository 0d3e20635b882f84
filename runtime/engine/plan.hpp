// Bytes by category of one rank, from layout and schedule: the arithmetic of spec/memory_plan.py.
// Pure.
#pragma once

#include <optional>
#include <vector>

#include "runtime/engine/schedule.hpp"
#include "zshard/memory_plan.hpp"

namespace zshard::engine {

struct PlanInput {
  std::vector<DType> moments;  // storage of each state slot
  MasterWeights master = MasterWeights::f32;
  Accumulation accumulation = Accumulation::reduced;
  std::optional<DType> wire;           // unset: the gradient's dtype
  Tier optimizer_tier = Tier::device;  // master and moments
  Tier gradient_tier = Tier::device;   // accumulators, full and local gradient buffers
};

/// Everything but the optimizer tiers' categories lies on Tier::device.
MemoryPlan make_plan(const shard::Layout& layout, const Schedule& schedule, const PlanInput& input);

/// Square-sum blocks of one rank: blocks of 1024 elements of its owned ranges.
std::int64_t count_blocks(const shard::Layout& layout, int rank);

}  // namespace zshard::engine
