#include "runtime/engine/plan.hpp"

#include <algorithm>
#include <string>
#include <string_view>

#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

constexpr std::int64_t kSquareBlock = 1024;  // elements of a block of square sums (section 6)
constexpr std::int64_t kAccumulator = size_of(DType::f32);
constexpr std::int64_t kStagedUnits = 2;  // stage 0: the unit being updated and the next one

/// A sum of products that names its category instead of wrapping round.
class Bytes {
 public:
  explicit Bytes(Category category) : category_(category) {}
  void add(std::int64_t count, std::int64_t each = 1) {
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(count, each, &bytes) ||
        __builtin_add_overflow(value_, bytes, &value_)) {
      throw UsageError("the memory plan passes 2^63 - 1 bytes at its category " +
                       std::string(to_string(category_)) + "; make the model smaller");
    }
  }
  void put(MemoryPlan& plan, Tier tier) const { plan.add(category_, tier, value_); }
  [[nodiscard]] std::int64_t value() const { return value_; }

 private:
  Category category_;
  std::int64_t value_ = 0;
};

std::int64_t master_bytes(MasterWeights master) {
  switch (master) {
    case MasterWeights::f32:
      return 4;
    case MasterWeights::remainder:
      return 2;
    case MasterWeights::none:
      return 0;
  }
  return 0;
}

bool on_disk(const PlanInput& input, bool TierMap::*what) {
  return input.tiers != nullptr && input.tiers->*what;
}

void plan_parameters(MemoryPlan& plan, const shard::Layout& layout, Stage stage,
                     const PlanInput& input) {
  Bytes parameters(Category::parameters);
  Bytes resident(Category::resident);
  for (const shard::UnitLayout& unit : layout.units()) {
    if (stage == Stage::parameters) {
      parameters.add(unit.gather_bytes / layout.world());
      resident.add(unit.bytes - unit.gather_bytes);
    } else {
      parameters.add(unit.bytes);
    }
  }
  if (on_disk(input, &TierMap::parameters)) {
    plan.add(Category::parameters, Tier::nvme, input.tiers->parameter_bytes);
  } else {
    parameters.put(plan, input.parameter_tier);
  }
  resident.put(plan, Tier::device);
}

void plan_state(MemoryPlan& plan, const shard::Layout& layout, Stage stage,
                const PlanInput& input) {
  Bytes master(Category::master);
  Bytes moments(Category::moments);
  for (std::size_t u = 0; u < layout.units().size(); ++u) {
    const shard::UnitLayout& unit = layout.units()[u];
    for (std::size_t i = 0; i < unit.segments.size(); ++i) {
      const shard::Segment& s = unit.segments[i];
      if (!s.trained()) {
        continue;
      }
      const std::int64_t all = stage == Stage::replicated ? s.padded : s.shard;
      const std::int64_t part =
          input.tiers == nullptr ? all : input.tiers->units[u].segments[i].kept;
      if (s.dtype != DType::f32) {
        master.add(part, master_bytes(input.master));
      }
      for (const DType slot : input.moments) {
        moments.add(part, size_of(slot));
      }
    }
  }
  const bool split = input.tiers != nullptr && input.optimizer_tier == Tier::nvme;
  const Tier memory = split ? Tier::host : input.optimizer_tier;
  master.put(plan, memory);
  moments.put(plan, memory);
  if (input.tiers == nullptr) return;
  plan.add(Category::master, Tier::nvme, input.tiers->master_bytes);
  plan.add(Category::moments, Tier::nvme, input.tiers->moment_bytes);
}

