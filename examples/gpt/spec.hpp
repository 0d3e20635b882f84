// The model as zshard sees it.
#pragma once

#include <cstddef>
#include <vector>

#include "config.hpp"
#include "model.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// The registered model, and the ids that registration gave. unit_ids[u] and parameter_ids[u][i]
/// belong to units[u].parameters[i].
struct GptSpec {
  std::vector<UnitInfo> units;
  zshard::ModelSpec model;
  std::vector<zshard::UnitId> unit_ids;
  std::vector<std::vector<zshard::ParameterId>> parameter_ids;
};

/// Units in the order of unit_list. The program uses the token table's pieces for the lookup, for
/// the logits, for the gradient of the logits' input, and at the end for both of their own
/// gradients, so that a piece's gradient is in memory for one position only.
GptSpec make_spec(const Config& config);

/// AdamW with the arguments' constants.
zshard::AdamW make_optimizer(const Config& config);

/// Bytes of one unit's largest set of parameters as fp32.
std::int64_t largest_unit_bytes(const std::vector<UnitInfo>& units);

}  // namespace gpt
