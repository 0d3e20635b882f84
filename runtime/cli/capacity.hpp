// What one machine offers to its ranks, and whether a plan fits it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/engine/tier_map.hpp"
#include "zshard/memory_plan.hpp"
#include "zshard/options.hpp"

namespace zshard::cli {

/// a * b, at most the largest number.
std::int64_t capped_product(std::int64_t a, std::int64_t b);

/// Bytes of the nvme tier of one rank.
std::int64_t disk_bytes(const MemoryPlan& plan);

/// Bytes of main memory that one rank takes: on a GPU the device tier is not among them.
std::int64_t main_memory_bytes(const MemoryPlan& plan, const EngineOptions& options);

/// Bytes that io_uring locks for one rank; 0: it uses none.
std::int64_t locked_bytes(const engine::TierMap& tiers, const EngineOptions& options);

struct Capacity {
  std::int64_t memory = -1;  // bytes for all ranks here; -1: not known, not checked
  std::int64_t disk = -1;    // likewise
  int ranks = 1;             // here

  /// Why the plan of one rank does not fit, with the numbers; empty if it does. A GPU's memory is
  /// compared with device_budget only: the machine that plans need not have the GPU.
  [[nodiscard]] std::vector<std::string> lacks(const MemoryPlan& plan,
                                               const EngineOptions& options) const;
};

}  // namespace zshard::cli
