#include "spec.hpp"

#include <algorithm>

namespace gpt {

GptSpec make_spec(const Config& config) {
  using zshard::Pass;
  GptSpec result;
  result.units = unit_list(config.shape);
  for (const UnitInfo& info : result.units) {
    zshard::UnitBuilder unit = result.model.unit(info.name);
    std::vector<zshard::ParameterId>& ids = result.parameter_ids.emplace_back();
    for (const ParameterInfo& parameter : info.parameters) {
      // GPT-2's rule: gains and biases are not decayed.
      const bool decay = parameter.shape.size() >= 2;
      ids.push_back(
          unit.parameter(parameter.name, parameter.shape, {.dtype = config.dtype, .decay = decay}));
    }
    result.unit_ids.push_back(unit.id());
  }

  const auto pieces = static_cast<std::size_t>(config.shape.vocab_units);
  std::vector<zshard::Position> program;
  for (const zshard::UnitId unit : result.unit_ids) program.push_back({unit, Pass::forward});
  for (std::size_t k = 0; k < pieces; ++k) program.push_back({result.unit_ids[k], Pass::forward});
  // No gradient is written here, so it is not a backward use. From the last piece to the first, as
  // later: what was used last may still be gathered.
  for (std::size_t k = pieces; k-- > 0;) program.push_back({result.unit_ids[k], Pass::recompute});
  for (std::size_t u = result.unit_ids.size(); u-- > 0;) {
    program.push_back({result.unit_ids[u], Pass::backward});
  }
  result.model.program(program);
  return result;
}

zshard::AdamW make_optimizer(const Config& config) {
  return {.lr = config.lr,
          .beta1 = config.beta1,
          .beta2 = config.beta2,
          .eps = 1e-8,
          .weight_decay = config.weight_decay};
}

std::int64_t largest_unit_bytes(const std::vector<UnitInfo>& units) {
  std::int64_t largest = 0;
  for (const UnitInfo& unit : units) {
    std::int64_t bytes = 0;
    for (const ParameterInfo& parameter : unit.parameters) {
      std::int64_t count = 1;
      for (const std::int64_t extent : parameter.shape) count *= extent;
      bytes += count * static_cast<std::int64_t>(sizeof(float));
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace gpt
