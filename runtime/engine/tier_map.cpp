#include "runtime/engine/tier_map.hpp"

#include <algorithm>
#include <limits>

#include "offload/tiers/store.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

// Sub-groups are cut where every dtype's element starts a block of the disk.
constexpr std::int64_t kGroupQuantum = offload::kAlignment / 2;

std::int64_t checked_sum(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw UsageError("the nvme tier passes 2^63 - 1 bytes; make the model smaller");
  }
  return sum;
}

std::int64_t blocks(std::int64_t bytes) {
  return checked_sum(bytes, offload::kAlignment - 1) / offload::kAlignment * offload::kAlignment;
}

/// Elements of a segment that a rank updates.
std::int64_t updated(const shard::Segment& s, Stage stage) {
  return stage == Stage::replicated ? s.padded : s.shard;
}

int parts_of(const shard::Segment& s, int slots) {
  return slots + (s.dtype == DType::f32 ? 0 : 1);
}

/// Elements that a sub-group of this segment has at most.
std::int64_t group_elements(std::int64_t sub_group_bytes, int slots) {
  const std::int64_t elements = std::max<std::int64_t>(1, sub_group_bytes / (4 * (1 + slots)));
  return std::min(elements, std::int64_t{1} << 40) / kGroupQuantum * kGroupQuantum +
         (elements % kGroupQuantum != 0 ? kGroupQuantum : 0);
}

/// Groups of at most `most` that `count` makes.
std::int64_t groups_of(std::int64_t count, std::int64_t most) {
  return count / most + (count % most != 0 ? 1 : 0);
}

class Builder {
 public:
  Builder(const shard::Layout& layout, const TierInput& input) : layout_(layout), input_(input) {
    map_.parameters = input.offload.parameters == Tier::nvme && input.stage == Stage::parameters;
    map_.gradients = input.offload.gradients == Tier::nvme;
  }

  TierMap build() {
    for (const shard::UnitLayout& unit : layout_.units()) {
      map_.units.emplace_back();
      map_.units.back().segments.resize(unit.segments.size());
    }
    if (map_.parameters) place_parameters();
    if (map_.gradients) place_gradients();
    place_state();
    map_.store_bytes = end_;
    // Of a model without elements there is nothing to put anywhere.
    map_.parameters = map_.parameters && map_.parameter_bytes != 0;
    map_.gradients = map_.gradients && map_.gradient_bytes != 0;
    if (map_.uses_store()) place_staging();
    return std::move(map_);
  }

