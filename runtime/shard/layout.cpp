#include "runtime/shard/layout.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"

namespace zshard::shard {
namespace {

constexpr std::array kKinds = {Kind::frozen, Kind::trained, Kind::trained_resident,
                               Kind::frozen_resident};
constexpr std::array kDTypes = {DType::f32, DType::bf16, DType::f16};
constexpr std::int64_t kBlock = 256;  // elements of a quantised block

Kind kind_of(const ParameterOptions& options) {
  if (options.resident) {
    return options.frozen ? Kind::frozen_resident : Kind::trained_resident;
  }
  return options.frozen ? Kind::frozen : Kind::trained;
}

/// Elements between possible starts.
std::int64_t quantum(DType dtype, bool block_quantised) {
  return block_quantised ? kBlock : kAlignment / size_of(dtype);
}

[[noreturn]] void throw_too_large(const std::string& unit) {
  throw UsageError("unit " + unit +
                   ": sizes past 2^63 - 1 bytes; make its parameters smaller or fewer");
}

/// Sizes of one unit; every operation that would pass 2^63 - 1 names the unit.
class Sizes {
 public:
  explicit Sizes(const std::string& unit) : unit_(unit) {}

  [[nodiscard]] std::int64_t add(std::int64_t a, std::int64_t b) const {
    std::int64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) {
      throw_too_large(unit_);
    }
    return sum;
  }
  [[nodiscard]] std::int64_t multiply(std::int64_t a, std::int64_t b) const {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) {
      throw_too_large(unit_);
    }
    return product;
  }
  /// The next multiple at or after value.
  [[nodiscard]] std::int64_t up(std::int64_t value, std::int64_t multiple) const {
    return multiply(add(value, multiple - 1) / multiple, multiple);
  }

 private:
  const std::string& unit_;
};

bool blank_or_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte <= ' ' || byte == 0x7f;
  });
}

void check_name(const std::string& what, const std::string& name) {
  if (name.empty() || blank_or_control(name)) {
    throw UsageError("names are not empty and hold no blank or control character: " + what + " " +
                     base::quoted(name) + "; rename it in the spec");
  }
}

/// Labels may be absent, but stand in the text like names.
void check_label(const std::string& owner, const std::string& what, const std::string& label) {
  if (blank_or_control(label)) {
    throw UsageError("names are not empty and hold no blank or control character: " + what +
                     " of " + owner + ", " + base::quoted(label) + "; rename it in the spec");
  }
}

void check_options(const ParameterSpec& p) {
  const ParameterOptions& options = p.options;
  const std::string owner = "parameter " + p.name;
  check_label(owner, "group", options.group);
  check_label(owner, "tensor_axis", options.tensor_axis);
  if (std::find(kDTypes.begin(), kDTypes.end(), options.dtype) == kDTypes.end()) {
    throw UsageError(owner + ": bad dtype or shape: dtype " +
                     std::to_string(static_cast<int>(options.dtype)) +
                     " is none of f32, bf16, f16");
  }
  if (!std::isfinite(options.lr_scale) || options.lr_scale < 0.0) {
    throw UsageError(
        fmt::format("{}: lr_scale {} is negative or not finite; use a factor >= 0, or "
                    "ParameterOptions::frozen to train nothing",
                    owner, options.lr_scale));
  }
}

using Seen = std::unordered_map<std::string_view, const ParameterSpec*>;

void check_alias(const ParameterSpec& p, const Seen& seen) {
  const auto found = seen.find(p.options.alias);
  if (found == seen.end() || !found->second->options.alias.empty()) {
    std::string message = p.name + ": an alias names an earlier parameter that is no alias, not " +
                          base::quoted(p.options.alias) + ".";
    if (found != seen.end()) {
      message += " Use '" + found->second->options.alias + "', the one it stands for.";
    } else {
      std::vector<std::string> owners;
      for (const auto& [name, other] : seen) {
        if (other->options.alias.empty()) {
          owners.emplace_back(name);
        }
      }
      std::sort(owners.begin(), owners.end());  // the message does not depend on a hash
      message += base::did_you_mean(p.options.alias, owners);
    }
    throw UsageError(message);
  }
  const ParameterSpec& owner = *found->second;
  if (p.shape != owner.shape || p.options.dtype != owner.options.dtype) {
    throw UsageError(p.name + ": shape or dtype differs from " + owner.name +
                     ", whose storage it is; give both the same");
  }
  const ParameterOptions plain;
  const auto stray = [](const auto& mine, const auto& unset, const auto& theirs) {
    return mine != unset && mine != theirs;
  };
  if (stray(p.options.lr_scale, plain.lr_scale, owner.options.lr_scale) ||
      stray(p.options.group, plain.group, owner.options.group) ||
      stray(p.options.tensor_axis, plain.tensor_axis, owner.options.tensor_axis)) {
    throw UsageError(p.name + ": lr_scale, group and tensor_axis are those of " + owner.name +
                     ", whose state it shares; set them there");
  }
}

