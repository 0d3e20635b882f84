#include <cmath>
#include <cstring>

#include "tests/simulator_tests/simulated.hpp"

namespace simulator_tests {
namespace {

using Memory = Simulated;
using MemoryDeathTest = Simulated;

TEST_F(MemoryDeathTest, HostCodeThatTouchesDeviceMemoryCrashes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto* memory = device_memory<float>(16);
#if defined(ZSHARD_SANITIZER)
  // The sanitizer's handler reports the signal and leaves with its own status.
  EXPECT_DEATH(*const_cast<volatile float*>(memory) = 1, "SEGV|DEADLYSIGNAL");
  EXPECT_DEATH((void)*const_cast<volatile float*>(memory), "SEGV|DEADLYSIGNAL");
#else
  EXPECT_EXIT(*const_cast<volatile float*>(memory) = 1, testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT((void)*const_cast<volatile float*>(memory), testing::KilledBySignal(SIGSEGV), "");
#endif
}

TEST_F(Memory, IsAlignedAndFreshMemoryIsNoNumber) {
  for (const std::int64_t bytes : {1, 255, 256, 257, 100000}) {
    void* memory = nullptr;
    CHECK_CUDA(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0U);
  }
  auto* memory = device_memory<float>(100);
  for (const float value : fetch(memory, 100)) EXPECT_TRUE(std::isnan(value));
}

TEST_F(Memory, EndsWhereTheDeviceEnds) {
  simulator::set_device_memory(1 << 20);
  void* a = nullptr;
  void* b = nullptr;
  void* c = nullptr;
  CHECK_CUDA(cudaMalloc(&a, 600 << 10));
  EXPECT_EQ(cudaMalloc(&b, 600 << 10), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  CHECK_CUDA(cudaMalloc(&b, 424 << 10));
  EXPECT_EQ(cudaMalloc(&c, 1), cudaErrorMemoryAllocation);
  std::size_t free_bytes = 1;
  std::size_t total_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  EXPECT_EQ(free_bytes, 0U);
  EXPECT_EQ(total_bytes, 1U << 20);
  CHECK_CUDA(cudaFree(a));
  CHECK_CUDA(cudaMalloc(&c, 300 << 10));
  EXPECT_EQ(simulator::allocated_bytes(0), 724 << 10);
  EXPECT_EQ(simulator::peak_bytes(0), 1 << 20);
}

TEST_F(Memory, WrongFreesAreRefused) {
  auto* memory = device_memory<char>(1000);
  EXPECT_EQ(cudaFree(memory + 256), cudaErrorInvalidValue);
  CHECK_CUDA(cudaFree(memory));
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  int on_the_stack = 0;
  EXPECT_EQ(cudaFree(&on_the_stack), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  EXPECT_EQ(simulator::faults().size(), 3U);
}

TEST_F(Memory, PageableSourcesAreStagedAtTheCall) {
  simulator::set_delays(200, 3);
  cudaStream_t stream = make_stream("in");
  auto* memory = device_memory<int>(1000);
  for (int run = 0; run < 20; ++run) {
    std::vector<int> values(1000, run);
    CHECK_CUDA(cudaMemcpyAsync(memory, values.data(), 4000, cudaMemcpyHostToDevice, stream));
    std::fill(values.begin(), values.end(), -1);
    ASSERT_EQ(fetch(memory, 1000)[999], run);
  }
}

TEST_F(Memory, PageableTargetsAreThereWhenTheCallReturns) {
  simulator::set_delays(200, 3);
  cudaStream_t stream = make_stream("out");
  auto* memory = device_memory<float>(1000);
  for (int run = 0; run < 20; ++run) {
    std::vector<float> values(1000);
    CHECK_CUDA(launch_fill("fill", stream, memory, 1000, static_cast<float>(run)));
    CHECK_CUDA(cudaMemcpyAsync(values.data(), memory, 4000, cudaMemcpyDefault, stream));
    ASSERT_EQ(values[999], static_cast<float>(run));
  }
  // ... and the host knows that the stream has come that far.
  CHECK_CUDA(launch_fill("other", make_stream("other"), memory, 1000, 1));
  EXPECT_EQ(all_races(), "");
}

TEST_F(Memory, PinnedSourcesAreReadWhenTheStreamComesToThem) {
  cudaStream_t stream = make_stream("in");
  auto* pinned = pinned_memory<int>(1000);
  std::fill(pinned, pinned + 1000, 1);
  auto* memory = device_memory<int>(1000);
  // The stream is held back until the host has overwritten the source: the copy must see that.
  static std::atomic<bool> gate;
  gate = false;
  CHECK_CUDA(cudaLaunchHostFunc(
      stream,
      [](void*) {
        while (!gate.load()) std::this_thread::yield();
      },
      nullptr));
  CHECK_CUDA(cudaMemcpyAsync(memory, pinned, 4000, cudaMemcpyHostToDevice, stream));
  std::fill(pinned, pinned + 1000, 2);
  gate = true;
  EXPECT_EQ(fetch(memory, 1000)[0], 2);
}

TEST_F(Memory, PinnedTargetsAreWrittenLate) {
  cudaStream_t stream = make_stream("out");
  auto* pinned = pinned_memory<int>(100);
  std::fill(pinned, pinned + 100, 1);
  static std::atomic<bool> gate;
  gate = false;
  CHECK_CUDA(cudaLaunchHostFunc(
      stream,
      [](void*) {
        while (!gate.load()) std::this_thread::yield();
      },
      nullptr));
  CHECK_CUDA(cudaMemcpyAsync(pinned, device_memory<int>(100), 400, cudaMemcpyDeviceToHost, stream));
  EXPECT_EQ(pinned[50], 1);
  gate = true;
  CHECK_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(pinned[50], -1);
}

TEST_F(Memory, RegistrationsAreKnownByTheirExactRange) {
  std::vector<char> host(3 * 4096);
  char* first = host.data();
  CHECK_CUDA(cudaHostRegister(first, 4096, cudaHostRegisterDefault));
  EXPECT_EQ(cudaHostRegister(first + 4000, 4096, cudaHostRegisterDefault),
            cudaErrorHostMemoryAlreadyRegistered);
  CHECK_CUDA(cudaHostRegister(first + 4096, 4096, cudaHostRegisterDefault));
  auto* memory = device_memory<char>(3 * 4096);
  cudaStream_t stream = make_stream("in");
  CHECK_CUDA(cudaMemcpyAsync(memory, first, 4096, cudaMemcpyHostToDevice, stream));
  CHECK_CUDA(cudaMemcpyAsync(memory, first + 8192, 4096, cudaMemcpyHostToDevice, stream));
  EXPECT_EQ(cudaMemcpyAsync(memory, first, 8192, cudaMemcpyHostToDevice, stream),
            cudaErrorInvalidValue)
      << "two registrations";
  EXPECT_EQ(cudaMemcpyAsync(memory, first + 8000, 4096, cudaMemcpyHostToDevice, stream),
            cudaErrorInvalidValue)
      << "pinned in part";
  CHECK_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(cudaHostUnregister(first + 1), cudaErrorHostMemoryNotRegistered);
  CHECK_CUDA(cudaHostUnregister(first));
  EXPECT_EQ(cudaHostUnregister(first), cudaErrorHostMemoryNotRegistered);
  CHECK_CUDA(cudaHostUnregister(first + 4096));
}

TEST_F(Memory, CopiesMustFitTheirKindAndTheirAllocation) {
  auto* memory = device_memory<char>(1000);
  char host[1000] = {};
  EXPECT_EQ(cudaMemcpy(memory, host, 1001, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory, host, 1000, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(memory + 10, 0, 991), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host, 0, 10), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory, host, 0, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory, host, 1000, cudaMemcpyDefault), cudaSuccess);
}

TEST_F(Memory, CopiesBetweenDevicesWork) {
  CHECK_CUDA(cudaSetDevice(1));
  auto* there = device_memory<int>(100);
  CHECK_CUDA(cudaSetDevice(0));
  auto* here = device_memory<int>(100);
  std::vector<int> values(100, 5);
  CHECK_CUDA(cudaMemcpy(here, values.data(), 400, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemcpy(there, here, 400, cudaMemcpyDeviceToDevice));
  CHECK_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(fetch(there, 100)[99], 5);
}

TEST_F(Memory, PointersTellWhatTheyAre) {
  auto* memory = device_memory<char>(1000);
  auto* pinned = pinned_memory<char>(1000);
  char host = 0;
  cudaPointerAttributes attributes{};
  CHECK_CUDA(cudaPointerGetAttributes(&attributes, memory + 999));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  CHECK_CUDA(cudaPointerGetAttributes(&attributes, pinned));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  CHECK_CUDA(cudaPointerGetAttributes(&attributes, &host));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST_F(Memory, AKernelOutsideItsAllocationIsAnIllegalAddress) {
  cudaStream_t stream = make_stream("work");
  auto* memory = device_memory<float>(100);
  CHECK_CUDA(launch_fill("wild", stream, memory + 1, 100, 1));  // the launch itself succeeds
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory), 4), cudaErrorIllegalAddress);
  ASSERT_EQ(simulator::faults().size(), 1U);
  EXPECT_NE(simulator::faults()[0].find("wild: writes"), std::string::npos);
}

TEST_F(Memory, LeaksAreListedWithWhereTheyWereMade) {
  EXPECT_EQ(all_lines(simulator::leaks()), "");
  cudaStream_t stream = make_stream("left over");
  cudaEvent_t event = make_event();
  auto* memory = device_memory<char>(1234);
  static char host[64];
  CHECK_CUDA(cudaHostRegister(host, 64, 0));
  const std::string text = all_lines(simulator::leaks());
  EXPECT_NE(text.find("allocation of 1234 bytes on device 0, made in "), std::string::npos) << text;
  EXPECT_NE(text.find("stream \"left over\" of device 0"), std::string::npos) << text;
  EXPECT_NE(text.find("event of device 0"), std::string::npos) << text;
  EXPECT_NE(text.find("registration of 64 bytes"), std::string::npos) << text;
  EXPECT_NE(text.find("test_simulator"), std::string::npos) << text;
  EXPECT_EQ(simulator::leaks().size(), 4U);
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK_CUDA(cudaEventDestroy(event));
  CHECK_CUDA(cudaFree(memory));
  CHECK_CUDA(cudaHostUnregister(host));
  EXPECT_EQ(all_lines(simulator::leaks()), "");
}

}  // namespace
}  // namespace simulator_tests
