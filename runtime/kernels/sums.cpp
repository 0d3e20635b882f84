#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/kernels/clones.hpp"
#include "runtime/kernels/formats.hpp"
#include "runtime/kernels/kernels.hpp"

namespace zshard::kernels {
namespace {

// A chunk's scratch stays in any L1 cache. Bursts of one source this short let the hardware fetch
// the next one while the last is still added.
constexpr std::int64_t kChunk = 512;
constexpr std::int64_t kBlock = 64;  // that is added while the next is fetched
constexpr int kLanes = 16;
constexpr int kTerms = 4;  // that one pass over the result adds

/// Stands for the source of a rank that skipped.
alignas(64) constexpr float kZeros[kChunk] = {};

/// out = what every owner sees of a contribution.
template <class Source, class Wire>
ZSHARD_INLINE void on_wire_loop(const void* from, float* __restrict out, std::int64_t count) {
  const auto* __restrict src = static_cast<const typename Source::Storage*>(from);
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = Wire::load(Wire::store(Source::load(src[i])));
  }
}

/// A wire that loses nothing of the source, its own dtype included, keeps the source's bits.
ZSHARD_CLONES void on_wire(const void* source, DType dtype, DType wire, float* out,
                           std::int64_t count) {
  if (wire == dtype) wire = DType::f32;
  switch (dtype) {
    case DType::f32:
      if (wire == DType::f32) on_wire_loop<F32, F32>(source, out, count);
      if (wire == DType::bf16) on_wire_loop<F32, Bf16>(source, out, count);
      if (wire == DType::f16) on_wire_loop<F32, F16>(source, out, count);
      break;
    case DType::bf16:
      if (wire == DType::f32) on_wire_loop<Bf16, F32>(source, out, count);
      if (wire == DType::f16) on_wire_loop<Bf16, F16>(source, out, count);
      break;
    case DType::f16:
      if (wire == DType::f32) on_wire_loop<F16, F32>(source, out, count);
      if (wire == DType::bf16) on_wire_loop<F16, Bf16>(source, out, count);
      break;
  }
}

enum class Into {
  set,     // out = ((a + b) + c) + d
  extend,  // out = (((out + a) + b) + c) + d
  add,     // out = out + (((a + b) + c) + d)
  start    // out = +0.0 + (((a + b) + c) + d)
};

template <Into into, int terms>
ZSHARD_INLINE void sum_loop(const float* const* x, float* __restrict out, std::int64_t count) {
  const float* __restrict a = x[0];
  const float* __restrict b = terms > 1 ? x[1] : nullptr;
  const float* __restrict c = terms > 2 ? x[2] : nullptr;
  const float* __restrict d = terms > 3 ? x[3] : nullptr;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      float sum = into == Into::extend ? out[i] + a[i] : a[i];
      if constexpr (terms > 1) sum = sum + b[i];
      if constexpr (terms > 2) sum = sum + c[i];
      if constexpr (terms > 3) sum = sum + d[i];
      if constexpr (into == Into::add) sum = out[i] + sum;
      if constexpr (into == Into::start) sum = 0.0f + sum;  // a sum of -0.0 becomes +0.0
      out[i] = sum;
    }
  };
  std::int64_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    for (std::int64_t i = begin + kBlock; i < begin + 2 * kBlock; i += 16) {
      for (int t = 0; t < terms; ++t) __builtin_prefetch(x[t] + i);
      __builtin_prefetch(out + i);
    }
    add(begin, begin + kBlock);
  }
  add(begin, count);
}

template <Into into>
ZSHARD_INLINE void sum_terms(const float* const* x, int terms, float* out, std::int64_t count) {
  if (terms == 1) sum_loop<into, 1>(x, out, count);
  if (terms == 2) sum_loop<into, 2>(x, out, count);
  if (terms == 3) sum_loop<into, 3>(x, out, count);
  if (terms == 4) sum_loop<into, 4>(x, out, count);
}

ZSHARD_CLONES void sum(Into into, const float* const* x, int terms, float* out,
                       std::int64_t count) {
  if (into == Into::set) sum_terms<Into::set>(x, terms, out, count);
  if (into == Into::extend) sum_terms<Into::extend>(x, terms, out, count);
  if (into == Into::add) sum_terms<Into::add>(x, terms, out, count);
  if (into == Into::start) sum_terms<Into::start>(x, terms, out, count);
}

/// One chunk of the sources.
class Chunk {
 public:
  Chunk(const void* const* sources, DType dtype, DType wire) noexcept
      : sources_(sources), dtype_(dtype), wire_(wire) {}

