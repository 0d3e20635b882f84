// Element loops against one-element references, at every length and cut, and at the edges of the
// formats.
#include "runtime/kernels/kernels.hpp"
#include "runtime/kernels/copy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "runtime/kernels/clip.hpp"

namespace zshard::kernels {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::uint32_t bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
float from_bits(std::uint32_t u) {
  return std::bit_cast<float>(u);
}

/// Rounds to fp32 whatever the compiler would like to do with the expression around it.
float rounded(float x) {
  volatile float y = x;
  return y;
}

/// Nearest even in integers of unlimited width, as the definition says: exact value, candidates,
/// distance. `fraction` bits kept, smallest exponent `lowest`, largest finite `largest`.
float reference_round(float x, int fraction, int lowest, double largest) {
  if (!std::isfinite(x) || x == 0.0f) return x;
  const double exact = x;
  int exponent = std::max(std::ilogb(exact), lowest);
  const double unit = std::ldexp(1.0, exponent - fraction);
  const double steps = std::abs(exact) / unit;  // exact: a power of two
  double below = std::floor(steps);
  const double rest = steps - below;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(below, 2.0) == 1.0)) below += 1.0;
  const double magnitude = below * unit;
  if (magnitude > largest) return std::copysign(kInfinity, x);
  return static_cast<float>(std::copysign(magnitude, exact));
}

/// Every exponent and sign with low halves around the ties of both formats, and NaNs of all kinds.
template <class Check>
void for_many_floats(const Check& check) {
  const std::uint32_t lows[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff,
                                0x8000, 0x8001, 0xefff, 0xf000, 0xf001, 0xffff, 0x5a5a};
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : lows) check(from_bits(high << 16 | low));
  }
}

TEST(Conversions, Bf16IsNearestEvenForEveryHighHalf) {
  int wrong = 0;
  for_many_floats([&](float x) {
    const std::uint16_t h = bf16_nearest(x);
    if (std::isnan(x)) {
      wrong += h != ((bits(x) >> 16) | 0x40u);
      return;
    }
    const double largest = from_bits(0x7f7f0000u);
    wrong += bits(bf16_float(h)) != bits(reference_round(x, 7, -126, largest));
  });
  EXPECT_EQ(wrong, 0);
}

TEST(Conversions, F16IsNearestEvenForEveryHighHalf) {
  int wrong = 0;
  for_many_floats([&](float x) {
    const std::uint16_t h = f16_nearest(x);
    if (std::isnan(x)) {
      wrong += h != ((bits(x) >> 16 & 0x8000u) | 0x7e00u | (bits(x) >> 13 & 0x3ffu));
      return;
    }
    wrong += bits(f16_float(h)) != bits(reference_round(x, 10, -14, 65504.0));
  });
  EXPECT_EQ(wrong, 0);
}

TEST(Conversions, EveryHalfSurvivesTheRoundTripThroughFp32) {
  for (std::uint32_t u = 0; u < 0x10000; ++u) {
    const auto h = static_cast<std::uint16_t>(u);
    ASSERT_EQ(bits(bf16_float(h)), u << 16);
    const bool bf16_nan = (u & 0x7fffu) > 0x7f80u;
    ASSERT_EQ(bf16_nearest(bf16_float(h)), bf16_nan ? u | 0x40u : u);

    const int exponent = static_cast<int>(u >> 10 & 31u);
    const auto fraction = static_cast<double>(u & 0x3ffu);
    if (exponent == 31 && fraction != 0.0) {
      ASSERT_EQ(bits(f16_float(h)), (u & 0x8000u) << 16 | 0x7fc00000u | (u & 0x3ffu) << 13);
      ASSERT_EQ(f16_nearest(f16_float(h)), u | 0x200u);
      continue;
    }
    const double magnitude = exponent == 31  ? std::numeric_limits<double>::infinity()
                             : exponent == 0 ? std::ldexp(fraction, -24)
                                             : std::ldexp(1024.0 + fraction, exponent - 25);
    const auto value = static_cast<float>(u & 0x8000u ? -magnitude : magnitude);
    ASSERT_EQ(bits(f16_float(h)), bits(value)) << u;
    ASSERT_EQ(f16_nearest(value), u);
  }
}

