#include "zshard/model_spec.hpp"

#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"

namespace zshard {
namespace {

constexpr auto kMostIds = static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max());

[[noreturn]] void throw_unknown(const std::string& what, const std::string& name,
                                const std::vector<std::string>& known) {
  throw UsageError("the spec has no " + what + " " + base::quoted(name) + "." +
                   base::did_you_mean(name, known));
}

}  // namespace

std::int64_t ParameterSpec::count() const {
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      throw UsageError("parameter " + name + ": bad dtype or shape: extent " +
                       std::to_string(extent) + " is negative");
    }
    empty = empty || extent == 0;
  }
  if (empty) {  // first, since the other extents may overflow between them
    return 0;
  }
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(elements, extent, &elements)) {
      throw UsageError("parameter " + name +
                       ": its shape has more than 2^63 - 1 elements; split it into smaller ones");
    }
  }
  return elements;
}

ParameterId UnitBuilder::parameter(const std::string& name, Shape shape, ParameterOptions options) {
  return add(name, std::move(shape), {}, {}, std::move(options));
}

ParameterId UnitBuilder::add(const std::string& name, Shape shape, PointerBinding data,
                             PointerBinding gradient, ParameterOptions options) {
  if (spec_->where_.size() >= kMostIds) {
    throw UsageError("parameter " + name + ": a spec holds at most 2^31 - 1 parameters");
  }
  UnitSpec& unit = spec_->units_[static_cast<std::size_t>(id_.value)];
  const ParameterId id{spec_->next_parameter_};
  spec_->where_.emplace_back(id_.value, static_cast<std::int32_t>(unit.parameters.size()));
  unit.parameters.push_back({name, std::move(shape), std::move(options), data, gradient, id, id_});
  ++spec_->next_parameter_;
  return id;
}

UnitBuilder ModelSpec::unit(const std::string& name, UnitOptions options) {
  if (units_.size() >= kMostIds) {
    throw UsageError("unit " + name + ": a spec holds at most 2^31 - 1 units");
  }
  const UnitId id{static_cast<std::int32_t>(units_.size())};
  units_.push_back({name, std::move(options), {}});
  return {this, id};
}

ModelSpec& ModelSpec::group(const std::string& name, HyperParameters hyper) {
  if (name.empty()) {
    throw UsageError(
        "group(): a group has a name; the parameters without one take StepOptions and the "
        "optimizer's values");
  }
  for (GroupSpec& known : groups_) {
    if (known.name == name) {  // said again: the later word counts
      known.hyper = hyper;
      return *this;
    }
  }
  groups_.push_back({name, hyper});
  return *this;
}

ModelSpec& ModelSpec::program(std::vector<Position> positions) {
  program_ = std::move(positions);
  return *this;
}

ModelSpec& ModelSpec::hold(int k) {
  hold_ = k;
  return *this;
}

ModelSpec& ModelSpec::block_quantised(bool on) {
  block_quantised_ = on;
  return *this;
}

std::vector<Position> ModelSpec::program() const {
  if (!program_.empty()) {
    return program_;
  }
  std::vector<Position> positions;
  positions.reserve(2 * units_.size());
  const auto count = static_cast<std::int32_t>(units_.size());
  for (std::int32_t u = 0; u < count; ++u) {
    positions.push_back({UnitId{u}, Pass::forward});
  }
  for (std::int32_t u = count; u-- > 0;) {
    positions.push_back({UnitId{u}, Pass::backward});
  }
  return positions;
}

ParameterId ModelSpec::parameter_id(const std::string& name) const {
  for (const UnitSpec& unit : units_) {
    for (const ParameterSpec& p : unit.parameters) {
      if (p.name == name) {
        return p.id;
      }
    }
  }
  std::vector<std::string> known;
  for (const UnitSpec& unit : units_) {
    for (const ParameterSpec& p : unit.parameters) {
      known.push_back(p.name);
    }
  }
  throw_unknown("parameter", name, known);
}

UnitId ModelSpec::unit_id(const std::string& name) const {
  std::vector<std::string> known;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].name == name) {
      return UnitId{static_cast<std::int32_t>(u)};
    }
  }
  for (const UnitSpec& unit : units_) {
    known.push_back(unit.name);
  }
  throw_unknown("unit", name, known);
}

const ParameterSpec& ModelSpec::parameter(ParameterId id) const {
  if (id.value < 0 || id.value >= next_parameter_) {
    throw UsageError("the spec has no parameter with id " + std::to_string(id.value) + "; it has " +
                     std::to_string(next_parameter_) +
                     ": use what UnitBuilder::parameter returned, or parameter_id(name)");
  }
  const auto [unit, index] = where_[static_cast<std::size_t>(id.value)];
  return units_[static_cast<std::size_t>(unit)].parameters[static_cast<std::size_t>(index)];
}

}  // namespace zshard
