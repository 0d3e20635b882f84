// The factors of an engine's run and their values, and a case for a row of them. Shared by the
// covering array and the fuzz.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tests/engine/lab.hpp"

namespace zshard::lab {

enum Factor {
  kWorld,
  kPlacement,  // stages 0-2, stage 3 at three budgets
  kMicroSteps,
  kAccumulation,
  kWire,
  kGroup,
  kGradientMode,
  kLookAhead,
  kBehind,
  kQueues,
  kClip,
  kUses,
  kTiers,
  kSubGroup,
  kEvaluate,
  kPoison,
  kBad,
  kFactors
};
inline const std::vector<int> kLevels = {7, 6, 2, 2, 4, 3, 2, 3, 3, 3, 2, 3, 3, 2, 2, 2, 2};

inline Case make_case(const std::vector<int>& row, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Case c;
  c.spec = random_spec(random);
  const auto at = [&](Factor f) {
    return static_cast<std::size_t>(row[static_cast<std::size_t>(f)]);
  };
  c.world = std::vector<int>{1, 2, 3, 4, 5, 7, 8}[at(kWorld)];
  EngineOptions& o = c.options;
  const std::size_t placement = at(kPlacement);
  o.stage = static_cast<Stage>(std::min<std::size_t>(placement, 3));
  if (placement >= 3) {
    const auto choices = budgets(c.spec, c.world);
    o.gather_budget = choices[std::min(placement - 3, choices.size() - 1)];
  }
  o.accumulation = static_cast<Accumulation>(at(kAccumulation));
  if (at(kWire) != 0) o.wire = static_cast<DType>(at(kWire) - 1);
  o.reduction_group = std::vector<int>{0, 2, 3}[at(kGroup)];
  o.gradient_mode = static_cast<GradientMode>(at(kGradientMode));
  o.look_ahead = std::vector<int>{1, 0, 3}[at(kLookAhead)];
  o.behind = std::vector<int>{1, 0, 2}[at(kBehind)];
  o.inline_queues = at(kQueues) == 1;
  o.test_delay_microseconds = at(kQueues) == 2 ? 300 : 0;
  if (at(kClip) != 0) c.clip = 0.5;
  const int micro_steps = at(kMicroSteps) == 0 ? 1 : 3;
  c.uses = random_uses(random, c.spec, c.world, 3, micro_steps, at(kUses) == 0 ? 100 : 65);
  c.declare = at(kUses) == 2;
  if (at(kTiers) >= 1) o.offload.optimizer = Tier::host;
  if (at(kTiers) == 2) o.offload.gradients = Tier::host;
  if (at(kSubGroup) == 1) o.sub_group_bytes = 4096;
  c.evaluate = at(kEvaluate) == 1;
  o.poison_slots = at(kPoison) == 1;
  if (at(kBad) == 1) c.bad_tick = micro_steps;  // in the second step
  return c;
}

inline std::string text(const std::vector<int>& row) {
  std::string out;
  for (const int v : row) out += std::to_string(v) + " ";
  return out;
}

}  // namespace zshard::lab
