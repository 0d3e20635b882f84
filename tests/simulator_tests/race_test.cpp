#include <cstdlib>

#include "tests/simulator_tests/simulated.hpp"

namespace simulator_tests {
namespace {

constexpr std::int64_t kCount = 512;

using Races = Simulated;

/// Kernels of these tests only claim memory: most of them race on purpose.
cudaError_t write(const char* name, cudaStream_t stream, float* memory, std::int64_t count) {
  return launch_claim(name, stream, {}, {{memory, bytes_of<float>(count)}});
}

cudaError_t update(const char* name, cudaStream_t stream, const float* in, float* out,
                   std::int64_t count) {
  return launch_claim(name, stream, {{in, bytes_of<float>(count)}},
                      {{out, bytes_of<float>(count)}});
}

/// Writes on one stream and reads on another, with or without the wait between them.
void produce_and_consume(bool with_wait) {
  cudaStream_t gather = make_stream("gather");
  cudaStream_t compute = make_stream("compute");
  cudaEvent_t event = make_event();
  auto* a = device_memory<float>(kCount);
  auto* b = device_memory<float>(kCount);
  EXPECT_CUDA(write("produce", gather, a, kCount));
  EXPECT_CUDA(cudaEventRecord(event, gather));
  if (with_wait) {
    EXPECT_CUDA(cudaStreamWaitEvent(compute, event, 0));
  }
  EXPECT_CUDA(update("consume", compute, a, b, kCount));
  EXPECT_CUDA(cudaDeviceSynchronize());
}

TEST_F(Races, AMissingWaitIsFoundByNameEveryTime) {
  for (int run = 0; run < 100; ++run) {
    simulator::reset();
    simulator::set_delays(run % 3 == 0 ? 0 : run, static_cast<std::uint64_t>(run));
    produce_and_consume(false);
    const std::vector<simulator::Race> races = simulator::races();
    ASSERT_EQ(races.size(), 1U) << all_races();
    EXPECT_EQ(races[0].first.operation, "produce");
    EXPECT_EQ(races[0].first.stream, "gather");
    EXPECT_TRUE(races[0].first.write);
    EXPECT_EQ(races[0].first.position, 1U);
    EXPECT_EQ(races[0].second.operation, "consume");
    EXPECT_EQ(races[0].second.stream, "compute");
    EXPECT_FALSE(races[0].second.write);
    EXPECT_EQ(races[0].bytes, bytes_of<float>(kCount));
    EXPECT_EQ(races[0].device, 0);
    EXPECT_NE(races[0].text().find("write by produce (gather, operation 1) and read by consume"),
              std::string::npos)
        << races[0].text();
  }
}

TEST_F(Races, TheSameWithTheWaitIsClean) {
  for (int run = 0; run < 100; ++run) {
    simulator::reset();
    simulator::set_delays(run % 3 == 0 ? 0 : run, static_cast<std::uint64_t>(run));
    produce_and_consume(true);
    ASSERT_EQ(all_races(), "");
  }
}

TEST_F(Races, AnIgnoredWaitIsAMissingOne) {
  simulator::ignore_waits("compute", "gather");
  produce_and_consume(true);
  EXPECT_EQ(simulator::ignored_waits(), 1);
  EXPECT_EQ(simulator::races().size(), 1U);
  simulator::reset();
  simulator::ignore_waits("gather", "compute");
  produce_and_consume(true);
  EXPECT_EQ(simulator::ignored_waits(), 0);
  EXPECT_EQ(all_races(), "");
}

TEST_F(Races, OnlyTheBytesThatOverlapCount) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(write("low", a, memory, 256));
  CHECK_CUDA(write("high", b, memory + 256, 256));
  EXPECT_EQ(all_races(), "");
  CHECK_CUDA(write("middle", b, memory + 200, 100));
  ASSERT_EQ(simulator::races().size(), 1U);
  EXPECT_EQ(simulator::races()[0].memory, memory + 200);
  EXPECT_EQ(simulator::races()[0].bytes, bytes_of<float>(56));
}

TEST_F(Races, TwoReadersAreNone) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(update("one", a, memory, device_memory<float>(kCount), kCount));
  CHECK_CUDA(update("two", b, memory, device_memory<float>(kCount), kCount));
  EXPECT_EQ(all_races(), "");
  // ... but a writer must wait for both.
  cudaEvent_t event = make_event();
  CHECK_CUDA(cudaEventRecord(event, a));
  cudaStream_t c = make_stream("c");
  CHECK_CUDA(cudaStreamWaitEvent(c, event, 0));
  CHECK_CUDA(write("write", c, memory, kCount));
  ASSERT_EQ(simulator::races().size(), 1U) << all_races();
  EXPECT_EQ(simulator::races()[0].first.operation, "two");
  EXPECT_FALSE(simulator::races()[0].first.write);
}

