#include <bit>
#include <cstring>

#include "runtime/kernels/clones.hpp"
#include "runtime/kernels/formats.hpp"
#include "runtime/kernels/kernels.hpp"

namespace zshard::kernels {
namespace {

template <class Format>
ZSHARD_INLINE void widen_loop(const void* from, float* __restrict dst, std::int64_t count) {
  const auto* __restrict src = static_cast<const typename Format::Storage*>(from);
  for (std::int64_t i = 0; i < count; ++i) dst[i] = Format::load(src[i]);
}

template <class Format>
ZSHARD_INLINE void narrow_loop(const float* __restrict src, void* to, std::int64_t count) {
  auto* __restrict dst = static_cast<typename Format::Storage*>(to);
  for (std::int64_t i = 0; i < count; ++i) dst[i] = Format::store(src[i]);
}

template <class Format>
ZSHARD_INLINE void round_trip_loop(float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) x[i] = Format::load(Format::store(x[i]));
}

}  // namespace

std::uint16_t bf16_nearest(float x) {
  return Bf16::store(x);
}

float bf16_float(std::uint16_t h) {
  return Bf16::load(h);
}

std::uint16_t f16_nearest(float x) {
  return F16::store(x);
}

float f16_float(std::uint16_t h) {
  return F16::load(h);
}

void remainder_publish(float x, std::uint16_t* published, std::uint16_t* low) {
  auto u = std::bit_cast<std::uint32_t>(x);
  // A NaN with a high payload would carry into -0 or an infinity.
  if ((u & 0x7fffffffu) > 0x7f800000u) u = (u & 0x80000000u) | 0x7fc00000u;
  *published = static_cast<std::uint16_t>((u + 0x8000u) >> 16);
  *low = static_cast<std::uint16_t>(u & 0xffffu);
}

float remainder_rebuild(std::uint16_t published, std::uint16_t low) {
  // The low half tells whether publishing carried: its upper bit is what the rounding looked at.
  const std::uint32_t high = (std::uint32_t{published} - (std::uint32_t{low} >> 15)) & 0xffffu;
  return std::bit_cast<float>((high << 16) | low);
}

std::uint16_t bf16_stochastic(float x, std::uint32_t random16) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7f800000u) == 0x7f800000u) return Bf16::store(x);
  return static_cast<std::uint16_t>((u + random16) >> 16);
}

ZSHARD_CLONES void widen(const void* src, DType dtype, float* dst, std::int64_t count) {
  if (count <= 0) return;
  switch (dtype) {
    case DType::f32:
      std::memmove(dst, src, static_cast<std::size_t>(count) * sizeof(float));
      break;
    case DType::bf16:
      widen_loop<Bf16>(src, dst, count);
      break;
    case DType::f16:
      widen_loop<F16>(src, dst, count);
      break;
  }
}

ZSHARD_CLONES void narrow(const float* src, DType dtype, void* dst, std::int64_t count) {
  if (count <= 0) return;
  switch (dtype) {
    case DType::f32:
      std::memmove(dst, src, static_cast<std::size_t>(count) * sizeof(float));
      break;
    case DType::bf16:
      narrow_loop<Bf16>(src, dst, count);
      break;
    case DType::f16:
      narrow_loop<F16>(src, dst, count);
      break;
  }
}

ZSHARD_CLONES void round_trip(float* x, DType dtype, std::int64_t count) {
  switch (dtype) {
    case DType::f32:
      break;
    case DType::bf16:
      round_trip_loop<Bf16>(x, count);
      break;
    case DType::f16:
      round_trip_loop<F16>(x, count);
      break;
  }
}

}  // namespace zshard::kernels
