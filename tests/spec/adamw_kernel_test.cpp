// The AdamW pass and its constants against the golden vectors.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "optimizers/rule.hpp"
#include "tests/spec/golden.hpp"
#include "zshard/optimizer.hpp"

namespace zshard::optimizers {
namespace {

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

TEST(GoldenAdamW, ThreeStepsGiveTheGoldenBits) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& steps = golden("adamw", "kernel");
  ASSERT_EQ(steps.size(), 3u);
  const Optimizer optimizer =
      AdamW{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
  const Rule& rule = optimizer.rule();
  std::vector<float> p = {1.0f, -2.0f, 0.5f}, m(3), v(3);
  std::int64_t step = 0;
  for (const nlohmann::json& entry : steps) {
    ++step;
    const std::vector<float> g = hex_floats(entry.at("g").get<std::string>());
    const Constants constants = rule.constants(rule.defaults(), step);
    for (const auto& [name, bits] : entry.at("constants").items()) {
      const auto expected = hex_floats(bits.get<std::string>()).at(0);
      int found = 0;
      for (const float value : constants.value) found += value == expected ? 1 : 0;
      EXPECT_GE(found, 1) << "step " << step << ": no constant has the golden bits of " << name;
    }
    Elements elements{.parameter = p.data(),
                      .slots = {m.data(), v.data()},
                      .gradient = g.data(),
                      .factor = 1.0f,
                      .count = 3};
    rule.passes()[0](elements, constants, step);
    EXPECT_EQ(bits_of(p), hex_words(entry.at("p").get<std::string>())) << "step " << step;
    EXPECT_EQ(bits_of(m), hex_words(entry.at("m").get<std::string>())) << "step " << step;
    EXPECT_EQ(bits_of(v), hex_words(entry.at("v").get<std::string>())) << "step " << step;
  }
}

}  // namespace
}  // namespace zshard::optimizers
