// Section 4 of the specification: what each call of a rank issues, waits for and refuses.
#include "runtime/engine/cursor.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/spec/cursor_log.hpp"
#include "tests/spec/golden.hpp"

namespace zshard {
namespace {

std::vector<Call> calls_of(const nlohmann::json& entry) {
  std::vector<Call> calls;
  for (const nlohmann::json& call : entry.at("calls")) {
    calls.push_back({call.at(0).get<std::string>(),
                     call.size() > 1 ? call.at(1).get<std::int32_t>() : 0,
                     call.size() > 2 ? golden_pass(call.at(2).get<std::string>()) : Pass::forward});
  }
  return calls;
}

/// Errors begin with the specification's text and go on with unit, place and remedy.
void expect_log(const std::vector<std::string>& log, const std::vector<std::string>& golden_log) {
  ASSERT_EQ(log.size(), golden_log.size())
      << (log.empty() ? "" : log.back()) << " / " << (golden_log.empty() ? "" : golden_log.back());
  for (std::size_t i = 0; i < log.size(); ++i) {
    if (golden_log[i].starts_with("error ")) {
      EXPECT_TRUE(log[i].starts_with(golden_log[i])) << log[i] << "\nnot\n" << golden_log[i];
    } else {
      EXPECT_EQ(log[i], golden_log[i]) << "line " << i;
    }
  }
}

TEST(GoldenCursor, LogsAreEqual) {
  ZSHARD_NEED_GOLDEN();
  ASSERT_EQ(golden().at("cursor").size(), 48u);
  const ModelSpec spec = golden_model("plain");
  const auto layout = shard::Layout::make(spec, 2);
  for (const nlohmann::json& entry : golden().at("cursor")) {
    SCOPED_TRACE("stage " + entry.at("stage").dump() + " hold " + entry.at("hold").dump() + " " +
                 entry.at("case").dump());
    engine::ScheduleOptions options{.stage = static_cast<Stage>(entry.at("stage").get<int>()),
                                    .budget = 0,
                                    .hold = entry.at("hold").get<int>()};
    if (options.stage == Stage::parameters) {
      options.budget = engine::minimum_gather_budget(layout, spec.program(), options.hold);
    }
    const auto training = engine::make_schedule(layout, spec.program(), options);
    const auto evaluation = engine::evaluation_schedule(layout, spec.program(), options);
    LogSink sink(&layout);
    engine::Cursor cursor(&training, &evaluation, true, &sink);
    run_calls(cursor, sink, calls_of(entry));
    expect_log(sink.log, entry.at("log").get<std::vector<std::string>>());
  }
}

}  // namespace
}  // namespace zshard
