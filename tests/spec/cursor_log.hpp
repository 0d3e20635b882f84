// Drives a cursor with named calls and writes down what it decides, in the specification's words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/engine/cursor.hpp"
#include "runtime/engine/schedule.hpp"
#include "zshard/error.hpp"

namespace zshard {

class LogSink : public engine::CursorSink {
 public:
  explicit LogSink(const shard::Layout* layout) : layout_(layout) {}

  void issue(engine::Queue queue, const engine::Signature& s, const engine::Item& item) override {
    log.push_back(std::to_string(s.sequence) + " " + item.text(*layout_) +
                  " micro=" + std::to_string(s.micro) + "/" + std::to_string(s.n) +
                  " range=" + std::to_string(s.range));
    collectives.push_back(log.back() + (s.evaluation ? " evaluation" : " training") +
                          (queue == engine::Queue::gather ? " gather" : " reduce"));
  }
  void accumulate_locally(const engine::Item& item) override {
    log.push_back("local " + item.text(*layout_));
  }
  void wait(engine::Queue queue, std::uint64_t count) override {
    log.push_back((queue == engine::Queue::gather ? "wait gather " : "wait reduce ") +
                  std::to_string(count));
  }
  void use(std::int32_t position, std::int32_t micro) override {
    log.push_back("use " + std::to_string(position) + " " + std::to_string(micro));
  }
  void released(std::int32_t position) override {
    log.push_back("release " + std::to_string(position));
  }

  std::vector<std::string> log;
  std::vector<std::string> collectives;  // what all ranks must agree on

 private:
  const shard::Layout* layout_;
};

/// One call of a script. `number` is n or a unit.
struct Call {
  std::string what;
  std::int32_t number = 0;
  Pass pass = Pass::forward;
};

/// step() as an engine does it when the vote passes and every unit was touched.
inline void run_step(engine::Cursor& cursor, LogSink& sink) {
  cursor.begin_step();
  sink.log.emplace_back("update");
  for (const std::int32_t unit :
       engine::update_order(*cursor.schedule().layout, cursor.step_count())) {
    cursor.step_gather(unit);
  }
  cursor.end_step(true);
}

inline void run_call(engine::Cursor& cursor, LogSink& sink, const Call& call) {
  const UnitId unit{call.number};
  if (call.what == "micro_steps") {
    cursor.micro_steps(call.number);
  } else if (call.what == "evaluation_passes") {
    cursor.evaluation_passes(call.number);
  } else if (call.what == "next_micro_step") {
    cursor.next_micro_step();
  } else if (call.what == "acquire") {
    cursor.acquire(unit, call.pass);
  } else if (call.what == "commit") {
    cursor.commit(unit);
  } else if (call.what == "release") {
    cursor.release(unit, call.pass);
  } else if (call.what == "skip") {
    cursor.skip(unit);
  } else if (call.what == "step") {
    run_step(cursor, sink);
  } else {
    throw Error("no such call: " + call.what);
  }
}

/// All calls; a UsageError, or a range that is still open at the end, ends the log.
inline void run_calls(engine::Cursor& cursor, LogSink& sink, const std::vector<Call>& calls) {
  try {
    for (const Call& call : calls) {
      run_call(cursor, sink, call);
    }
    if (cursor.in_range()) {
      throw UsageError("engine destroyed inside a range");
    }
  } catch (const UsageError& error) {
    sink.log.push_back(std::string("error ") + error.what());
  }
}

/// Acquires the used positions in order; each is handed over as late as hold allows.
inline std::vector<Call> micro_step_calls(const engine::Schedule& schedule,
                                          const std::vector<std::int32_t>& used) {
  std::vector<Call> calls{{"next_micro_step"}};
  std::vector<std::int32_t> held;
  const auto finish = [&](std::int32_t p) {
    const Position& position = schedule.program[static_cast<std::size_t>(p)];
    if (position.pass == Pass::backward) {
      calls.push_back({"commit", position.unit.value});
    }
    calls.push_back({"release", position.unit.value, position.pass});
  };
  for (const std::int32_t p : used) {
    while (!held.empty() && held.front() <= p - schedule.hold) {
      finish(held.front());
      held.erase(held.begin());
    }
    const Position& position = schedule.program[static_cast<std::size_t>(p)];
    calls.push_back({"acquire", position.unit.value, position.pass});
    held.push_back(p);
  }
  for (const std::int32_t p : held) {
    finish(p);
  }
  return calls;
}

}  // namespace zshard