 private:
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t at = end_;
    end_ = checked_sum(end_, blocks(bytes));
    return at;
  }

  void place_parameters() {
    for (std::size_t u = 0; u < map_.units.size(); ++u) {
      TierMap::Unit& unit = map_.units[u];
      unit.parameters.offset = end_;
      for (std::size_t s = 0; s < unit.segments.size(); ++s) {
        const shard::Segment& seg = layout_.units()[u].segments[s];
        if (seg.gathered())
          unit.segments[s].parameter = take(seg.shard_bytes()) - unit.parameters.offset;
      }
      unit.parameters.bytes = end_ - unit.parameters.offset;
      map_.largest_parameters = std::max(map_.largest_parameters, unit.parameters.bytes);
    }
    map_.parameter_bytes = end_;
  }

  void place_gradients() {
    const std::int64_t begin = end_;
    for (std::size_t u = 0; u < map_.units.size(); ++u) {
      TierMap::Unit& unit = map_.units[u];
      unit.gradients.offset = end_;
      for (std::size_t s = 0; s < unit.segments.size(); ++s) {
        const shard::Segment& seg = layout_.units()[u].segments[s];
        if (seg.trained()) unit.segments[s].gradient = take(seg.shard * 4) - unit.gradients.offset;
      }
      unit.gradients.bytes = end_ - unit.gradients.offset;
      map_.accumulator_bytes = std::max(map_.accumulator_bytes, unit.gradients.bytes);
    }
    map_.gradient_bytes = end_ - begin;
  }

  /// Bytes of state that go to disk at least, of `all`.
  [[nodiscard]] std::int64_t wanted_on_disk(std::int64_t all) const {
    if (input_.offload.optimizer != Tier::nvme) return 0;
    if (input_.kept_bytes) return std::max<std::int64_t>(0, all - *input_.kept_bytes);
    return std::min(all, input_.offload.optimizer_nvme_bytes.value_or(all));
  }

  void place_state() {
    const std::int64_t all = state_bytes(layout_, input_.stage, input_.slots);
    const std::int64_t wanted = wanted_on_disk(all);
    const double share = all == 0 ? 0.0 : static_cast<double>(wanted) / static_cast<double>(all);
    const std::int64_t most = group_elements(input_.sub_group_bytes, input_.slots);
    split_state(all, wanted, share, most);
    std::int64_t count = 0;
    for (std::size_t u = 0; u < map_.units.size(); ++u) {
      for (std::size_t s = 0; s < map_.units[u].segments.size(); ++s) {
        const Cut cut = cut_of(u, s, most);
        count = checked_sum(count, groups_of(cut.elements, cut.most));
      }
    }
    if (count > kMostGroups) {
      throw UsageError("option sub_group_bytes: " + std::to_string(input_.sub_group_bytes) +
                       " cuts this model into " + std::to_string(count) +
                       " sub-groups a rank, more than " + std::to_string(kMostGroups) +
                       "; raise it");
    }
    map_.groups.reserve(static_cast<std::size_t>(count));
    for (std::size_t u = 0; u < map_.units.size(); ++u) {
      TierMap::Unit& unit = map_.units[u];
      unit.first_group = static_cast<std::int32_t>(map_.groups.size());
      for (std::size_t s = 0; s < unit.segments.size(); ++s) {
        const Cut cut = cut_of(u, s, most);
        for (std::int64_t first = 0; first < cut.elements; first += cut.most) {
          add_group(static_cast<std::int32_t>(u), static_cast<std::int32_t>(s),
                    layout_.units()[u].segments[s], first, std::min(cut.most, cut.elements - first),
                    first >= unit.segments[s].kept);
        }
      }
      unit.groups = static_cast<std::int32_t>(map_.groups.size()) - unit.first_group;
    }
  }

  /// Sets which elements of each segment's state stay in memory, `wanted` bytes of `all` at least
  /// going to disk in groups of `most` elements.
  void split_state(std::int64_t all, std::int64_t wanted, double share, std::int64_t most) {
    std::int64_t seen = 0;
    std::int64_t moved = 0;
    for (std::size_t u = 0; u < map_.units.size(); ++u) {
      for (std::size_t s = 0; s < map_.units[u].segments.size(); ++s) {
        const shard::Segment& seg = layout_.units()[u].segments[s];
        if (!seg.trained()) continue;
        const std::int64_t each = std::int64_t{4} * parts_of(seg, input_.slots);
        const std::int64_t elements = updated(seg, input_.stage);
        seen = checked_sum(seen, each * elements);
        // Every unit sends the same share to disk, in whole sub-groups, so that transfers and
        // updates alternate all along a step.
        const std::int64_t due =
            seen == all ? wanted : static_cast<std::int64_t>(share * static_cast<double>(seen));
        std::int64_t kept = elements;
        if (each != 0 && moved < due) {
          const std::int64_t sent = std::min(elements, groups_of(due - moved, each));
          kept = (elements - sent) / most * most;
        }
        moved += each * (elements - kept);
        map_.units[u].segments[s].kept = kept;
      }
    }
  }

  /// The elements of a segment that the rank updates, and how many of them a group has at most.
  struct Cut {
    std::int64_t elements = 0;
    std::int64_t most = 1;
  };
  [[nodiscard]] Cut cut_of(std::size_t u, std::size_t s, std::int64_t most) const {
    const shard::Segment& seg = layout_.units()[u].segments[s];
    if (!seg.trained()) return {};
    const std::int64_t elements = updated(seg, input_.stage);
    const bool cut = moves(map_.units[u].segments[s], seg, elements);
    return {elements, cut ? most : std::max<std::int64_t>(elements, 1)};
  }

  /// Whether the step moves anything of it; else it is one group.
  [[nodiscard]] bool moves(const TierMap::Segment& segment, const shard::Segment& seg,
                           std::int64_t elements) const {
    return input_.cut || segment.parameter >= 0 ||
           (segment.gradient >= 0 && input_.stage != Stage::replicated) ||
           (segment.kept < elements && parts_of(seg, input_.slots) != 0);
  }

  // A table of groups that does not fit memory itself helps nobody.
  static constexpr std::int64_t kMostGroups = std::int64_t{1} << 24;

  void add_group(std::int32_t u, std::int32_t s, const shard::Segment& seg, std::int64_t first,
                 std::int64_t count, bool to_disk) {
    const TierMap::Unit& unit = map_.units[static_cast<std::size_t>(u)];
    const TierMap::Segment& segment = unit.segments[static_cast<std::size_t>(s)];
    SubGroup g;
    g.unit = u;
    g.segment = s;
    g.first = first;
    g.count = count;
    const int parts = parts_of(seg, input_.slots);
    if (to_disk && parts != 0) {
      g.state_bytes = blocks(4 * parts * count);
      g.state = take(g.state_bytes);
      map_.optimizer = true;
      const std::int64_t master = parts > input_.slots ? 4 * count : 0;
      // The rounding is the moments', or the master's where there are none.
      map_.master_bytes += input_.slots == 0 ? g.state_bytes : master;
      map_.moment_bytes += input_.slots == 0 ? 0 : g.state_bytes - master;
    }
    if (segment.parameter >= 0) {
      g.parameter_bytes = blocks(count * size_of(seg.dtype));
      g.parameter = unit.parameters.offset + segment.parameter + first * size_of(seg.dtype);
      g.reads_parameter = seg.dtype == DType::f32;
    }
    // At stage 0 the update takes the gathered gradients.
    if (segment.gradient >= 0 && input_.stage != Stage::replicated) {
      g.gradient_bytes = blocks(4 * count);
      g.gradient = unit.gradients.offset + segment.gradient + 4 * first;
    }
    map_.groups.push_back(g);
  }

  void place_staging() {
    std::int64_t at = 0;
    const auto give = [&](std::int64_t bytes) {
      const std::int64_t begin = at;
      at = checked_sum(at, bytes);
      return begin;
    };
    map_.windows = give(kWindows * kWindowBytes);
    std::int64_t on_disk = 0;
    for (const SubGroup& g : map_.groups) {
      map_.buffer_bytes = std::max(map_.buffer_bytes, g.buffer_bytes());
      on_disk += g.on_disk() ? 1 : 0;
    }
    map_.buffer_count =
        static_cast<int>(std::min<std::int64_t>(input_.offload.io_buffers, on_disk));
    map_.buffers = give(map_.buffer_bytes * map_.buffer_count);
    if (map_.parameters) {
      // One unit can always be read beside the one that peers still copy from, if there are
      // buffers at all.
      map_.ring_bytes = std::min(map_.parameter_bytes,
                                 map_.largest_parameters * (input_.offload.io_buffers > 1 ? 2 : 1));
      map_.ring = give(map_.ring_bytes);
    }
    if (map_.gradients) map_.accumulators = give(kAccumulatorSlots * map_.accumulator_bytes);
    if (input_.offload.io_verify) {
      map_.checksum_bytes = 8 * offload::verify_words(map_.store_bytes);
      map_.checksums = give(map_.checksum_bytes);
    }
    map_.staging_bytes = at;
  }

  const shard::Layout& layout_;
  const TierInput& input_;
  TierMap map_;
  std::int64_t end_ = 0;
};

}  // namespace

