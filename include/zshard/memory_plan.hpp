// Bytes of one rank by category and tier, computed before anything is allocated.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "zshard/model_spec.hpp"
#include "zshard/optimizer.hpp"
#include "zshard/options.hpp"
#include "zshard/types.hpp"

namespace zshard {

/// What memory is for. Each (category, tier) is one arena.
enum class Category : std::uint8_t {
  parameters,
  resident,
  master,
  moments,
  gradients,
  gather_slots,
  gradient_slots,
  communication_staging,
  io_staging,
  square_sum_blocks,
};
inline constexpr int kCategories = 10;
inline constexpr int kTiers = 3;

std::string_view to_string(Category category);

/// A table of bytes, the same on every rank. A value.
class MemoryPlan {
 public:
  /// Bytes of a category in a tier, before arenas are rounded.
  [[nodiscard]] std::int64_t bytes(Category category, Tier tier) const {
    return bytes_[index(category, tier)];
  }
  /// Bytes of a category over all tiers.
  [[nodiscard]] std::int64_t bytes(Category category) const;
  /// Bytes that the arenas of a tier take: each category rounded up to 2 MiB.
  [[nodiscard]] std::int64_t arena_bytes(Tier tier) const;
  /// Bytes that the arenas take over all tiers but nvme.
  [[nodiscard]] std::int64_t memory_bytes() const;

  void add(Category category, Tier tier, std::int64_t count) {
    bytes_[index(category, tier)] += count;
  }

  /// A table with one line a category and a column a tier, and the totals.
  [[nodiscard]] std::string to_string() const;

  friend bool operator==(const MemoryPlan&, const MemoryPlan&) = default;

 private:
  static std::size_t index(Category category, Tier tier) {
    return static_cast<std::size_t>(category) * kTiers + static_cast<std::size_t>(tier);
  }
  std::array<std::int64_t, kCategories * kTiers> bytes_{};
};

/// The plan of an engine with these arguments. Pure: allocates and touches nothing but the tables
/// of the layout. Throws UsageError for what an engine would refuse; not for exceeded budgets.
MemoryPlan plan_memory(const ModelSpec& spec, const Optimizer& optimizer, int world,
                       const EngineOptions& options = {});

/// The smallest gather_budget with which the spec's program runs at stage 3 on `world` ranks, in
/// bytes.
std::int64_t minimum_gather_budget(const ModelSpec& spec, int world);

/// Bytes of gathered parameters if every unit of the program stays: the largest useful
/// gather_budget.
std::int64_t maximum_gather_budget(const ModelSpec& spec, int world);

}  // namespace zshard
