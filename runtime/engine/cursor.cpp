#include "runtime/engine/cursor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

constexpr std::size_t kPasses = 3;

std::size_t index(std::int32_t value) {
  return static_cast<std::size_t>(value);
}

std::size_t index(UnitId unit) {
  return static_cast<std::size_t>(unit.value);
}

/// Gradient memory of each unit: its slot from stage 2 on, else its own buffer, one after another.
std::vector<std::pair<std::int64_t, std::int64_t>> gradient_ranges(const Schedule& schedule) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  std::int64_t before = 0;
  for (std::size_t u = 0; u < schedule.layout->units().size(); ++u) {
    const std::int64_t bytes = schedule.layout->units()[u].gradient_bytes;
    if (schedule.last_backward[u] < 0) {
      ranges.emplace_back(0, 0);
    } else {
      const std::int64_t lo =
          schedule.stage >= Stage::gradients ? schedule.gradient_offset[u] : before;
      ranges.emplace_back(lo, lo + bytes);
    }
    before += bytes;
  }
  return ranges;
}

const Schedule& checked(const Schedule* training) {
  if (training == nullptr) {
    throw UsageError("a cursor needs a training schedule");
  }
  return *training;
}

}  // namespace

Cursor::PositionIndex::PositionIndex(const Schedule& schedule)
    : begin_(schedule.layout->units().size() * kPasses + 1) {
  const auto key = [](const Position& p) {
    return index(p.unit) * kPasses + static_cast<std::size_t>(p.pass);
  };
  for (const Position& p : schedule.program) {
    ++begin_[key(p) + 1];
  }
  for (std::size_t k = 1; k < begin_.size(); ++k) {
    begin_[k] += begin_[k - 1];
  }
  positions_.resize(schedule.program.size());
  std::vector<std::size_t> next(begin_.begin(), begin_.end() - 1);
  for (std::size_t p = 0; p < schedule.program.size(); ++p) {
    positions_[next[key(schedule.program[p])]++] = static_cast<std::int32_t>(p);
  }
}

std::int32_t Cursor::PositionIndex::find(UnitId unit, Pass pass, std::int32_t from) const {
  const std::size_t key = index(unit) * kPasses + static_cast<std::size_t>(pass);
  const auto begin = positions_.begin() + static_cast<std::ptrdiff_t>(begin_[key]);
  const auto end = positions_.begin() + static_cast<std::ptrdiff_t>(begin_[key + 1]);
  const auto found = std::lower_bound(begin, end, from);
  return found == end ? -1 : *found;
}

Cursor::Cursor(const Schedule* training, const Schedule* evaluation, bool reduces_always,
               CursorSink* sink)
    : training_(training),
      evaluation_(evaluation),
      reduces_always_(reduces_always),
      sink_(sink),
      training_index_(checked(training)),
      schedule_(training),
      gradient_readers_(gradient_ranges(*training)) {
  if (sink == nullptr) {
    throw UsageError("a cursor needs a sink");
  }
  std::size_t positions = training->program.size();
  if (evaluation != nullptr) {
    evaluation_index_ = PositionIndex(*evaluation);
    positions = std::max(positions, evaluation->program.size());
  }
  const std::size_t units = training->layout->units().size();
  // At most `hold` positions are held at once, whatever a loop does: check_released.
  held_.reserve(std::min(index(training->hold), positions) + 1);
  acquired_.assign(positions, 0);
  committed_.assign(positions, 0);
  last_gather_.assign(units, 0);
  flagged_.assign(units, 0);
  behind_.assign(units, 0);
  written_.assign(units, 0);
  touched_.assign(units, 0);
}

// -- ranges --

void Cursor::micro_steps(std::int32_t n) {
  begin_range(n, training_);
}

void Cursor::evaluation_passes(std::int32_t n) {
  if (evaluation_ == nullptr) {
    throw UsageError("evaluation_passes(n): this engine has no evaluation schedule");
  }
  begin_range(n, evaluation_);
}

