#include "bench/common/memory.hpp"

#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

#include "runtime/kernels/clones.hpp"

namespace bench {
namespace {

template <int terms>
ZSHARD_INLINE void add_loop(const float* const* x, float* __restrict acc, std::int64_t count) {
  const float* __restrict a = x[0];
  const float* __restrict b = terms > 1 ? x[1] : nullptr;
  const float* __restrict c = terms > 2 ? x[2] : nullptr;
  const float* __restrict d = terms > 3 ? x[3] : nullptr;
  for (std::int64_t i = 0; i < count; ++i) {
    float sum = a[i];
    if constexpr (terms > 1) sum = sum + b[i];
    if constexpr (terms > 2) sum = sum + c[i];
    if constexpr (terms > 3) sum = sum + d[i];
    acc[i] = acc[i] + sum;
  }
}

}  // namespace

Floats::Floats(std::int64_t count) : count_(count), arena_(zshard::memory::Arena::make(count * 4)) {
  // Different values, so that no page or line can be folded into another.
  float* x = data();
  for (std::int64_t i = 0; i < count; ++i) x[i] = 0.5f + static_cast<float>(i % 1021) * 0x1p-11f;
}

ZSHARD_CLONES void update_in_place(float* __restrict x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) x[i] = x[i] * 0.5f + 0.25f;
}

ZSHARD_CLONES std::uint32_t read_all(const float* __restrict x, std::int64_t count) {
  std::uint32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += std::bit_cast<std::uint32_t>(x[i]);
  return sum;
}

ZSHARD_CLONES void copy_loop(const float* __restrict x, float* __restrict y, std::int64_t count) {
  // The product keeps the compiler from calling memcpy, which goes around the caches.
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] * 0.5f;
}

ZSHARD_CLONES void add_sources(const float* const* sources, int terms, float* acc,
                               std::int64_t count) {
  switch (terms) {
    case 1:
      return add_loop<1>(sources, acc, count);
    case 2:
      return add_loop<2>(sources, acc, count);
    case 4:
      return add_loop<4>(sources, acc, count);
    default:
      throw std::logic_error("add_sources: no loop for " + std::to_string(terms) + " sources");
  }
}

ZSHARD_CLONES void plain_adamw(float* __restrict p, float* __restrict m, float* __restrict v,
                               const float* __restrict g, std::int64_t count, std::int64_t step) {
  const auto t = static_cast<double>(step);
  const auto rate = static_cast<float>(1e-4 / (1.0 - std::pow(0.9, t)));
  const auto root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(0.99, t)));
  const float keep = 1.0f - 1e-4f * 0.1f;
  for (std::int64_t i = 0; i < count; ++i) {
    m[i] = m[i] * 0.9f + g[i] * 0.1f;
    v[i] = v[i] * 0.99f + g[i] * g[i] * 0.01f;
    p[i] = p[i] * keep - rate * (m[i] / (std::sqrt(v[i]) * root + 1e-8f));
  }
}

}  // namespace bench
