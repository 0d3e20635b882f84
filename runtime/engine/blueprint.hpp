// Everything about an engine that follows from its arguments alone: layout, schedules and memory
// plan. A pure value, made before anything is allocated; plan_memory() and the engine share it, so
// that the plan is what the engine takes.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "runtime/engine/device_map.hpp"
#include "runtime/engine/plan.hpp"
#include "runtime/engine/schedule.hpp"
#include "runtime/engine/tier_map.hpp"
#include "runtime/shard/layout.hpp"
#include "zshard/memory_plan.hpp"
#include "zshard/model_spec.hpp"
#include "zshard/optimizer.hpp"
#include "zshard/options.hpp"

namespace zshard::engine {

struct Blueprint {
  ModelSpec spec;
  Optimizer optimizer;
  EngineOptions options;
  std::unique_ptr<shard::Layout> layout;  // the schedules point to it
  Schedule training;
  Schedule evaluation;
  TierMap tiers;
  DeviceMap device;
  MemoryPlan plan;

  /// Throws UsageError for what this version or the arguments cannot serve.
  static Blueprint make(const ModelSpec& spec, const Optimizer& optimizer, int world,
                        const EngineOptions& options);

  /// Bytes of the arena for gathered units: both schedules share it.
  [[nodiscard]] std::int64_t gather_arena() const;
  /// What must be equal on every rank, as text with one fact a line.
  [[nodiscard]] std::string identity() const;
};

/// Whether the plan of these options is small enough.
using Fits = std::function<bool(const MemoryPlan& plan, const EngineOptions& options)>;

/// A sentence that names the cheapest change of options, or of options and ranks, with which the
/// plan fits, or says that none does.
std::string cheapest_change(const Blueprint& blueprint, int world, const Fits& fits);

/// Throws OutOfMemory, with the plan's table and the cheapest change that fits, if a budget of the
/// options is exceeded.
void check_budgets(const Blueprint& blueprint, int world);

/// Throws OutOfMemory if the machine has less memory than `ranks_here` ranks of this plan take.
void check_machine(const Blueprint& blueprint, int ranks_here);

}  // namespace zshard::engine
