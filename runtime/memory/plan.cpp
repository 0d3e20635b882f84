#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/bytes.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/memory_plan.hpp"

namespace zshard {
namespace {

constexpr std::array kAllTiers = {Tier::device, Tier::host, Tier::nvme};
static_assert(kAllTiers.size() == kTiers);

/// Plans of models that fit nowhere are still compared and printed: sums stop at the largest
/// number.
std::int64_t sum_of(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::numeric_limits<std::int64_t>::max();
  return sum;
}

std::string cell(std::int64_t bytes) {
  return bytes == 0 ? "0" : fmt::format("{} ({})", base::human_bytes(bytes), bytes);
}

/// Name, a cell a tier, and their sum.
using Row = std::array<std::string, kTiers + 2>;

Row row_of(std::string_view name, const std::array<std::int64_t, kTiers>& bytes) {
  return {std::string(name), cell(bytes[0]), cell(bytes[1]), cell(bytes[2]),
          cell(sum_of(sum_of(bytes[0], bytes[1]), bytes[2]))};
}

}  // namespace

std::string_view to_string(Category category) {
  switch (category) {
    case Category::parameters:
      return "parameters";
    case Category::resident:
      return "resident";
    case Category::master:
      return "master";
    case Category::moments:
      return "moments";
    case Category::gradients:
      return "gradients";
    case Category::gather_slots:
      return "gather slots";
    case Category::gradient_slots:
      return "gradient slots";
    case Category::communication_staging:
      return "communication staging";
    case Category::io_staging:
      return "I/O staging";
    case Category::square_sum_blocks:
      return "square-sum blocks";
  }
  return "?";
}

std::int64_t MemoryPlan::bytes(Category category) const {
  std::int64_t sum = 0;
  for (const Tier tier : kAllTiers) {
    sum = sum_of(sum, bytes(category, tier));
  }
  return sum;
}

std::int64_t MemoryPlan::arena_bytes(Tier tier) const {
  std::int64_t sum = 0;
  for (int c = 0; c < kCategories; ++c) {
    sum = sum_of(sum, memory::round_to_arena(bytes(static_cast<Category>(c), tier)));
  }
  return sum;
}

std::int64_t MemoryPlan::memory_bytes() const {
  return sum_of(arena_bytes(Tier::device), arena_bytes(Tier::host));
}

std::string MemoryPlan::to_string() const {
  std::vector<Row> rows{{"category", std::string(zshard::to_string(Tier::device)),
                         std::string(zshard::to_string(Tier::host)),
                         std::string(zshard::to_string(Tier::nvme)), "total"}};
  std::array<std::int64_t, kTiers> totals{};
  std::array<std::int64_t, kTiers> arenas{};
  for (int c = 0; c < kCategories; ++c) {
    const auto category = static_cast<Category>(c);
    std::array<std::int64_t, kTiers> row{};
    for (std::size_t t = 0; t < row.size(); ++t) {
      row[t] = bytes(category, kAllTiers[t]);
      totals[t] = sum_of(totals[t], row[t]);
      arenas[t] = sum_of(arenas[t], memory::round_to_arena(row[t]));
    }
    rows.push_back(row_of(zshard::to_string(category), row));
  }
  rows.push_back(row_of("total", totals));
  rows.push_back(row_of("in arenas of 2 MiB pages", arenas));

  std::array<std::size_t, kTiers + 2> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const Row& row : rows) {
    fmt::format_to(std::back_inserter(text), "{:<{}}", row[0], widths[0]);
    for (std::size_t i = 1; i < row.size(); ++i) {
      fmt::format_to(std::back_inserter(text), "  {:>{}}", row[i], widths[i]);
    }
    text += '\n';
  }
  return text;
}

}  // namespace zshard
