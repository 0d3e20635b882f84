// Residency, schedule and memory plan beyond the golden vectors: bounds, refusals, large programs.
#include "runtime/engine/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine/latest_cover.hpp"
#include "runtime/engine/plan.hpp"
#include "runtime/engine/residency.hpp"
#include "zshard/error.hpp"

namespace zshard {
namespace {

using engine::ScheduleOptions;

constexpr int kHuge = std::numeric_limits<int>::max();

ModelSpec chain(const std::vector<std::int64_t>& counts) {
  ModelSpec spec;
  for (std::size_t u = 0; u < counts.size(); ++u) {
    spec.unit("u" + std::to_string(u)).parameter("p" + std::to_string(u), {counts[u]});
  }
  return spec;
}

template <class Call>
std::string refusal(Call&& call) {
  try {
    (void)call();
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

// -- residency --

/// Never past the budget, never on top of each other, and a held unit stays where it is.
void expect_sound(const engine::ResidencyPass& pass, const std::vector<std::int32_t>& units,
                  const std::vector<std::int64_t>& sizes, std::int64_t budget, int hold) {
  const auto size = [&](std::int32_t u) { return sizes[static_cast<std::size_t>(u)]; };
  for (std::int32_t p = 0; p < static_cast<std::int32_t>(units.size()); ++p) {
    std::vector<std::pair<std::int64_t, std::int64_t>> spans;
    for (std::int32_t u = 0; u < static_cast<std::int32_t>(sizes.size()); ++u) {
      const std::int64_t offset = pass.residents.offset(p, u);
      if (offset >= 0) {
        spans.emplace_back(offset, offset + size(u));
      }
    }
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 0; i < spans.size(); ++i) {
      EXPECT_LE(spans[i].second, i + 1 < spans.size() ? spans[i + 1].first : budget);
    }
    for (std::int32_t q = std::max(0, p - hold + 1); q <= p; ++q) {
      const std::int32_t u = units[static_cast<std::size_t>(q)];
      EXPECT_EQ(pass.residents.offset(p, u), pass.address[static_cast<std::size_t>(q)]);
      EXPECT_EQ(pass.residents.inside(p, u), size(u) > 0);
    }
  }
}

TEST(Residency, BudgetIsHardAndHeldUnitsStay) {
  std::mt19937 random(11);
  const auto pick = [&](int lo, int hi) {
    return lo + static_cast<int>(random() % static_cast<unsigned>(hi - lo + 1));
  };
  for (int round = 0; round < 900; ++round) {
    const int hold = 1 + round % 3;
    const int count = pick(1, 9);
    std::vector<std::int64_t> sizes;
    std::vector<std::int32_t> units;
    for (int u = 0; u < count; ++u) {
      sizes.push_back(256 * (pick(0, 4) == 0 ? 0 : pick(1, 60)));
      units.push_back(u);
    }
    for (int u = count; u-- > 0;) {
      units.push_back(u);
    }
    for (int extra = pick(0, 3); extra-- > 0;) {
      units.insert(units.begin() + pick(0, static_cast<int>(units.size())), pick(0, count - 1));
    }
    const std::int64_t minimum = engine::minimum_budget(units, sizes, hold);
    const std::int64_t budget = minimum + (round % 2 == 0 ? 0 : pick(0, 60000));
    const auto plan = engine::plan_residency(units, sizes, budget, hold, pick(0, 4));
    expect_sound(plan.first, units, sizes, budget, hold);
    expect_sound(plan.later, units, sizes, budget, hold);
    for (const auto& [unit, offset] : plan.kept) {  // later micro-steps repeat
      ASSERT_TRUE(plan.later.end.contains(unit));
      EXPECT_EQ(plan.later.end.at(unit), offset);
    }
    if (minimum > 0) {
      EXPECT_THROW((void)engine::plan_residency(units, sizes, minimum - 1, hold, 0), UsageError);
    }
  }
}

TEST(Residency, NothingOutsideThePlanIsInside) {
  const engine::Residents none;
  EXPECT_FALSE(none.inside(0, 0));
  const engine::Residents some({{1, 2, 4, 512}, {0, 0, 9, 0}, {1, 7, 7, 256}}, 3);
  EXPECT_FALSE(some.inside(1, 1));
  EXPECT_EQ(some.offset(2, 1), 512);
  EXPECT_EQ(some.offset(4, 1), 512);
  EXPECT_FALSE(some.inside(5, 1));
  EXPECT_EQ(some.offset(7, 1), 256);
  EXPECT_FALSE(some.inside(8, 1));
  EXPECT_FALSE(some.inside(0, 2));
  EXPECT_FALSE(some.inside(0, 3));
  EXPECT_FALSE(some.inside(0, -1));
}

TEST(Residency, GradientSlotsThatLiveTogetherAreApart) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::map<std::int32_t, engine::GradientInterval> intervals;
    for (int u = 0; u < 8; ++u) {
      const auto first = static_cast<std::int32_t>(random() % 12);
      intervals[u] = {first, first + static_cast<std::int32_t>(random() % 6),
                      256 * static_cast<std::int64_t>(1 + random() % 9)};
    }
    const auto [offsets, arena] = engine::pack_gradients(intervals);
    for (const auto& [u, a] : intervals) {
      EXPECT_LE(offsets.at(u) + a.bytes, arena);
      for (const auto& [v, b] : intervals) {
        if (u < v && a.first <= b.last && b.first <= a.last) {
          EXPECT_TRUE(offsets.at(u) + a.bytes <= offsets.at(v) ||
                      offsets.at(v) + b.bytes <= offsets.at(u));
        }
      }
    }
  }
}

TEST(LatestCover, IsTheLastStampOfAnythingThatOverlaps) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::pair<std::int64_t, std::int64_t>> intervals;
    for (int i = 0; i < 12; ++i) {
      const auto lo = static_cast<std::int64_t>(random() % 40);
      intervals.emplace_back(lo, lo + static_cast<std::int64_t>(random() % 12));
    }
    engine::LatestCover cover(intervals);
    std::vector<std::pair<std::size_t, std::uint64_t>> stamps;
    for (std::uint64_t stamp = 1; stamp < 40; ++stamp) {
      const std::size_t i = random() % intervals.size();
      cover.stamp(i, stamp);
      stamps.emplace_back(i, stamp);
      const std::size_t asked = random() % intervals.size();
      std::uint64_t expected = 0;
      for (const auto& [j, s] : stamps) {
        const bool overlaps = std::max(intervals[j].first, intervals[asked].first) <
                              std::min(intervals[j].second, intervals[asked].second);
        expected = overlaps ? s : expected;
      }
      EXPECT_EQ(cover.latest(asked), expected);
    }
  }
}