TEST(Conversions, KnownValues) {
  const auto through_bf16 = [](float x) { return bf16_float(bf16_nearest(x)); };
  const auto through_f16 = [](float x) { return f16_float(f16_nearest(x)); };
  EXPECT_EQ(through_bf16(1.00390625f), 1.0f);
  EXPECT_EQ(through_bf16(1.01171875f), 1.015625f);
  EXPECT_EQ(through_bf16(257.0f), 256.0f);
  EXPECT_EQ(through_bf16(259.0f), 260.0f);
  EXPECT_EQ(through_bf16(65504.0f), 65536.0f);
  EXPECT_EQ(through_bf16(3.4e38f), kInfinity);
  EXPECT_TRUE(std::isnan(through_bf16(from_bits(0x7fffffffu))));
  EXPECT_EQ(through_f16(65519.99f), 65504.0f);
  EXPECT_EQ(through_f16(65520.0f), kInfinity);
  EXPECT_EQ(through_f16(2.9e-8f), 0.0f);
  EXPECT_EQ(bits(through_f16(-2.9e-8f)), 0x80000000u);
}

TEST(Conversions, LoopsGiveTheBitsOfOneElementAtEveryLengthAndOffset) {
  std::vector<float> values;
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) values.push_back(from_bits(static_cast<std::uint32_t>(random())));
  for (const std::uint32_t u : {0x7f800001u, 0xff800000u, 0x00000001u, 0x807fffffu, 0x33000001u}) {
    values.insert(values.begin() + 70, from_bits(u));
  }
  for (const std::size_t begin : {0u, 1u, 3u}) {
    for (std::size_t count = 0; count <= 150; ++count) {
      const auto length = static_cast<std::int64_t>(count);
      std::vector<std::uint16_t> bf16(count), f16(count);
      narrow(values.data() + begin, DType::bf16, bf16.data(), length);
      narrow(values.data() + begin, DType::f16, f16.data(), length);
      std::vector<float> wide_bf16(count), wide_f16(count), same(count);
      widen(bf16.data(), DType::bf16, wide_bf16.data(), length);
      widen(f16.data(), DType::f16, wide_f16.data(), length);
      widen(values.data() + begin, DType::f32, same.data(), length);
      std::vector<float> trip_bf16(values), trip_f16(values);
      round_trip(trip_bf16.data() + begin, DType::bf16, length);
      round_trip(trip_f16.data() + begin, DType::f16, length);
      for (std::size_t i = 0; i < count; ++i) {
        const float x = values[begin + i];
        ASSERT_EQ(bf16[i], bf16_nearest(x));
        ASSERT_EQ(f16[i], f16_nearest(x));
        ASSERT_EQ(bits(wide_bf16[i]), bits(bf16_float(bf16[i])));
        ASSERT_EQ(bits(wide_f16[i]), bits(f16_float(f16[i])));
        ASSERT_EQ(bits(same[i]), bits(x));
        ASSERT_EQ(bits(trip_bf16[begin + i]), bits(wide_bf16[i]));
        ASSERT_EQ(bits(trip_f16[begin + i]), bits(wide_f16[i]));
      }
      ASSERT_EQ(bits(trip_bf16[begin + count]), bits(values[begin + count])) << "wrote too far";
    }
  }
}

TEST(Remainder, RebuildsEveryMasterAndPublishesTiesAway) {
  int wrong = 0;
  for_many_floats([&](float x) {
    std::uint16_t published = 0, low = 0;
    remainder_publish(x, &published, &low);
    const float rebuilt = remainder_rebuild(published, low);
    if (std::isnan(x)) {
      wrong += bits(rebuilt) != ((bits(x) & 0x80000000u) | 0x7fc00000u);
      wrong += !std::isnan(bf16_float(published));
      return;
    }
    wrong += bits(rebuilt) != bits(x);
    // Where nearest even and ties away differ, it is a tie: one bf16 step apart.
    const std::uint16_t nearest = bf16_nearest(x);
    wrong += published != nearest && (low != 0x8000u || published != nearest + 1);
  });
  EXPECT_EQ(wrong, 0);
}