std::int64_t state_bytes(const shard::Layout& layout, Stage stage, int slots) {
  std::int64_t bytes = 0;
  for (const shard::UnitLayout& unit : layout.units()) {
    for (const shard::Segment& seg : unit.segments) {
      if (!seg.trained()) continue;
      std::int64_t each = 0;
      if (__builtin_mul_overflow(updated(seg, stage), std::int64_t{4} * parts_of(seg, slots),
                                 &each)) {
        each = std::numeric_limits<std::int64_t>::max();
      }
      bytes = checked_sum(bytes, each);
    }
  }
  return bytes;
}

TierMap make_tier_map(const shard::Layout& layout, const TierInput& input) {
  return Builder(layout, input).build();
}

std::string TierMap::describe(const shard::Layout& layout, std::int64_t offset) const {
  const auto inside = [offset](std::int64_t begin, std::int64_t bytes) {
    return begin >= 0 && offset >= begin && offset < begin + bytes;
  };
  for (std::size_t u = 0; u < units.size(); ++u) {
    const std::string of = " of unit " + layout.units()[u].name;
    if (inside(units[u].parameters.offset, units[u].parameters.bytes)) return "parameters" + of;
    if (inside(units[u].gradients.offset, units[u].gradients.bytes)) return "gradients" + of;
  }
  for (const SubGroup& g : groups) {
    if (!inside(g.state, g.state_bytes)) continue;
    return "optimizer state of unit " + layout.units()[static_cast<std::size_t>(g.unit)].name +
           ", segment " + std::to_string(g.segment) + ", elements " + std::to_string(g.first) +
           " to " + std::to_string(g.first + g.count);
  }
  return "nothing";
}

}  // namespace zshard::engine