void Cursor::begin_range(std::int32_t n, const Schedule* schedule) {
  if (in_range_) {
    throw UsageError(
        fmt::format("a range of micro-steps or evaluation passes is still open ({}); finish it "
                    "first: {}",
                    where(), in_evaluation() ? "call finish_evaluation()" : "call step()"));
  }
  if (n < 1) {
    throw UsageError(
        fmt::format("micro_steps(n): n < 1: {}; a range has at least one micro-step", n));
  }
  schedule_ = schedule;
  in_range_ = true;
  n_ = n;
  micro_ = -1;
  ++range_;
}

bool Cursor::next_micro_step() {
  if (!in_range_) {
    throw UsageError(
        "next micro-step outside a range; call micro_steps(n) or evaluation_passes(n) first");
  }
  finish_micro_step();
  if (micro_ < n_) {
    ++micro_;
  }
  if (micro_ == n_) {
    if (in_evaluation()) {
      in_range_ = false;
    }
    return false;
  }
  reset_micro_step();
  return true;
}

void Cursor::reset_micro_step() {
  cursor_ = 0;
  next_item_ = 0;
  reduces_ = reduces_always_ || micro_ == n_ - 1;
  held_.clear();
  std::fill(acquired_.begin(), acquired_.end(), char{0});
  std::fill(committed_.begin(), committed_.end(), char{0});
  forgotten_ = -1;
  std::fill(flagged_.begin(), flagged_.end(), char{0});
  std::fill(behind_.begin(), behind_.end(), 0);
  units_behind_ = 0;
  std::fill(written_.begin(), written_.end(), char{0});
}

void Cursor::finish_micro_step() {
  if (!in_micro_step()) {
    return;
  }
  check_committed();
  check_released(static_cast<std::int64_t>(schedule_->program.size()) + schedule_->hold);
  cursor_ = static_cast<std::int32_t>(schedule_->program.size());
  pump();
}

// -- issuing --

void Cursor::issue(const Item& item) {
  const bool reduces = item.kind == ItemKind::reduce || item.kind == ItemKind::vote;
  std::uint64_t& count = reduces ? reductions_ : gathers_;
  ++count;
  const Signature signature{.sequence = sequence_++,
                            .kind = item.kind,
                            .unit = item.unit,
                            .position = item.position,
                            .micro = micro_,
                            .n = n_,
                            .range = range_,
                            .evaluation = in_evaluation()};
  if (item.kind == ItemKind::gather) {
    last_gather_[index(item.unit)] = count;
  } else if (item.kind == ItemKind::reduce) {
    gradient_readers_.stamp(index(item.unit), count);
  }
  sink_->issue(reduces ? Queue::reduce : Queue::gather, signature, item);
}

/// Issues the list in order, up to the first item whose moment has not come.
void Cursor::pump() {
  const std::vector<Item>& items = schedule_->items(micro_);
  for (; next_item_ < items.size(); ++next_item_) {
    const Item& item = items[next_item_];
    if (item.kind == ItemKind::gather) {
      if (item.trigger >= cursor_) {
        return;
      }
      issue(item);
      continue;
    }
    if (item.position >= cursor_ || blocks_reduction(item.position)) {
      return;
    }
    if (reduces_) {
      issue(item);
    } else {
      sink_->accumulate_locally(item);
    }
  }
}

void Cursor::wait(Queue queue, std::uint64_t count) {
  if (count > 0) {
    sink_->wait(queue, count);
  }
}

// -- positions --

const Position& Cursor::at(std::int32_t position) const {
  return schedule_->program[index(position)];
}

bool Cursor::needs_commit(std::int32_t position) const {
  const Position& p = at(position);
  return p.pass == Pass::backward && schedule_->last_backward[index(p.unit)] >= 0;
}

bool Cursor::blocks_reduction(std::int32_t position) const {
  return acquired_[index(position)] != 0 && committed_[index(position)] == 0;
}

/// The earliest position that is held; one past every position if none is.
std::int32_t Cursor::first_held() const {
  auto first = static_cast<std::int32_t>(schedule_->program.size());
  for (const Held& held : held_) {
    first = std::min(first, held.position);
  }
  return first;
}

