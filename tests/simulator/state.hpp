// Everything that the simulated runtime keeps, and what the calls of the CUDA runtime and of NCCL
// are made of. Locks are short and of host threads; workers of streams take none of them.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/simulator/access_map.hpp"
#include "tests/simulator/memory.hpp"
#include "tests/simulator/simulator.hpp"
#include "tests/simulator/stream.hpp"

namespace simulator {

struct Event {
  int device = 0;
  unsigned flags = 0;
  const void* site = nullptr;
  std::mutex mutex;
  std::optional<Mark> mark;  // empty: never recorded
  /// When the stream came to the record, in nanoseconds; for events with timing.
  std::shared_ptr<std::atomic<std::int64_t>> stamp;
};

struct Allocation {
  std::int64_t bytes = 0;  // asked for
  const void* site = nullptr;
};

/// Pinned host memory.
struct Registration {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool owned = false;  // made by cudaMallocHost
  const void* site = nullptr;
  AccessMap accesses;
};

struct SimulatedDevice {
  int ordinal = 0;
  std::atomic<int> fault{0};  // the sticky error

  std::mutex memory_mutex;
  std::map<std::uintptr_t, Allocation> allocations;
  std::int64_t used = 0;
  std::int64_t peak = 0;
  AccessMap accesses;

  /// What host threads that use the device know to be complete.
  std::mutex host_mutex;
  Clock host;
  std::atomic<std::uint64_t> host_version{0};

  /// Held while something is queued on the default stream or on one that takes part in its order.
  std::mutex legacy_mutex;

