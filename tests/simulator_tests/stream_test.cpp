#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "tests/simulator_tests/simulated.hpp"

namespace simulator_tests {
namespace {

using Streams = Simulated;

/// Queues a task that waits until `gate` opens.
void queue_gate(cudaStream_t stream, std::atomic<bool>& gate) {
  EXPECT_CUDA(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        while (!static_cast<std::atomic<bool>*>(data)->load()) std::this_thread::yield();
      },
      &gate));
}

TEST_F(Streams, RunTasksInOrderAndAfterTheCall) {
  simulator::set_delays(50, 7);
  cudaStream_t stream = make_stream("work");
  constexpr std::int64_t kCount = 1000;
  auto* a = device_memory<float>(kCount);
  CHECK_CUDA(launch_fill("fill", stream, a, kCount, 1));
  for (int i = 0; i < 50; ++i) CHECK_CUDA(launch_increment("add", stream, a, a, kCount));
  for (const float value : fetch(a, kCount)) ASSERT_EQ(value, 51);
  EXPECT_EQ(all_races(), "");
}

TEST_F(Streams, QueryTellsWhetherWorkIsDone) {
  cudaStream_t stream = make_stream("work");
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  std::atomic<bool> gate{false};
  queue_gate(stream, gate);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  gate = true;
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
}

TEST_F(Streams, AnEventStandsForWhatWasQueuedBeforeIt) {
  cudaStream_t stream = make_stream("work");
  cudaEvent_t event = make_event();
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "never recorded: complete";
  std::atomic<bool> first{false};
  std::atomic<bool> second{false};
  queue_gate(stream, first);
  CHECK_CUDA(cudaEventRecord(event, stream));
  queue_gate(stream, second);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  first = true;
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  second = true;
  CHECK_CUDA(cudaStreamSynchronize(stream));
}

TEST_F(Streams, ALaterRecordDoesNotMoveAWaitThatIsQueued) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  cudaEvent_t event = make_event();
  std::atomic<bool> gate{false};
  CHECK_CUDA(cudaEventRecord(event, a));
  CHECK_CUDA(cudaStreamWaitEvent(b, event, 0));
  queue_gate(a, gate);
  CHECK_CUDA(cudaEventRecord(event, a));
  // b waits for the first record alone, which is complete.
  EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
  CHECK_CUDA(cudaStreamWaitEvent(b, event, 0));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(cudaStreamQuery(b), cudaErrorNotReady);
  gate = true;
  EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
}

TEST_F(Streams, AWaitForAnEventThatWasNeverRecordedIsNone) {
  cudaStream_t stream = make_stream("work");
  CHECK_CUDA(cudaStreamWaitEvent(stream, make_event(), 0));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST_F(Streams, TheDefaultStreamWaitsForBlockingStreamsOnly) {
  cudaStream_t blocking = make_stream("blocking", cudaStreamDefault);
  cudaStream_t free_stream = make_stream("free");
  constexpr std::int64_t kCount = 256;
  auto* a = device_memory<float>(kCount);
  auto* b = device_memory<float>(kCount);
  std::atomic<bool> gate{false};
  queue_gate(blocking, gate);
  CHECK_CUDA(launch_fill("fill", nullptr, a, kCount, 1));
  CHECK_CUDA(launch_fill("fill", blocking, b, kCount, 1));  // after the default stream's
  CHECK_CUDA(launch_increment("free", free_stream, device_memory<float>(kCount),
                              device_memory<float>(kCount), kCount));
  EXPECT_EQ(cudaStreamSynchronize(free_stream), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
  gate = true;
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(fetch(a, kCount)[0], 1);
}

TEST_F(Streams, TheDefaultStreamsOrderCountsForRaces) {
  cudaStream_t blocking = make_stream("blocking", cudaStreamDefault);
  cudaStream_t free_stream = make_stream("free");
  constexpr std::int64_t kCount = 64;
  auto* a = device_memory<float>(kCount);
  CHECK_CUDA(launch_fill("first", blocking, a, kCount, 1));
  CHECK_CUDA(launch_increment("second", nullptr, a, a, kCount));
  CHECK_CUDA(launch_increment("third", blocking, a, a, kCount));
  EXPECT_EQ(all_races(), "");
  EXPECT_EQ(fetch(a, kCount)[0], 3);
  CHECK_CUDA(launch_increment("fourth", nullptr, a, a, kCount));
  let_finish(nullptr);
  CHECK_CUDA(launch_increment("fifth", free_stream, a, a, kCount));
  ASSERT_EQ(simulator::races().size(), 2U) << all_races();  // against its read, its write
  EXPECT_EQ(simulator::races()[0].first.operation, "fourth");
  EXPECT_EQ(simulator::races()[0].second.stream, "free");
}

TEST_F(Streams, ElapsedTimeCountsTheStreamsWork) {
  cudaStream_t stream = make_stream("work");
  cudaEvent_t first = nullptr;
  cudaEvent_t last = nullptr;
  CHECK_CUDA(cudaEventCreate(&first));
  CHECK_CUDA(cudaEventCreate(&last));
  float milliseconds = -1;
  CHECK_CUDA(cudaEventRecord(first, stream));
  CHECK_CUDA(cudaLaunchHostFunc(
      stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }, nullptr));
  CHECK_CUDA(cudaEventRecord(last, stream));
  CHECK_CUDA(cudaEventSynchronize(last));
  CHECK_CUDA(cudaEventElapsedTime(&milliseconds, first, last));
  EXPECT_GE(milliseconds, 9.5F);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, first, make_event()),
            cudaErrorInvalidResourceHandle);
}

TEST_F(Streams, AStreamMayBeDestroyedBeforeItsWorkIsDone) {
  cudaStream_t stream = make_stream("work");
  constexpr std::int64_t kCount = 64;
  auto* a = device_memory<float>(kCount);
  CHECK_CUDA(launch_fill("fill", stream, a, kCount, 4));
  cudaEvent_t event = make_event();
  CHECK_CUDA(cudaEventRecord(event, stream));
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK_CUDA(cudaEventSynchronize(event));
  EXPECT_EQ(fetch(a, kCount)[63], 4);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(simulator::faults().size(), 2U);
}

TEST_F(Streams, ManyStreamsComeAndGo) {
  auto* a = device_memory<float>(64);
  for (int i = 0; i < 300; ++i) {
    cudaStream_t stream = make_stream("short");
    CHECK_CUDA(launch_fill("fill", stream, a, 64, static_cast<float>(i)));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaStreamDestroy(stream));
  }
  EXPECT_EQ(all_races(), "");
  EXPECT_EQ(fetch(a, 64)[5], 299);
}

TEST_F(Streams, AHostFunctionMustNotCallCuda) {
  cudaStream_t stream = make_stream("work");
  static cudaError_t got;
  got = cudaSuccess;
  CHECK_CUDA(cudaLaunchHostFunc(
      stream, [](void*) { got = cudaDeviceSynchronize(); }, nullptr));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(got, cudaErrorNotPermitted);
  EXPECT_EQ(simulator::faults().size(), 1U);
}

TEST_F(Streams, DevicesAreAsManyAsWasSaid) {
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 8);
  simulator::set_devices(2);
  CHECK_CUDA(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 2);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  simulator::set_devices(0);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  simulator::set_driver_version(0);
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  int version = -1;
  CHECK_CUDA(cudaDriverGetVersion(&version));
  EXPECT_EQ(version, 0);
}

}  // namespace
}  // namespace simulator_tests