/// A recomputation inside backward is counted on the backward position.
Cursor::Held* Cursor::find_held(UnitId unit, Pass pass) {
  Held* any = nullptr;
  for (Held& held : held_) {
    if (at(held.position).unit != unit) {
      continue;
    }
    if (at(held.position).pass == pass) {
      return &held;
    }
    if (any == nullptr) {
      any = &held;
    }
  }
  return any;
}

void Cursor::acquire(UnitId unit, Pass pass) {
  check_unit(unit, "acquire");
  check_micro_step("acquire", unit);
  if (flagged_[index(unit)] != 0) {
    throw UsageError(fmt::format(
        "this unit was declared skipped for this micro-step: {} {} ({}); call skip() only for a "
        "unit that is not used again before the next micro-step",
        name(unit), to_string(pass), where()));
  }
  for (Held& held : held_) {  // re-entrant: counted, the cursor stays
    const Position& p = at(held.position);
    if (p.unit != unit || (pass == Pass::backward && p.pass != Pass::backward)) {
      continue;
    }
    if (committed_[index(held.position)] != 0) {
      throw UsageError(fmt::format(
          "its gradient was already handed over: {} at {} ({}); acquire before commit(), or "
          "release the unit first",
          name(unit), describe(held.position), where()));
    }
    ++held.holds;
    held.due += pass == Pass::backward ? 1 : 0;
    return;
  }
  check_committed();
  if (pass != Pass::backward && cursor_ > 0 && at(cursor_ - 1) == Position{unit, pass}) {
    hold(cursor_ - 1);  // again, where the cursor stands
    return;
  }
  const PositionIndex& positions = in_evaluation() ? evaluation_index_ : training_index_;
  const std::int32_t match = positions.find(unit, pass, cursor_);
  if (match < 0) {
    serve_behind(unit, pass);
    return;
  }
  check_released(match);
  cursor_ = match + 1;
  acquired_[index(match)] = 1;  // before issuing: its own reduction waits for commit()
  pump();
  hold(match);
}

void Cursor::hold(std::int32_t position) {
  const Position p = at(position);
  held_.push_back({position, 1, p.pass == Pass::backward ? 1 : 0});
  wait(Queue::gather, last_gather_[index(p.unit)]);
  if (needs_commit(position) && written_[index(p.unit)] == 0) {
    wait(Queue::reduce, gradient_readers_.latest(index(p.unit)));  // the memory's last reader
  }
  sink_->use(position, micro_);
}

void Cursor::serve_behind(UnitId unit, Pass pass) {
  const bool stays = schedule_->stage < Stage::parameters ||
                     schedule_->layout->units()[index(unit)].gather_bytes == 0;
  if (pass == Pass::backward ||
      !(stays || (cursor_ > 0 && schedule_->inside(micro_).inside(cursor_ - 1, unit.value)))) {
    throw UsageError(fmt::format(
        "behind the cursor: out of program order, and not kept in the plan: {} {}, while the "
        "program stands behind position {} ({}); state this use in ModelSpec::program{}",
        name(unit), to_string(pass), cursor_ - 1, where(),
        pass == Pass::backward ? "" : ", or raise gather_budget so that the unit stays"));
  }
  if (behind_[index(unit)]++ == 0) {
    ++units_behind_;
  }
  ++served_behind_;
  wait(Queue::gather, last_gather_[index(unit)]);
}

void Cursor::commit(UnitId unit) {
  check_unit(unit, "commit");
  Held* held = find_held(unit, Pass::backward);
  if (held == nullptr) {
    throw UsageError(fmt::format(
        "not held: commit() of {} ({}); commit between acquire and release of its backward pass",
        name(unit), where()));
  }
  const std::int32_t position = held->position;
  if (!needs_commit(position)) {
    return;
  }
  if (held->due == 0) {
    throw UsageError(fmt::format("commit() twice: {} at {} ({}); each backward guard commits once",
                                 name(unit), describe(position), where()));
  }
  if (--held->due == 0) {  // the last of the nested backward holds hands the gradient over
    committed_[index(position)] = 1;
    written_[index(unit)] = 1;
    touched_[index(unit)] = 1;
    pump();
  }
}