TEST_F(Races, OrderPassesThroughAThirdStream) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  cudaStream_t c = make_stream("c");
  cudaEvent_t event = make_event();
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(write("write", a, memory, kCount));
  CHECK_CUDA(cudaEventRecord(event, a));
  CHECK_CUDA(cudaStreamWaitEvent(b, event, 0));
  CHECK_CUDA(cudaEventRecord(event, b));
  CHECK_CUDA(cudaStreamWaitEvent(c, event, 0));
  CHECK_CUDA(update("read", c, memory, memory, kCount));
  EXPECT_EQ(all_races(), "");
}

TEST_F(Races, AnEventRecordedTooEarlyDoesNotHelp) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  cudaEvent_t event = make_event();
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(cudaEventRecord(event, a));
  CHECK_CUDA(write("write", a, memory, kCount));
  CHECK_CUDA(cudaStreamWaitEvent(b, event, 0));
  CHECK_CUDA(update("read", b, memory, device_memory<float>(kCount), kCount));
  EXPECT_EQ(simulator::races().size(), 1U);
}

TEST_F(Races, WhatTheHostSawCompleteIsOrdered) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  cudaEvent_t event = make_event();
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(write("write", a, memory, kCount));
  CHECK_CUDA(cudaStreamSynchronize(a));
  CHECK_CUDA(write("again", b, memory, kCount));
  CHECK_CUDA(cudaEventRecord(event, b));
  while (cudaEventQuery(event) == cudaErrorNotReady) {
    (void)cudaGetLastError();
  }
  CHECK_CUDA(write("third", a, memory, kCount));
  EXPECT_EQ(all_races(), "");
}

TEST_F(Races, QueueingAloneOrdersNothing) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(cudaMemsetAsync(memory, 0, 64, a));
  let_finish(a);
  CHECK_CUDA(cudaMemsetAsync(memory, 0, 64, b));
  ASSERT_EQ(simulator::races().size(), 1U);
  EXPECT_EQ(simulator::races()[0].first.operation, "cudaMemsetAsync");
}

TEST_F(Races, ThreadsOfOneDeviceShareWhatTheyKnow) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(write("write", a, memory, kCount));
  std::thread([&] { EXPECT_CUDA(cudaStreamSynchronize(a)); }).join();
  CHECK_CUDA(write("again", b, memory, kCount));
  EXPECT_EQ(all_races(), "");
}

TEST_F(Races, WhatAWatcherSeesOrdersNothing) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(write("write", a, memory, kCount));
  std::thread([&] {
    const simulator::Watching watching;
    EXPECT_CUDA(cudaStreamSynchronize(a));
  }).join();
  {
    const simulator::Watching watching;
    CHECK_CUDA(cudaStreamSynchronize(a));
  }
  CHECK_CUDA(write("again", b, memory, kCount));
  ASSERT_EQ(simulator::races().size(), 1U);
  // Only as long as it watches.
  CHECK_CUDA(cudaStreamSynchronize(b));
  CHECK_CUDA(write("third", a, memory, kCount));
  EXPECT_EQ(simulator::races().size(), 1U);
}

