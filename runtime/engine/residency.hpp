// Where gathered units lie in one arena, planned ahead under a hard byte budget. Pure values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace zshard::engine {

/// Smallest legal budget. units: unit at each position; sizes: bytes of each unit; hold: positions
/// held at once.
std::int64_t minimum_budget(const std::vector<std::int32_t>& units,
                            const std::vector<std::int64_t>& sizes, int hold);

struct Trigger {
  std::int32_t unit = -1;
  std::int32_t wanted = -1;  // the position it is for
  std::int64_t offset = 0;   // bytes in the arena
  friend bool operator==(const Trigger&, const Trigger&) = default;
};

/// A unit's stay in the arena: positions [first, last], both inclusive.
struct Stay {
  std::int32_t unit = -1;
  std::int32_t first = 0;
  std::int32_t last = 0;
  std::int64_t offset = 0;  // bytes in the arena
};

/// Which units lie in the arena while a position is the current one, and where. Kept as stays,
/// since a list of units for each position would be quadratic.
class Residents {
 public:
  Residents() = default;
  /// stays: those of one unit are apart and in ascending order; units in any order.
  Residents(const std::vector<Stay>& stays, std::size_t units);

  /// Offset of the unit while `position` is current; -1: it is not in the arena.
  [[nodiscard]] std::int64_t offset(std::int32_t position, std::int32_t unit) const;
  [[nodiscard]] bool inside(std::int32_t position, std::int32_t unit) const {
    return offset(position, unit) >= 0;
  }

 private:
  std::vector<Stay> stays_;         // by unit, then position
  std::vector<std::size_t> begin_;  // per unit: its first stay; one more at the end
};

/// The plan of one micro-step.
struct ResidencyPass {
  std::vector<std::vector<Trigger>> triggers;  // per position: gathers issued when it is acquired
  std::vector<std::int64_t> address;  // per position: offset of its unit, -1 without gathered bytes
  Residents residents;                // in the arena while a position is current
  std::map<std::int32_t, std::int64_t> end;  // unit -> offset left at the end
};

struct ResidencyPlan {
  ResidencyPass first;  // the first micro-step of a step starts empty
  ResidencyPass later;  // all others start from `kept`
  std::map<std::int32_t, std::int64_t> kept;
};

/// Bytes of all units that occur: what an arena needs to drop nothing.
std::int64_t everything(const std::vector<std::int32_t>& units,
                        const std::vector<std::int64_t>& sizes);

/// Throws UsageError if the budget is below the minimum, hold < 1 or look_ahead < 0. Sizes are
/// multiples of 256 bytes.
ResidencyPlan plan_residency(const std::vector<std::int32_t>& units,
                             const std::vector<std::int64_t>& sizes, std::int64_t budget, int hold,
                             int look_ahead);

struct GradientInterval {
  std::int32_t first = 0;  // position, inclusive
  std::int32_t last = 0;
  std::int64_t bytes = 0;
};

/// First fit in order of (first, unit): offsets and the arena's bytes.
std::pair<std::map<std::int32_t, std::int64_t>, std::int64_t> pack_gradients(
    const std::map<std::int32_t, GradientInterval>& intervals);

}  // namespace zshard::engine
