// Section 2 of the specification: where gathered units lie.
#include "runtime/engine/residency.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/spec/golden.hpp"
#include "zshard/error.hpp"

namespace zshard {
namespace {

void expect_pass(const engine::ResidencyPass& pass, const nlohmann::json& triggers,
                 const nlohmann::json& address) {
  ASSERT_EQ(pass.triggers.size(), triggers.size());
  for (std::size_t p = 0; p < triggers.size(); ++p) {
    ASSERT_EQ(pass.triggers[p].size(), triggers[p].size()) << "position " << p;
    for (std::size_t i = 0; i < triggers[p].size(); ++i) {
      const nlohmann::json& t = triggers[p][i];
      EXPECT_EQ(pass.triggers[p][i],
                (engine::Trigger{t.at(0).get<std::int32_t>(), t.at(1).get<std::int32_t>(),
                                 t.at(2).get<std::int64_t>()}))
          << "position " << p;
    }
    EXPECT_EQ(pass.address[p], address[p].is_null() ? -1 : address[p].get<std::int64_t>())
        << "position " << p;
  }
}

TEST(GoldenResidency, PlansAreEqual) {
  ZSHARD_NEED_GOLDEN();
  ASSERT_EQ(golden().at("residency").size(), 24u);
  for (const nlohmann::json& entry : golden().at("residency")) {
    SCOPED_TRACE(entry.dump());
    const auto units = entry.at("units").get<std::vector<std::int32_t>>();
    const auto sizes = entry.at("sizes").get<std::vector<std::int64_t>>();
    const auto budget = entry.at("budget").get<std::int64_t>();
    const auto minimum = entry.at("minimum").get<std::int64_t>();
    const int hold = entry.at("hold").get<int>();
    const int ahead = entry.at("look_ahead").get<int>();

    EXPECT_EQ(engine::minimum_budget(units, sizes, hold), minimum);
    const engine::ResidencyPlan plan = engine::plan_residency(units, sizes, budget, hold, ahead);
    expect_pass(plan.first, entry.at("first"), entry.at("first_address"));
    expect_pass(plan.later, entry.at("later"), entry.at("later_address"));
    const auto kept = entry.at("kept").get<std::vector<std::pair<std::int32_t, std::int64_t>>>();
    EXPECT_EQ(
        (std::vector<std::pair<std::int32_t, std::int64_t>>(plan.kept.begin(), plan.kept.end())),
        kept);
    if (minimum > 0) {
      EXPECT_THROW((void)engine::plan_residency(units, sizes, minimum - 1, hold, ahead),
                   UsageError);
    }
  }
}

}  // namespace
}  // namespace zshard