void validate(const ModelSpec& spec, int world) {
  if (world < 1) {
    throw UsageError("world size < 1: " + std::to_string(world));
  }
  std::unordered_set<std::string_view> unit_names;
  for (const UnitSpec& unit : spec.units()) {
    if (!unit_names.insert(unit.name).second) {
      throw UsageError("two units with one name: " + base::quoted(unit.name) +
                       "; rename one in the spec");
    }
  }
  Seen seen;
  for (const UnitSpec& unit : spec.units()) {
    check_name("unit", unit.name);
    check_label("unit " + unit.name, "shard_axis", unit.options.shard_axis);
    for (const ParameterSpec& p : unit.parameters) {
      if (const auto found = seen.find(p.name); found != seen.end()) {
        const std::string& first =
            spec.units()[static_cast<std::size_t>(found->second->unit.value)].name;
        throw UsageError("parameter " + p.name + " is registered twice: in unit " + first +
                         " and in unit " + unit.name + "; rename one, or make it an alias");
      }
      check_name("parameter", p.name);
      check_options(p);
      (void)p.count();  // throws for a bad shape, also of an alias
      if (!p.options.alias.empty()) {
        check_alias(p, seen);
      }
      seen.emplace(p.name, &p);
    }
  }
}

Segment make_segment(Kind kind, DType dtype, std::int64_t byte, int world, bool block_quantised,
                     const std::vector<const ParameterSpec*>& parameters, const Sizes& sizes) {
  const std::int64_t step = quantum(dtype, block_quantised);
  Segment segment{.kind = kind, .dtype = dtype, .byte = byte};
  std::int64_t end = 0;
  for (const ParameterSpec* p : parameters) {
    const std::int64_t start = sizes.up(end, step);
    segment.placed.push_back({p->id, start, p->count()});
    end = sizes.add(start, p->count());
  }
  segment.padded = sizes.up(end, step * world);  // 0 stays 0: no bytes and no collective
  segment.shard = segment.padded / world;
  (void)sizes.multiply(segment.padded, size_of(dtype));  // bytes() has no check of its own
  return segment;
}

UnitLayout make_unit(const UnitSpec& spec, int world, bool block_quantised) {
  const Sizes sizes(spec.name);
  UnitLayout unit;
  unit.name = spec.name;
  for (const Kind kind : kKinds) {
    for (const DType dtype : kDTypes) {
      std::vector<const ParameterSpec*> own;  // registration order inside a segment
      for (const ParameterSpec& p : spec.parameters) {
        if (p.options.alias.empty() && kind_of(p.options) == kind && p.options.dtype == dtype) {
          own.push_back(&p);
        }
      }
      if (own.empty()) {
        continue;
      }
      const Segment& s = unit.segments.emplace_back(
          make_segment(kind, dtype, unit.bytes, world, block_quantised, own, sizes));
      unit.bytes = sizes.add(unit.bytes, s.bytes());
      if (s.gathered()) {
        unit.gather_bytes += s.bytes();
      }
      if (kind == Kind::frozen) {
        unit.gradient_byte += s.bytes();
      }
      if (s.trained()) {
        unit.gradient_bytes += s.bytes();
        unit.trained_elements = sizes.add(unit.trained_elements, s.padded);
      }
    }
  }
  return unit;
}

