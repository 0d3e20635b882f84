// What tests of the simulator share: a clean start, checked calls, rank threads, small kernels.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/simulator/simulator.hpp"

#define CHECK_CUDA(call) ASSERT_EQ(call, cudaSuccess)
#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess)

namespace simulator_tests {

/// Each test starts from nothing; what it leaves is its own business.
class Simulated : public testing::Test {
 protected:
  void SetUp() override { simulator::reset(); }
  void TearDown() override { simulator::reset(); }
};

inline cudaStream_t make_stream(const char* name, unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = nullptr;
  EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, flags));
  simulator::name_stream(stream, name);
  return stream;
}

inline cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  EXPECT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

template <class T>
T* device_memory(std::int64_t count) {
  void* memory = nullptr;
  EXPECT_CUDA(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
T* pinned_memory(std::int64_t count) {
  void* memory = nullptr;
  EXPECT_CUDA(cudaMallocHost(&memory, static_cast<std::size_t>(count) * sizeof(T)));
  return static_cast<T*>(memory);
}

template <class T>
std::int64_t bytes_of(std::int64_t count) {
  return count * static_cast<std::int64_t>(sizeof(T));
}

/// memory[i] = value, as a kernel.
inline cudaError_t launch_fill(const char* name, cudaStream_t stream, float* memory,
                               std::int64_t count, float value) {
  simulator::launch(name, stream, {}, {{memory, bytes_of<float>(count)}}, [=] {
    float* at = simulator::reach(memory);
    for (std::int64_t i = 0; i < count; ++i) at[i] = value;
  });
  return cudaGetLastError();
}

/// out[i] = in[i] + 1, as a kernel.
inline cudaError_t launch_increment(const char* name, cudaStream_t stream, const float* in,
                                    float* out, std::int64_t count) {
  simulator::launch(name, stream, {{in, bytes_of<float>(count)}}, {{out, bytes_of<float>(count)}},
                    [=] {
                      const float* from = simulator::reach(in);
                      float* to = simulator::reach(out);
                      for (std::int64_t i = 0; i < count; ++i) to[i] = from[i] + 1;
                    });
  return cudaGetLastError();
}

/// Waits for what is queued on the stream without the simulator's knowledge: tests that leave out a
/// wait on purpose keep their own data in order, or the thread sanitizer would find them.
inline void let_finish(cudaStream_t stream) {
  std::atomic<bool> done{false};
  EXPECT_CUDA(cudaLaunchHostFunc(
      stream, [](void* flag) { static_cast<std::atomic<bool>*>(flag)->store(true); }, &done));
  while (!done.load()) std::this_thread::yield();
}

/// A kernel that only says what it touches.
inline cudaError_t launch_claim(const char* name, cudaStream_t stream,
                                const simulator::Ranges& reads, const simulator::Ranges& writes) {
  simulator::launch(name, stream, reads, writes, [] {});
  return cudaGetLastError();
}

/// The memory's values when all work of the device is done.
template <class T>
std::vector<T> fetch(const T* memory, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_CUDA(cudaMemcpy(values.data(), memory, static_cast<std::size_t>(count) * sizeof(T),
                         cudaMemcpyDeviceToHost));
  return values;
}

/// Runs body(rank) on threads, each with its own device current.
inline void ranks(int world, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([rank, &body] {
      EXPECT_CUDA(cudaSetDevice(rank));
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::string all_races() {
  std::string text;
  for (const simulator::Race& race : simulator::races()) text += race.text() + "\n";
  return text;
}

inline std::string all_lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

}  // namespace simulator_tests
