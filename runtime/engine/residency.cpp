#include "runtime/engine/residency.hpp"

#include <algorithm>
#include <limits>
#include <optional>
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
/// for each unit and brought up to date at its own positions; the arena is kept in order of offset,
/// so that what a window would evict is a run of it. Hence one placement is linear in the units
/// inside, and nothing is quadratic in the program.
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
  [[nodiscard]] std::int64_t evictable_until(std::int32_t unit) const;
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
  std::vector<std::size_t> queue_;      // scratch of choose()
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

/// The position that needs it next, or one that is never late enough if it is pinned.
std::int64_t Planner::evictable_until(std::int32_t unit) const {
  return pins_[at(unit)] > 0 ? -1 : next_use_[at(unit)];
}

/// Of all windows, 0, the far end and beside each unit inside, the one whose soonest evicted use is
/// farthest and later than `wanted`, then the lowest (Belady with addresses). Windows and what they
/// evict both ascend, so the soonest use is the minimum of a sliding run: queue_ holds the
/// candidates for it.
std::optional<Planner::Window> Planner::choose(std::int32_t unit, std::int64_t wanted) {
  const std::int64_t size = sizes_[at(unit)];
  const std::int64_t top = budget_ - size;
  std::optional<Window> best;
  std::int64_t farthest = wanted;
  std::size_t first = 0;
  std::size_t last = 0;
  std::size_t ends = 0;    // next unit whose end is a candidate
  std::size_t starts = 0;  // next unit whose start minus size is one
  std::size_t head = 0;
  queue_.clear();
  std::int64_t offset = 0;
  while (offset <= top) {
    for (; last < arena_.size() && arena_[last].offset < offset + size; ++last) {
      const std::int64_t use = evictable_until(arena_[last].unit);
      while (queue_.size() > head && evictable_until(arena_[queue_.back()].unit) >= use) {
        queue_.pop_back();
      }
      queue_.push_back(last);
    }
    while (first < last && arena_[first].end <= offset) {
      ++first;
    }
    while (head < queue_.size() && queue_[head] < first) {
      ++head;
    }
    const std::int64_t soonest =
        head < queue_.size() ? evictable_until(arena_[queue_[head]].unit) : kNever;
    if (soonest > farthest && safe(unit, offset)) {
      farthest = soonest;
      best = Window{offset, first, last};
      if (soonest == kNever) {
        break;
      }
    }
    std::int64_t next = offset < top ? top : kNever;
    while (ends < arena_.size() && arena_[ends].end <= offset) {
      ++ends;
    }
    while (starts < arena_.size() && arena_[starts].offset - size <= offset) {
      ++starts;
    }
    if (ends < arena_.size()) {
      next = std::min(next, arena_[ends].end);
    }
    if (starts < arena_.size()) {
      next = std::min(next, arena_[starts].offset - size);
    }
    offset = next;
  }
  return best;
}

void Planner::end_stay(const Inside& inside, std::int32_t last) {
  offset_[at(inside.unit)] = -1;
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
  for (const auto& [unit, offset] : start) {
    arena_.push_back({offset, offset + sizes_[at(unit)], unit, 0});
    offset_[at(unit)] = offset;
  }
  std::sort(arena_.begin(), arena_.end(),
            [](const Inside& a, const Inside& b) { return a.offset < b.offset; });
}

void Planner::enter(std::int32_t now) {
  const std::int32_t unit = units_[at(now)];
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
