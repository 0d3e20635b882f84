// How the model's kernels run: on a GPU where nvcc compiles them, one after another on the calling
// thread where a C++ compiler does, or where a test puts them. A kernel is written once, as what
// one element or one row needs.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>

#include <cub/warp/warp_reduce.cuh>

#include "cuda_check.hpp"
#define GPT_DEVICE __device__ __forceinline__
#define GPT_BODY [=] __device__
#else
#include <cmath>
#define GPT_DEVICE inline
#define GPT_BODY [=]
#endif

// A test's header, whose gpt::gpu::run_task() takes the place of the one below.
#if defined(GPT_TASKS)
#include GPT_TASKS
#endif

namespace gpt::gpu {

constexpr int kLanes = 32;

/// The threads that share one row: a warp. Lane j has elements j, j + 32, ...; a sum adds each
/// lane's own first and then neighbours, pairs, fours, ...: CUB's order, here and on the host.
class Lanes {
 public:
#if defined(__CUDACC__)
  /// f(i) for i in [0, count). What it wrote is seen by all lanes afterwards.
  template <class Function>
  GPT_DEVICE void each(std::int64_t count, Function f) const {
    for (std::int64_t i = threadIdx.x % kLanes; i < count; i += kLanes) f(i);
    __syncwarp();
  }
  /// The sum of term(i), on every lane.
  template <class T, class Term>
  GPT_DEVICE T sum(std::int64_t count, Term term) const {
    T value = 0;
    for (std::int64_t i = threadIdx.x % kLanes; i < count; i += kLanes) value += term(i);
    return reduce(value, [](T a, T b) { return a + b; });
  }
  /// The largest term(i) of at least one, on every lane; NaNs are left out.
  template <class Term>
  GPT_DEVICE float max(std::int64_t count, Term term) const {
    float value = term(0);
    for (std::int64_t i = threadIdx.x % kLanes; i < count; i += kLanes) {
      value = fmaxf(value, term(i));
    }
    return reduce(value, [](float a, float b) { return fmaxf(a, b); });
  }
  /// f() on one lane.
  template <class Function>
  GPT_DEVICE void once(Function f) const {
    if (threadIdx.x % kLanes == 0) f();
    __syncwarp();
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFu;

  /// The lanes' values in one, on every lane.
  template <class T, class Both>
  GPT_DEVICE static T reduce(T value, Both both) {
    using Reduce = cub::WarpReduce<T, kLanes>;
    // Of a whole warp it exchanges registers and has nothing to store.
    typename Reduce::TempStorage none;
    static_assert(sizeof none <= 1);
    value = __shfl_sync(kAll, Reduce(none).Reduce(value, both), 0);
    // What the lanes read for it is read before any of them writes.
    __syncwarp();
    return value;
  }
#else
  template <class Function>
  void each(std::int64_t count, Function f) const {
    for (std::int64_t i = 0; i < count; ++i) f(i);
  }
  template <class T, class Term>
  T sum(std::int64_t count, Term term) const {
    T lane[kLanes] = {};
    for (std::int64_t i = 0; i < count; ++i) lane[i % kLanes] += term(i);
    for (int apart = 1; apart < kLanes; apart *= 2) {
      for (int j = 0; j < kLanes; j += 2 * apart) lane[j] += lane[j + apart];
    }
    return lane[0];
  }
  template <class Term>
  float max(std::int64_t count, Term term) const {
    float value = term(0);
    for (std::int64_t i = 1; i < count; ++i) value = std::fmax(value, term(i));
    return value;
  }
  template <class Function>
  void once(Function f) const {
    f();
  }
#endif
};

#if defined(__CUDACC__)

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1 << 20;

template <class Body>
__global__ void run_elements(std::int64_t count, Body body) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < count; i += stride) body(i);
}

template <class Body>
__global__ void run_rows(std::int64_t count, Body body) {
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / kLanes);
  std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  for (; row < count; row += warps) body(Lanes{}, row);
}

inline unsigned blocks_for(std::int64_t count, std::int64_t of_block) {
  const std::int64_t blocks = (count + of_block - 1) / of_block;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

#elif !defined(GPT_TASKS)

template <class Task>
void run_task(const char* /*name*/, void* /*stream*/, Task task) {
  task();
}

#endif

/// body(i) for i in [0, count), in any order, on `stream`.
template <class Body>
void for_elements(const char* name, void* stream, std::int64_t count, Body body) {
  if (count <= 0) return;
#if defined(__CUDACC__)
  run_elements<<<blocks_for(count, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      count, body);
  check_cuda(cudaGetLastError(), name, __FILE__, __LINE__);
#else
  run_task(name, stream, [count, body] {
    for (std::int64_t i = 0; i < count; ++i) body(i);
  });
#endif
}

/// body(lanes, row) for row in [0, count), in any order, on `stream`.
template <class Body>
void for_rows(const char* name, void* stream, std::int64_t count, Body body) {
  if (count <= 0) return;
#if defined(__CUDACC__)
  run_rows<<<blocks_for(count, kThreads / kLanes), kThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(count, body);
  check_cuda(cudaGetLastError(), name, __FILE__, __LINE__);
#else
  run_task(name, stream, [count, body] {
    for (std::int64_t row = 0; row < count; ++row) body(Lanes{}, row);
  });
#endif
}

}  // namespace gpt::gpu