TEST_F(Races, ThreadsOfDifferentDevicesSayWhatTheyHandOver) {
  // Pinned memory that two devices use in turn.
  auto* shared = pinned_memory<float>(kCount);
  for (const bool annotated : {false, true}) {
    cudaStream_t first = nullptr;
    std::thread([&] {
      EXPECT_CUDA(cudaSetDevice(0));
      first = make_stream("first");
      EXPECT_CUDA(cudaMemcpyAsync(shared, device_memory<float>(kCount), kCount * sizeof(float),
                                  cudaMemcpyDeviceToHost, first));
      EXPECT_CUDA(cudaStreamSynchronize(first));
      if (annotated) simulator::release(shared);
    }).join();
    std::thread([&] {
      EXPECT_CUDA(cudaSetDevice(1));
      if (annotated) simulator::acquire(shared);
      EXPECT_CUDA(cudaMemcpyAsync(device_memory<float>(kCount), shared, kCount * sizeof(float),
                                  cudaMemcpyHostToDevice, make_stream("second")));
      EXPECT_CUDA(cudaDeviceSynchronize());
      simulator::release(&shared);
    }).join();
    if (!annotated) {
      ASSERT_EQ(simulator::races().size(), 1U);
      EXPECT_EQ(simulator::races()[0].device, -1);
      EXPECT_EQ(simulator::races()[0].first.stream, "first");
      EXPECT_EQ(simulator::races()[0].second.stream, "second");
      simulator::reset();
      shared = pinned_memory<float>(kCount);
    }
  }
  EXPECT_EQ(all_races(), "");
}

TEST_F(Races, PinnedMemoryThatIsReusedTooEarlyIsFound) {
  cudaStream_t out = make_stream("out");
  cudaStream_t in = make_stream("in");
  auto* memory = device_memory<float>(kCount);
  auto* pinned = pinned_memory<float>(kCount);
  // Written back from the device while it may still be read by a copy to it.
  CHECK_CUDA(cudaMemcpyAsync(memory, pinned, 1024, cudaMemcpyHostToDevice, in));
  let_finish(in);
  CHECK_CUDA(
      cudaMemcpyAsync(pinned, device_memory<float>(kCount), 1024, cudaMemcpyDeviceToHost, out));
  ASSERT_EQ(simulator::races().size(), 1U) << all_races();
  EXPECT_EQ(simulator::races()[0].memory, pinned);
  // The host's own write.
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemcpyAsync(memory, pinned, 1024, cudaMemcpyHostToDevice, in));
  simulator::touch("refill", pinned, 4, true);
  ASSERT_EQ(simulator::races().size(), 2U) << all_races();
  EXPECT_EQ(simulator::races()[1].second.operation, "refill");
  EXPECT_EQ(simulator::races()[1].second.stream, "host");
  CHECK_CUDA(cudaStreamSynchronize(in));
  simulator::touch("refill", pinned, 4, true);
  EXPECT_EQ(simulator::races().size(), 2U) << all_races();
}

TEST_F(Races, UnpinningUnderACopyIsFound) {
  std::vector<float> values(kCount, 1);
  cudaStream_t in = make_stream("in");
  auto* memory = device_memory<float>(kCount);
  CHECK_CUDA(cudaHostRegister(values.data(), kCount * sizeof(float), cudaHostRegisterDefault));
  CHECK_CUDA(cudaMemcpyAsync(memory, values.data(), 2048, cudaMemcpyHostToDevice, in));
  CHECK_CUDA(cudaHostUnregister(values.data()));
  ASSERT_EQ(simulator::races().size(), 1U);
  EXPECT_EQ(simulator::races()[0].second.operation, "cudaHostUnregister");
  CHECK_CUDA(cudaDeviceSynchronize());
}

