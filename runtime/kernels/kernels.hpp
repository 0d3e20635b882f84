// Element loops. Each gives the same bits wherever an element lies and however a range is cut. Pure
// functions on caller's memory: no allocation, no locks, no globals; they never throw. Counts are
// elements.
#pragma once

#include <cstdint>

#include "zshard/types.hpp"

namespace zshard::kernels {

// -- conversions (rounding.cpp) --
/// Nearest even; a NaN keeps sign and upper payload and becomes quiet. Bits of a bf16.
std::uint16_t bf16_nearest(float x);
/// Exact: the bits become the upper half.
float bf16_float(std::uint16_t h);
/// Nearest even; a NaN keeps sign and upper payload and becomes quiet, as F16C does it. Bits of an
/// f16.
std::uint16_t f16_nearest(float x);
/// Exact, subnormals too; a NaN becomes quiet, as F16C does it.
float f16_float(std::uint16_t h);
/// fp32 -> bf16 rounded ties away, and the low half that rebuilds it. A NaN becomes the quiet NaN
/// of its sign.
void remainder_publish(float x, std::uint16_t* published, std::uint16_t* low);
/// The fp32 that remainder_publish took apart, to the bit.
float remainder_rebuild(std::uint16_t published, std::uint16_t low);
/// Adds random16 (16 bits) below the kept ones and truncates; infinities and NaN as bf16_nearest.
std::uint16_t bf16_stochastic(float x, std::uint32_t random16);

/// dst[i] = fp32 of src[i]. dtype is src's.
void widen(const void* src, DType dtype, float* dst, std::int64_t count);
/// dst[i] = src[i] in dtype, nearest even.
void narrow(const float* src, DType dtype, void* dst, std::int64_t count);
/// x[i] = fp32 of (x[i] in dtype): what the wire does to a value.
void round_trip(float* x, DType dtype, std::int64_t count);

// -- sums (sums.cpp) --
inline constexpr std::int64_t kSquareBlock = 1024;
/// acc[i] += chain over ranks of wire(sources[r][i]); a null source gives +0.0. sources are of
/// `dtype`, rounded to `wire` first; in groups of `group` consecutive ranks, then over the partials
/// (group 0: one group). Each chain starts from its first term. acc overlaps no source. `wire`
/// equal to `dtype`: as they are. from_zero: acc counts as +0.0 and is not read.
void reduce_add(const void* const* sources, int ranks, DType dtype, DType wire, int group,
                float* acc, std::int64_t count, bool from_zero = false);
/// buffer[i] += fp32 of gradient[i]. dtype is gradient's.
void accumulate(const void* gradient, DType dtype, float* buffer, std::int64_t count);

struct Squares {
  std::int64_t non_finite = 0;
  std::int64_t first = -1;  // index of the first element that is not finite
};
/// Sums of squares of values[0, count) in blocks of 1024, fp64, one a block into blocks[]; and the
/// non-finite count.
Squares block_squares(const float* values, std::int64_t count, double* blocks);

// -- random numbers (philox.cpp): Philox4x32-10 --
/// FNV-1a, 64 bits.
std::uint64_t fnv1a64(const void* data, std::size_t bytes);
/// Key of a named parameter: FNV-1a over the seed's 8 little-endian bytes and the name.
std::uint64_t philox_key(std::uint64_t seed, const char* name, std::size_t length);
/// The generator itself: ten rounds of a 128-bit counter (Salmon et al., Parallel random numbers:
/// as easy as 1, 2, 3). The key's low word comes first.
void philox4x32(const std::uint32_t counter[4], std::uint64_t key, std::uint32_t out[4]);
/// 16 random bits of an element of the key's parameter in a step.
std::uint32_t random16(std::uint64_t key, std::uint64_t step, std::uint64_t index);
/// [-0.5, 0.5) in steps of 2^-24, for elements first, first + 1, ...
void uniform(std::uint64_t key, std::uint64_t step, std::uint64_t first, float* out,
             std::int64_t count);

}  // namespace zshard::kernels