TEST(Stochastic, AddsTheDrawBelowTheKeptBits) {
  for (const std::uint32_t u : {0x3f800000u, 0x3f808000u, 0xbf80ffffu, 0x00000001u, 0x7f7fffffu}) {
    int up = 0;
    for (std::uint32_t r = 0; r < 0x10000; ++r) {
      const std::uint16_t h = bf16_stochastic(from_bits(u), r);
      ASSERT_TRUE(h == u >> 16 || h == (u >> 16) + 1);
      up += h != u >> 16;
    }
    EXPECT_EQ(static_cast<std::uint32_t>(up), u & 0xffffu) << "the distance is the probability";
  }
  for (const std::uint32_t r : {0u, 0x8000u, 0xffffu}) {
    EXPECT_EQ(bf16_stochastic(kInfinity, r), 0x7f80u);
    EXPECT_EQ(bf16_stochastic(-kInfinity, r), 0xff80u);
    EXPECT_EQ(bf16_stochastic(from_bits(0x7f800001u), r), 0x7fc0u);
  }
}

TEST(Stochastic, OneAndAThousandthRoundsUpWithItsProbability) {
  const std::uint64_t key = philox_key(3, "w", 1);
  int up = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const float x = bf16_float(bf16_stochastic(1.001f, random16(key, 0, std::uint64_t(i))));
    ASSERT_TRUE(x == 1.0f || x == 1.0078125f);
    up += x != 1.0f;
  }
  EXPECT_NEAR(up / double{kDraws}, 0.128, 6 * std::sqrt(0.128 * 0.872 / kDraws));
}

TEST(Stochastic, AThousandSmallAdditionsAreNotLost) {
  const std::uint64_t key = philox_key(3, "w", 1);
  float nearest = 1.0f, master = 1.0f, stochastic = 1.0f;
  for (std::uint64_t step = 0; step < 1000; ++step) {
    nearest = bf16_float(bf16_nearest(nearest + 0.001f));
    master += 0.001f;
    stochastic = bf16_float(bf16_stochastic(stochastic + 0.001f, random16(key, step, 0)));
  }
  EXPECT_EQ(nearest, 1.0f);
  EXPECT_NEAR(master, 2.0f, 1e-4f);
  // Each step's error is at most one bf16 step, 1/128, with mean 0 and variance at most a quarter
  // of its square: six deviations.
  EXPECT_NEAR(stochastic, 2.0f, 6 * std::sqrt(1000.0 / 4.0) / 128.0);
}

TEST(Sums, OrderIsPartOfTheContract) {
  const float terms[] = {1e8f, 1.0f, -1e8f, 1.0f};
  const void* forward[] = {&terms[0], &terms[1], &terms[2], &terms[3]};
  const void* backward[] = {&terms[3], &terms[2], &terms[1], &terms[0]};
  float acc = 0.0f;
  reduce_add(forward, 4, DType::f32, DType::f32, 0, &acc, 1);
  EXPECT_EQ(acc, 1.0f);
  acc = 0.0f;
  reduce_add(backward, 4, DType::f32, DType::f32, 0, &acc, 1);
  EXPECT_EQ(acc, 0.0f);
}

TEST(Sums, AThousandOnesInBf16AreAThousand) {
  const std::vector<std::uint16_t> ones(1, bf16_nearest(1.0f));
  const std::vector<const void*> sources(1000, ones.data());
  float acc = 0.0f;
  reduce_add(sources.data(), 1000, DType::bf16, DType::bf16, 0, &acc, 1);
  EXPECT_EQ(acc, 1000.0f);
  float in_bf16 = 0.0f;
  for (int i = 0; i < 1000; ++i) in_bf16 = bf16_float(bf16_nearest(in_bf16 + 1.0f));
  EXPECT_EQ(in_bf16, 256.0f);
}

TEST(Sums, ASkippedRankAddsPlusZero) {
  const float negative[] = {-0.0f};
  float acc = -0.0f;
  const void* present[] = {negative, negative};
  reduce_add(present, 2, DType::f32, DType::f32, 0, &acc, 1);
  EXPECT_EQ(bits(acc), 0x80000000u) << "-0 + (-0 + -0)";
  const void* skipped[] = {negative, nullptr};
  reduce_add(skipped, 2, DType::f32, DType::f32, 0, &acc, 1);
  EXPECT_EQ(bits(acc), 0u) << "a +0.0 was added";
}

/// A rank's gradient as the sum sees it: null where it skipped.
struct Gradient {
  std::vector<float> wide;
  std::vector<std::uint16_t> half;
  bool skipped = false;

  [[nodiscard]] const void* data(DType dtype, std::int64_t begin) const {
    if (skipped) return nullptr;
    if (dtype == DType::f32) return wide.data() + begin;
    return half.data() + begin;
  }

