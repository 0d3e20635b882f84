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
  kBuffers,
  kBackend,
  kVerify,
  kEvaluate,
  kPoison,
  kBad,
  kFactors
};
inline const std::vector<int> kLevels = {7, 6, 2, 2, 4, 3, 2, 3, 3, 3,
                                         2, 3, 8, 3, 4, 2, 2, 2, 2, 2};

enum TierLevel {
  kAllDevice,
  kOptimizerHost,
  kOptimizerAndGradientsHost,
  kOptimizerNvme,
  kHalfOptimizerNvme,
  kOptimizerAndGradientsNvme,
  kAllNvme,
  kParametersNvme
};

/// What of the tiers a case can have: parameters move at stage 3, accumulators on disk need
/// accumulation `reduced`.
inline void set_tiers(EngineOptions& o, std::size_t level) {
  const bool third = o.stage == Stage::parameters;
  const bool reduced = o.accumulation == Accumulation::reduced;
  o.offload.nvme_dir = level >= kOptimizerNvme ? nvme_directory() : "";
  switch (level) {
    case kOptimizerHost:
      o.offload.optimizer = Tier::host;
      break;
    case kOptimizerAndGradientsHost:
      o.offload.optimizer = Tier::host;
      o.offload.gradients = Tier::host;
      break;
    case kOptimizerNvme:
      o.offload.optimizer = Tier::nvme;
      break;
    case kHalfOptimizerNvme:
      o.offload.optimizer = Tier::nvme;
      o.offload.optimizer_nvme_bytes = 20000;
      break;
    case kOptimizerAndGradientsNvme:
      o.offload.optimizer = Tier::nvme;
      if (reduced) o.offload.gradients = Tier::nvme;
      break;
    case kAllNvme:
      o.offload.optimizer = Tier::nvme;
      if (reduced) o.offload.gradients = Tier::nvme;
      if (third) o.offload.parameters = Tier::nvme;
      break;
    case kParametersNvme:
      if (third) o.offload.parameters = Tier::nvme;
      break;
    default:
      break;
  }
}

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
  set_tiers(o, at(kTiers));
  // All of a segment; 341 elements, which are rounded up to the smallest group; two of those.
  if (at(kSubGroup) != 0) o.sub_group_bytes = at(kSubGroup) == 1 ? 4096 : 40000;
  o.offload.io_buffers = std::vector<int>{3, 1, 2, 8}[at(kBuffers)];
  o.offload.io_backend = at(kBackend) == 0 ? IoBackendKind::automatic : IoBackendKind::posix;
  o.offload.io_verify = at(kVerify) == 1;
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