void plan_gradients(MemoryPlan& plan, const shard::Layout& layout, Stage stage,
                    const PlanInput& input) {
  const bool split = input.tiers != nullptr && input.gradient_tier == Tier::nvme;
  const Tier home = split ? Tier::device : input.gradient_tier;
  const Tier buffer_home = input.kernels ? Tier::device : home;
  Bytes accumulators(Category::gradients);
  Bytes apart(Category::gradients);
  Bytes& buffers = buffer_home == home ? accumulators : apart;
  for (const shard::UnitLayout& unit : layout.units()) {
    if (!on_disk(input, &TierMap::gradients)) {
      accumulators.add(unit.trained_elements / layout.world(), kAccumulator);
    }
    if (stage < Stage::gradients) {
      buffers.add(unit.gradient_bytes);
    }
    if (input.accumulation == Accumulation::local) {
      buffers.add(unit.trained_elements, kAccumulator);
    }
  }
  accumulators.put(plan, home);
  apart.put(plan, buffer_home);
  if (input.tiers != nullptr) {
    plan.add(Category::gradients, Tier::nvme, input.tiers->gradient_bytes);
    plan.add(Category::io_staging, Tier::host, input.tiers->staging_bytes);
  }
}

/// Direct algorithm of host ranks: peers read the gradient slot itself, so only what changes its
/// dtype on the wire is staged.
void plan_staging(MemoryPlan& plan, const shard::Layout& layout, Stage stage,
                  const PlanInput& input) {
  std::int64_t largest_wire = 0;
  std::int64_t largest_full = 0;
  for (const shard::UnitLayout& unit : layout.units()) {
    Bytes wire(Category::communication_staging);
    Bytes full(Category::communication_staging);
    full.add(unit.trained_elements, kAccumulator);
    for (const shard::Segment& s : unit.segments) {
      if (s.trained() && input.wire && s.dtype != *input.wire) {
        wire.add(s.padded, size_of(*input.wire));
      }
    }
    largest_wire = std::max(largest_wire, wire.value());
    largest_full = std::max(largest_full, full.value());
  }
  Bytes staging(Category::communication_staging);
  if (input.accumulation == Accumulation::reduced) {
    staging.add(largest_wire);
  }
  if (stage == Stage::replicated) {
    staging.add(largest_full, kStagedUnits);
  }
  staging.put(plan, Tier::device);
}

/// MemoryPlan adds up without checks of its own: whatever sum it forms must fit.
void check_sums(const MemoryPlan& plan) {
  Bytes all(Category::square_sum_blocks);                // the last one
  all.add(kCategories * kTiers, std::int64_t{2} << 20);  // arenas are rounded up
  for (int c = 0; c < kCategories; ++c) {
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      all.add(plan.bytes(static_cast<Category>(c), tier));
    }
  }
}

}  // namespace

std::int64_t count_blocks(const shard::Layout& layout, int rank) {
  std::int64_t blocks = 0;
  for (const shard::UnitLayout& unit : layout.units()) {
    for (const shard::Segment& s : unit.segments) {
      if (!s.trained()) {
        continue;
      }
      for (const shard::Placed& placed : s.placed) {
        const std::int64_t count = s.owned(placed, rank).count();
        blocks += count / kSquareBlock + (count % kSquareBlock != 0 ? 1 : 0);
      }
    }
  }
  return blocks;
}

MemoryPlan make_plan(const shard::Layout& layout, const Schedule& schedule,
                     const PlanInput& input) {
  MemoryPlan plan;
  plan_parameters(plan, layout, schedule.stage, input);
  plan_state(plan, layout, schedule.stage, input);
  plan_gradients(plan, layout, schedule.stage, input);
  plan_staging(plan, layout, schedule.stage, input);
  plan.add(Category::gather_slots, Tier::device, schedule.gather_arena);
  plan.add(Category::gradient_slots, Tier::device, schedule.gradient_arena);
  std::int64_t blocks = 0;
  for (int rank = 0; rank < layout.world(); ++rank) {
    blocks = std::max(blocks, count_blocks(layout, rank));
  }
  Bytes squares(Category::square_sum_blocks);
  squares.add(blocks, sizeof(double));
  squares.put(plan, Tier::device);
  check_sums(plan);
  return plan;
}

}  // namespace zshard::engine
