#include "runtime/cli/capacity.hpp"

#include <limits>
#include <optional>

#include "offload/io/lock_limit.hpp"
#include "runtime/base/bytes.hpp"

namespace zshard::cli {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

std::string sizes(std::int64_t wanted, std::int64_t there) {
  return base::human_bytes(wanted) + " (" + std::to_string(wanted) + "), there are " +
         base::human_bytes(there) + " (" + std::to_string(there) + ")";
}

}  // namespace

std::int64_t capped_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kMost : product;
}

std::int64_t disk_bytes(const MemoryPlan& plan) {
  std::int64_t sum = 0;
  for (int c = 0; c < kCategories; ++c) {
    if (__builtin_add_overflow(sum, plan.bytes(static_cast<Category>(c), Tier::nvme), &sum)) {
      return kMost;
    }
  }
  return sum;
}

std::int64_t main_memory_bytes(const MemoryPlan& plan, const EngineOptions& options) {
  return options.device == DeviceKind::host ? plan.memory_bytes() : plan.arena_bytes(Tier::host);
}

std::int64_t locked_bytes(const engine::TierMap& tiers, const EngineOptions& options) {
  if (!tiers.uses_store() || options.offload.io_backend == IoBackendKind::posix) return 0;
  return offload::locked_bytes(options.offload.io_depth, tiers.transfer_bytes());
}

std::vector<std::string> Capacity::lacks(const MemoryPlan& plan,
                                         const EngineOptions& options) const {
  std::vector<std::string> reasons;
  const std::string who = std::to_string(ranks) + (ranks == 1 ? " rank takes " : " ranks take ");
  const std::int64_t memory_here = capped_product(main_memory_bytes(plan, options), ranks);
  if (memory >= 0 && memory_here > memory) {
    reasons.push_back("memory: " + who + sizes(memory_here, memory));
  }
  const std::int64_t disk_here = capped_product(disk_bytes(plan), ranks);
  if (disk >= 0 && disk_here > disk) reasons.push_back("disk: " + who + sizes(disk_here, disk));
  const auto budget = [&](const char* name, const std::optional<std::int64_t>& most, Tier tier) {
    if (most && plan.arena_bytes(tier) > *most) {
      reasons.push_back(std::string(name) + ": a rank takes " +
                        sizes(plan.arena_bytes(tier), *most));
    }
  };
  budget("device_budget", options.device_budget, Tier::device);
  budget("host_budget", options.host_budget, Tier::host);
  return reasons;
}

}  // namespace zshard::cli
