// One rank's cursor: which collectives each call issues, and what it must wait for. A state machine
// without tensors, threads or allocation after construction (no call allocates unless it throws);
// the engine executes what it says. No call blocks before it has issued, and a call waits only for
// items that this rank has issued itself: that is the proof of progress (spec/README.md, section
// 4).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

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
  /// False at the end of the range; the micro-step before it is finished first.
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
  /// The position by which a unit is held, or served behind the cursor: -1 if it is not. behind:
  /// position is of the cursor.
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
  // the implementation's members
};

}  // namespace zshard::engine