void Cursor::release(UnitId unit, Pass pass) {
  check_unit(unit, "release");
  if (behind_[index(unit)] > 0) {
    if (--behind_[index(unit)] == 0) {
      --units_behind_;
    }
    return;
  }
  Held* held = find_held(unit, pass);
  if (held == nullptr) {
    throw UsageError(fmt::format("not held: release of {} {} ({}); release once for each acquire",
                                 name(unit), to_string(pass), where()));
  }
  if (--held->holds > 0) {
    return;
  }
  const std::int32_t position = held->position;
  held_.erase(held_.begin() + (held - held_.data()));
  if (forgotten_ < 0 && needs_commit(position) && committed_[index(position)] == 0) {
    forgotten_ = position;
  }
  sink_->released(position);
  pass_flagged();
}

void Cursor::skip(UnitId unit) {
  check_unit(unit, "skip");
  check_micro_step("skip", unit);
  for (const Held& held : held_) {
    if (at(held.position).unit == unit) {
      throw UsageError(fmt::format("skip of a unit that is held: {} by {} ({}); release it first",
                                   name(unit), describe(held.position), where()));
    }
  }
  check_committed();
  flagged_[index(unit)] = 1;
  pass_flagged();
}

/// Passes declared positions where the cursor stands, never over one that was not declared.
void Cursor::pass_flagged() {
  const std::int64_t first = first_held();
  const auto count = static_cast<std::int32_t>(schedule_->program.size());
  while (cursor_ < count && flagged_[index(at(cursor_).unit)] != 0 && units_behind_ == 0 &&
         (held_.empty() || first > std::int64_t{cursor_} - schedule_->hold)) {
    ++cursor_;
  }
  pump();
}

// -- the step --

void Cursor::begin_step() {
  if (!in_range_ || in_evaluation()) {
    throw UsageError(in_range_
                         ? "step() without micro_steps(): the open range is one of evaluation "
                           "passes; call finish_evaluation(), then micro_steps(n)"
                         : "step() without micro_steps(); call micro_steps(n) first");
  }
  if (stepping_) {
    throw UsageError("step() inside step(): the vote of this step was issued already");
  }
  while (micro_ < n_) {
    next_micro_step();
  }
  // Drained before the vote: after it no peer reads an old shard.
  wait(Queue::gather, gathers_);
  wait(Queue::reduce, reductions_);
  stepping_ = true;
  issue(Item{.kind = ItemKind::vote});
  wait(Queue::reduce, reductions_);
}

void Cursor::step_gather(std::int32_t unit) {
  check_unit(UnitId{unit}, "step_gather");
  if (!stepping_) {
    throw UsageError("step_gather of " + name(UnitId{unit}) + " outside a step");
  }
  if (const auto item = engine::step_gather(*schedule_->layout, schedule_->stage, unit)) {
    issue(*item);
  }
}

void Cursor::end_step(bool passed) {
  if (!stepping_) {
    throw UsageError("end_step outside a step");
  }
  wait(Queue::gather, gathers_);
  stepping_ = false;
  in_range_ = false;
  std::fill(touched_.begin(), touched_.end(), char{0});
  step_count_ += passed ? 1 : 0;
}

// -- checks --

void Cursor::check_unit(UnitId unit, std::string_view call) const {
  const std::size_t units = schedule_->layout->units().size();
  if (unit.value < 0 || index(unit) >= units) {
    throw UsageError(
        fmt::format("{} of unit {}, but the spec has {} units; pass an id that "
                    "ModelSpec::unit returned",
                    call, unit.value, units));
  }
}

void Cursor::check_micro_step(std::string_view call, UnitId unit) const {
  if (!in_micro_step()) {
    throw UsageError(fmt::format(
        "{} outside a micro-step: {} ({}); call it inside micro_steps(n) or evaluation_passes(n)",
        call, name(unit), where()));
  }
}

