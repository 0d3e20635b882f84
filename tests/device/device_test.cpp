// CudaDevice over the simulated runtime: bytes arrive, every refused call is an error of the right
// class that says where, nothing is left over, and a lost device stays lost.
#include <sys/mman.h>

#include <functional>

#include "runtime/base/log.hpp"
#include "tests/device/lab.hpp"

namespace zshard::lab {
namespace {

constexpr int kOrdinal = 1;
constexpr int kRank = 3;

class DeviceTest : public SimulatedTest {
 protected:
  static std::unique_ptr<device::Device> open() { return simulated().open(kOrdinal, kRank); }
};

TEST_F(DeviceTest, NameAndMemory) {
  simulator::set_device_memory(std::int64_t{1} << 28);
  const auto gpu = open();
  EXPECT_EQ(gpu->ordinal(), kOrdinal);
  EXPECT_EQ(gpu->name(), simulated().gpus()[kOrdinal].name);
  std::int64_t free_bytes = 0;
  std::int64_t total = 0;
  gpu->memory(free_bytes, total);
  EXPECT_EQ(total, std::int64_t{1} << 28);
  const std::int64_t before = free_bytes;
  const Block block(*gpu, 1 << 20);
  gpu->memory(free_bytes, total);
  EXPECT_LE(free_bytes, before - (1 << 20));
}

TEST_F(DeviceTest, NewMemoryIsZeroAndAligned) {
  const auto gpu = open();
  Queue queue(*gpu);
  for (const std::int64_t bytes : {1, 255, 4096, 1 << 20}) {
    const Block block(*gpu, bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.get()) % 256, 0U);
    const auto seen =
        from_device<std::uint8_t>(*gpu, queue, block.get(), static_cast<std::size_t>(bytes));
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 0), bytes);
  }
  EXPECT_EQ(gpu->allocate(0), nullptr);
  EXPECT_THROW((void)gpu->allocate(-1), UsageError);
}

TEST_F(DeviceTest, CopiesAndFills) {
  const auto gpu = open();
  Queue queue(*gpu);
  const Block a(*gpu, 1000);
  const Block b(*gpu, 1000);
  std::vector<std::uint8_t> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint8_t>(i * 7);
  to_device(*gpu, queue, a.get(), values);
  gpu->copy(b.get(), a.get(), 1000, queue.stream());
  gpu->fill(b.get() + 10, 0xab, 20, queue.stream());
  gpu->copy(b.get(), a.get() + 1, 0, queue.stream());
  std::fill_n(values.begin() + 10, 20, std::uint8_t{0xab});
  EXPECT_EQ(from_device<std::uint8_t>(*gpu, queue, b.get(), 1000), values);
  EXPECT_THROW(gpu->copy(b.get(), a.get(), -1, queue.stream()), UsageError);
}

TEST_F(DeviceTest, StreamsWaitForEvents) {
  const auto gpu = open();
  simulator::set_delays(300, 7);
  Queue first(*gpu, "first");
  Queue second(*gpu, "second");
  const device::NativeEvent event = gpu->make_event();
  // Never recorded: complete.
  EXPECT_TRUE(gpu->reached(event));
  gpu->wait(second.stream(), event);
  const Block a(*gpu, 4096);
  const Block b(*gpu, 4096);
  for (int turn = 1; turn < 20; ++turn) {
    gpu->fill(a.get(), turn, 4096, first.stream());
    gpu->record(event, first.stream());
    gpu->wait(second.stream(), event);
    gpu->copy(b.get(), a.get(), 4096, second.stream());
    const auto seen = from_device<std::uint8_t>(*gpu, second, b.get(), 4096);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), turn), 4096);
    // The next fill must not run before this copy.
    gpu->record(event, second.stream());
    gpu->wait(first.stream(), event);
  }
  ASSERT_TRUE(first.ends());
  gpu->destroy_event(event);
}

TEST_F(DeviceTest, EventIsReachedWhenItsWorkIsDone) {
  const auto gpu = open();
  Queue queue(*gpu);
  const Block block(*gpu, 256);
  simulator::fail({.call = "cudaMemsetAsync", .how = simulator::How::hang});
  gpu->fill(block.get(), 1, 256, queue.stream());
  queue.mark();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(queue.reached());
  simulator::fault(kOrdinal, cudaErrorLaunchFailure);
  EXPECT_THROW((void)queue.reached(), DeviceError);
}

// -- each call, refused --

struct Refusal {
  const char* call;
  cudaError_t code;
  std::function<void(device::Device&, Queue&, Block&)> act;
  int after = 0;
};

