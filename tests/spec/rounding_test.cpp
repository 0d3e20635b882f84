// Conversions and random bits against the golden vectors.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/kernels/kernels.hpp"
#include "tests/spec/golden.hpp"

namespace zshard::kernels {
namespace {

std::vector<float> cases() {
  return hex_floats(golden("rounding", "f32").get<std::string>());
}

std::vector<std::uint16_t> halves(const char* key) {
  return hex_halves(golden("rounding", key).get<std::string>());
}

std::uint64_t key_of(std::uint64_t seed, const std::string& name) {
  return philox_key(seed, name.data(), name.size());
}

TEST(GoldenRounding, ConversionsGiveTheGoldenBits) {
  ZSHARD_NEED_GOLDEN();
  const std::vector<float> values = cases();
  const auto count = static_cast<std::int64_t>(values.size());
  const std::vector<std::uint16_t> bf16 = halves("bf16_nearest");
  const std::vector<std::uint16_t> f16 = halves("f16_nearest");
  ASSERT_EQ(values.size(), bf16.size());
  ASSERT_EQ(values.size(), f16.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(bf16_nearest(values[i]), bf16[i]) << i;
    EXPECT_EQ(f16_nearest(values[i]), f16[i]) << i;
  }
  std::vector<std::uint16_t> array(values.size());
  narrow(values.data(), DType::bf16, array.data(), count);
  EXPECT_EQ(array, bf16);
  narrow(values.data(), DType::f16, array.data(), count);
  EXPECT_EQ(array, f16);
}

TEST(GoldenRounding, RemainderMastersPublishTheGoldenBits) {
  ZSHARD_NEED_GOLDEN();
  const std::vector<float> values = cases();
  const std::vector<std::uint16_t> published = halves("remainder_published");
  const std::vector<std::uint16_t> low = halves("remainder_low");
  ASSERT_EQ(values.size(), published.size());
  ASSERT_EQ(values.size(), low.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t p = 0, l = 0;
    remainder_publish(values[i], &p, &l);
    EXPECT_EQ(p, published[i]) << i;
    EXPECT_EQ(l, low[i]) << i;
  }
}

TEST(GoldenRounding, PhiloxGivesTheKnownAnswers) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& answers = golden("rounding", "philox4x32");
  ASSERT_FALSE(answers.empty());
  for (const nlohmann::json& answer : answers) {
    const auto counter = hex_words(answer.at("counter").get<std::string>());
    const auto words = hex_words(answer.at("words").get<std::string>());
    ASSERT_EQ(counter.size(), 4u);
    std::vector<std::uint32_t> drawn(4);
    philox4x32(counter.data(), hex_bits(answer.at("key").get<std::string>()).at(0), drawn.data());
    EXPECT_EQ(drawn, words);
  }
}

TEST(GoldenRounding, HashesAndKeys) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& hashes = golden("rounding", "fnv1a64");
  ASSERT_FALSE(hashes.empty());
  for (const auto& [text, hash] : hashes.items()) {
    EXPECT_EQ(fnv1a64(text.data(), text.size()), hex_bits(hash.get<std::string>()).at(0)) << text;
  }
  const nlohmann::json& key = golden("rounding", "key");
  EXPECT_EQ(key_of(key.at("seed").get<std::uint64_t>(), key.at("name").get<std::string>()),
            hex_bits(key.at("key").get<std::string>()).at(0));
}

// The counter is not handed out, so its words are seen in what they draw.
TEST(GoldenRounding, TheCounterHoldsBlockAndStepInTwoWordsEach) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& golden_counter = golden("rounding", "counter");
  const auto block = golden_counter.at("block").get<std::uint64_t>();
  const auto step = golden_counter.at("step").get<std::uint64_t>();
  const auto counter = golden_counter.at("words").get<std::vector<std::uint32_t>>();
  ASSERT_EQ(counter.size(), 4u);
  const std::uint64_t key = key_of(7, "h.0.w");
  std::uint32_t words[4];
  philox4x32(counter.data(), key, words);
  for (std::uint64_t lane = 0; lane < 8; ++lane) {
    EXPECT_EQ(random16(key, step, block * 8 + lane),
              (words[lane / 2] >> (lane % 2 * 16)) & 0xffffu);
  }
  float drawn[4];
  uniform(key, step, block * 4, drawn, 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(drawn[i], static_cast<float>(words[i] >> 8) * 0x1p-24f - 0.5f);
  }
}

TEST(GoldenRounding, Random16) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& draws = golden("rounding", "random16");
  const std::uint64_t key =
      key_of(draws.at("seed").get<std::uint64_t>(), draws.at("name").get<std::string>());
  const auto step = draws.at("step").get<std::uint64_t>();
  const auto check = [&](const char* field, std::uint64_t first) {
    const auto values = hex_halves(draws.at(field).get<std::string>());
    ASSERT_FALSE(values.empty());
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(random16(key, step, first + i), values[i]) << field << " " << i;
    }
  };
  check("values", draws.at("first").get<std::uint64_t>());
  check("at_2^34", std::uint64_t{1} << 34);
}

TEST(GoldenRounding, UniformWhereverItIsCut) {
  ZSHARD_NEED_GOLDEN();
  const nlohmann::json& draws = golden("rounding", "uniform");
  const std::uint64_t key =
      key_of(draws.at("seed").get<std::uint64_t>(), draws.at("name").get<std::string>());
  const auto step = draws.at("step").get<std::uint64_t>();
  const auto first = draws.at("first").get<std::uint64_t>();
  const auto values = hex_floats(draws.at("values").get<std::string>());
  ASSERT_EQ(values.size(), 9u);
  for (std::size_t begin = 0; begin <= values.size(); ++begin) {
    for (std::size_t end = begin; end <= values.size(); ++end) {
      std::vector<float> drawn(end - begin);
      uniform(key, step, first + begin, drawn.data(), static_cast<std::int64_t>(end - begin));
      EXPECT_EQ(drawn, std::vector<float>(values.begin() + static_cast<std::ptrdiff_t>(begin),
                                          values.begin() + static_cast<std::ptrdiff_t>(end)));
    }
  }
}

TEST(GoldenRounding, StochasticWithTheGoldenDraws) {
  ZSHARD_NEED_GOLDEN();
  const std::vector<float> values = cases();
  const std::vector<std::uint16_t> rounded = halves("bf16_stochastic");
  ASSERT_EQ(values.size(), rounded.size());
  const std::uint64_t key = key_of(7, "h.0.w");
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(bf16_stochastic(values[i], random16(key, 3, i)), rounded[i]) << i;
  }
}

}  // namespace
}  // namespace zshard::kernels
