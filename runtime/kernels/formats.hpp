// The storage formats as types, one element at a time, for loops that are compiled per format. All
// of it is branch-free arithmetic on bits, so that loops over it vectorise on every machine and
// give the bits of the spec whatever hardware conversions do. Compiled for GPUs as well.
#pragma once

#include <cstdint>

#include "runtime/kernels/clones.hpp"

namespace zshard::kernels {

/// std::bit_cast that device code may call as well: nvcc takes a constexpr function of the standard
/// library for one of the host.
template <class To, class From>
ZSHARD_INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

struct F32 {
  using Storage = float;
  static ZSHARD_INLINE float load(Storage x) { return x; }
  static ZSHARD_INLINE Storage store(float x) { return x; }
};

struct Bf16 {
  using Storage = std::uint16_t;

  static ZSHARD_INLINE float load(Storage h) {
    return bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
  }

  static ZSHARD_INLINE Storage store(float x) {
    const auto u = bit_cast<std::uint32_t>(x);
    // The largest input that is no NaN is 0xff800000: the carry stays inside 32 bits.
    const std::uint32_t near = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (u >> 16) | 0x40u;
    const auto magnitude = static_cast<std::int32_t>(u & 0x7fffffffu);
    return static_cast<Storage>(magnitude > 0x7f800000 ? quiet : near);
  }
};

struct F16 {
  using Storage = std::uint16_t;

  static ZSHARD_INLINE float load(Storage h) {
    const std::uint32_t sign = (h & 0x8000u) << 16;
    const auto magnitude = static_cast<std::int32_t>(h & 0x7fffu);
    const std::uint32_t shifted = static_cast<std::uint32_t>(magnitude) << 13;
    // A subnormal m * 2^-24 is (2^-14 + m * 2^-24) - 2^-14, both exact. The subtraction stands
    // outside every choice, with 0 for the others, since a loop with it inside does not vectorise.
    const std::uint32_t lift = magnitude < 0x0400 ? 113u << 23 : 112u << 23;
    const std::uint32_t drop = magnitude < 0x0400 ? 113u << 23 : 0u;
    const float finite = bit_cast<float>(shifted + lift) - bit_cast<float>(drop);
    // Infinity and NaN take the largest exponent; a NaN becomes quiet, as F16C makes it.
    const std::uint32_t largest = magnitude >= 0x7c00 ? 0x7f800000u : 0u;
    const std::uint32_t quiet = magnitude > 0x7c00 ? 0x00400000u : 0u;
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(finite) | largest | quiet);
  }

  static ZSHARD_INLINE Storage store(float x) {
    const auto u = bit_cast<std::uint32_t>(x);
    const auto magnitude = static_cast<std::int32_t>(u & 0x7fffffffu);
    // Signed: SSE2 compares no unsigned integers. Everything from 65520 up lands on infinity.
    const std::int32_t rounded = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const std::int32_t normal = rounded < 0x7c00 ? rounded : 0x7c00;
    // Next to 0.5 the spacing of fp32 is that of f16's subnormals: the addition rounds.
    const float placed = bit_cast<float>(magnitude) + 0.5f;
    const std::int32_t subnormal = bit_cast<std::int32_t>(placed) - 0x3f000000;
    const std::int32_t quiet = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const std::int32_t number = magnitude < 0x38800000 ? subnormal : normal;
    const std::int32_t result = magnitude > 0x7f800000 ? quiet : number;
    return static_cast<Storage>(static_cast<std::uint32_t>(result) | ((u >> 16) & 0x8000u));
  }
};

}  // namespace zshard::kernels
