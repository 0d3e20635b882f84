// Training of the specification's models gives golden.json's bits at every stage and budget, with
// every kind of queue.
#include <cmath>

#include "tests/engine/placements.hpp"

namespace zshard {
namespace {

TEST(Golden, TrainingGivesTheSpecificationsBits) {
  ZSHARD_NEED_GOLDEN();
  int runs = 0;
  for (const nlohmann::json& model : golden("adamw", "models")) {
    for (const lab::Case& c : lab::placements(lab::golden_case(model))) {
      EXPECT_EQ(lab::golden_difference(model, c, lab::train(c)), "")
          << "model " << model.at("model") << ", " << lab::where(c);
      ++runs;
    }
  }
  EXPECT_GE(runs, 25 * (3 - lab::kFirstQueues));
}

TEST(Golden, AnotherBitOrNormIsADifference) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& model = golden("adamw", "models")[0];
  const lab::Case c = lab::golden_case(model);
  const lab::Tensors got = lab::train(c);
  ASSERT_EQ(lab::golden_difference(model, c, got), "");
  for (const auto& [name, tensors] : model.at("final").items()) {
    lab::Tensors other = got;
    if (other.values.at(name).empty()) continue;
    float& last = other.values.at(name).back();
    last = std::nextafter(last, 2.0f);
    EXPECT_NE(lab::golden_difference(model, c, other), "") << name;
  }
  lab::Tensors other = got;
  other.norms.back() = std::nextafter(other.norms.back(), 0.0);
  EXPECT_NE(lab::golden_difference(model, c, other), "");
}

}  // namespace
}  // namespace zshard