std::string shape_text(const Shape& shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

void append_unit(std::string& text, std::size_t index, const UnitLayout& unit, const UnitSpec& own,
                 const ModelSpec& spec) {
  auto out = std::back_inserter(text);
  fmt::format_to(out, "unit {} {}", index, unit.name);
  if (!own.options.shard_axis.empty()) {
    fmt::format_to(out, " shard_axis={}", own.options.shard_axis);
  }
  text += '\n';
  for (const Segment& s : unit.segments) {
    fmt::format_to(out, "segment {} {} byte={} padded={} shard={}\n", to_string(s.kind),
                   zshard::to_string(s.dtype), s.byte, s.padded, s.shard);
    for (const Placed& placed : s.placed) {
      const ParameterSpec& p = spec.parameter(placed.parameter);
      fmt::format_to(out, "parameter {} {} start={} count={} decay={}", p.name, shape_text(p.shape),
                     placed.start, placed.count, p.options.decay ? 1 : 0);
      if (p.options.lr_scale != 1.0) {
        fmt::format_to(out, " lr_scale={}", p.options.lr_scale);  // shortest text that reads back
      }
      if (!p.options.group.empty()) {
        fmt::format_to(out, " group={}", p.options.group);
      }
      if (!p.options.tensor_axis.empty()) {
        fmt::format_to(out, " tensor_axis={}", p.options.tensor_axis);
      }
      text += '\n';
    }
  }
  for (const ParameterSpec& p : own.parameters) {
    if (!p.options.alias.empty()) {
      fmt::format_to(out, "alias {} {}\n", p.name, p.options.alias);
    }
  }
}

/// An alias has its owner's place, which is complete by then: owners come earlier.
std::vector<Place> make_places(const ModelSpec& spec, const std::vector<UnitLayout>& units) {
  std::vector<Place> places(static_cast<std::size_t>(spec.parameter_count()));
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t s = 0; s < units[u].segments.size(); ++s) {
      const std::vector<Placed>& placed = units[u].segments[s].placed;
      for (std::size_t i = 0; i < placed.size(); ++i) {
        places[static_cast<std::size_t>(placed[i].parameter.value)] = {
            static_cast<std::int32_t>(u), static_cast<std::int32_t>(s),
            static_cast<std::int32_t>(i)};
      }
    }
  }
  std::unordered_map<std::string_view, ParameterId> owners;
  for (const UnitSpec& unit : spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      owners.emplace(p.name, p.id);
      if (!p.options.alias.empty()) {
        places[static_cast<std::size_t>(p.id.value)] =
            places[static_cast<std::size_t>(owners.at(p.options.alias).value)];
      }
    }
  }
  return places;
}

}  // namespace

std::string_view to_string(Kind kind) {
  switch (kind) {
    case Kind::frozen:
      return "frozen";
    case Kind::trained:
      return "trained";
    case Kind::trained_resident:
      return "trained-resident";
    case Kind::frozen_resident:
      return "frozen-resident";
  }
  return "?";
}

Range Segment::owned(const Placed& p, int rank) const {
  return {std::max(p.start, rank * shard), std::min(p.start + p.count, (rank + 1) * shard)};
}

Layout Layout::make(const ModelSpec& spec, int world) {
  validate(spec, world);
  Layout layout;
  layout.world_ = world;
  layout.text_ = fmt::format("zshard-layout 1 world={} block_quantised={}\n", world,
                             spec.block_quantised() ? 1 : 0);
  std::int64_t total = 0;  // of all units: sums over the model must not overflow either
  std::int64_t elements = 0;
  for (const UnitSpec& unit : spec.units()) {
    const UnitLayout& made =
        layout.units_.emplace_back(make_unit(unit, world, spec.block_quantised()));
    const Sizes sizes(unit.name);
    total = sizes.add(total, made.bytes);
    elements = sizes.add(elements, made.trained_elements);
    append_unit(layout.text_, layout.units_.size() - 1, made, unit, spec);
  }
  layout.places_ = make_places(spec, layout.units_);
  layout.hash_ = XXH3_64bits(layout.text_.data(), layout.text_.size());
  return layout;
}

ParameterId Layout::parameter_at(std::int32_t unit, std::int32_t index) const {
  if (unit >= 0 && static_cast<std::size_t>(unit) < units_.size() && index >= 0) {
    auto left = static_cast<std::size_t>(index);
    for (const Segment& s : units_[static_cast<std::size_t>(unit)].segments) {
      if (left < s.placed.size()) {
        return s.placed[left].parameter;
      }
      left -= s.placed.size();
    }
  }
  throw UsageError(fmt::format("the layout has no parameter {} in unit {}", index, unit));
}

}  // namespace zshard::shard
