#include "runtime/engine/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

constexpr std::size_t kMostPositions = std::size_t{1} << 30;  // twice it still fits an int32_t

std::size_t at(std::int32_t index) {
  return static_cast<std::size_t>(index);
}

void check_program(const shard::Layout& layout, const std::vector<Position>& program) {
  if (program.size() > kMostPositions) {
    throw UsageError(fmt::format("a program holds at most {} positions, not {}", kMostPositions,
                                 program.size()));
  }
  const std::size_t units = layout.units().size();
  for (std::size_t p = 0; p < program.size(); ++p) {
    const std::int32_t unit = program[p].unit.value;
    if (unit < 0 || at(unit) >= units) {
      throw UsageError(
          fmt::format("position {} of the program names unit {}, but the spec has {} "
                      "units; pass ids that ModelSpec::unit returned",
                      p, unit, units));
    }
    if (program[p].pass > Pass::backward) {
      throw UsageError(fmt::format("position {} of the program, unit {}: {} is no pass", p,
                                   layout.units()[at(unit)].name,
                                   static_cast<int>(program[p].pass)));
    }
  }
}

void check_options(const ScheduleOptions& options) {
  if (options.hold < 1) {
    throw UsageError(fmt::format(
        "hold {} is below 1: ModelSpec::hold states how many positions a loop holds at once",
        options.hold));
  }
  if (options.look_ahead < 0) {
    throw UsageError(
        fmt::format("look_ahead {} is negative: it is the number of positions gathered ahead, 0 "
                    "for none",
                    options.look_ahead));
  }
  if (options.behind < 0) {
    throw UsageError(
        fmt::format("behind {} is negative: it is the number of positions that a reduction may run "
                    "on behind the loop, 0 for none",
                    options.behind));
  }
}

std::vector<std::int32_t> units_of(const std::vector<Position>& program) {
  std::vector<std::int32_t> units;
  units.reserve(program.size());
  for (const Position& position : program) {
    units.push_back(position.unit.value);
  }
  return units;
}

std::vector<Position> forward_part(const std::vector<Position>& program) {
  std::vector<Position> part;
  std::copy_if(program.begin(), program.end(), std::back_inserter(part),
               [](const Position& p) { return p.pass == Pass::forward; });
  return part;
}

/// Bytes that a gather of each unit moves; 0 where nothing is gathered in a micro-step.
std::vector<std::int64_t> gather_sizes(const shard::Layout& layout, Stage stage) {
  std::vector<std::int64_t> sizes;
  sizes.reserve(layout.units().size());
  for (const shard::UnitLayout& unit : layout.units()) {
    sizes.push_back(stage == Stage::parameters ? unit.gather_bytes : 0);
  }
  return sizes;
}

/// Position p: its gathers, then the reduction of p - hold + 1: a reduction stands as late as the
/// loop may hold its unit, so that handing over late never blocks a gather that the loop needs
/// first. Reductions that would stand behind the end follow in order.
std::vector<Item> interleave(const Schedule& schedule,
                             const std::vector<std::vector<Trigger>>& triggers) {
  std::vector<Item> items;
  const auto count = static_cast<std::int64_t>(schedule.program.size());
  const auto reduce = [&](std::int64_t position) {
    if (position < 0) {
      return;
    }
    const std::int32_t unit = schedule.program[static_cast<std::size_t>(position)].unit.value;
    if (schedule.last_backward[at(unit)] == position) {
      items.push_back({ItemKind::reduce, unit, static_cast<std::int32_t>(position), -1,
                       schedule.gradient_offset[at(unit)]});
    }
  };
  for (std::int64_t p = 0; p < count; ++p) {
    for (const Trigger& t : triggers[static_cast<std::size_t>(p)]) {
      items.push_back({ItemKind::gather, t.unit, t.wanted, static_cast<std::int32_t>(p), t.offset});
    }
    reduce(p - schedule.hold + 1);
  }
  for (std::int64_t p = std::max<std::int64_t>(0, count - schedule.hold + 1); p < count; ++p) {
    reduce(p);
  }
  return items;
}