TEST_F(DeviceTest, RefusedCallsAreNamedAndLeaveNothing) {
  const auto gpu = open();
  Queue queue(*gpu);
  Block block(*gpu, 4096);
  std::vector<std::byte> host(4096);
  const auto allocate = [](device::Device& d, Queue&, Block&) { d.free_memory(d.allocate(512)); };
  const auto stream = [](device::Device& d, Queue&, Block&) {
    d.destroy_stream(d.make_stream("s"));
  };
  const auto event = [](device::Device& d, Queue&, Block&) { d.destroy_event(d.make_event()); };
  const std::vector<Refusal> refusals = {
      {"cudaMalloc", cudaErrorInvalidValue, allocate},
      {"cudaStreamCreateWithPriority", cudaErrorInvalidValue, allocate},
      {"cudaMemsetAsync", cudaErrorInvalidValue, allocate},
      {"cudaStreamSynchronize", cudaErrorInvalidResourceHandle, allocate},
      {"cudaMemGetInfo", cudaErrorInvalidValue,
       [](device::Device& d, Queue&, Block&) {
         std::int64_t a = 0;
         std::int64_t b = 0;
         d.memory(a, b);
       }},
      {"cudaDeviceGetStreamPriorityRange", cudaErrorInvalidValue, stream},
      {"cudaStreamCreateWithPriority", cudaErrorMemoryAllocation, stream},
      {"cudaEventCreateWithFlags", cudaErrorInvalidValue, event},
      {"cudaEventRecord", cudaErrorInvalidResourceHandle,
       [](device::Device&, Queue& q, Block&) { q.mark(); }},
      {"cudaStreamWaitEvent", cudaErrorInvalidResourceHandle,
       [](device::Device& d, Queue& q, Block&) {
         const device::NativeEvent made = d.make_event();
         try {
           d.wait(q.stream(), made);
         } catch (...) {
           d.destroy_event(made);
           throw;
         }
         d.destroy_event(made);
       }},
      {"cudaEventQuery", cudaErrorInvalidResourceHandle,
       [](device::Device&, Queue& q, Block&) { (void)q.reached(); }},
      {"cudaMemcpyAsync", cudaErrorInvalidValue,
       [&](device::Device& d, Queue& q, Block& b) {
         d.copy(b.get(), host.data(), 4096, q.stream());
       }},
      {"cudaMemsetAsync", cudaErrorInvalidValue,
       [](device::Device& d, Queue& q, Block& b) { d.fill(b.get(), 0, 4096, q.stream()); }},
      {"cudaHostRegister", cudaErrorInvalidDevice,
       [&](device::Device& d, Queue&, Block&) {
         d.unpin(host.data(), d.pin(host.data(), 4096) ? 4096 : 0);
       }},
  };
  queue.mark();
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.call);
    ASSERT_TRUE(queue.ends());
    const std::vector<std::string> before = simulator::leaks();
    simulator::fail({.call = refusal.call, .code = refusal.code});
    std::string said;
    if (refusal.code == cudaErrorMemoryAllocation) {
      said = thrown<OutOfMemory>([&] { refusal.act(*gpu, queue, block); });
    } else {
      said = thrown<DeviceError>([&] { refusal.act(*gpu, queue, block); });
    }
    EXPECT_TRUE(contains(said, std::string(refusal.call)));
    EXPECT_TRUE(contains(said, cudaGetErrorName(refusal.code)));
    EXPECT_TRUE(contains(said, cudaGetErrorString(refusal.code)));
    EXPECT_TRUE(contains(said, "(GPU 1, rank 3, runtime/device/cuda_device.cpp:"));
    EXPECT_EQ(simulator::leaks(), before);
    // Nothing is wrong afterwards, and the error is not found again by a launch.
    refusal.act(*gpu, queue, block);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(simulator::leaks(), before);
  }
}

TEST_F(DeviceTest, OpeningFails) {
  simulator::fail({.call = "cudaGetDeviceProperties", .code = cudaErrorInvalidDevice});
  EXPECT_TRUE(contains(thrown<DeviceError>([] { (void)open(); }), "cudaGetDeviceProperties"));
  std::thread([] {
    simulator::fail({.call = "cudaSetDevice", .code = cudaErrorDevicesUnavailable});
    EXPECT_TRUE(contains(thrown<DeviceError>([] { (void)open(); }), "exclusive mode"));
  }).join();
}

