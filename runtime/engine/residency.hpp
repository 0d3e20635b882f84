// Where gathered units lie in one arena, planned ahead under a hard byte budget. Pure values.
#pragma once

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

/// The plan of one micro-step.
struct ResidencyPass {
  std::vector<std::vector<Trigger>> triggers;  // per position: gathers issued when it is acquired
  std::vector<std::int64_t> address;  // per position: offset of its unit, -1 without gathered bytes
  std::vector<std::vector<std::int32_t>>
      inside;  // per position: units in the arena while it is current, ascending
  std::map<std::int32_t, std::int64_t> end;  // unit -> offset left at the end
};

struct ResidencyPlan {
  ResidencyPass first;  // the first micro-step of a step starts empty
  ResidencyPass later;  // all others start from `kept`
  std::map<std::int32_t, std::int64_t> kept;
};

/// Throws UsageError if the budget is below the minimum.
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