// -- schedule --

TEST(Schedule, AnEmptySpecIsLegal) {
  const ModelSpec spec;
  const auto layout = shard::Layout::make(spec, 3);
  for (const int hold : {1, 2, 3, kHuge}) {
    const auto schedule = engine::make_schedule(layout, spec.program(), {.hold = hold});
    EXPECT_TRUE(schedule.first.empty());
    EXPECT_TRUE(schedule.later.empty());
    EXPECT_EQ(schedule.gather_arena, 0);
    EXPECT_EQ(engine::minimum_gather_budget(layout, spec.program(), hold), 0);
  }
}

TEST(Schedule, OptionsLargerThanTheProgramActAsItsLength) {
  const ModelSpec spec = chain({64, 300, 100, 64});
  const auto layout = shard::Layout::make(spec, 2);
  const auto program = spec.program();
  const int length = static_cast<int>(program.size());
  const auto body = [&](const ScheduleOptions& options) {
    const std::string text = engine::make_schedule(layout, program, options).text();
    return text.substr(text.find('\n'));  // the first line names the stated hold
  };
  for (const Stage stage : {Stage::optimizer, Stage::gradients, Stage::parameters}) {
    EXPECT_EQ(body({.stage = stage, .hold = kHuge}), body({.stage = stage, .hold = length}));
    EXPECT_EQ(body({.stage = stage, .look_ahead = kHuge}),
              body({.stage = stage, .look_ahead = length}));
    EXPECT_EQ(body({.stage = stage, .behind = kHuge}), body({.stage = stage, .behind = length}));
    EXPECT_EQ(body({.stage = stage, .hold = kHuge, .look_ahead = kHuge, .behind = kHuge}),
              body({.stage = stage, .hold = length, .look_ahead = length, .behind = length}));
  }
}