void Cursor::check_committed() const {
  if (forgotten_ >= 0) {
    throw UsageError(fmt::format(
        "a backward position was released without commit(): {} ({}); call commit() before the "
        "release, or skip() for a unit without a gradient",
        describe(forgotten_), where()));
  }
}

/// Before the cursor moves to target: only positions > target - hold may still be held.
void Cursor::check_released(std::int64_t target) const {
  constexpr const char* kText =
      "a unit is still held: release it, or state a larger hold in the spec: {} ({}, hold {})";
  if (units_behind_ > 0) {
    const auto unit = std::find_if(behind_.begin(), behind_.end(), [](auto n) { return n > 0; });
    throw UsageError(
        fmt::format(kText,
                    name(UnitId{static_cast<std::int32_t>(unit - behind_.begin())}) +
                        ", which is served behind the cursor and is released before it moves",
                    where(), schedule_->hold));
  }
  if (const std::int32_t first = first_held();
      !held_.empty() && first <= target - schedule_->hold) {
    throw UsageError(fmt::format(kText, describe(first), where(), schedule_->hold));
  }
}

std::string Cursor::name(UnitId unit) const {
  return "unit " + schedule_->layout->units()[index(unit)].name;
}

std::string Cursor::describe(std::int32_t position) const {
  return fmt::format("position {}, {} {}", position, name(at(position).unit),
                     to_string(at(position).pass));
}

std::string Cursor::where() const {
  if (!in_range_) {
    return fmt::format("step {}, outside a range", step_count_);
  }
  return fmt::format("step {}, {} {} of {}", step_count_,
                     in_evaluation() ? "evaluation pass" : "micro-step", micro_, n_);
}

// -- facts --

bool Cursor::in_range() const {
  return in_range_;
}

bool Cursor::in_evaluation() const {
  return in_range_ && schedule_ == evaluation_;
}

bool Cursor::in_micro_step() const {
  return in_range_ && micro_ >= 0 && micro_ < n_;
}

bool Cursor::range_finished() const {
  return in_range_ && !in_evaluation() && micro_ == n_;
}

std::int32_t Cursor::micro() const {
  return micro_;
}

std::int32_t Cursor::n() const {
  return n_;
}

std::int64_t Cursor::step_count() const {
  return step_count_;
}

void Cursor::set_step_count(std::int64_t step) {
  if (in_range_) {
    throw UsageError(
        fmt::format("the step counter is set between steps only ({}); finish the "
                    "range with step() first",
                    where()));
  }
  if (step < 0) {
    throw UsageError(fmt::format("step counter {} is negative; it counts updates from 0", step));
  }
  step_count_ = step;
}

bool Cursor::held(UnitId unit) const {
  check_unit(unit, "held");
  return behind_[index(unit)] > 0 || std::any_of(held_.begin(), held_.end(), [&](const Held& h) {
           return at(h.position).unit == unit;
         });
}

std::int32_t Cursor::held_backward(UnitId unit) const {
  for (const Held& h : held_) {
    if (at(h.position) == Position{unit, Pass::backward}) {
      return h.position;
    }
  }
  return -1;
}

std::int64_t Cursor::address(UnitId unit) const {
  check_unit(unit, "address");
  for (const Held& h : held_) {
    if (at(h.position).unit == unit) {
      return schedule_->address(micro_)[index(h.position)];
    }
  }
  // The cursor does not move while a unit is served behind it, so the plan of where it stands
  // holds.
  return behind_[index(unit)] > 0 && cursor_ > 0
             ? schedule_->inside(micro_).offset(cursor_ - 1, unit.value)
             : -1;
}

bool Cursor::unwritten(UnitId unit) const {
  check_unit(unit, "unwritten");
  return written_[index(unit)] == 0;
}

std::span<const char> Cursor::written() const {
  return written_;
}

std::span<const char> Cursor::touched() const {
  return touched_;
}

std::uint64_t Cursor::served_behind() const {
  return served_behind_;
}

const Schedule& Cursor::schedule() const {
  return *schedule_;
}

}  // namespace zshard::engine