  [[nodiscard]] float seen(DType dtype, DType wire, std::size_t i) const {
    if (skipped) return 0.0f;
    float x = wide[i];
    if (dtype == DType::bf16) x = bf16_float(half[i]);
    if (dtype == DType::f16) x = f16_float(half[i]);
    if (wire == dtype || wire == DType::f32) return x;
    return wire == DType::bf16 ? bf16_float(bf16_nearest(x)) : f16_float(f16_nearest(x));
  }
};

std::vector<Gradient> gradients(int ranks, DType dtype, std::int64_t count) {
  std::mt19937 random(static_cast<std::uint32_t>(ranks));
  std::normal_distribution<float> normal(0.0f, 30.0f);
  std::vector<Gradient> all(static_cast<std::size_t>(ranks));
  for (std::size_t r = 0; r < all.size(); ++r) {
    Gradient& gradient = all[r];
    for (std::int64_t i = 0; i < count; ++i) {
      gradient.wide.push_back(i % 7 == 0 ? std::copysign(0.0f, normal(random)) : normal(random));
    }
    gradient.half.resize(gradient.wide.size());
    if (dtype != DType::f32) narrow(gradient.wide.data(), dtype, gradient.half.data(), count);
    gradient.skipped = r % 5 == 3 || (r == 0 && ranks % 2 == 0);
  }
  return all;
}

/// The sum of one element as the spec words it.
float reference_sum(const std::vector<Gradient>& all, DType dtype, DType wire, int group, float acc,
                    std::size_t i) {
  const std::size_t size = group > 0 ? static_cast<std::size_t>(group) : all.size();
  float total = 0.0f;
  for (std::size_t first = 0; first < all.size(); first += size) {
    float partial = all[first].seen(dtype, wire, i);
    for (std::size_t r = first + 1; r < std::min(first + size, all.size()); ++r) {
      partial = rounded(partial + all[r].seen(dtype, wire, i));
    }
    total = first == 0 ? partial : rounded(total + partial);
  }
  return rounded(acc + total);
}

TEST(Sums, ReduceAddEqualsTheSpecForAnyRanksFormatsGroupsAndCuts) {
  constexpr std::int64_t kCount = 1300;  // crosses the chunks of the loop
  const std::int64_t cuts[] = {0, 1, 17, 511, 513, 1024, kCount};
  for (const int ranks : {1, 2, 3, 4, 5, 8, 9, 13}) {
    for (const DType dtype : kDTypes) {
      const std::vector<Gradient> all = gradients(ranks, dtype, kCount);
      for (const DType wire : kDTypes) {
        for (const int group : {0, 1, 2, 3, 4, 5, 8, 64}) {
          std::vector<float> whole(kCount, 0.0f);
          whole[5] = -0.0f;
          whole[6] = 3.0e-42f;
          const std::vector<float> before = whole;
          std::vector<float> cut = whole;
          std::vector<const void*> sources;
          for (const Gradient& gradient : all) sources.push_back(gradient.data(dtype, 0));
          reduce_add(sources.data(), ranks, dtype, wire, group, whole.data(), kCount);
          for (std::size_t i = 0; i < whole.size(); ++i) {
            ASSERT_EQ(bits(whole[i]), bits(reference_sum(all, dtype, wire, group, before[i], i)))
                << "ranks " << ranks << " " << to_string(dtype) << " wire " << to_string(wire)
                << " group " << group << " element " << i;
          }
          for (std::size_t c = 0; c + 1 < std::size(cuts); ++c) {
            std::vector<const void*> pieces;
            for (const Gradient& gradient : all) pieces.push_back(gradient.data(dtype, cuts[c]));
            reduce_add(pieces.data(), ranks, dtype, wire, group, cut.data() + cuts[c],
                       cuts[c + 1] - cuts[c]);
          }
          ASSERT_EQ(std::memcmp(whole.data(), cut.data(), whole.size() * sizeof(float)), 0);
        }
      }
    }
  }
}

TEST(Sums, AThousandAndTwentyFourRanks) {
  const std::vector<Gradient> all = gradients(1024, DType::f32, 3);
  std::vector<const void*> sources;
  for (const Gradient& gradient : all) sources.push_back(gradient.data(DType::f32, 0));
  for (const int group : {0, 8, 1000}) {
    std::vector<float> acc(3, 0.0f);
    reduce_add(sources.data(), 1024, DType::f32, DType::f32, group, acc.data(), 3);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(bits(acc[i]), bits(reference_sum(all, DType::f32, DType::f32, group, 0.0f, i)));
    }
  }
}

