// The one way to run a kernel of zshard. nvcc compiles it to grids of threads; a build with
// ZSHARD_SIMULATED_DEVICE compiles the same sources as C++ and hands the same loops to a simulated
// stream. The ranges that a kernel reads and writes are declared beside it: there a missing wait is
// found by them.
//
// A kernel is a body: a struct of pointers and numbers, taken by value, whose operations are marked
// ZSHARD_INLINE. Its member `template <class Visit> void pointers(Visit&& visit)` visits each
// pointer into device memory, by reference.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "runtime/device/cuda_check.hpp"
#include "runtime/kernels/clones.hpp"

#if defined(ZSHARD_SIMULATED_DEVICE)
#include ZSHARD_SIMULATED_LAUNCH  // the simulator's header, which no source here may name
#endif

#if defined(__CUDA_ARCH__)
#define ZSHARD_UNROLL_TEXT(text) _Pragma(#text)
#define ZSHARD_UNROLL(count) ZSHARD_UNROLL_TEXT(unroll count)
#else
#define ZSHARD_UNROLL(count)
#endif

namespace zshard::kernels {

/// Bytes that a kernel touches.
struct Touched {
  const void* memory = nullptr;
  std::int64_t bytes = 0;
};

/// Elements that one thread takes at once: 16 bytes of fp32.
inline constexpr int kPack = 4;
/// Threads that share a group of launch_groups.
inline constexpr int kGroupLanes = 16;

/// Neighbours in memory, loaded and stored as one.
template <class T, int n>
struct alignas(n * sizeof(T)) Pack {
  T value[n];
};

template <int n, class T>
ZSHARD_INLINE Pack<T, n> load_pack(const T* at) {
  return *reinterpret_cast<const Pack<T, n>*>(at);
}
template <int n, class T>
ZSHARD_INLINE void store_pack(T* at, const Pack<T, n>& pack) {
  *reinterpret_cast<Pack<T, n>*>(at) = pack;
}

namespace detail {

#if defined(__CUDACC__)
inline constexpr int kThreads = 256;
inline constexpr std::int64_t kMostBlocks = 1 << 16;

/// Blocks of a grid whose threads stride over `threads` items.
inline unsigned grid(std::int64_t threads) {
  const std::int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

template <class Body>
__global__ void __launch_bounds__(kThreads) for_each(std::int64_t count, Body body) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    body(i);
  }
}

template <class Body>
__global__ void __launch_bounds__(kThreads) for_each_group(std::int64_t groups, Body body) {
  constexpr int kGroups = kThreads / kGroupLanes;
  const int lane = static_cast<int>(threadIdx.x) % kGroupLanes;
  // The two groups of a warp may leave the loop at different times.
  const unsigned mask = 0xffffu << (threadIdx.x & 16u);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kGroups;
  for (std::int64_t g = static_cast<std::int64_t>(blockIdx.x) * kGroups + threadIdx.x / kGroupLanes;
       g < groups; g += stride) {
    double sum = body.lane(g, lane);
    // The host's tree; that of CUB is nobody's promise.
    for (int width = kGroupLanes / 2; width > 0; width /= 2) {
      sum += __shfl_down_sync(mask, sum, static_cast<unsigned>(width), kGroupLanes);
    }
    if (lane == 0) body.finish(g, sum);
  }
}
#endif

#if defined(__CUDACC__)
/// kernel(count, body). The launch's own result is asked for: cudaGetLastError() could tell of an
/// earlier call of the user's, and would take it away from him.
template <class Kernel, class Body>
void start(const char* name, cudaStream_t stream, Kernel* kernel, std::int64_t threads,
           std::int64_t count, Body body) {
  void* arguments[] = {&count, &body};
  const cudaError_t result = cudaLaunchKernel(kernel, dim3(grid(threads)), dim3(kThreads),
                                              arguments, std::size_t{0}, stream);
  ZSHARD_CUDA_CHECK(result, name);
}
#endif

#if defined(ZSHARD_SIMULATED_DEVICE)
/// run(body) as a task of the simulated stream, on a copy whose pointers lead to where the
/// simulator keeps device memory.
template <class Body, class Run>
void simulate(const char* name, cudaStream_t stream, std::initializer_list<Touched> reads,
              std::initializer_list<Touched> writes, const Body& body, const Run& run) {
  simulator::Ranges in;
  simulator::Ranges out;
  for (const Touched& t : reads) in.push_back({t.memory, t.bytes});
  for (const Touched& t : writes) out.push_back({t.memory, t.bytes});
  simulator::launch(name, stream, in, out, [body, run] {
    Body here = body;
    here.pointers([](auto*& pointer) { pointer = simulator::reach(pointer); });
    run(here);
  });
  ZSHARD_CUDA_CHECK(cudaGetLastError(), name);
}
#endif

/// Elements as items: packs first, then what lies before and behind them one by one.
template <class Body>
struct Packed {
  Body body;
  std::int64_t head = 0;  // elements before the first pack
  std::int64_t packs = 0;