TEST_F(Races, FreedMemoryIsForgotten) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* first = device_memory<float>(kCount);
  CHECK_CUDA(write("write", a, first, kCount));
  CHECK_CUDA(cudaFree(first));  // waits for the device
  auto* second = device_memory<float>(kCount);
  EXPECT_EQ(first, second) << "this test wants the same memory again";
  CHECK_CUDA(write("write", b, second, kCount));
  EXPECT_EQ(all_races(), "");
}

TEST_F(Races, AStreamInTheIdOfAFinishedOneIsAnotherOne) {
  auto* memory = device_memory<float>(kCount);
  cudaStream_t other = make_stream("other");
  cudaStream_t first = make_stream("first");
  CHECK_CUDA(write("one", first, memory, kCount));
  CHECK_CUDA(cudaStreamDestroy(first));  // not waited for
  cudaStream_t second = make_stream("second");
  CHECK_CUDA(write("two", second, memory, kCount));
  ASSERT_EQ(simulator::races().size(), 1U) << all_races();
  CHECK_CUDA(cudaStreamSynchronize(second));
  CHECK_CUDA(cudaStreamDestroy(second));  // waited for
  cudaStream_t third = make_stream("third");
  CHECK_CUDA(write("three", third, memory, kCount));
  CHECK_CUDA(write("four", other, memory, kCount));
  ASSERT_EQ(simulator::races().size(), 2U) << all_races();
  EXPECT_EQ(simulator::races()[1].first.operation, "three");
  EXPECT_EQ(simulator::races()[1].first.position, 1U);
}

TEST_F(Races, RepeatedOnesAreCountedNotListed) {
  cudaStream_t a = make_stream("a");
  cudaStream_t b = make_stream("b");
  auto* memory = device_memory<float>(kCount);
  for (int i = 0; i < 10; ++i) {
    CHECK_CUDA(write("one", a, memory, kCount));
    CHECK_CUDA(write("two", b, memory, kCount));
  }
  ASSERT_EQ(simulator::races().size(), 2U);
  EXPECT_EQ(simulator::races()[0].count, 10);
  EXPECT_EQ(simulator::races()[1].count, 9);
}

TEST_F(Races, ThousandsOfOperationsAreQuick) {
  simulator::set_delays(0, 1);
  cudaStream_t streams[3] = {make_stream("a"), make_stream("b"), make_stream("c")};
  std::vector<float*> memory;
  for (int i = 0; i < 300; ++i) memory.push_back(device_memory<float>(kCount));
  cudaEvent_t event = make_event();
  for (int i = 0; i < 5000; ++i) {
    cudaStream_t stream = streams[i % 3];
    if (i > 0) {
      CHECK_CUDA(cudaStreamWaitEvent(stream, event, 0));
    }
    const auto at = static_cast<std::size_t>(i) % memory.size();
    CHECK_CUDA(update("part", stream, memory[at] + i % 7, memory[(at + 1) % 300] + 100, 200));
    CHECK_CUDA(cudaEventRecord(event, stream));
  }
  EXPECT_EQ(all_races(), "");
}

#if defined(__SANITIZE_THREAD__)
using RacesDeathTest = Simulated;

// The simulated streams share no lock, so the thread sanitizer sees the missing wait as well.
TEST_F(RacesDeathTest, TheThreadSanitizerSeesAMissingWaitToo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    auto* memory = device_memory<float>(kCount);
    cudaStream_t gather = make_stream("gather");
    cudaStream_t compute = make_stream("compute");
    EXPECT_CUDA(launch_fill("produce", gather, memory, kCount, 1));
    EXPECT_CUDA(launch_increment("consume", compute, memory, device_memory<float>(kCount), kCount));
    EXPECT_CUDA(cudaDeviceSynchronize());
    std::exit(0);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(66), "data race");
}
#endif

}  // namespace
}  // namespace simulator_tests
