// One rank's cursor: which collectives each call issues, and what it must wait for. A state machine
// without tensors, threads or allocation after construction (no call allocates unless it throws);
// the engine executes what it says. No call blocks before it has issued, and a call waits only for
// items that this rank has issued itself: that is the proof of progress (spec/README.md, section
// 4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/engine/latest_cover.hpp"
#include "runtime/engine/schedule.hpp"

namespace zshard::engine {

enum class Queue : std::uint8_t { gather, reduce };

/// What every rank must agree on about one collective; compared by sequence number before data
/// moves.
struct Signature {
  std::uint64_t sequence = 0;  // over both queues
  ItemKind kind = ItemKind::gather;
  std::int32_t unit = -1;
  std::int32_t position = -1;
  std::int32_t micro = -1;
  std::int32_t n = 0;
  std::uint64_t range = 0;  // number of the range: finds a stray evaluation
  bool evaluation = false;
};

/// Receives what the cursor decides, in order. Methods may throw; the engine is then poisoned.
class CursorSink {
 public:
  virtual ~CursorSink() = default;
  virtual void issue(Queue queue, const Signature& signature, const Item& item) = 0;
  /// In place of a reduction in a micro-step whose gradients stay local (accumulation `local`, not
  /// the last one).
  virtual void accumulate_locally(const Item& item) = 0;
  /// Until the first `count` items of that queue are complete.
  virtual void wait(Queue queue, std::uint64_t count) = 0;
  /// A position is held from now on.
  virtual void use(std::int32_t position, std::int32_t micro) = 0;
  /// A position's last hold is gone.
  virtual void released(std::int32_t position) = 0;
};

class Cursor {
 public:
  /// The schedules must outlive the cursor. reduces_always: false for accumulation `local`.
  /// evaluation may be null.
  Cursor(const Schedule* training, const Schedule* evaluation, bool reduces_always,
         CursorSink* sink);

  // -- ranges --
  void micro_steps(std::int32_t n);
  void evaluation_passes(std::int32_t n);
  /// False at the end of the range, and from then on until step; the micro-step before it is
  /// finished first.
  bool next_micro_step();

  // -- positions --
  void acquire(UnitId unit, Pass pass);
  void commit(UnitId unit);
  void release(UnitId unit, Pass pass);
  void skip(UnitId unit);

  // -- the step, in parts, since updates stand between vote and gathers --
  /// Finishes the range, waits for both queues, issues the vote and waits for it. UsageError
  /// without micro_steps().
  void begin_step();
  /// Issues the gather of a unit, if the stage has one (step_gather). In update order, touched
  /// units only.
  void step_gather(std::int32_t unit);
  /// Waits for the gathers and closes the range. passed: the step counter advances.
  void end_step(bool passed);

  // -- facts --
  [[nodiscard]] bool in_range() const;  // a range of micro-steps or evaluation passes is open
  [[nodiscard]] bool in_evaluation() const;
  [[nodiscard]] bool in_micro_step() const;
  [[nodiscard]] bool range_finished()
      const;  // training range whose last micro-step is finished, before step()
  [[nodiscard]] std::int32_t micro() const;
  [[nodiscard]] std::int32_t n() const;
  [[nodiscard]] std::int64_t step_count() const;
  void set_step_count(std::int64_t step);  // outside a range
  /// Counts the unit as used since the last step: its gradient was set from outside.
  void touch(UnitId unit) { touched_[static_cast<std::size_t>(unit.value)] = 1; }
  /// A position of the unit is held, or the unit is served behind the cursor.
  [[nodiscard]] bool held(UnitId unit) const;
  /// The held backward position of a unit, -1 if none.
  [[nodiscard]] std::int32_t held_backward(UnitId unit) const;
  /// Offset in the gather arena of a unit that is held or served behind the cursor; -1: it has no
  /// gathered bytes.
  [[nodiscard]] std::int64_t address(UnitId unit) const;
  /// True until the unit's first hand-over of this micro-step: its gradient buffer holds nothing
  /// yet.
  [[nodiscard]] bool unwritten(UnitId unit) const;
  /// One flag a unit: committed in this micro-step / since the last step.
  [[nodiscard]] std::span<const char> written() const;
  [[nodiscard]] std::span<const char> touched() const;
  [[nodiscard]] std::uint64_t served_behind() const;  // uses served behind the cursor so far
  [[nodiscard]] const Schedule& schedule() const;     // of the present range

