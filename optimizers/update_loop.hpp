// The loop of an element pass on the host: a rule's element over contiguous arrays, at the speed of
// memory. Included by the rules' passes only, which are compiled once per machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "optimizers/rule.hpp"
#include "runtime/kernels/clones.hpp"
#include "runtime/kernels/formats.hpp"

namespace zshard::optimizers {

/// Elements that are loaded, updated and published as one. Short, so that publishing a block
/// overlaps with the loads of the next: in blocks of 1024 the memory idles meanwhile, and AdamW
/// with a 16-bit copy reaches 0.81 of the bandwidth instead of 0.92 (bench/run.sh --kernels).
inline constexpr std::int64_t kUpdateBlock = 64;
inline constexpr std::int64_t kCacheLine = 64;  // bytes
/// Shorter runs are one plain loop.
inline constexpr std::int64_t kWorthBlocks = 1024;

/// Asks for the block behind the one at x. The hardware's own prefetch ends at every page.
ZSHARD_INLINE void prefetch_next(const float* x) {
  for (std::int64_t i = 0; i < kUpdateBlock; i += kCacheLine / 4) {
    __builtin_prefetch(x + kUpdateBlock + i);
  }
}

template <class Format>
ZSHARD_INLINE void publish_block(const float* __restrict from, std::uint16_t* __restrict to,
                                 std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = Format::store(from[i]);
}

ZSHARD_INLINE void publish_block(DType dtype, const float* from, std::uint16_t* to,
                                 std::int64_t count) {
  if (dtype == DType::bf16) {
    publish_block<kernels::Bf16>(from, to, count);
  } else {
    publish_block<kernels::F16>(from, to, count);
  }
}

/// A whole block to aligned memory, around the caches.
ZSHARD_INLINE void stream_block(DType dtype, const float* from, std::uint16_t* to) {
  alignas(kCacheLine) std::uint16_t block[kUpdateBlock];
  publish_block(dtype, from, block, kUpdateBlock);
#if defined(__SSE2__)
  for (std::int64_t i = 0; i < kUpdateBlock; i += 8) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(block + i)));
  }
#else
  std::memcpy(to, block, sizeof block);
#endif
}

/// Element: float operator()(float parameter, float gradient, float& slot...) const, the new
/// parameter. kSlots: 2, 1, or 0 where the one slot is not there. Publishes if elements.published
/// says so: the pass is the rule's last.
template <int kSlots, class Element>
ZSHARD_INLINE void update_loop(const Elements& elements, const Element& element) {
  float* parameter = elements.parameter;
  const float* gradient = elements.gradient;
  auto* published = static_cast<std::uint16_t*>(elements.published);
  const std::int64_t count = elements.count;
  const auto update = [&](std::int64_t at, std::int64_t length) {
    float* __restrict p = parameter + at;
    const float* __restrict g = gradient + at;
    if constexpr (kSlots == 0) {
      for (std::int64_t i = 0; i < length; ++i) {
        float none = 0.0f;
        p[i] = element(p[i], g[i], none);
      }
    } else if constexpr (kSlots == 1) {
      float* __restrict s = elements.slots[0] + at;
      for (std::int64_t i = 0; i < length; ++i) p[i] = element(p[i], g[i], s[i]);
    } else {
      static_assert(kSlots == 2);
      float* __restrict s = elements.slots[0] + at;
      float* __restrict t = elements.slots[1] + at;
      for (std::int64_t i = 0; i < length; ++i) p[i] = element(p[i], g[i], s[i], t[i]);
    }
  };
  const auto some = [&](std::int64_t at, std::int64_t length) {
    update(at, length);
    if (published != nullptr) {
      publish_block(elements.dtype, parameter + at, published + at, length);
    }
  };
  if (count < kWorthBlocks && !elements.streams) {
    some(0, count);
    return;
  }
  std::int64_t at = 0;
  const bool streams = published != nullptr && elements.streams;
  if (streams) {
    const auto misplaced =
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(published) % kCacheLine);
    at = misplaced == 0 ? 0 : std::min(count, (kCacheLine - misplaced) / 2);
    some(0, at);
  }
  for (; at + kUpdateBlock <= count; at += kUpdateBlock) {
    prefetch_next(parameter + at);
    prefetch_next(gradient + at);
    for (int k = 0; k < kSlots; ++k) prefetch_next(elements.slots[k] + at);
    if (streams) {
      update(at, kUpdateBlock);
      stream_block(elements.dtype, parameter + at, published + at);
    } else {
      some(at, kUpdateBlock);
    }
  }
  some(at, count - at);
}

}  // namespace zshard::optimizers