  void move(std::int64_t begin, std::int64_t count) {
    offset_ = begin * size_of(dtype_);
    count_ = count;
  }

  /// out = the chain over ranks [first, last), started or extended, kTerms a pass; or, for at most
  /// kTerms ranks, put onto out.
  void chain(Into into, int first, int last, float* out) {
    const float* x[kTerms];
    while (first < last) {
      const int terms = std::min(kTerms, last - first);
      for (int i = 0; i < terms; ++i) x[i] = contribution(first + i, staged_[i]);
      sum(into, x, terms, out, count_);
      first += terms;
      into = Into::extend;
    }
  }

 private:
  const float* contribution(int rank, float* staged) const {
    const void* source = sources_[rank];
    if (source == nullptr) return kZeros;
    source = static_cast<const unsigned char*>(source) + offset_;
    if (dtype_ == DType::f32 && wire_ == DType::f32) return static_cast<const float*>(source);
    on_wire(source, dtype_, wire_, staged, count_);
    return staged;
  }

  const void* const* sources_;
  DType dtype_;
  DType wire_;
  std::int64_t offset_ = 0;  // bytes
  std::int64_t count_ = 0;
  alignas(64) float staged_[kTerms][kChunk];
};

template <class Source>
ZSHARD_INLINE void accumulate_loop(const void* gradient, float* __restrict buffer,
                                   std::int64_t count) {
  const auto* __restrict src = static_cast<const typename Source::Storage*>(gradient);
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = buffer[i] + Source::load(src[i]);
}

/// Sum of the squares of count <= 1024 values.
ZSHARD_CLONES double square_sum(const float* __restrict values, std::int64_t count) {
  double lane[kLanes] = {};
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double x = values[i + j];
      lane[j] += x * x;
    }
  }
  for (std::int64_t i = whole; i < count; ++i) {
    const double x = values[i];
    lane[i - whole] += x * x;
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  return lane[0];
}

ZSHARD_CLONES std::int64_t count_non_finite(const float* __restrict values, std::int64_t count) {
  std::int32_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    found += (bits & 0x7f800000u) == 0x7f800000u ? 1 : 0;
  }
  return found;
}

}  // namespace

void reduce_add(const void* const* sources, int ranks, DType dtype, DType wire, int group,
                float* acc, std::int64_t count, bool from_zero) {
  if (ranks <= 0) return;
  const Into onto = from_zero ? Into::start : Into::add;
  // Groups of one rank are the plain chain.
  const int size = group > 1 && group < ranks ? group : ranks;
  alignas(64) float total[kChunk];
  alignas(64) float partial[kChunk];
  const float* const total_term = total;
  const float* const partial_term = partial;
  Chunk chunk(sources, dtype, wire);
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t elements = std::min(kChunk, count - begin);
    chunk.move(begin, elements);
    if (ranks <= kTerms && size == ranks) {
      chunk.chain(onto, 0, ranks, acc + begin);
      continue;
    }
    chunk.chain(Into::set, 0, size, total);
    for (int first = size; first < ranks; first += std::min(size, ranks - first)) {
      chunk.chain(Into::set, first, first + std::min(size, ranks - first), partial);
      sum(Into::extend, &partial_term, 1, total, elements);
    }
    sum(onto, &total_term, 1, acc + begin, elements);
  }
}

ZSHARD_CLONES void accumulate(const void* gradient, DType dtype, float* buffer,
                              std::int64_t count) {
  switch (dtype) {
    case DType::f32:
      accumulate_loop<F32>(gradient, buffer, count);
      break;
    case DType::bf16:
      accumulate_loop<Bf16>(gradient, buffer, count);
      break;
    case DType::f16:
      accumulate_loop<F16>(gradient, buffer, count);
      break;
  }
}

Squares block_squares(const float* values, std::int64_t count, double* blocks) {
  Squares squares;
  for (std::int64_t begin = 0; begin < count; begin += kSquareBlock) {
    const std::int64_t size = std::min(kSquareBlock, count - begin);
    const double sum = square_sum(values + begin, size);
    *blocks++ = sum;
    // 1024 squares of finite fp32 values stay far below the largest fp64: the sum is finite exactly
    // if all of them are, and only then the elements need no second look.
    if (std::isfinite(sum)) continue;
    if (squares.first < 0) {
      squares.first = begin;
      while (std::isfinite(values[squares.first])) ++squares.first;
    }
    squares.non_finite += count_non_finite(values + begin, size);
  }
  return squares;
}

}  // namespace zshard::kernels