TEST(Schedule, RefusesWhatCannotRun) {
  const ModelSpec spec = chain({64, 300});
  const auto layout = shard::Layout::make(spec, 2);
  const auto program = spec.program();
  const auto of = [&](const std::vector<Position>& positions, const ScheduleOptions& options) {
    return refusal([&] { return engine::make_schedule(layout, positions, options); });
  };
  EXPECT_EQ(of(program, {}), "");
  EXPECT_NE(of(program, {.hold = 0}).find("hold 0"), std::string::npos);
  EXPECT_NE(of(program, {.hold = -1}).find("ModelSpec::hold"), std::string::npos);
  EXPECT_NE(of(program, {.look_ahead = -1}).find("look_ahead -1"), std::string::npos);
  EXPECT_NE(of(program, {.behind = -2}).find("behind -2"), std::string::npos);
  EXPECT_NE(of(program, {.stage = Stage::optimizer, .budget = -1}).find("gather budget"),
            std::string::npos);
  const std::int64_t minimum = engine::minimum_gather_budget(layout, program, 1);
  EXPECT_EQ(of(program, {.budget = minimum}), "");
  EXPECT_TRUE(of(program, {.budget = minimum - 1})
                  .starts_with("gather budget " + std::to_string(minimum - 1) +
                               " is below the minimum " + std::to_string(minimum)));
  EXPECT_NE(of({{UnitId{2}, Pass::forward}}, {}).find("names unit 2"), std::string::npos);
  EXPECT_NE(of({{UnitId{}, Pass::forward}}, {}).find("names unit -1"), std::string::npos);
  EXPECT_NE(of({{UnitId{0}, static_cast<Pass>(7)}}, {}).find("no pass"), std::string::npos);

  const std::string untrained =
      of({{UnitId{0}, Pass::forward}, {UnitId{1}, Pass::forward}, {UnitId{0}, Pass::backward}}, {});
  EXPECT_TRUE(untrained.starts_with("a unit with trained parameters has no backward position"));
  EXPECT_NE(untrained.find("unit u1"), std::string::npos);
  EXPECT_NE(untrained.find("ModelSpec::program"), std::string::npos);
}

TEST(Schedule, AFrozenPrefixNeedsNoBackward) {
  ModelSpec spec;
  spec.unit("base").parameter("base.w", {64}, {.frozen = true});
  spec.unit("head").parameter("head.w", {64});
  spec.program(
      {{UnitId{0}, Pass::forward}, {UnitId{1}, Pass::forward}, {UnitId{1}, Pass::backward}});
  const auto layout = shard::Layout::make(spec, 2);
  const auto schedule = engine::make_schedule(layout, spec.program(), {});
  EXPECT_EQ(schedule.last_backward, (std::vector<std::int32_t>{-1, 2}));
  EXPECT_EQ(schedule.gradient_offset, (std::vector<std::int64_t>{-1, 0}));
}

TEST(Schedule, BudgetsCoverEvaluationToo) {
  // Without its recompute passes two large units become neighbours.
  const ModelSpec spec = chain({1024, 64, 1024});
  const auto layout = shard::Layout::make(spec, 1);
  const std::vector<Position> program{{UnitId{0}, Pass::forward},  {UnitId{1}, Pass::recompute},
                                      {UnitId{2}, Pass::forward},  {UnitId{2}, Pass::backward},
                                      {UnitId{1}, Pass::backward}, {UnitId{0}, Pass::backward}};
  const std::int64_t minimum = engine::minimum_gather_budget(layout, program, 2);
  EXPECT_EQ(minimum, 8192);
  EXPECT_NO_THROW((void)engine::make_schedule(layout, program, {.budget = minimum, .hold = 2}));
  EXPECT_NO_THROW(
      (void)engine::evaluation_schedule(layout, program, {.budget = minimum, .hold = 2}));
  EXPECT_THROW(
      (void)engine::evaluation_schedule(layout, program, {.budget = minimum - 1, .hold = 2}),
      UsageError);
  EXPECT_EQ(engine::maximum_gather_budget(layout, program), 4096 * 2 + 256);
}

