// The element loops against fp64 formulas, and that their bits depend on values and sizes only.
#include "gpt/kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace gpt_test {
namespace {

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(Kernels, GeluEqualsItsFormula) {
  std::vector<float> x;
  for (int i = -20000; i <= 20000; ++i) x.push_back(static_cast<float>(i) * 1e-3f);
  for (const float far : {-1e30f, -1e4f, -100.0f, 100.0f, 1e4f, 1e30f}) x.push_back(far);
  const auto count = static_cast<std::int64_t>(x.size());
  const std::vector<float> ones(x.size(), 1.0f);
  std::vector<float> y(x.size());
  std::vector<float> slope(x.size());
  gpt::gelu_forward(x.data(), y.data(), count);
  gpt::gelu_backward(ones.data(), x.data(), slope.data(), count);
  const double root = std::sqrt(2.0 / 3.14159265358979323846);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    const double tanh = std::tanh(root * (v + 0.044715 * v * v * v));
    const double expected = 0.5 * v * (1.0 + tanh);
    // Ten roundings, and three of the exponent 2u, which count 2u times; 1 + tanh loses digits in
    // fp64 as well, 1e-15 of 1.
    const double exponent = 2.0 * root * std::abs(v + 0.044715 * v * v * v);
    const double relative = (10.0 + 3.0 * std::min(exponent, 90.0)) * 0x1p-24;
    EXPECT_NEAR(y[i], expected, relative * std::abs(expected) + 1e-15 * std::abs(v)) << v;
    if (std::abs(v) > 100.0) continue;
    const double exact =
        0.5 * (1.0 + tanh) + 0.5 * v * (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044715 * v * v);
    EXPECT_NEAR(slope[i], exact, 1e-6) << v;
  }
}

TEST(Kernels, CrossEntropyAndItsGradient) {
  for (const std::int64_t vocab : {1, 2, 15, 16, 17, 256, 1000}) {
    const std::vector<float> x = random_values(static_cast<std::size_t>(vocab), 3);
    for (const std::int64_t target : {std::int64_t{0}, vocab / 2, vocab - 1}) {
      std::vector<float> logits = x;
      const double loss = gpt::cross_entropy(logits.data(), target, 2.0f, vocab);
      double sum = 0.0;
      for (const float value : x) sum += std::exp(static_cast<double>(value));
      const double of_target = x[static_cast<std::size_t>(target)];
      EXPECT_NEAR(loss, std::log(sum) - of_target, 1e-6);
      for (std::int64_t i = 0; i < vocab; ++i) {
        const double softmax = std::exp(static_cast<double>(x[static_cast<std::size_t>(i)])) / sum;
        EXPECT_NEAR(logits[static_cast<std::size_t>(i)], 2.0 * (softmax - (i == target)), 1e-6);
      }
    }
  }
}

TEST(Kernels, CrossEntropyOfFarLogitsIsFinite) {
  std::vector<float> logits = {-1e4f, 1e4f, 0.0f};
  EXPECT_NEAR(gpt::cross_entropy(logits.data(), 0, 1.0f, 3), 2e4, 1e-2);
  EXPECT_NEAR(logits[0], -1.0, 1e-6);
  EXPECT_NEAR(logits[1], 1.0, 1e-6);
  EXPECT_NEAR(logits[2], 0.0, 1e-6);
}

TEST(Kernels, ANotANumberIsNotHidden) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> logits = {0.0f, kNan, 1.0f};
  gpt::cross_entropy(logits.data(), 0, 1.0f, 3);
  EXPECT_TRUE(std::isnan(logits[1]));
  const float x = kNan;
  float y = 0.0f;
  gpt::gelu_forward(&x, &y, 1);
  EXPECT_TRUE(std::isnan(y));
}

// The same values at another alignment, and a row alone or in a batch, give the same bits.
TEST(Kernels, BitsDoNotDependOnPlaceOrBatch) {
  for (const std::int64_t width : {1, 7, 16, 33, 128}) {
    const auto size = static_cast<std::size_t>(width);
    constexpr std::size_t kRows = 3;
    const std::vector<float> x = random_values(kRows * size, 5);
    const std::vector<float> gain = random_values(size, 6);
    const std::vector<float> bias = random_values(size, 7);
    std::vector<float> expected(kRows * size);
    std::vector<float> mean(kRows);
    std::vector<float> inverse_std(kRows);
    gpt::layer_norm_forward(x.data(), gain.data(), bias.data(), expected.data(), mean.data(),
                            inverse_std.data(), kRows, width);
    std::vector<float> activated(kRows * size);
    gpt::gelu_forward(x.data(), activated.data(), static_cast<std::int64_t>(activated.size()));
    for (std::size_t shift = 0; shift < 5; ++shift) {
      for (std::size_t row = 0; row < kRows; ++row) {
        std::vector<float> moved(size + shift);
        std::vector<float> out(size + shift);
        std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(row * size), size,
                    moved.begin() + static_cast<std::ptrdiff_t>(shift));
        float m = 0.0f;
        float s = 0.0f;
        gpt::layer_norm_forward(moved.data() + shift, gain.data(), bias.data(), out.data() + shift,
                                &m, &s, 1, width);
        EXPECT_EQ(m, mean[row]);
        EXPECT_EQ(s, inverse_std[row]);
        for (std::size_t i = 0; i < size; ++i) EXPECT_EQ(out[shift + i], expected[row * size + i]);
        gpt::gelu_forward(moved.data() + shift, out.data() + shift, width);
        for (std::size_t i = 0; i < size; ++i) EXPECT_EQ(out[shift + i], activated[row * size + i]);
      }
    }
  }
}

TEST(Kernels, Bf16RoundsToNearestEven) {
  // Values of shared/numerics.md, and the corners.
  const std::vector<float> x = {1.00390625f, 1.01171875f, 257.0f, 259.0f, 65504.0f,
                                3.4e38f,     -0.0f,       1e-45f, -257.0f};
  const std::vector<float> expected = {1.0f,     1.015625f, 256.0f, 260.0f, 65536.0f,
                                       INFINITY, -0.0f,     0.0f,   -256.0f};
  std::vector<std::uint16_t> narrow(x.size());
  std::vector<float> wide(x.size());
  gpt::narrow(x.data(), narrow.data(), static_cast<std::int64_t>(x.size()));
  gpt::widen(narrow.data(), wide.data(), static_cast<std::int64_t>(x.size()));
  EXPECT_EQ(wide, expected);
  EXPECT_TRUE(std::signbit(wide[6]));
  for (const std::uint32_t bits : {0x7FFFFFFFU, 0x7F800001U, 0xFFFFFFFFU, 0xFF800001U}) {
    const float nan = std::bit_cast<float>(bits);
    std::uint16_t result = 0;
    gpt::narrow(&nan, &result, 1);
    float back = 0.0f;
    gpt::widen(&result, &back, 1);
    EXPECT_TRUE(std::isnan(back));
    EXPECT_EQ(std::signbit(back), std::signbit(nan));
  }
  const float step = 1.0f;
  std::uint16_t sum = 0;
  for (int i = 0; i < 1000; ++i) gpt::narrow_add(&step, &sum, 1);
  float total = 0.0f;
  gpt::widen(&sum, &total, 1);
  EXPECT_EQ(total, 256.0f);  // where adding one no longer changes a bf16
}

}  // namespace
}  // namespace gpt_test