  std::mutex streams_mutex;
  StreamPointer default_stream;
  std::vector<StreamPointer> streams;                           // without the default one
  std::vector<std::pair<std::size_t, std::uint64_t>> free_ids;  // and their counts
};

/// Bytes that a call touches, and where accesses to them are noted.
struct Touch {
  const char* operation = nullptr;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool write = false;
  AccessMap* map = nullptr;
  std::shared_ptr<Registration> pinned;  // keeps `map`
  int device = -1;
};

enum class Place { device, pinned, pageable, invalid };
/// What a range is. touch: filled for device and pinned memory, but for operation and write.
struct Located {
  Place place = Place::invalid;
  Touch touch;
};

/// What an allocation of so many bytes takes of its device.
inline std::uintptr_t rounded_size(std::uintptr_t bytes) {
  constexpr std::uintptr_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Injected {
  How how = How::refused;
  int code = 0;
};

/// A host thread.
struct ThreadState {
  int device = 0;
  cudaError_t last = cudaSuccess;
  std::uint64_t generation = 0;
  Clock known;
  std::array<std::uint64_t, kMostDevices> seen{};  // host_version of each device
  std::optional<std::size_t> id;                   // in clocks, once it touched memory
  std::uint64_t touches = 0;
  bool in_worker = false;
  bool watching = false;  // sees without learning
};

class State {
 public:
  static State& get();
  /// Of the calling thread, cleared if there was a reset since.
  ThreadState& thread();

  // -- settings --
  std::atomic<int> device_count{0};
  std::atomic<std::int64_t> device_bytes{std::int64_t{1} << 30};
  std::atomic<int> driver_version{CUDART_VERSION};
  std::atomic<int> nccl_version{0};
  std::atomic<bool> serial_collectives{true};
  std::atomic<bool> remote_errors{true};
  /// Grows at each reset; kernels that hang look at it.
  std::atomic<std::uint64_t> generation{1};

  /// The machine's number of a device that the process sees as `ordinal`.
  [[nodiscard]] int physical(int ordinal) const;
  SimulatedDevice& device(int ordinal) { return devices_[static_cast<std::size_t>(ordinal)]; }

  // -- calls --
  /// Counts a call; the failure that it meets, if any.
  std::optional<Injected> count(const std::string& name, int device);
  std::int64_t calls(const std::string& name);
  void add_failure(const Failure& failure);
  void report_fault(std::string text);

  // -- handles --
  StreamPointer make_stream(int device, unsigned flags, int priority, const void* site);
  /// The stream of a handle; null (the default stream of the current device) included. Empty if
  /// there is none.
  StreamPointer stream(cudaStream_t handle);
  bool destroy_stream(cudaStream_t handle);
  std::shared_ptr<Event> make_event(int device, unsigned flags, const void* site);
  std::shared_ptr<Event> event(cudaEvent_t handle);
  bool destroy_event(cudaEvent_t handle);
  /// All streams of the device.
  std::vector<StreamPointer> streams(int device);

  // -- memory --
  cudaError_t allocate(int device, std::size_t bytes, const void* site, void** memory);
  cudaError_t free(void* memory);
  cudaError_t pin(void* memory, std::size_t bytes, bool owned, const void* site);
  cudaError_t unpin(void* memory, bool owned);
  Located locate(const void* memory, std::int64_t bytes);
  std::shared_ptr<Registration> pinned(std::uintptr_t begin, std::uintptr_t end, bool& partly);

  // -- order --
  /// Queues a task with its touches: the check for races, then the push. Returns the position. The
  /// body gets whether the device is at fault: then it does nothing but tidy up.
  std::uint64_t submit(const StreamPointer& stream, const std::vector<Touch>& touches,
                       std::function<void(bool faulted)> body);
  /// The stream's present end.
  Mark mark(const StreamPointer& stream, std::function<void()> at_mark = {});
  /// What is queued on the stream from now on comes after the mark.
  void wait(const StreamPointer& stream, const Mark& mark);
  /// The host saw that the work of the clock is complete.
  void learn(int device, const Clock& clock);
  /// What the calling thread knows, for work or calls on the device.
  const Clock& knowledge(int device);
  void touch(const char* name, std::uintptr_t begin, std::uintptr_t end, bool write);
  void release(const void* token);
  void acquire(const void* token);
  void ignore_waits(const char* waiting, const char* recorded);
  bool ignored(const StreamPointer& waiting, const StreamPointer& recorded);
  std::int64_t ignored_waits();

  std::vector<Race> races();
  std::vector<std::string> faults();
  std::vector<std::string> leaks();
  void reset();
  [[nodiscard]] bool in_use();

  // -- what NCCL's part adds --
  std::function<void(std::vector<std::string>&)> communicator_leaks;
  std::function<void()> end_communicators;
  std::function<void()> forget_communicators;

 private:
  State();
  std::size_t take_id();
  /// Waits that the order of the default stream asks for. The caller holds legacy_mutex.
  std::vector<Mark> legacy_waits(const StreamPointer& stream);
  bool legacy(const Stream& stream);
  void check(const std::vector<Touch>& touches, const OperationPointer& like, const Clock& clock);
  void report(const std::vector<Conflict>& conflicts, int device);
  StreamPointer start_stream(int device, unsigned flags, int priority, const void* site);

  std::array<SimulatedDevice, kMostDevices> devices_;
  std::vector<int> visible_;  // CUDA_VISIBLE_DEVICES
  std::atomic<std::uint64_t> stream_numbers_{0};
  std::atomic<std::size_t> next_id_{0};

  std::shared_mutex handles_mutex_;
  std::unordered_map<const void*, StreamPointer> streams_;
  std::unordered_map<const void*, std::shared_ptr<Event>> events_;
  std::vector<StreamPointer> ending_;  // destroyed, perhaps still at work
  std::map<std::uintptr_t, std::shared_ptr<Registration>> pinned_;

  std::shared_mutex calls_mutex_;
  std::unordered_map<std::string, std::unique_ptr<std::atomic<std::int64_t>>> calls_;
  std::atomic<int> armed_{0};
  std::mutex failures_mutex_;
  struct Armed {
    Failure failure;
    int seen = 0;
  };
  std::vector<Armed> failures_;

  std::mutex reports_mutex_;
  std::vector<Race> races_;
  std::vector<std::string> faults_;

  std::mutex tokens_mutex_;
  std::map<const void*, Clock> tokens_;

  std::atomic<int> ignoring_{0};
  std::mutex ignored_mutex_;
  std::vector<std::pair<std::optional<std::string>, std::optional<std::string>>> ignored_names_;
  std::int64_t ignored_count_ = 0;
};

/// "name+0x12 (library.so)" of a code address.
std::string describe_site(const void* site);

}  // namespace simulator