TEST_F(DeviceTest, OutOfMemorySaysWhatIsFree) {
  simulator::set_device_memory(std::int64_t{1} << 24);
  const auto gpu = open();
  const std::string said = thrown<OutOfMemory>([&] { (void)gpu->allocate(std::int64_t{1} << 25); });
  EXPECT_TRUE(contains(said, "cudaMalloc of 32.00 MiB (33554432 bytes)"));
  EXPECT_TRUE(contains(said, "of 16.00 MiB are free (GPU 1, rank 3,"));
  const Block block(*gpu, 1 << 20);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(DeviceTest, DestroyingNeverThrows) {
  const auto gpu = open();
  for (const char* call : {"cudaFree", "cudaStreamDestroy", "cudaEventDestroy"}) {
    simulator::fail({.call = call, .code = cudaErrorInvalidValue});
  }
  std::byte* memory = gpu->allocate(256);  // its own stream takes one of the failures
  const device::NativeStream stream = gpu->make_stream("s");
  const device::NativeEvent event = gpu->make_event();
  gpu->free_memory(memory);
  gpu->destroy_stream(stream);
  gpu->destroy_event(event);
  gpu->free_memory(nullptr);
  gpu->destroy_stream({});
  gpu->destroy_event({});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  // What was refused is left over.
  EXPECT_EQ(simulator::leaks().size(), 3U);
  simulator::reset();
}

// -- faults --

TEST_F(DeviceTest, FaultPoisonsTheDevice) {
  faults_expected_ = true;
  const auto gpu = open();
  const auto other = simulated().open(kOrdinal + 1, kRank + 1);
  {
    Queue queue(*gpu);
    Queue elsewhere(*other);
    const Block block(*gpu, 256);
    simulator::fault(kOrdinal, cudaErrorIllegalAddress);
    const std::string first = thrown<DeviceError>([&] { queue.mark(); });
    EXPECT_TRUE(contains(first, "cudaErrorIllegalAddress"));
    EXPECT_TRUE(contains(first, "rank 3"));
    EXPECT_TRUE(contains(first, "start a new one from the last checkpoint"));
    // From every call, and from every thread, the same account of it.
    EXPECT_EQ(thrown<DeviceError>([&] { (void)gpu->allocate(1); }), first);
    EXPECT_EQ(thrown<DeviceError>([&] { (void)queue.reached(); }), first);
    EXPECT_EQ(thrown<DeviceError>([&] { (void)gpu->make_event(); }), first);
    std::thread([&] {
      EXPECT_EQ(thrown<DeviceError>([&] { gpu->fill(block.get(), 0, 1, queue.stream()); }), first);
    }).join();
    EXPECT_EQ(thrown<DeviceError>([&] { (void)simulated().make_kernels(*gpu); }), first);
    EXPECT_TRUE(elsewhere.ends());
  }
  simulator::reset();
}

TEST_F(DeviceTest, FaultOfAKernelIsFoundByTheNextQuery) {
  faults_expected_ = true;
  const auto gpu = open();
  const auto kernels = simulated().make_kernels(*gpu);
  {
    Queue queue(*gpu);
    const Block a(*gpu, 4096);
    const Block b(*gpu, 4096);
    simulator::fail(
        {.call = "convert", .code = cudaErrorLaunchFailure, .how = simulator::How::fault});
    std::string first;
    EXPECT_TRUE(comes_true([&] {
      first = thrown<DeviceError>([&] {
        kernels->convert(a.get(), DType::f32, b.get(), DType::bf16, 100, queue.stream());
        (void)queue.ends(0.01);
      });
      return !first.empty();
    }));
    EXPECT_TRUE(contains(first, "cudaErrorLaunchFailure"));
    EXPECT_EQ(thrown<DeviceError>([&] {
                kernels->convert(a.get(), DType::f32, b.get(), DType::bf16, 1, queue.stream());
              }),
              first);
  }
  simulator::reset();
}

TEST_F(DeviceTest, RefusedLaunchNamesTheKernel) {
  const auto gpu = open();
  const auto kernels = simulated().make_kernels(*gpu);
  Queue queue(*gpu);
  const Block a(*gpu, 4096);
  const Block b(*gpu, 4096);
  simulator::fail({.call = "convert", .code = cudaErrorNoKernelImageForDevice});
  const std::string said = thrown<DeviceError>(
      [&] { kernels->convert(a.get(), DType::f32, b.get(), DType::f16, 100, queue.stream()); });
  EXPECT_TRUE(contains(said, "convert"));
  EXPECT_TRUE(contains(said, "ZSHARD_CUDA_ARCHITECTURES"));
  EXPECT_TRUE(contains(said, "rank 3"));
  kernels->convert(a.get(), DType::f32, b.get(), DType::f16, 100, queue.stream());
  EXPECT_TRUE(queue.ends());
}

/// A thread that works for two ranks: each call goes to its own device.
TEST_F(DeviceTest, CurrentDeviceFollowsTheCalls) {
  const auto first = simulated().open(0, 0);
  const auto second = simulated().open(2, 1);
  Queue a(*first);
  Queue b(*second);
  const Block on_first(*first, 256);
  const Block on_second(*second, 256);
  for (int turn = 1; turn < 4; ++turn) {
    first->fill(on_first.get(), turn, 256, a.stream());
    second->fill(on_second.get(), turn + 10, 256, b.stream());
    // The user's loop may choose a device itself.
    ASSERT_EQ(cudaSetDevice(5), cudaSuccess);
    const auto from_first = from_device<std::uint8_t>(*first, a, on_first.get(), 256);
    const auto from_second = from_device<std::uint8_t>(*second, b, on_second.get(), 256);
    EXPECT_EQ(std::count(from_first.begin(), from_first.end(), turn), 256);
    EXPECT_EQ(std::count(from_second.begin(), from_second.end(), turn + 10), 256);
  }
}

// -- pinned memory --

/// Address space that takes memory only where it is touched.
class Reserve {
 public:
  explicit Reserve(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::runtime_error("no address space");
  }
  ~Reserve() { munmap(memory_, bytes_); }
  Reserve(const Reserve&) = delete;
  Reserve& operator=(const Reserve&) = delete;
  [[nodiscard]] std::byte* get() const { return static_cast<std::byte*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_;
};

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

TEST_F(DeviceTest, PinnedPiecesAreCopiedAcross) {
  const auto gpu = open();
  Queue queue(*gpu);
  const std::int64_t bytes = 2 * kGiB + 4096;
  const Reserve host(bytes + 4096);
  ASSERT_TRUE(gpu->pin(host.get(), bytes));
  EXPECT_EQ(simulator::calls("cudaHostRegister"), 3);
  const Block block(*gpu, 16384);
  // Over the first cut; over the end of what is pinned; all of it pageable.
  for (const std::int64_t at : {kGiB - 4096, 2 * kGiB - 1000, bytes - 2048, std::int64_t{0}}) {
    for (std::int64_t i = 0; i < 6000; ++i) host.get()[at + i] = static_cast<std::byte>(i * 3 + at);
    gpu->copy(block.get(), host.get() + at, 6000, queue.stream());
    ASSERT_TRUE(queue.ends());
    std::vector<std::byte> back(6000);
    gpu->copy(back.data(), block.get(), 6000, queue.stream());
    ASSERT_TRUE(queue.ends());
    EXPECT_EQ(std::memcmp(back.data(), host.get() + at, 6000), 0) << at;
    std::memset(host.get() + at, 0, 6000);
    gpu->copy(host.get() + at, block.get(), 6000, queue.stream());
    ASSERT_TRUE(queue.ends());
    EXPECT_EQ(std::memcmp(back.data(), host.get() + at, 6000), 0) << at;
  }
  gpu->unpin(host.get() + 4096, 4096);  // never pinned as such: nothing happens
  EXPECT_EQ(simulator::calls("cudaHostUnregister"), 0);
  gpu->unpin(host.get(), bytes);
  EXPECT_EQ(simulator::calls("cudaHostUnregister"), 3);
}

TEST_F(DeviceTest, RefusedPinIsUndoneAndSaidOnce) {
  std::mutex mutex;
  std::vector<std::string> lines;
  const base::LogSink before = base::set_log_sink([&](const base::LogRecord& record) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(record.message);
    EXPECT_EQ(record.rank, kRank);
    EXPECT_EQ(record.topic, base::Topic::device);
  });
  {
    const auto gpu = open();
    const Reserve host(3 * kGiB);
    for (int turn = 0; turn < 2; ++turn) {
      simulator::fail({.call = "cudaHostRegister", .after = 2, .code = cudaErrorMemoryAllocation});
      EXPECT_FALSE(gpu->pin(host.get(), 3 * kGiB));
      EXPECT_TRUE(simulator::leaks().empty());
    }
    EXPECT_TRUE(gpu->pin(host.get(), 3 * kGiB));
    // The device takes what is still pinned with it.
  }
  base::set_log_sink(before);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_TRUE(contains(lines.front(), "host memory stays pageable"));
  EXPECT_TRUE(contains(lines.front(), "cudaErrorMemoryAllocation"));
}

}  // namespace
}  // namespace zshard::lab
