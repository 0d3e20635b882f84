// Section 3 of the specification: the total order of collectives.
#include "runtime/engine/schedule.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/spec/golden.hpp"

namespace zshard {
namespace {

/// The programs that the golden schedules name.
std::vector<Position> program_of(const ModelSpec& spec, const std::string& which) {
  const std::vector<Position> plain = spec.program();
  if (which == "default") {
    return plain;
  }
  const auto middle = plain.begin() + static_cast<std::ptrdiff_t>(spec.units().size());
  std::vector<Position> program(plain.begin(), middle);
  if (which == "tied") {
    program.push_back({UnitId{0}, Pass::forward});
    program.push_back({UnitId{0}, Pass::backward});
    program.insert(program.end(), middle, plain.end());
    return program;
  }
  EXPECT_EQ(which, "recompute");
  for (auto p = middle; p != plain.end(); ++p) {
    program.push_back({p->unit, Pass::recompute});
    program.push_back(*p);
  }
  return program;
}

TEST(GoldenSchedule, TextsAreEqualToTheByte) {
  ZSHARD_NEED_GOLDEN();
  int compared = 0;
  for (const nlohmann::json& entry : golden().at("schedules")) {
    if (entry.contains("step")) {
      continue;
    }
    SCOPED_TRACE(entry.at("model").dump() + entry.at("program").dump() + " stage " +
                 entry.at("stage").dump() + " hold " + entry.at("hold").dump() + " budget " +
                 entry.at("budget").dump());
    const ModelSpec spec = golden_model(entry.at("model").get<std::string>());
    const auto layout = shard::Layout::make(spec, entry.at("world").get<int>());
    const auto program = program_of(spec, entry.at("program").get<std::string>());
    const engine::ScheduleOptions options{.stage = static_cast<Stage>(entry.at("stage").get<int>()),
                                          .budget = entry.at("budget").get<std::int64_t>(),
                                          .hold = entry.at("hold").get<int>(),
                                          .look_ahead = entry.at("look_ahead").get<int>(),
                                          .behind = entry.at("behind").get<int>()};
    const engine::Schedule schedule = engine::make_schedule(layout, program, options);
    EXPECT_EQ(schedule.text(), entry.at("text").get<std::string>());
    EXPECT_EQ(schedule.gradient_arena, entry.at("gradient_arena").get<std::int64_t>());
    if (entry.contains("evaluation")) {
      const engine::Schedule evaluation = engine::evaluation_schedule(layout, program, options);
      EXPECT_EQ(evaluation.text(), entry.at("evaluation").get<std::string>());
      EXPECT_EQ(evaluation.gradient_arena, 0);
      EXPECT_LE(evaluation.gather_arena, schedule.gather_arena);
    }
    ++compared;
  }
  EXPECT_EQ(compared, 81);
}

TEST(GoldenSchedule, StepItemsAreEqual) {
  ZSHARD_NEED_GOLDEN();
  int compared = 0;
  for (const nlohmann::json& entry : golden().at("schedules")) {
    if (!entry.contains("step")) {
      continue;
    }
    SCOPED_TRACE(entry.dump());
    const auto layout = shard::Layout::make(golden_model(entry.at("model").get<std::string>()),
                                            entry.at("world").get<int>());
    const auto stage = static_cast<Stage>(entry.at("stage").get<int>());
    const std::vector<char> second{0, 1, 0};
    const std::vector<std::vector<engine::Item>> lists{
        engine::step_items(layout, stage, 0), engine::step_items(layout, stage, 1),
        engine::step_items(layout, stage, 0, second)};
    for (std::size_t i = 0; i < lists.size(); ++i) {
      std::vector<std::string> texts;
      for (const engine::Item& item : lists[i]) {
        texts.push_back(item.text(layout));
      }
      EXPECT_EQ(texts, entry.at("step").at(i).get<std::vector<std::string>>());
    }
    EXPECT_EQ(engine::step_items(layout, stage, 0, {}, false).size(), 1u);
    ++compared;
  }
  EXPECT_EQ(compared, 4);
}

}  // namespace
}  // namespace zshard