TEST(Sums, AccumulateAddsEachFormat) {
  constexpr std::int64_t kCount = 300;
  for (const DType dtype : kDTypes) {
    const std::vector<Gradient> all = gradients(1, dtype, kCount);
    std::vector<float> buffer(kCount, 0.125f), cut = buffer;
    accumulate(all[0].data(dtype, 0), dtype, buffer.data(), kCount);
    for (std::size_t i = 0; i < buffer.size(); ++i) {
      ASSERT_EQ(bits(buffer[i]), bits(rounded(0.125f + all[0].seen(dtype, DType::f32, i))));
    }
    accumulate(all[0].data(dtype, 0), dtype, cut.data(), 37);
    accumulate(all[0].data(dtype, 37), dtype, cut.data() + 37, kCount - 37);
    EXPECT_EQ(buffer, cut);
  }
}

TEST(Sums, SubnormalsAreNotFlushed) {
  const float tiny = from_bits(1);
  const void* sources[] = {&tiny, &tiny};
  float acc = 0.0f;
  reduce_add(sources, 2, DType::f32, DType::f32, 0, &acc, 1);
  EXPECT_EQ(bits(acc), 2u);
}

TEST(Sums, NothingIsReadOrWrittenAtLengthZero) {
  float acc = 1.0f;
  const void* sources[] = {nullptr};
  reduce_add(sources, 1, DType::f32, DType::f32, 0, &acc, 0);
  accumulate(nullptr, DType::bf16, &acc, 0);
  widen(nullptr, DType::f32, nullptr, 0);
  narrow(nullptr, DType::f32, nullptr, 0);
  const Squares squares = block_squares(nullptr, 0, nullptr);
  EXPECT_EQ(squares.non_finite, 0);
  EXPECT_EQ(squares.first, -1);
  EXPECT_EQ(acc, 1.0f);
}

double reference_squares(const std::vector<float>& values, std::size_t begin) {
  volatile double lane[16] = {};
  const std::size_t end = std::min(values.size(), begin + std::size_t{kSquareBlock});
  for (std::size_t i = begin; i < end; ++i) {
    const double x = values[i];
    lane[(i - begin) % 16] = lane[(i - begin) % 16] + x * x;
  }
  for (int width = 8; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] = lane[j] + lane[j + width];
  }
  return lane[0];
}

TEST(Squares, BlocksEqualTheSpecAtEveryLength) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> values;
  for (std::int64_t count = 1; count <= 2100; ++count) {
    values.push_back(normal(random));
    if (count > 70 && count % 97 != 0 && std::abs(count % 1024) > 20) continue;
    std::vector<double> blocks(3, -1.0);
    const Squares squares = block_squares(values.data(), count, blocks.data());
    ASSERT_EQ(squares.non_finite, 0);
    const auto used = static_cast<std::size_t>((count + kSquareBlock - 1) / kSquareBlock);
    for (std::size_t b = 0; b < used; ++b) {
      ASSERT_EQ(std::bit_cast<std::uint64_t>(blocks[b]),
                std::bit_cast<std::uint64_t>(reference_squares(values, b * 1024)))
          << count;
    }
    for (std::size_t b = used; b < blocks.size(); ++b) ASSERT_EQ(blocks[b], -1.0);
  }
}

TEST(Squares, NonFiniteElementsAreCountedAndTheFirstIsNamed) {
  std::vector<float> values(3000, std::numeric_limits<float>::max());
  std::vector<double> blocks(3);
  Squares squares = block_squares(values.data(), 3000, blocks.data());
  EXPECT_EQ(squares.non_finite, 0) << "the largest finite values are finite";
  EXPECT_TRUE(std::isfinite(blocks[0]));
  values[2999] = kInfinity;
  squares = block_squares(values.data(), 3000, blocks.data());
  EXPECT_EQ(squares.non_finite, 1);
  EXPECT_EQ(squares.first, 2999);
  EXPECT_EQ(blocks[2], std::numeric_limits<double>::infinity());
  values[1500] = std::numeric_limits<float>::quiet_NaN();
  values[1501] = -kInfinity;
  values[1025] = from_bits(0x7f800001u);
  squares = block_squares(values.data(), 3000, blocks.data());
  EXPECT_EQ(squares.non_finite, 4);
  EXPECT_EQ(squares.first, 1025);
  EXPECT_TRUE(std::isfinite(blocks[0]));
  EXPECT_TRUE(std::isnan(blocks[1]));
}