  template <class Visit>
  void pointers(Visit&& visit) {
    body.pointers(visit);
  }

  ZSHARD_INLINE void operator()(std::int64_t item) const {
    if (item < packs) {
      body.template run<kPack>(head + item * kPack);
    } else {
      const std::int64_t i = item - packs;
      body.template run<1>(i < head ? i : i + packs * kPack);
    }
  }
};

/// The first element at which every array of the body lies on a pack's boundary; -1: there is none.
template <class Body>
std::int64_t first_pack(Body body) {
  for (int head = 0; head < kPack; ++head) {
    bool aligned = true;
    body.pointers([&](auto*& pointer) {
      const auto address = reinterpret_cast<std::uintptr_t>(pointer + head);
      if (address % (kPack * sizeof *pointer) != 0) aligned = false;
    });
    if (aligned) return head;
  }
  return -1;
}

}  // namespace detail

/// body(i) for i in [0, count), in any order, on `stream`. name: static storage. Throws DeviceError
/// if the launch fails.
template <class Body>
void launch(const char* name, cudaStream_t stream, std::initializer_list<Touched> reads,
            std::initializer_list<Touched> writes, std::int64_t count, const Body& body) {
  if (count <= 0) return;
#if defined(ZSHARD_SIMULATED_DEVICE)
  detail::simulate(name, stream, reads, writes, body, [count](const Body& here) {
    for (std::int64_t i = 0; i < count; ++i) here(i);
  });
#else
  (void)reads;
  (void)writes;
  detail::start(name, stream, &detail::for_each<Body>, count, count, body);
#endif
}

/// As launch(), several elements a thread: `body.template run<n>(i)` does elements [i, i + n), with
/// load_pack and store_pack, for n = 1 and, where all its arrays are aligned alike, n = kPack. The
/// arrays are visited at their element 0. packs: false keeps to n = 1, for a body whose other
/// arrays are not aligned like these.
template <class Body>
void launch_packs(const char* name, cudaStream_t stream, std::initializer_list<Touched> reads,
                  std::initializer_list<Touched> writes, std::int64_t count, const Body& body,
                  bool packs = true) {
  detail::Packed<Body> packed{body};
  const std::int64_t head = packs ? detail::first_pack(body) : -1;
  if (head >= 0 && head < count) {
    packed.head = head;
    packed.packs = (count - head) / kPack;
  }
  launch(name, stream, reads, writes, count - packed.packs * (kPack - 1), packed);
}

/// For each group g in [0, groups): body.lane(g, j) for j in [0, 16), added as a tree (lane j takes
/// lane j + 8, then + 4, + 2, + 1), and body.finish(g, sum) once. Otherwise as launch().
template <class Body>
void launch_groups(const char* name, cudaStream_t stream, std::initializer_list<Touched> reads,
                   std::initializer_list<Touched> writes, std::int64_t groups, const Body& body) {
  if (groups <= 0) return;
#if defined(ZSHARD_SIMULATED_DEVICE)
  detail::simulate(name, stream, reads, writes, body, [groups](const Body& here) {
    for (std::int64_t g = 0; g < groups; ++g) {
      double lane[kGroupLanes];
      for (int j = 0; j < kGroupLanes; ++j) lane[j] = here.lane(g, j);
      for (int width = kGroupLanes / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
      }
      here.finish(g, lane[0]);
    }
  });
#else
  (void)reads;
  (void)writes;
  detail::start(name, stream, &detail::for_each_group<Body>, groups * kGroupLanes, groups, body);
#endif
}

}  // namespace zshard::kernels
