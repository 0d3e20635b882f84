#include "runtime/engine/residency.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>

#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kGrain = 256;  // bytes: budgets are cut down to it

std::size_t at(std::int32_t index) {
  return static_cast<std::size_t>(index);
}

std::int64_t largest_of(const std::vector<std::int32_t>& units,
                        const std::vector<std::int64_t>& sizes) {
  std::int64_t largest = 0;
  for (const std::int32_t u : units) {
    largest = std::max(largest, sizes[at(u)]);
  }
  return largest;
}

/// Plans passes over one program. A unit's next use changes only where it is used, so it is kept
/// for each unit and brought up to date at its own positions. The arena is kept in order of offset,
/// and its units also in order of next use: a place is found by giving up units from the farthest
/// use on until a run of them and of the gaps between is long enough, which takes few.
class Planner {
 public:
  Planner(const std::vector<std::int32_t>& units, const std::vector<std::int64_t>& sizes,
          std::int64_t budget, int hold, int look_ahead);

  ResidencyPass run(const std::map<std::int32_t, std::int64_t>& start);

 private:
  struct Inside {
    std::int64_t offset;
    std::int64_t end;
    std::int32_t unit;
    std::int32_t since;  // position
  };
  struct Window {
    std::int64_t offset;
    std::size_t first;  // what it evicts: arena_[first, last)
    std::size_t last;
  };

  [[nodiscard]] bool safe(std::int32_t unit, std::int64_t offset) const;
  [[nodiscard]] std::size_t index_of(std::int32_t unit) const;
  [[nodiscard]] std::optional<Window> lowest(std::int32_t unit, std::size_t first,
                                             std::size_t last) const;
  [[nodiscard]] std::optional<Window> choose(std::int32_t unit, std::int64_t wanted);
  [[nodiscard]] std::optional<std::int64_t> place(std::int32_t unit, std::int32_t now,
                                                  std::int32_t wanted);
  void enter(std::int32_t now);
  void begin(const std::map<std::int32_t, std::int64_t>& start);
  void end_stay(const Inside& inside, std::int32_t last);

  const std::vector<std::int32_t>& units_;  // at each position
  std::vector<std::int64_t> sizes_;         // of each unit, as placed
  std::int64_t budget_ = 0;
  std::int64_t hold_;
  std::int64_t look_ahead_;
  bool all_fit_ = false;                 // nothing is ever dropped, so nothing fragments
  std::vector<std::int64_t> follower_;   // largest unit acquired while this one may still be held
  std::vector<std::int64_t> following_;  // per position: the next one of its unit, as if repeated
  std::vector<std::int32_t> first_use_;  // per unit; -1: none

  std::vector<Inside> arena_;           // by offset
  std::vector<std::int64_t> next_use_;  // per unit, after the current position
  std::vector<std::int32_t> pins_;      // per unit: how many held positions it has
  std::vector<std::int64_t> offset_;    // per unit; -1: not in the arena
  std::int64_t free_ = 0;               // bytes of the arena that no unit has
  std::set<std::pair<std::int64_t, std::int32_t>> by_use_;  // (next use, unit) of those inside

  // Scratch of choose(), per index in arena_: units given up form runs, each known at its two ends.
  std::int64_t round_ = 0;
  std::vector<std::int64_t> given_up_;  // in this round
  std::vector<std::size_t> run_first_;
  std::vector<std::size_t> run_last_;

  std::vector<Stay> stays_;
};

Planner::Planner(const std::vector<std::int32_t>& units, const std::vector<std::int64_t>& sizes,
                 std::int64_t budget, int hold, int look_ahead)
    : units_(units), sizes_(sizes), hold_(hold), look_ahead_(look_ahead) {
  const std::int64_t all = everything(units, sizes);
  const std::int64_t largest = largest_of(units, sizes);
  all_fit_ = budget >= all;
  budget_ = std::min(budget / kGrain * kGrain, all);
  if (hold > 2 && largest > 0 && !all_fit_) {  // equal slots cannot fragment
    for (std::int64_t& size : sizes_) {
      size = size > 0 ? largest : 0;
    }
    budget_ = budget / largest * largest;
  }
  given_up_.resize(sizes.size());
  run_first_.resize(sizes.size());
  run_last_.resize(sizes.size());
  follower_.resize(sizes.size());
  for (std::size_t p = 1; p < units.size(); ++p) {
    if (units[p - 1] != units[p]) {
      std::int64_t& follower = follower_[at(units[p - 1])];
      follower = std::max(follower, sizes_[at(units[p])]);
    }
  }
  const auto count = static_cast<std::int64_t>(units.size());
  first_use_.assign(sizes.size(), -1);
  for (std::size_t p = units.size(); p-- > 0;) {
    first_use_[at(units[p])] = static_cast<std::int32_t>(p);
  }
  following_.resize(units.size());
  std::vector<std::int64_t> later(sizes.size());
  for (std::size_t u = 0; u < sizes.size(); ++u) {
    later[u] = first_use_[u] + count;
  }
  for (std::size_t p = units.size(); p-- > 0;) {
    following_[p] = later[at(units[p])];
    later[at(units[p])] = static_cast<std::int64_t>(p);
  }
}

