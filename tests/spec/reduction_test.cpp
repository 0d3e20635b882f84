// Sums, square sums and clipping against the golden vectors.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/kernels/clip.hpp"
#include "runtime/kernels/kernels.hpp"
#include "tests/spec/golden.hpp"

namespace zshard::kernels {
namespace {

TEST(GoldenReduction, ReduceAddGivesTheGoldenBits) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& sums = golden("reduction", "sums");
  ASSERT_FALSE(sums.empty());
  for (const nlohmann::json& entry : sums) {
    const DType dtype = golden_dtype(entry.at("dtype").get<std::string>());
    const DType wire =
        entry.at("wire").is_null() ? dtype : golden_dtype(entry.at("wire").get<std::string>());
    const int group = entry.at("group").is_null() ? 0 : entry.at("group").get<int>();
    const int skipped = entry.at("skipped").get<int>();
    std::vector<std::vector<float>> wide;
    std::vector<std::vector<std::uint16_t>> narrow_ones;
    const nlohmann::json& gradients = entry.at("gradients");
    for (const nlohmann::json& gradient : gradients) {
      wide.push_back(hex_floats(gradient.get<std::string>()));
      narrow_ones.push_back(hex_halves(gradient.get<std::string>()));
    }
    const int ranks = static_cast<int>(gradients.size());
    std::vector<const void*> sources;
    for (std::size_t r = 0; r < gradients.size(); ++r) {
      const void* source = dtype == DType::f32 ? static_cast<const void*>(wide[r].data())
                                               : static_cast<const void*>(narrow_ones[r].data());
      sources.push_back(static_cast<int>(r) == skipped ? nullptr : source);
    }
    const auto expected = hex_words(entry.at("result").get<std::string>());
    ASSERT_EQ(expected.size(), wide.at(0).size());
    std::vector<float> acc(expected.size(), 0.0f);
    reduce_add(sources.data(), ranks, dtype, wire, group, acc.data(),
               static_cast<std::int64_t>(acc.size()));
    for (std::size_t i = 0; i < acc.size(); ++i) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(acc[i]), expected[i]) << entry.dump() << " " << i;
    }
  }
}

TEST(GoldenReduction, SquareSumsGiveTheGoldenBits) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& squares = golden("reduction", "squares");
  ASSERT_FALSE(squares.empty());
  for (const nlohmann::json& entry : squares) {
    const nlohmann::json& drawn = entry.at("uniform");
    const auto name = drawn.at(2).get<std::string>();
    const auto count = entry.at("count").get<std::int64_t>();
    std::vector<float> values(static_cast<std::size_t>(count));
    uniform(philox_key(drawn.at(0).get<std::uint64_t>(), name.data(), name.size()),
            drawn.at(1).get<std::uint64_t>(), 0, values.data(), count);
    for (float& value : values) value *= entry.at("times").get<float>();
    const nlohmann::json& expected = entry.at("blocks");
    ASSERT_EQ(static_cast<std::int64_t>(expected.size()),
              (count + kSquareBlock - 1) / kSquareBlock);
    std::vector<double> blocks(expected.size());
    const Squares found = block_squares(values.data(), count, blocks.data());
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      EXPECT_EQ(std::bit_cast<std::uint64_t>(blocks[b]),
                hex_bits(expected[b].get<std::string>()).at(0))
          << "count " << count << " block " << b;
    }
    EXPECT_EQ(found.non_finite, 0);
    EXPECT_EQ(found.first, -1);
  }
}

TEST(GoldenReduction, ClipGivesTheGoldenBits) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& clips = golden("reduction", "clip");
  ASSERT_FALSE(clips.empty());
  for (const nlohmann::json& entry : clips) {
    std::optional<double> limit;
    if (!entry.at("clip_norm").is_null()) limit = entry.at("clip_norm").get<double>();
    const Clip result = clip(hex_double(entry.at("sum").get<std::string>()),
                             hex_double(entry.at("gradient_scale").get<std::string>()),
                             entry.at("loss_scale").get<double>(), limit);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(result.norm),
              hex_bits(entry.at("norm").get<std::string>()).at(0));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(result.factor),
              hex_words(entry.at("factor").get<std::string>()).at(0));
  }
}

}  // namespace
}  // namespace zshard::kernels