/// Residency and the lists, from program and last_backward and gradient_offset, which stand
/// already.
void fill(Schedule& schedule, const ScheduleOptions& options) {
  const std::vector<std::int32_t> units = units_of(schedule.program);
  const std::vector<std::int64_t> sizes = gather_sizes(*schedule.layout, schedule.stage);
  const std::int64_t all = everything(units, sizes);
  const std::int64_t budget = options.budget.value_or(all);
  ResidencyPlan plan = plan_residency(units, sizes, budget, options.hold, options.look_ahead);
  schedule.gather_arena = std::min(budget / shard::kAlignment * shard::kAlignment, all);
  schedule.first = interleave(schedule, plan.first.triggers);
  schedule.later = interleave(schedule, plan.later.triggers);
  schedule.first_address = std::move(plan.first.address);
  schedule.later_address = std::move(plan.later.address);
  schedule.first_inside = std::move(plan.first.residents);
  schedule.later_inside = std::move(plan.later.residents);
}

Schedule start(const shard::Layout& layout, std::vector<Position> program,
               const ScheduleOptions& options) {
  Schedule schedule;
  schedule.layout = &layout;
  schedule.program = std::move(program);
  schedule.stage = options.stage;
  schedule.hold = options.hold;
  schedule.gradient_offset.assign(layout.units().size(), -1);
  schedule.last_backward.assign(layout.units().size(), -1);
  schedule.first_backward.assign(layout.units().size(), -1);
  return schedule;
}

/// First and last backward position of every trained unit.
void find_backward(Schedule& schedule) {
  const std::vector<shard::UnitLayout>& units = schedule.layout->units();
  for (std::size_t p = 0; p < schedule.program.size(); ++p) {
    const std::size_t unit = at(schedule.program[p].unit.value);
    if (schedule.program[p].pass == Pass::backward && units[unit].gradient_bytes > 0) {
      schedule.last_backward[unit] = static_cast<std::int32_t>(p);
      if (schedule.first_backward[unit] < 0) {
        schedule.first_backward[unit] = static_cast<std::int32_t>(p);
      }
    }
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (units[u].gradient_bytes > 0 && schedule.last_backward[u] < 0) {
      throw UsageError("a unit with trained parameters has no backward position: unit " +
                       units[u].name +
                       "; give it one in ModelSpec::program, or set ParameterOptions::frozen");
    }
  }
}

/// A slot lives from the unit's first backward position until its reduction may still run.
void place_gradients(Schedule& schedule, int behind) {
  const auto end = static_cast<std::int64_t>(schedule.program.size());
  std::map<std::int32_t, GradientInterval> intervals;
  for (std::size_t u = 0; u < schedule.last_backward.size(); ++u) {
    if (schedule.last_backward[u] >= 0) {
      const std::int64_t last =
          std::int64_t{schedule.last_backward[u]} + schedule.hold - 1 + behind;
      intervals.emplace(static_cast<std::int32_t>(u),
                        GradientInterval{schedule.first_backward[u],
                                         static_cast<std::int32_t>(std::min(last, end)),
                                         schedule.layout->units()[u].gradient_bytes});
    }
  }
  auto [offsets, arena] = pack_gradients(intervals);
  for (const auto& [unit, offset] : offsets) {
    schedule.gradient_offset[at(unit)] = offset;
  }
  schedule.gradient_arena = arena;
}

void append(std::string& text, const Item& item, const shard::Layout& layout) {
  const std::string_view name =
      item.unit >= 0 ? std::string_view(layout.units()[at(item.unit)].name) : "-";
  fmt::format_to(std::back_inserter(text), "{} {} for={} at={} offset={}", to_string(item.kind),
                 name, item.position, item.trigger, item.offset);
}

}  // namespace

std::string_view to_string(ItemKind kind) {
  switch (kind) {
    case ItemKind::gather:
      return "gather";
    case ItemKind::reduce:
      return "reduce";
    case ItemKind::vote:
      return "vote";
    case ItemKind::gather_gradient:
      return "gather-gradient";
    case ItemKind::gather_parameter:
      return "gather-parameter";
  }
  return "?";
}