/// hold 2: beside this unit the largest follower still fits, on one side.
bool Planner::safe(std::int32_t unit, std::int64_t offset) const {
  const std::int64_t room = hold_ == 2 && !all_fit_ ? follower_[at(unit)] : 0;
  return offset >= room || offset + sizes_[at(unit)] <= budget_ - room;
}

std::size_t Planner::index_of(std::int32_t unit) const {
  const auto found = std::lower_bound(
      arena_.begin(), arena_.end(), offset_[at(unit)],
      [](const Inside& inside, std::int64_t offset) { return inside.offset < offset; });
  return static_cast<std::size_t>(found - arena_.begin());
}

/// The lowest safe window between the neighbours of arena_[first, last): the run's own bounds and
/// sides, and those of the units in it, are the offsets that count.
std::optional<Planner::Window> Planner::lowest(std::int32_t unit, std::size_t first,
                                               std::size_t last) const {
  const std::int64_t size = sizes_[at(unit)];
  const std::int64_t low = first > 0 ? arena_[first - 1].end : 0;
  const std::int64_t high = (last < arena_.size() ? arena_[last].offset : budget_) - size;
  if (low > high) {
    return std::nullopt;
  }
  std::int64_t offset = kNever;
  const auto consider = [&](std::int64_t candidate) {
    if (low <= candidate && candidate <= high && candidate < offset && safe(unit, candidate)) {
      offset = candidate;
    }
  };
  consider(low);
  if (offset != low) {
    consider(high);
    for (std::size_t i = first; i < last; ++i) {
      consider(arena_[i].end);
      consider(arena_[i].offset - size);
    }
  }
  if (offset == kNever) {
    return std::nullopt;
  }
  while (first < last && arena_[first].end <= offset) {
    ++first;
  }
  while (last > first && arena_[last - 1].offset >= offset + size) {
    --last;
  }
  return Window{offset, first, last};
}

/// Of all windows, at 0, at the far end and beside each unit inside, the one whose soonest evicted
/// use is farthest and later than `wanted`, then the lowest (Belady with addresses). Next uses are
/// distinct, so the last unit given up is the soonest of the window that it makes possible.
std::optional<Planner::Window> Planner::choose(std::int32_t unit, std::int64_t wanted) {
  const std::int64_t size = sizes_[at(unit)];
  if (free_ >= size) {  // a gap evicts nothing
    std::int64_t end = 0;
    for (std::size_t i = 0; i <= arena_.size(); ++i) {
      const std::int64_t next = i < arena_.size() ? arena_[i].offset : budget_;
      if (next - end >= size) {
        if (const std::optional<Window> window = lowest(unit, i, i)) {
          return window;
        }
      }
      end = i < arena_.size() ? arena_[i].end : budget_;
    }
  }
  ++round_;
  for (auto farthest = by_use_.rbegin(); farthest != by_use_.rend() && farthest->first > wanted;
       ++farthest) {
    if (pins_[at(farthest->second)] > 0) {
      continue;
    }
    const std::size_t i = index_of(farthest->second);
    const std::size_t first = i > 0 && given_up_[i - 1] == round_ ? run_first_[i - 1] : i;
    const std::size_t last =
        i + 1 < arena_.size() && given_up_[i + 1] == round_ ? run_last_[i + 1] : i;
    given_up_[i] = round_;
    run_last_[first] = last;
    run_first_[last] = first;
    if (const std::optional<Window> window = lowest(unit, first, last + 1)) {
      return window;
    }
  }
  return std::nullopt;
}

void Planner::end_stay(const Inside& inside, std::int32_t last) {
  offset_[at(inside.unit)] = -1;
  free_ += inside.end - inside.offset;
  by_use_.erase({next_use_[at(inside.unit)], inside.unit});
  if (inside.since <= last) {
    stays_.push_back({inside.unit, inside.since, last, inside.offset});
  }
}

