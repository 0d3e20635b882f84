// Program -> total order of collectives of a micro-step, of an evaluation pass and of a step. A
// pure value, the same on every rank; its text is hashed and compared.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/engine/residency.hpp"
#include "runtime/shard/layout.hpp"
#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::engine {

enum class ItemKind : std::uint8_t { gather, reduce, vote, gather_gradient, gather_parameter };
std::string_view to_string(ItemKind kind);  // "gather-gradient", ...

struct Item {
  ItemKind kind = ItemKind::gather;
  std::int32_t unit = -1;
  std::int32_t position =
      -1;  // gather: the position it is for; reduce: the unit's last backward position
  std::int32_t trigger = -1;  // gather: issued once this position is acquired or passed
  std::int64_t offset =
      -1;  // bytes in the gather arena (gather) or in the gradient slots (reduce); -1: none

  [[nodiscard]] std::string text(const shard::Layout& layout) const;
};

struct ScheduleOptions {
  Stage stage = Stage::parameters;
  std::optional<std::int64_t> budget;  // unset: all units of the program
  int hold = 1;
  int look_ahead = 1;
  int behind = 1;
};

/// Everything a rank needs to know to run a micro-step. Holds a pointer to the layout, which must
/// outlive it.
struct Schedule {
  const shard::Layout* layout = nullptr;
  std::vector<Position> program;
  Stage stage = Stage::parameters;
  int hold = 1;
  std::vector<Item> first;  // items of the first micro-step of a step (or of an evaluation range)
  std::vector<Item> later;
  std::vector<std::int64_t> first_address;  // offset in the gather arena per position, -1: none
  std::vector<std::int64_t> later_address;
  Residents first_inside;  // units that may be served behind the cursor, and where they lie
  Residents later_inside;
  std::vector<std::int64_t>
      gradient_offset;  // per unit, in the gradient slots; -1 below stage 2 and for untrained units
  std::int64_t gradient_arena = 0;  // bytes
  std::int64_t gather_arena =
      0;  // bytes: min(budget down to 256, all units of the program); 0 below stage 3
  std::vector<std::int32_t> last_backward;   // per unit: position of its reduction, -1: none
  std::vector<std::int32_t> first_backward;  // per unit

  [[nodiscard]] const std::vector<Item>& items(int micro) const {
    return micro == 0 ? first : later;
  }
  [[nodiscard]] const std::vector<std::int64_t>& address(int micro) const {
    return micro == 0 ? first_address : later_address;
  }
  [[nodiscard]] const Residents& inside(int micro) const {
    return micro == 0 ? first_inside : later_inside;
  }
  [[nodiscard]] std::string text() const;
};

/// Throws UsageError if a unit with trained parameters has no backward position, a budget is too
/// small, a position names no unit, hold < 1, look_ahead < 0 or behind < 0. Options larger than the
/// program is long act as its length.
Schedule make_schedule(const shard::Layout& layout, const std::vector<Position>& program,
                       const ScheduleOptions& options);

/// Forward positions only; starts empty like a step, later passes start from their kept set.
Schedule evaluation_schedule(const shard::Layout& layout, const std::vector<Position>& program,
                             const ScheduleOptions& options);

/// Of the training program and of its forward-only one.
std::int64_t minimum_gather_budget(const shard::Layout& layout,
                                   const std::vector<Position>& program, int hold);

/// Bytes of all units of the program.
std::int64_t maximum_gather_budget(const shard::Layout& layout,
                                   const std::vector<Position>& program);

/// Units with trained parameters: ascending when the step counter is even, descending when odd.
std::vector<std::int32_t> update_order(const shard::Layout& layout, std::int64_t step);

/// The gather of a unit at the end of a step; unset if the stage moves nothing for it.
std::optional<Item> step_gather(const shard::Layout& layout, Stage stage, std::int32_t unit);

/// The vote, then, if it passed, one gather per touched unit in update order. touched: one flag a
/// unit; empty: all.
std::vector<Item> step_items(const shard::Layout& layout, Stage stage, std::int64_t step,
                             std::span<const char> touched = {}, bool finite = true);

}  // namespace zshard::engine