std::string Item::text(const shard::Layout& layout) const {
  std::string text;
  append(text, *this, layout);
  return text;
}

std::string Schedule::text() const {
  std::string text =
      fmt::format("zshard-schedule 1 stage={} hold={}\n", static_cast<int>(stage), hold);
  for (std::size_t p = 0; p < program.size(); ++p) {
    fmt::format_to(std::back_inserter(text), "position {} {} {}\n", p,
                   layout->units()[at(program[p].unit.value)].name,
                   zshard::to_string(program[p].pass));
  }
  for (const auto& [name, list] : {std::pair{"first", &first}, std::pair{"later", &later}}) {
    for (std::size_t n = 0; n < list->size(); ++n) {
      fmt::format_to(std::back_inserter(text), "{} {} ", name, n);
      append(text, (*list)[n], *layout);
      text += '\n';
    }
  }
  return text;
}

Schedule make_schedule(const shard::Layout& layout, const std::vector<Position>& program,
                       const ScheduleOptions& options) {
  check_options(options);
  check_program(layout, program);
  Schedule schedule = start(layout, program, options);
  find_backward(schedule);
  if (options.stage >= Stage::gradients) {
    place_gradients(schedule, options.behind);
  }
  fill(schedule, options);
  return schedule;
}

Schedule evaluation_schedule(const shard::Layout& layout, const std::vector<Position>& program,
                             const ScheduleOptions& options) {
  check_options(options);
  check_program(layout, program);
  Schedule schedule = start(layout, forward_part(program), options);
  fill(schedule, options);
  return schedule;
}

std::int64_t minimum_gather_budget(const shard::Layout& layout,
                                   const std::vector<Position>& program, int hold) {
  check_options({.hold = hold});
  check_program(layout, program);
  const std::vector<std::int64_t> sizes = gather_sizes(layout, Stage::parameters);
  return std::max(minimum_budget(units_of(program), sizes, hold),
                  minimum_budget(units_of(forward_part(program)), sizes, hold));
}

std::int64_t maximum_gather_budget(const shard::Layout& layout,
                                   const std::vector<Position>& program) {
  check_program(layout, program);
  return everything(units_of(program), gather_sizes(layout, Stage::parameters));
}

std::vector<std::int32_t> update_order(const shard::Layout& layout, std::int64_t step) {
  std::vector<std::int32_t> order;
  for (std::size_t u = 0; u < layout.units().size(); ++u) {
    if (layout.units()[u].gradient_bytes > 0) {
      order.push_back(static_cast<std::int32_t>(u));
    }
  }
  if (step % 2 != 0) {
    std::reverse(order.begin(), order.end());
  }
  return order;
}

std::optional<Item> step_gather(const shard::Layout& layout, Stage stage, std::int32_t unit) {
  std::int64_t moved = 0;
  for (const shard::Segment& s : layout.units().at(at(unit)).segments) {
    const bool moves =
        stage == Stage::parameters ? s.kind == shard::Kind::trained_resident : s.trained();
    moved += moves ? s.bytes() : 0;
  }
  if (moved == 0) {
    return std::nullopt;
  }
  return Item{
      .kind = stage == Stage::replicated ? ItemKind::gather_gradient : ItemKind::gather_parameter,
      .unit = unit};
}

std::vector<Item> step_items(const shard::Layout& layout, Stage stage, std::int64_t step,
                             std::span<const char> touched, bool finite) {
  std::vector<Item> items{Item{.kind = ItemKind::vote}};
  if (!finite) {
    return items;
  }
  for (const std::int32_t unit : update_order(layout, step)) {
    if (!touched.empty() && touched[at(unit)] == 0) {
      continue;
    }
    if (const std::optional<Item> item = step_gather(layout, stage, unit)) {
      items.push_back(*item);
    }
  }
  return items;
}

}  // namespace zshard::engine