/// Offset of a unit that position `wanted` needs, chosen when `now` is acquired; unset if only what
/// is needed sooner is in the way.
std::optional<std::int64_t> Planner::place(std::int32_t unit, std::int32_t now,
                                           std::int32_t wanted) {
  const std::optional<Window> window = choose(unit, wanted);
  if (!window) {
    return std::nullopt;
  }
  const auto begin = arena_.begin();
  const auto low = begin + static_cast<std::ptrdiff_t>(window->first);
  const auto high = begin + static_cast<std::ptrdiff_t>(window->last);
  for (auto i = low; i != high; ++i) {
    end_stay(*i, now - 1);
  }
  const Inside inside{window->offset, window->offset + sizes_[at(unit)], unit, now};
  if (low == high) {
    arena_.insert(low, inside);
  } else {
    *low = inside;
    arena_.erase(low + 1, high);
  }
  offset_[at(unit)] = window->offset;
  free_ -= sizes_[at(unit)];
  by_use_.emplace(next_use_[at(unit)], unit);
  return window->offset;
}

void Planner::begin(const std::map<std::int32_t, std::int64_t>& start) {
  arena_.clear();
  stays_.clear();
  pins_.assign(sizes_.size(), 0);
  offset_.assign(sizes_.size(), -1);
  next_use_.assign(sizes_.size(), kNever);
  for (std::size_t u = 0; u < sizes_.size(); ++u) {
    if (first_use_[u] >= 0) {
      next_use_[u] = first_use_[u];
    }
  }
  by_use_.clear();
  free_ = budget_;
  for (const auto& [unit, offset] : start) {
    arena_.push_back({offset, offset + sizes_[at(unit)], unit, 0});
    offset_[at(unit)] = offset;
    free_ -= sizes_[at(unit)];
    by_use_.emplace(next_use_[at(unit)], unit);
  }
  std::sort(arena_.begin(), arena_.end(),
            [](const Inside& a, const Inside& b) { return a.offset < b.offset; });
}

void Planner::enter(std::int32_t now) {
  const std::int32_t unit = units_[at(now)];
  if (offset_[at(unit)] >= 0) {
    by_use_.erase({next_use_[at(unit)], unit});
    by_use_.emplace(following_[at(now)], unit);
  }
  next_use_[at(unit)] = following_[at(now)];
  ++pins_[at(unit)];
  if (now >= hold_) {
    --pins_[at(units_[static_cast<std::size_t>(now - hold_)])];
  }
}

ResidencyPass Planner::run(const std::map<std::int32_t, std::int64_t>& start) {
  begin(start);
  ResidencyPass pass;
  const auto count = static_cast<std::int32_t>(units_.size());
  pass.triggers.resize(units_.size());
  pass.address.reserve(units_.size());
  // Positions before it have their unit inside: nothing evicts a unit before its next use, so they
  // need no second look.
  std::int32_t served = 0;
  for (std::int32_t now = 0; now < count; ++now) {
    enter(now);
    served = std::max(served, now);
    for (; served < count && served - now <= look_ahead_; ++served) {
      const std::int32_t unit = units_[at(served)];
      if (sizes_[at(unit)] == 0 || offset_[at(unit)] >= 0) {
        continue;
      }
      const std::optional<std::int64_t> offset = place(unit, now, served);
      if (!offset) {
        break;  // look-ahead fills what is left, in program order
      }
      pass.triggers[at(now)].push_back({unit, served, *offset});
    }
    const std::int32_t unit = units_[at(now)];
    pass.address.push_back(sizes_[at(unit)] == 0 ? -1 : offset_[at(unit)]);
    if (sizes_[at(unit)] > 0 && offset_[at(unit)] < 0) {
      throw Error("internal error: the minimum gather budget did not suffice at position " +
                  std::to_string(now));
    }
  }
  for (const Inside& inside : arena_) {
    pass.end.emplace(inside.unit, inside.offset);
    stays_.push_back({inside.unit, inside.since, count - 1, inside.offset});
  }
  if (count > 0) {
    pass.residents = Residents(stays_, sizes_.size());
  }
  return pass;
}

}  // namespace

Residents::Residents(const std::vector<Stay>& stays, std::size_t units) : begin_(units + 1) {
  for (const Stay& stay : stays) {
    ++begin_[at(stay.unit) + 1];
  }
  for (std::size_t u = 0; u < units; ++u) {
    begin_[u + 1] += begin_[u];
  }
  stays_.resize(stays.size());
  std::vector<std::size_t> next(begin_.begin(), begin_.end() - 1);
  for (const Stay& stay : stays) {
    stays_[next[at(stay.unit)]++] = stay;
  }
}