TEST(Clip, ScalesTheNormOfTheWholeGradient) {
  const Clip five = clip(25.0, 1.0, 1.0, 1.0);
  EXPECT_EQ(five.norm, 5.0);
  EXPECT_EQ(rounded(3.0f * five.factor), 0.599999905f);
  EXPECT_EQ(rounded(4.0f * five.factor), 0.799999833f);
  EXPECT_EQ(clip(25.0, 1.0, 1.0, std::nullopt).factor, 1.0f);
  EXPECT_EQ(clip(25.0, 1.0, 1.0, 10.0).factor, 1.0f);
  EXPECT_EQ(clip(25.0, -1.0, 1.0, std::nullopt).norm, 5.0);
  EXPECT_EQ(clip(25.0, -1.0, 1.0, std::nullopt).factor, -1.0f);
}

TEST(Clip, TotalsThatAreNotFinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(clip(infinity, 1.0, 1.0, 1.0).norm, infinity);
  EXPECT_EQ(clip(infinity, 1.0, 1.0, 1.0).factor, 0.0f);
  EXPECT_TRUE(std::isnan(clip(nan, 1.0, 1.0, 1.0).norm));
  EXPECT_EQ(clip(nan, 0.5, 1.0, 1.0).factor, 0.5f);
}

TEST(Philox, UniformIsTheSameWhereverARangeBegins) {
  const std::uint64_t key = philox_key(9, "h.0.w", 5);
  for (const std::uint64_t origin : {std::uint64_t{0}, (std::uint64_t{1} << 34) - 3}) {
    std::vector<float> whole(1000);
    uniform(key, 2, origin, whole.data(), 1000);
    for (const float x : whole) {
      ASSERT_GE(x, -0.5f);
      ASSERT_LT(x, 0.5f);
      ASSERT_EQ(std::ldexp(x, 24), std::trunc(std::ldexp(x, 24)));
    }
    std::vector<float> cut(1000);
    std::mt19937 random(5);
    for (std::int64_t begin = 0; begin < 1000;) {
      const std::int64_t size = std::min<std::int64_t>(1 + random() % 13, 1000 - begin);
      uniform(key, 2, origin + static_cast<std::uint64_t>(begin), cut.data() + begin, size);
      begin += size;
    }
    EXPECT_EQ(whole, cut);
  }
}

TEST(Philox, KeysTellSeedsAndNamesApart) {
  EXPECT_NE(philox_key(1, "a", 1), philox_key(2, "a", 1));
  EXPECT_NE(philox_key(1, "a", 1), philox_key(1, "b", 1));
  EXPECT_NE(philox_key(1, "a", 1), philox_key(std::uint64_t{1} << 56, "a", 1));
  const unsigned char same[] = {1, 0, 0, 0, 0, 0, 0, 0, 'a'};
  EXPECT_EQ(philox_key(1, "a", 1), fnv1a64(same, sizeof same));
}

// -- copies --

TEST(Copy, EveryByteAndNoOtherAtAnyPlaceAndLength) {
  constexpr std::int64_t kStreamed = std::int64_t{4} << 20;
  constexpr std::int64_t kGuard = 256;
  std::vector<std::uint8_t> source(static_cast<std::size_t>(kStreamed + 70000 + 2 * kGuard));
  std::uint32_t state = 1;
  for (std::uint8_t& byte : source) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  std::vector<std::uint8_t> target(source.size());
  for (const std::int64_t bytes :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{4097}, kStreamed - 1, kStreamed,
        kStreamed + 1, kStreamed + 63, kStreamed + 16384, kStreamed + 69999}) {
    for (const std::int64_t to : {0, 1, 16, 63, 64}) {
      for (const std::int64_t from : {0, 1, 64}) {
        std::fill(target.begin(), target.end(), std::uint8_t{0xEE});
        kernels::copy(target.data() + kGuard + to, source.data() + from, bytes);
        const auto begin = target.begin() + kGuard + to;
        ASSERT_TRUE(std::equal(begin, begin + bytes, source.begin() + from))
            << bytes << " to " << to << " from " << from;
        ASSERT_TRUE(std::all_of(target.begin(), begin, [](auto b) { return b == 0xEE; }));
        ASSERT_TRUE(std::all_of(begin + bytes, target.end(), [](auto b) { return b == 0xEE; }));
      }
    }
  }
}

}  // namespace
}  // namespace zshard::kernels
