// Section 8 of the specification: bytes by category.
#include "runtime/engine/plan.hpp"

#include <gtest/gtest.h>

#include <string>

#include "tests/spec/golden.hpp"

namespace zshard {
namespace {

MasterWeights master_of(const std::string& name) {
  EXPECT_TRUE(name == "f32" || name == "remainder") << name;
  return name == "f32" ? MasterWeights::f32 : MasterWeights::remainder;
}

TEST(GoldenPlan, BytesAreEqual) {
  ZSHARD_NEED_GOLDEN();
  ASSERT_EQ(golden().at("memory_plans").size(), 144u);
  for (const nlohmann::json& entry : golden().at("memory_plans")) {
    SCOPED_TRACE(entry.dump());
    const ModelSpec spec = golden_model(entry.at("model").get<std::string>());
    const auto layout = shard::Layout::make(spec, entry.at("world").get<int>());
    const auto schedule =
        engine::make_schedule(layout, spec.program(),
                              {.stage = static_cast<Stage>(entry.at("stage").get<int>()),
                               .budget = entry.at("gather_budget").get<std::int64_t>()});
    engine::PlanInput input;
    for (const nlohmann::json& slot : entry.at("moments")) {
      input.moments.push_back(golden_dtype(slot.get<std::string>()));
    }
    input.master = master_of(entry.at("master").get<std::string>());
    input.accumulation = entry.at("accumulation").get<std::string>() == "local"
                             ? Accumulation::local
                             : Accumulation::reduced;
    if (!entry.at("wire").is_null()) {
      input.wire = golden_dtype(entry.at("wire").get<std::string>());
    }
    const MemoryPlan plan = engine::make_plan(layout, schedule, input);
    ASSERT_EQ(entry.at("bytes").size(), static_cast<std::size_t>(kCategories));
    for (int c = 0; c < kCategories; ++c) {
      const auto category = static_cast<Category>(c);
      EXPECT_EQ(plan.bytes(category),
                entry.at("bytes").at(std::string(to_string(category))).get<std::int64_t>())
          << to_string(category);
      EXPECT_EQ(plan.bytes(category, Tier::device), plan.bytes(category));
    }
  }
}

}  // namespace
}  // namespace zshard
