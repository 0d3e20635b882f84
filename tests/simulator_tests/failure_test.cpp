#include <chrono>

#include "tests/simulator_tests/simulated.hpp"

namespace simulator_tests {
namespace {

using Failures = Simulated;

TEST_F(Failures, TheNthCallIsRefused) {
  simulator::fail({.call = "cudaMalloc", .after = 2, .code = cudaErrorMemoryAllocation});
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
  EXPECT_EQ(simulator::calls("cudaMalloc"), 4);
  EXPECT_EQ(simulator::leaks().size(), 3U);
}

TEST_F(Failures, OfOneDeviceSpareTheOthers) {
  simulator::fail(
      {.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .device = 1, .times = -1});
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
  CHECK_CUDA(cudaSetDevice(1));
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaErrorMemoryAllocation);
  CHECK_CUDA(cudaSetDevice(0));
  EXPECT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
}

TEST_F(Failures, ARefusedLaunchDoesNothing) {
  cudaStream_t stream = make_stream("work");
  auto* memory = device_memory<float>(10);
  CHECK_CUDA(launch_fill("first", stream, memory, 10, 1));
  simulator::fail({.call = "second", .code = cudaErrorLaunchOutOfResources});
  EXPECT_EQ(launch_fill("second", stream, memory, 10, 2), cudaErrorLaunchOutOfResources);
  EXPECT_EQ(fetch(memory, 10)[0], 1);
  CHECK_CUDA(launch_fill("second", stream, memory, 10, 2));
  EXPECT_EQ(fetch(memory, 10)[0], 2);
}

TEST_F(Failures, AFaultIsStickyForItsDeviceAlone) {
  cudaStream_t stream = make_stream("work");
  cudaEvent_t event = make_event();
  auto* memory = device_memory<float>(10);
  simulator::fail({.call = "kernel", .code = cudaErrorLaunchFailure, .how = simulator::How::fault});
  CHECK_CUDA(launch_fill("kernel", stream, memory, 10, 1));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(launch_fill("other", stream, memory, 10, 1), cudaErrorLaunchFailure);
  // What is given back counts as given back all the same.
  EXPECT_EQ(cudaFree(memory), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorLaunchFailure);
  EXPECT_EQ(all_lines(simulator::leaks()), "");
  CHECK_CUDA(cudaSetDevice(1));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(fetch(device_memory<char>(1), 1).size(), 1U);
}

TEST_F(Failures, QueuedWorkOfAFaultyDeviceIsDropped) {
  cudaStream_t stream = make_stream("work");
  auto* pinned = pinned_memory<int>(1);
  *pinned = 7;
  auto* memory = device_memory<int>(1);
  simulator::fail(
      {.call = "cudaMemsetAsync", .code = cudaErrorECCUncorrectable, .how = simulator::How::fault});
  CHECK_CUDA(cudaMemsetAsync(memory, 0, 4, stream));
  (void)cudaMemcpyAsync(pinned, memory, 4, cudaMemcpyDeviceToHost, stream);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorECCUncorrectable);
  EXPECT_EQ(cudaFreeHost(nullptr), cudaSuccess);
  EXPECT_EQ(*pinned, 7);
}

TEST_F(Failures, ALostDeviceEndsAKernelThatHangs) {
  cudaStream_t stream = make_stream("work");
  auto* memory = device_memory<float>(10);
  simulator::fail({.call = "endless", .how = simulator::How::hang});
  CHECK_CUDA(launch_fill("endless", stream, memory, 10, 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  simulator::fault(0, cudaErrorDevicesUnavailable);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorDevicesUnavailable);
}

TEST_F(Failures, ResetEndsAKernelThatHangs) {
  cudaStream_t stream = make_stream("work");
  auto* memory = device_memory<float>(10);
  simulator::fail({.call = "endless", .how = simulator::How::hang});
  CHECK_CUDA(launch_fill("endless", stream, memory, 10, 1));
  simulator::reset();
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaMemset(memory, 0, 4), cudaErrorInvalidValue);
}

TEST_F(Failures, CallsAreCountedByName) {
  cudaStream_t stream = make_stream("work");
  auto* memory = device_memory<float>(10);
  for (int i = 0; i < 3; ++i) CHECK_CUDA(launch_fill("kernel", stream, memory, 10, 1));
  EXPECT_EQ(simulator::calls("kernel"), 3);
  EXPECT_EQ(simulator::calls("cudaStreamSynchronize"), 0);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(simulator::calls("cudaStreamSynchronize"), 1);
}

TEST_F(Failures, ErrorsHaveTheNamesOfCuda) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_STREQ(cudaGetErrorName(cudaSuccess), "cudaSuccess");
}

}  // namespace
}  // namespace simulator_tests