TEST(Schedule, UpdateOrderAlternates) {
  ModelSpec spec = chain({64, 64});
  spec.unit("frozen").parameter("f", {64}, {.frozen = true});
  const auto layout = shard::Layout::make(spec, 2);
  EXPECT_EQ(engine::update_order(layout, 0), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(engine::update_order(layout, 7), (std::vector<std::int32_t>{1, 0}));
  EXPECT_FALSE(engine::step_gather(layout, Stage::optimizer, 2).has_value());
  EXPECT_FALSE(engine::step_gather(layout, Stage::parameters, 0).has_value());
  EXPECT_EQ(engine::step_gather(layout, Stage::replicated, 0)->kind,
            engine::ItemKind::gather_gradient);
}

TEST(Schedule, TwentyThousandPositionsPlanInSeconds) {
  std::mt19937 random(1);
  std::vector<std::int64_t> counts;
  for (int u = 0; u < 10000; ++u) {
    counts.push_back(64 + static_cast<std::int64_t>(random() % 5000));
  }
  const ModelSpec spec = chain(counts);
  const auto layout = shard::Layout::make(spec, 8);
  const auto program = spec.program();
  const std::int64_t all = engine::maximum_gather_budget(layout, program);
  for (const std::int64_t budget : {all / 100, all / 2, all}) {
    for (const int hold : {1, 2, 3}) {
      const auto begin = std::chrono::steady_clock::now();
      const auto schedule =
          engine::make_schedule(layout, program, {.budget = budget, .hold = hold});
      EXPECT_GT(schedule.text().size(), program.size());
      // About half a second without sanitizers; quadratic planning takes minutes.
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
    }
  }
}

// -- memory plan --

TEST(MemoryPlan, TiersAndArenas) {
  const ModelSpec spec = chain({1000, 3000});
  const auto layout = shard::Layout::make(spec, 2);
  const auto schedule = engine::make_schedule(layout, spec.program(), {.stage = Stage::optimizer});
  const auto plan = engine::make_plan(layout, schedule,
                                      {.moments = {DType::f32, DType::f32},
                                       .optimizer_tier = Tier::nvme,
                                       .gradient_tier = Tier::host});
  const std::int64_t elements = 1024 + 3072;
  EXPECT_EQ(plan.bytes(Category::moments, Tier::nvme), elements / 2 * 8);
  EXPECT_EQ(plan.bytes(Category::moments, Tier::device), 0);
  EXPECT_EQ(plan.bytes(Category::gradients, Tier::host), elements / 2 * 4 + elements * 4);
  EXPECT_EQ(plan.bytes(Category::parameters, Tier::device), elements * 4);
  const std::int64_t page = 2 << 20;
  EXPECT_EQ(plan.arena_bytes(Tier::nvme), page);
  EXPECT_EQ(plan.arena_bytes(Tier::device), 2 * page);  // parameters, square-sum blocks
  EXPECT_EQ(plan.memory_bytes(), 3 * page);

  MemoryPlan more = plan;
  EXPECT_EQ(more, plan);
  more.add(Category::parameters, Tier::device, page);
  EXPECT_NE(more, plan);
  EXPECT_EQ(more.arena_bytes(Tier::device), 3 * page);
}

TEST(MemoryPlan, TextIsATableOfEqualLines) {
  MemoryPlan plan;
  plan.add(Category::parameters, Tier::device, (std::int64_t{3} << 30) + 1);
  plan.add(Category::moments, Tier::nvme, 1536);
  const std::string text = plan.to_string();
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    ASSERT_NE(end, std::string::npos);
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  ASSERT_EQ(lines.size(), 1u + kCategories + 2u);
  for (const std::string& line : lines) {
    EXPECT_EQ(line.size(), lines[0].size());
  }
  EXPECT_TRUE(lines[1].starts_with("parameters"));
  EXPECT_NE(lines[1].find("3.00 GiB (3221225473)"), std::string::npos);
  EXPECT_NE(lines[4].find("1.50 KiB (1536)"), std::string::npos);
  EXPECT_TRUE(lines[11].ends_with("(3221227009)")) << text;
}

TEST(MemoryPlan, SumsPast63BitsAreRefused) {
  const ModelSpec spec = chain({std::int64_t{1} << 60});
  const auto layout = shard::Layout::make(spec, 1);
  const auto schedule = engine::make_schedule(layout, spec.program(), {.stage = Stage::optimizer});
  EXPECT_NE(refusal([&] {
              return engine::make_plan(layout, schedule, {.moments = {DType::f32, DType::f32}});
            }).find("2^63"),
            std::string::npos);
}

}  // namespace
}  // namespace zshard