 private:
  /// A position that is held. Commits are counted here, since only a held one can commit.
  struct Held {
    std::int32_t position = 0;
    std::int32_t holds = 0;
    std::int32_t due = 0;  // backward holds that have not committed yet
  };

  /// Where a (unit, pass) stands in a program: sorted positions, found by binary search.
  class PositionIndex {
   public:
    PositionIndex() = default;
    explicit PositionIndex(const Schedule& schedule);
    /// The first position at or after `from`; -1: none.
    [[nodiscard]] std::int32_t find(UnitId unit, Pass pass, std::int32_t from) const;

   private:
    std::vector<std::int32_t> positions_;  // by (unit, pass), then ascending
    std::vector<std::size_t> begin_;       // per (unit, pass); one more at the end
  };

  void begin_range(std::int32_t n, const Schedule* schedule);
  void reset_micro_step();
  void finish_micro_step();
  void issue(const Item& item);
  void pump();
  void wait(Queue queue, std::uint64_t count);
  void hold(std::int32_t position);
  void serve_behind(UnitId unit, Pass pass);
  void pass_flagged();
  void check_unit(UnitId unit, std::string_view call) const;
  void check_micro_step(std::string_view call, UnitId unit) const;
  void check_committed() const;
  void check_released(std::int64_t target) const;
  [[nodiscard]] bool needs_commit(std::int32_t position) const;
  [[nodiscard]] bool blocks_reduction(std::int32_t position) const;
  [[nodiscard]] std::int32_t first_held() const;
  [[nodiscard]] Held* find_held(UnitId unit, Pass pass);
  [[nodiscard]] const Position& at(std::int32_t position) const;
  [[nodiscard]] std::string name(UnitId unit) const;
  [[nodiscard]] std::string describe(std::int32_t position) const;
  [[nodiscard]] std::string where() const;

  const Schedule* training_;
  const Schedule* evaluation_;
  bool reduces_always_;  // false: accumulation `local`
  CursorSink* sink_;
  PositionIndex training_index_;
  PositionIndex evaluation_index_;

  const Schedule* schedule_;  // of the present range
  bool in_range_ = false;
  bool stepping_ = false;  // between begin_step and end_step
  std::int32_t n_ = 0;
  std::int32_t micro_ = -1;
  std::uint64_t range_ = 0;
  std::int64_t step_count_ = 0;
  std::uint64_t sequence_ = 0;
  std::uint64_t served_behind_ = 0;
  std::uint64_t gathers_ = 0;     // issued so far
  std::uint64_t reductions_ = 0;  // likewise, votes included

  std::vector<std::uint64_t> last_gather_;  // per unit: gathers issued up to its latest one
  LatestCover gradient_readers_;            // the latest reduction of each place of gradient memory

  // of the present micro-step
  std::int32_t cursor_ = 0;           // first position not yet passed
  std::size_t next_item_ = 0;         // first item not issued
  bool reduces_ = true;               // false: gradients stay local
  std::vector<Held> held_;            // in the order of acquiring
  std::vector<char> acquired_;        // per position
  std::vector<char> committed_;       // per position
  std::int32_t forgotten_ = -1;       // first position released without commit
  std::vector<char> flagged_;         // per unit: declared skipped
  std::vector<std::int32_t> behind_;  // per unit: holds served behind the cursor
  std::int32_t units_behind_ = 0;     // units with such holds
  std::vector<char> written_;         // per unit: its gradient buffer has a contribution
  std::vector<char> touched_;         // per unit, since the last step
};

}  // namespace zshard::engine
