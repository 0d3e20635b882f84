// Flat layout: where each parameter of a unit starts in the unit's flat buffer, and where each
// rank's shard is cut. A pure value, computed from spec and world size; nothing here owns or
// touches tensor memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::shard {

inline constexpr std::int64_t kAlignment =
    256;  // bytes: every start, shard and unit is a multiple of it

/// Segments of a unit, in this order: what stage 3 gathers is the first two, what holds a gradient
/// the middle two.
enum class Kind : std::uint8_t { frozen, trained, trained_resident, frozen_resident };
std::string_view to_string(Kind kind);

/// Elements [lo, hi) of a segment; empty if lo >= hi.
struct Range {
  std::int64_t lo = 0;
  std::int64_t hi = 0;
  [[nodiscard]] bool empty() const { return lo >= hi; }
  [[nodiscard]] std::int64_t count() const { return empty() ? 0 : hi - lo; }
};

/// A parameter inside its segment.
struct Placed {
  ParameterId parameter;
  std::int64_t start = 0;  // element in the segment
  std::int64_t count = 0;  // elements
};

/// Parameters of one kind and dtype, one after another, padded to world * quantum elements.
struct Segment {
  Kind kind = Kind::trained;
  DType dtype = DType::f32;
  std::int64_t byte = 0;    // start in the unit's flat buffer
  std::int64_t padded = 0;  // elements
  std::int64_t shard = 0;   // elements of each rank
  std::vector<Placed> placed;

  [[nodiscard]] std::int64_t bytes() const { return padded * size_of(dtype); }
  [[nodiscard]] std::int64_t shard_bytes() const { return shard * size_of(dtype); }
  [[nodiscard]] bool gathered() const { return kind == Kind::frozen || kind == Kind::trained; }
  [[nodiscard]] bool trained() const {
    return kind == Kind::trained || kind == Kind::trained_resident;
  }
  /// The part of a parameter that a rank owns, as elements of the segment.
  [[nodiscard]] Range owned(const Placed& p, int rank) const;
};

struct UnitLayout {
  std::string name;
  std::vector<Segment> segments;   // layout order
  std::int64_t bytes = 0;          // of the whole flat buffer
  std::int64_t gather_bytes = 0;   // frozen + trained: one gather slot at stage 3; starts at byte 0
  std::int64_t gradient_byte = 0;  // where the gradient range starts in the flat buffer
  std::int64_t gradient_bytes = 0;    // trained + trained-resident, in the parameters' dtypes
  std::int64_t trained_elements = 0;  // padded elements of the trained segments
};

/// Where a parameter of the spec lies. An alias has its owner's place.
struct Place {
  std::int32_t unit = -1;
  std::int32_t segment = -1;
  std::int32_t index = -1;  // in Segment::placed
};

class Layout {
 public:
  /// Throws UsageError for a spec that breaks the rules: names empty, repeated or with blanks or
  /// control characters, bad shapes, bad aliases, more elements than int64_t holds in bytes,
  /// lr_scale that is negative or not finite.
  static Layout make(const ModelSpec& spec, int world);

  [[nodiscard]] const std::vector<UnitLayout>& units() const { return units_; }
  [[nodiscard]] int world() const { return world_; }
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] std::uint64_t hash() const { return hash_; }  // XXH3-64 of text()
  [[nodiscard]] const Place& place(ParameterId id) const {
    return places_[static_cast<std::size_t>(id.value)];
  }
  /// Index of a parameter in its unit in layout order, as StepReport's first offender counts.
  [[nodiscard]] ParameterId parameter_at(std::int32_t unit, std::int32_t index) const;

 private:
  std::vector<UnitLayout> units_;
  std::vector<Place> places_;
  int world_ = 1;
  std::string text_;
  std::uint64_t hash_ = 0;
};

}  // namespace zshard::shard