std::int64_t Residents::offset(std::int32_t position, std::int32_t unit) const {
  if (unit < 0 || at(unit) + 1 >= begin_.size()) {
    return -1;
  }
  const auto begin = stays_.begin() + static_cast<std::ptrdiff_t>(begin_[at(unit)]);
  const auto end = stays_.begin() + static_cast<std::ptrdiff_t>(begin_[at(unit) + 1]);
  const auto after = std::upper_bound(
      begin, end, position, [](std::int32_t p, const Stay& stay) { return p < stay.first; });
  return after != begin && position <= (after - 1)->last ? (after - 1)->offset : -1;
}

std::int64_t everything(const std::vector<std::int32_t>& units,
                        const std::vector<std::int64_t>& sizes) {
  std::vector<char> counted(sizes.size());
  std::int64_t bytes = 0;
  for (const std::int32_t u : units) {
    if (counted[at(u)] == 0) {
      counted[at(u)] = 1;
      bytes += sizes[at(u)];
    }
  }
  return bytes;
}

std::int64_t minimum_budget(const std::vector<std::int32_t>& units,
                            const std::vector<std::int64_t>& sizes, int hold) {
  const std::int64_t largest = largest_of(units, sizes);
  if (hold == 1) {
    return largest;
  }
  if (hold == 2) {
    std::int64_t pair = largest;
    for (std::size_t p = 1; p < units.size(); ++p) {
      if (units[p - 1] != units[p]) {
        pair = std::max(pair, sizes[at(units[p - 1])] + sizes[at(units[p])]);
      }
    }
    return pair;
  }
  const std::int64_t all = everything(units, sizes);
  std::int64_t slots = 0;
  return __builtin_mul_overflow(largest, hold, &slots) ? all : std::min(slots, all);
}

ResidencyPlan plan_residency(const std::vector<std::int32_t>& units,
                             const std::vector<std::int64_t>& sizes, std::int64_t budget, int hold,
                             int look_ahead) {
  if (hold < 1) {
    throw UsageError("hold " + std::to_string(hold) +
                     " is below 1: ModelSpec::hold states how many positions a loop holds at once");
  }
  if (look_ahead < 0) {
    throw UsageError("look_ahead " + std::to_string(look_ahead) +
                     " is negative: it is the number of positions gathered ahead, 0 for none");
  }
  const std::int64_t minimum = minimum_budget(units, sizes, hold);
  if (budget < minimum) {
    throw UsageError("gather budget " + std::to_string(budget) + " is below the minimum " +
                     std::to_string(minimum) + " bytes of this program at hold " +
                     std::to_string(hold) +
                     "; raise gather_budget, or split the largest unit of the spec");
  }
  Planner planner(units, sizes, budget, hold, look_ahead);
  ResidencyPlan plan;
  plan.first = planner.run({});
  plan.kept = plan.first.end;
  while (true) {  // ends: the kept set only shrinks
    plan.later = planner.run(plan.kept);
    std::map<std::int32_t, std::int64_t> again;
    for (const auto& [unit, offset] : plan.kept) {
      const auto left = plan.later.end.find(unit);
      if (left != plan.later.end.end() && left->second == offset) {
        again.emplace(unit, offset);
      }
    }
    if (again == plan.kept) {
      return plan;
    }
    plan.kept = std::move(again);
  }
}

std::pair<std::map<std::int32_t, std::int64_t>, std::int64_t> pack_gradients(
    const std::map<std::int32_t, GradientInterval>& intervals) {
  struct Busy {
    std::int64_t lo;
    std::int64_t hi;
    std::int32_t last;
  };
  std::vector<std::pair<std::int32_t, std::int32_t>> order;  // (first, unit)
  for (const auto& [unit, interval] : intervals) {
    order.emplace_back(interval.first, unit);
  }
  std::sort(order.begin(), order.end());
  std::map<std::int32_t, std::int64_t> placed;
  std::vector<Busy> busy;  // by (lo, hi): slots that later intervals may still meet
  std::int64_t arena = 0;
  for (const auto& [first, unit] : order) {
    const GradientInterval& own = intervals.at(unit);
    std::erase_if(busy, [begin = first](const Busy& b) { return b.last < begin; });
    std::int64_t offset = 0;
    for (const Busy& b : busy) {
      if (offset + own.bytes <= b.lo) {
        break;
      }
      offset = std::max(offset, b.hi);
    }
    placed.emplace(unit, offset);
    arena = std::max(arena, offset + own.bytes);
    const Busy mine{offset, offset + own.bytes, own.last};
    const auto where = std::upper_bound(
        busy.begin(), busy.end(), mine,
        [](const Busy& a, const Busy& b) { return std::pair(a.lo, a.hi) < std::pair(b.lo, b.hi); });
    busy.insert(where, mine);
  }
  return {std::move(placed), arena};
}

}  // namespace zshard::engine
