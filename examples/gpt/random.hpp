// Random numbers that are functions of (seed, name, counter): the same on every rank, in any order.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

namespace gpt {

/// A stream of numbers that can be read at any place.
class CounterRandom {
 public:
  /// Streams of different seeds or names are unrelated.
  CounterRandom(std::uint64_t seed, std::string_view name) : key_(mix(seed)) {
    for (const char letter : name) key_ = mix(key_ ^ static_cast<unsigned char>(letter));
  }

  /// 64 random bits.
  [[nodiscard]] std::uint64_t bits(std::uint64_t counter) const {
    return mix(key_ + counter * kGolden);
  }

  /// Standard normal, by Box and Muller from the bits at 2 counter and 2 counter + 1.
  [[nodiscard]] double normal(std::uint64_t counter) const {
    constexpr double kUnit = 0x1p-53;
    const double u = (static_cast<double>(bits(2 * counter) >> 11U) + 1.0) * kUnit;  // (0, 1]
    const double v = static_cast<double>(bits(2 * counter + 1) >> 11U) * kUnit;      // [0, 1)
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;

  // The step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every bit of the input changes
  // half of the output's bits.
  static std::uint64_t mix(std::uint64_t x) {
    x += kGolden;
    x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EB;
    return x ^ (x >> 31U);
  }

  std::uint64_t key_;
};

}  // namespace gpt
