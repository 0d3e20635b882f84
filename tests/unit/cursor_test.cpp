// The cursor beyond the golden vectors: one list on all ranks, slots that nobody overwrites, and
// errors that leave it as it was.
#include "runtime/engine/cursor.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/spec/cursor_log.hpp"

namespace zshard {
namespace {

constexpr Pass kForward = Pass::forward;
constexpr Pass kRecompute = Pass::recompute;
constexpr Pass kBackward = Pass::backward;

/// A layout, its schedules and a cursor.
struct Rig {
  explicit Rig(const ModelSpec& spec, const engine::ScheduleOptions& options, bool reduces = true,
               int world = 2)
      : layout(shard::Layout::make(spec, world)),
        training(engine::make_schedule(layout, spec.program(), options)),
        evaluation(engine::evaluation_schedule(layout, spec.program(), options)),
        sink(&layout),
        cursor(&training, &evaluation, reduces, &sink) {}

  shard::Layout layout;
  engine::Schedule training;
  engine::Schedule evaluation;
  LogSink sink;
  engine::Cursor cursor;
};

ModelSpec three_units() {
  ModelSpec spec;
  spec.unit("a").parameter("a.w", {64});
  spec.unit("b").parameter("b.w", {300});
  spec.unit("c").parameter("c.w", {100});
  return spec;
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

/// Checks, from the waits alone and thus for every timing, that what a loop uses is there: gathered
/// parameters are complete and stay, and gradient memory has no reader left.
class SlotSink : public engine::CursorSink {
 public:
  SlotSink(const engine::Schedule* training, const engine::Schedule* evaluation)
      : training_(training), evaluation_(evaluation) {}

  void issue(engine::Queue queue, const engine::Signature& s, const engine::Item& item) override {
    const std::uint64_t count = ++issued_[static_cast<int>(queue)];
    const engine::Schedule& schedule = s.evaluation ? *evaluation_ : *training_;
    if (item.kind == engine::ItemKind::gather) {
      const Range mine{item.offset, item.offset + unit(item.unit).gather_bytes, item.unit, count};
      for (const auto& [position, held] : held_) {
        EXPECT_FALSE(overlap(held, mine)) << "overwrites a held slot";
      }
      std::erase_if(gathered_, [&](const Range& g) { return overlap(g, mine); });
      gathered_.push_back(mine);
    } else if (item.kind == engine::ItemKind::reduce) {
      live_.erase(item.unit);
      readers_[item.unit] = {item.offset, item.offset + unit(item.unit).gradient_bytes, item.unit,
                             count};
      EXPECT_EQ(item.offset, schedule.gradient_offset[static_cast<std::size_t>(item.unit)]);
    }
  }
  void accumulate_locally(const engine::Item& item) override { live_.erase(item.unit); }
  void wait(engine::Queue queue, std::uint64_t count) override {
    EXPECT_LE(count, issued_[static_cast<int>(queue)]) << "waits for what it has not issued";
    done_[static_cast<int>(queue)] = std::max(done_[static_cast<int>(queue)], count);
  }
  void use(std::int32_t position, std::int32_t micro) override {
    const engine::Schedule& schedule = in_evaluation ? *evaluation_ : *training_;
    const Position p = schedule.program[static_cast<std::size_t>(position)];
    const std::int32_t u = p.unit.value;
    ++uses;
    if (schedule.stage == Stage::parameters && unit(u).gather_bytes > 0) {
      const std::int64_t at = schedule.address(micro)[static_cast<std::size_t>(position)];
      const auto mine = std::find_if(gathered_.begin(), gathered_.end(),
                                     [&](const Range& g) { return g.unit == u && g.lo == at; });
      ASSERT_NE(mine, gathered_.end());
      EXPECT_LE(mine->count, done_[0]) << "read before its gather completes";
      held_[position] = *mine;
    }
    if (p.pass == kBackward && schedule.last_backward[static_cast<std::size_t>(u)] >= 0 &&
        schedule.stage >= Stage::gradients) {
      const std::int64_t lo = schedule.gradient_offset[static_cast<std::size_t>(u)];
      const Range mine{lo, lo + unit(u).gradient_bytes, u, 0};
      for (const auto& [v, reader] : readers_) {
        EXPECT_TRUE(!overlap(reader, mine) || live_.contains(u) || reader.count <= done_[1])
            << "a gradient that peers still read";
      }
      for (const auto& [v, other] : live_) {
        EXPECT_TRUE(v == u || !overlap(other, mine)) << "two gradients in one place";
      }
      live_[u] = mine;
    }
  }
  void released(std::int32_t position) override { held_.erase(position); }

  bool in_evaluation = false;
  int uses = 0;

 private:
  struct Range {
    std::int64_t lo;
    std::int64_t hi;
    std::int32_t unit;
    std::uint64_t count;  // position in its queue
  };
  static bool overlap(const Range& a, const Range& b) { return a.lo < b.hi && b.lo < a.hi; }
  [[nodiscard]] const shard::UnitLayout& unit(std::int32_t u) const {
    return training_->layout->units()[static_cast<std::size_t>(u)];
  }

  const engine::Schedule* training_;
  const engine::Schedule* evaluation_;
  std::uint64_t issued_[2] = {0, 0};
  std::uint64_t done_[2] = {0, 0};
  std::vector<Range> gathered_;
  std::map<std::int32_t, Range> held_;
  std::map<std::int32_t, Range> readers_;
  std::map<std::int32_t, Range> live_;
};

// -- random loops --

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int pick(int lo, int hi) {
    return lo + static_cast<int>(engine_() % static_cast<unsigned>(hi - lo + 1));
  }
  bool chance(int percent) { return pick(1, 100) <= percent; }

 private:
  std::mt19937 engine_;
};

ModelSpec random_spec(Random& random) {
  ModelSpec spec;
  const int count = random.pick(1, 5);
  for (int u = 0; u < count; ++u) {
    const std::vector<std::int64_t> sizes{0, 1, 64, 100, 300, 900};
    spec.unit("u" + std::to_string(u))
        .parameter("p" + std::to_string(u), {sizes[static_cast<std::size_t>(random.pick(0, 5))]},
                   {.frozen = random.chance(25), .resident = random.chance(15)});
  }
  std::vector<Position> program = spec.program();
  for (int extra = random.pick(0, 2); extra-- > 0;) {
    program.insert(program.begin() + random.pick(0, static_cast<int>(program.size())),
                   {UnitId{random.pick(0, count - 1)}, static_cast<Pass>(random.pick(0, 2))});
  }
  spec.program(program);
  return spec;
}

/// Some positions in order, without those that acquire would serve at another one: an equal earlier
/// match, the position where the cursor stands, or one still held.
std::vector<std::int32_t> random_uses(Random& random, const engine::Schedule& schedule) {
  const std::vector<int> shares{0, 50, 80, 100};
  const int share = shares[static_cast<std::size_t>(random.pick(0, 3))];
  const std::vector<Position>& program = schedule.program;
  std::vector<std::int32_t> used;
  for (std::int32_t p = 0; p < static_cast<std::int32_t>(program.size()); ++p) {
    const Position position = program[static_cast<std::size_t>(p)];
    const auto from = used.empty() ? 0 : used.back() + 1;
    const bool first =
        std::find(program.begin() + from, program.end(), position) == program.begin() + p;
    const bool here = !used.empty() && program[static_cast<std::size_t>(used.back())] == position;
    const bool reentrant = std::any_of(used.begin(), used.end(), [&](std::int32_t q) {
      return q > p - schedule.hold && program[static_cast<std::size_t>(q)].unit == position.unit;
    });
    if (random.chance(share) && first && !here && !reentrant) {
      used.push_back(p);
    }
  }
  return used;
}

/// A micro-step that uses a random part of the program and declares some of the rest.
std::vector<Call> random_micro_step(Random& random, const engine::Schedule& schedule) {
  const std::vector<std::int32_t> used = random_uses(random, schedule);
  std::vector<Call> calls = micro_step_calls(schedule, used);
  std::vector<Call> skips;
  for (std::int32_t u = 0; u < static_cast<std::int32_t>(schedule.layout->units().size()); ++u) {
    const bool absent = std::none_of(used.begin(), used.end(), [&](std::int32_t p) {
      return schedule.program[static_cast<std::size_t>(p)].unit.value == u;
    });
    if (absent && random.chance(30)) {
      skips.push_back({"skip", u});
    }
  }
  calls.insert(calls.begin() + 1, skips.begin(), skips.end());
  return calls;
}

engine::ScheduleOptions random_options(Random& random, const ModelSpec& spec, int world) {
  engine::ScheduleOptions options{.stage = static_cast<Stage>(random.pick(0, 3)),
                                  .hold = random.pick(1, 3),
                                  .look_ahead = random.pick(0, 3),
                                  .behind = random.pick(0, 2)};
  const std::vector<std::int64_t> room{0, 256, 1000, 5000, 100000};
  options.budget = engine::minimum_gather_budget(shard::Layout::make(spec, world), spec.program(),
                                                 options.hold) +
                   room[static_cast<std::size_t>(random.pick(0, 4))];
  return options;
}

TEST(Cursor, AllRanksIssueOneListWhateverTheySkip) {
  Random random(1);
  std::size_t items = 0;
  for (int round = 0; round < 500; ++round) {
    const ModelSpec spec = random_spec(random);
    const int world = random.pick(1, 4);
    const engine::ScheduleOptions options = random_options(random, spec, world);
    const bool reduces = random.chance(70);
    const int n = random.pick(1, 3);
    std::optional<std::vector<std::string>> expected;
    for (int rank = 0; rank < 3; ++rank) {
      Rig rig(spec, options, reduces, world);
      std::vector<Call> calls;
      for (int range = 0; range < 2; ++range) {
        calls.push_back({"evaluation_passes", 2});
        for (int pass = 0; pass < 2; ++pass) {
          const auto more = random_micro_step(random, rig.evaluation);
          calls.insert(calls.end(), more.begin(), more.end());
        }
        calls.push_back({"next_micro_step"});
        calls.push_back({"micro_steps", n});
        for (int micro = random.chance(80) ? 0 : 1; micro < n; ++micro) {  // step() skips the rest
          const auto more = random_micro_step(random, rig.training);
          calls.insert(calls.end(), more.begin(), more.end());
        }
        calls.push_back({"step"});
      }
      run_calls(rig.cursor, rig.sink, calls);
      ASSERT_TRUE(rig.sink.log.empty() || !rig.sink.log.back().starts_with("error"))
          << rig.sink.log.back() << "\n"
          << rig.training.text();
      EXPECT_EQ(rig.cursor.step_count(), 2);
      items += rig.sink.collectives.size();
      if (!expected) {
        expected = rig.sink.collectives;
      }
      ASSERT_EQ(rig.sink.collectives, *expected) << rig.training.text();
    }
  }
  EXPECT_GT(items, 20000u);
}

TEST(Cursor, WaitsAloneKeepSlotsSafe) {
  Random random(2);
  int uses = 0;
  for (int round = 0; round < 800; ++round) {
    const ModelSpec spec = random_spec(random);
    const Rig rig(spec, random_options(random, spec, 2));
    SlotSink sink(&rig.training, &rig.evaluation);
    engine::Cursor cursor(&rig.training, &rig.evaluation, random.chance(70), &sink);
    LogSink unused(&rig.layout);
    for (int range = 0; range < 3; ++range) {
      sink.in_evaluation = range == 1;
      const engine::Schedule& schedule = sink.in_evaluation ? rig.evaluation : rig.training;
      run_call(cursor, unused, {sink.in_evaluation ? "evaluation_passes" : "micro_steps", 2});
      for (int micro = 0; micro < 2; ++micro) {
        for (const Call& call : random_micro_step(random, schedule)) {
          run_call(cursor, unused, call);
        }
      }
      run_call(cursor, unused, {sink.in_evaluation ? "next_micro_step" : "step"});
    }
    uses += sink.uses;
    ASSERT_FALSE(HasFailure()) << rig.training.text();
  }
  EXPECT_GT(uses, 5000);
}

// -- single rules --

TEST(Cursor, LocalMicroStepsReduceOnlyInTheLast) {
  Rig rig(three_units(), {.stage = Stage::gradients}, false);
  std::vector<std::int32_t> all(6);
  std::iota(all.begin(), all.end(), 0);
  std::vector<Call> calls{{"micro_steps", 2}};
  for (int micro = 0; micro < 2; ++micro) {
    const auto more = micro_step_calls(rig.training, all);
    calls.insert(calls.end(), more.begin(), more.end());
  }
  run_calls(rig.cursor, rig.sink, calls);
  const std::vector<std::string> begin{
      "use 0 0",
      "release 0",
      "use 1 0",
      "release 1",
      "use 2 0",
      "release 2",
      "use 3 0",
      "local reduce c for=3 at=-1 offset=0",
      "release 3",
      "use 4 0",
      "local reduce b for=4 at=-1 offset=512",
      "release 4",
      "use 5 0",
      "local reduce a for=5 at=-1 offset=0",
      "release 5",
  };
  ASSERT_GT(rig.sink.log.size(), begin.size());
  EXPECT_EQ(
      std::vector<std::string>(rig.sink.log.begin(),
                               rig.sink.log.begin() + static_cast<std::ptrdiff_t>(begin.size())),
      begin);
  ASSERT_EQ(rig.sink.collectives.size(), 3u);
  EXPECT_EQ(rig.sink.collectives[0],
            "0 reduce c for=3 at=-1 offset=0 micro=1/2 range=1 training reduce");
}

TEST(Cursor, AUsageErrorLeavesItAsItWas) {
  Rig good(three_units(), {.budget = 2048});
  Rig bad(three_units(), {.budget = 2048});
  const UnitId a{0};
  const UnitId b{1};
  const UnitId c{2};
  for (Rig* rig : {&good, &bad}) {
    const auto fail = [&](auto&& call) {
      if (rig == &bad) {
        EXPECT_NE(refusal(call), "");
      }
    };
    engine::Cursor& cursor = rig->cursor;
    fail([&] { cursor.acquire(a, kForward); });
    fail([&] { (void)cursor.next_micro_step(); });
    fail([&] { cursor.begin_step(); });
    fail([&] { cursor.micro_steps(0); });
    fail([&] { cursor.evaluation_passes(-1); });
    fail([&] { cursor.step_gather(0); });
    fail([&] { cursor.end_step(true); });
    cursor.micro_steps(1);
    fail([&] { cursor.micro_steps(1); });
    fail([&] { cursor.acquire(a, kForward); });
    fail([&] { cursor.set_step_count(3); });
    cursor.next_micro_step();
    cursor.acquire(a, kForward);
    fail([&] { cursor.acquire(b, kForward); });  // still held
    fail([&] { (void)cursor.next_micro_step(); });
    fail([&] { cursor.begin_step(); });
    fail([&] { cursor.skip(a); });
    fail([&] { cursor.release(b, kForward); });
    fail([&] { cursor.commit(c); });
    fail([&] { cursor.acquire(UnitId{3}, kForward); });
    fail([&] { cursor.acquire(UnitId{}, kForward); });
    cursor.release(a, kForward);
    fail([&] { cursor.release(a, kForward); });
    cursor.acquire(c, kBackward);
    cursor.commit(c);
    fail([&] { cursor.commit(c); });
    fail([&] { cursor.acquire(c, kBackward); });
    cursor.release(c, kBackward);
    fail([&] { cursor.acquire(c, kBackward); });  // behind the cursor
    cursor.skip(b);
    fail([&] { cursor.acquire(b, kBackward); });
    run_step(cursor, rig->sink);
  }
  EXPECT_EQ(bad.sink.log, good.sink.log);
}

TEST(Cursor, ErrorsNameUnitPlaceAndRemedy) {
  Rig rig(three_units(), {.budget = 2048});
  rig.cursor.micro_steps(2);
  rig.cursor.next_micro_step();
  rig.cursor.acquire(UnitId{1}, kForward);
  const std::string held = refusal([&] { rig.cursor.acquire(UnitId{2}, kForward); });
  EXPECT_TRUE(held.starts_with(
      "a unit is still held: release it, or state a larger hold in the spec: position 1, unit b "
      "forward"))
      << held;
  EXPECT_NE(held.find("micro-step 0 of 2"), std::string::npos);
  rig.cursor.release(UnitId{1}, kForward);
  rig.cursor.acquire(UnitId{1}, kBackward);
  rig.cursor.release(UnitId{1}, kBackward);
  const std::string forgotten = refusal([&] { rig.cursor.acquire(UnitId{0}, kBackward); });
  EXPECT_TRUE(forgotten.starts_with("a backward position was released without commit()"));
  EXPECT_NE(forgotten.find("unit b backward"), std::string::npos);
}

TEST(Cursor, RecomputationInsideBackwardCostsNothing) {
  Rig rig(three_units(), {});
  engine::Cursor& cursor = rig.cursor;
  const UnitId c{2};
  cursor.micro_steps(1);
  cursor.next_micro_step();
  cursor.acquire(c, kBackward);
  const std::size_t before = rig.sink.log.size();
  cursor.acquire(c, kRecompute);
  cursor.acquire(c, kBackward);
  EXPECT_EQ(cursor.held_backward(c), 3);
  cursor.release(c, kRecompute);
  cursor.commit(c);
  EXPECT_EQ(rig.sink.log.size(), before);
  EXPECT_TRUE(cursor.unwritten(c));
  cursor.release(c, kBackward);
  cursor.commit(c);
  EXPECT_FALSE(cursor.unwritten(c));
  EXPECT_TRUE(cursor.held(c));
  cursor.release(c, kBackward);
  EXPECT_FALSE(cursor.held(c));
  EXPECT_EQ(cursor.held_backward(c), -1);
  EXPECT_EQ(cursor.written()[2], 1);
  EXPECT_EQ(cursor.touched()[2], 1);
  EXPECT_EQ(cursor.touched()[0], 0);
  run_step(cursor, rig.sink);
  EXPECT_EQ(cursor.touched()[2], 0);
}

TEST(Cursor, DeclaredUnitsArePassedOnlyWhereNothingIsInTheWay) {
  Rig rig(three_units(), {.budget = 2048, .look_ahead = 0});  // the largest unit alone fits
  engine::Cursor& cursor = rig.cursor;
  cursor.micro_steps(1);
  cursor.next_micro_step();
  cursor.acquire(UnitId{0}, kForward);
  ASSERT_EQ(rig.sink.collectives.size(), 1u);
  cursor.skip(UnitId{1});  // its gather would overwrite what is held
  EXPECT_EQ(rig.sink.collectives.size(), 1u);
  cursor.release(UnitId{0}, kForward);
  ASSERT_EQ(rig.sink.collectives.size(), 2u);
  EXPECT_TRUE(rig.sink.collectives[1].starts_with("1 gather b for=1"));

  Rig behind(three_units(), {.look_ahead = 0});  // everything stays
  behind.cursor.micro_steps(1);
  behind.cursor.next_micro_step();
  behind.cursor.acquire(UnitId{1}, kForward);
  behind.cursor.release(UnitId{1}, kForward);
  behind.cursor.acquire(UnitId{0}, kForward);  // served behind the cursor
  const std::size_t issued = behind.sink.collectives.size();
  behind.cursor.skip(UnitId{2});
  EXPECT_EQ(behind.sink.collectives.size(), issued);
  behind.cursor.release(UnitId{0}, kForward);
  behind.cursor.acquire(UnitId{1}, kBackward);
  EXPECT_GT(behind.sink.collectives.size(), issued);
}

TEST(Cursor, AddressesAreThePlans) {
  Rig rig(three_units(), {});  // everything fits, so everything is served behind the cursor
  engine::Cursor& cursor = rig.cursor;
  const UnitId a{0};
  const UnitId b{1};
  cursor.micro_steps(2);
  for (const int micro : {0, 1}) {
    cursor.next_micro_step();
    cursor.acquire(b, kForward);
    EXPECT_EQ(cursor.address(b), rig.training.address(micro)[1]);
    EXPECT_EQ(cursor.address(a), -1);  // inside, but not held
    cursor.release(b, kForward);
    cursor.acquire(a, kForward);
    EXPECT_EQ(cursor.address(a), rig.training.inside(micro).offset(1, 0));
    EXPECT_GE(cursor.address(a), 0);
    EXPECT_TRUE(cursor.held(a));
    EXPECT_NE(refusal([&] { cursor.acquire(UnitId{2}, kForward); }).find("unit a, which is served"),
              std::string::npos);
    cursor.release(a, kForward);
    EXPECT_FALSE(cursor.held(a));
  }
  EXPECT_EQ(cursor.served_behind(), 2u);

  Rig replicated(three_units(), {.stage = Stage::optimizer});
  replicated.cursor.micro_steps(1);
  replicated.cursor.next_micro_step();
  replicated.cursor.acquire(b, kForward);
  EXPECT_EQ(replicated.cursor.address(b), -1);  // nothing is gathered below stage 3
}

TEST(Cursor, FactsFollowTheRange) {
  Rig rig(three_units(), {});
  engine::Cursor& cursor = rig.cursor;
  EXPECT_FALSE(cursor.in_range());
  cursor.set_step_count(41);
  cursor.evaluation_passes(1);
  EXPECT_TRUE(cursor.in_evaluation());
  EXPECT_FALSE(cursor.in_micro_step());
  EXPECT_EQ(&cursor.schedule(), &rig.evaluation);
  EXPECT_NE(refusal([&] { cursor.begin_step(); }).find("step() without micro_steps()"),
            std::string::npos);
  EXPECT_TRUE(cursor.next_micro_step());
  EXPECT_FALSE(cursor.next_micro_step());
  EXPECT_FALSE(cursor.in_range());
  cursor.micro_steps(2);
  EXPECT_TRUE(cursor.next_micro_step());
  EXPECT_TRUE(cursor.in_micro_step());
  EXPECT_EQ(cursor.micro(), 0);
  EXPECT_EQ(cursor.n(), 2);
  EXPECT_TRUE(cursor.next_micro_step());
  EXPECT_FALSE(cursor.range_finished());
  EXPECT_FALSE(cursor.next_micro_step());
  EXPECT_TRUE(cursor.range_finished());
  EXPECT_FALSE(cursor.next_micro_step());  // said again: the same answer
  cursor.begin_step();
  EXPECT_NE(refusal([&] { cursor.begin_step(); }), "");
  cursor.end_step(false);
  EXPECT_EQ(cursor.step_count(), 41);
  EXPECT_FALSE(cursor.range_finished());
  EXPECT_THROW(cursor.set_step_count(-1), UsageError);

  engine::Cursor alone(&rig.training, nullptr, true, &rig.sink);
  EXPECT_THROW(alone.evaluation_passes(1), UsageError);
  EXPECT_THROW(engine::Cursor(nullptr, nullptr, true, &rig.sink), UsageError);
  EXPECT_THROW(engine::Cursor(&rig.training, nullptr, true, nullptr), UsageError);
}

TEST(Cursor, AnEmptyProgramStillVotes) {
  Rig rig(ModelSpec(), {});
  rig.cursor.micro_steps(2);
  run_step(rig.cursor, rig.sink);
  EXPECT_EQ(rig.sink.log,
            (std::vector<std::string>{"0 vote - for=-1 at=-1 offset=-1 micro=2/2 range=1",
                                      "wait reduce 1", "update"}));
}

}  // namespace
}  // namespace zshard
