// The calls of the CUDA runtime that zshard makes, on the simulated device. What each one does is
// what the CUDA runtime's manual says of it.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulator/queue.hpp"
#include "tests/simulator/state.hpp"

namespace simulator {

namespace {

/// One call: counted, refused if a failure was injected, and its result kept for
/// cudaGetLastError().
class Call {
 public:
  explicit Call(const char* name) : name_(name), state_(State::get()), thread_(state_.thread()) {
    const std::optional<Injected> injected = state_.count(name, thread_.device);
    if (thread_.in_worker) {
      state_.report_fault(std::string(name) + ": called from a host function");
      refused_ = cudaErrorNotPermitted;
    } else if (injected && injected->how == How::refused) {
      refused_ = static_cast<cudaError_t>(injected->code);
    } else {
      injected_ = injected;
    }
  }
  /// The error that the call returns at once: an injected one, or that of a device.
  [[nodiscard]] cudaError_t early(int device) const {
    if (refused_ != cudaSuccess) return refused_;
    return sticky(device);
  }
  [[nodiscard]] cudaError_t sticky(int device) const {
    return static_cast<cudaError_t>(state_.device(device).fault.load(std::memory_order_relaxed));
  }
  [[nodiscard]] cudaError_t early() const { return early(thread_.device); }
  [[nodiscard]] cudaError_t refused() const { return refused_; }
  cudaError_t end(cudaError_t result) {
    // A sticky error is the device's, whichever device the thread turns to.
    if (result != cudaSuccess && result != sticky(thread_.device)) thread_.last = result;
    return result;
  }
  /// A handle that is none.
  cudaError_t dead(const char* what) {
    state_.report_fault(std::string(name_) + ": " + what + " does not exist");
    return end(cudaErrorInvalidResourceHandle);
  }
  [[nodiscard]] State& state() const { return state_; }
  [[nodiscard]] ThreadState& thread() const { return thread_; }
  [[nodiscard]] const std::optional<Injected>& injected() const { return injected_; }
  [[nodiscard]] const char* name() const { return name_; }

 private:
  const char* name_;
  State& state_;
  ThreadState& thread_;
  cudaError_t refused_ = cudaSuccess;
  std::optional<Injected> injected_;
};

/// Waits until the mark is complete; the host knows it then.
cudaError_t synchronize(State& state, const Mark& mark) {
  mark.stream->wait_for(mark.position);
  const int fault = state.device(mark.stream->device).fault.load(std::memory_order_relaxed);
  if (fault != 0) return static_cast<cudaError_t>(fault);
  state.learn(mark.stream->device, mark.clock);
  return cudaSuccess;
}

bool direction_fits(cudaMemcpyKind kind, bool from_device, bool to_device) {
  switch (kind) {
    case cudaMemcpyDefault:
      return true;
    case cudaMemcpyHostToHost:
      return !from_device && !to_device;
    case cudaMemcpyHostToDevice:
      return !from_device && to_device;
    case cudaMemcpyDeviceToHost:
      return from_device && !to_device;
    case cudaMemcpyDeviceToDevice:
      return from_device && to_device;
  }
  return false;
}

cudaError_t copy(Call& call, void* target, const void* source, std::size_t bytes,
                 cudaMemcpyKind kind, cudaStream_t handle, bool asynchronous) {
  State& state = call.state();
  const StreamPointer stream = state.stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  if (bytes == 0) return cudaSuccess;
  const auto count = static_cast<std::int64_t>(bytes);
  Located from = state.locate(source, count);
  Located to = state.locate(target, count);
  const bool from_device = from.place == Place::device;
  const bool to_device = to.place == Place::device;
  if (from.place == Place::invalid || to.place == Place::invalid ||
      !direction_fits(kind, from_device, to_device)) {
    char text[160];
    std::snprintf(text, sizeof text,
                  ": %zu bytes from %p to %p: not in one allocation or registration, or the kind "
                  "of copy does not fit",
                  bytes, source, target);
    state.report_fault(call.name() + std::string(text));
    return call.end(cudaErrorInvalidValue);
  }
  if (from.touch.begin < to.touch.end && to.touch.begin < from.touch.end) {
    state.report_fault(std::string(call.name()) + ": source and target overlap");
  }

  if (from.place == Place::pageable || to.place == Place::pageable) {
    (void)state.count("pageable copy", stream->device);
  }
  const bool staged = from.place == Place::pageable && to_device;
  if (staged && !asynchronous) {
    if (const cudaError_t error = synchronize(state, state.mark(stream))) return call.end(error);
  }
  std::shared_ptr<std::vector<std::byte>> staging;
  if (staged) {
    const auto* first = static_cast<const std::byte*>(source);
    staging = std::make_shared<std::vector<std::byte>>(first, first + bytes);
  }
  std::vector<Touch> touches;
  from.touch.operation = call.name();
  to.touch.operation = call.name();
  to.touch.write = true;
  touches.push_back(from.touch);
  touches.push_back(to.touch);
  queue(stream, touches, call.injected(), [staging, source, target, bytes] {
    std::memmove(reach(target), staging ? staging->data() : reach(source), bytes);
  });

  const bool waits = to.place == Place::pageable || (!from_device && !to_device) ||
                     (!asynchronous && !staged && !(from_device && to_device));
  if (!waits) return cudaSuccess;
  return call.end(simulator::synchronize(state, state.mark(stream)));
}

cudaError_t fill(Call& call, void* memory, int value, std::size_t bytes, cudaStream_t handle) {
  State& state = call.state();
  const StreamPointer stream = state.stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  if (bytes == 0) return cudaSuccess;
  Located located = state.locate(memory, static_cast<std::int64_t>(bytes));
  if (located.place != Place::device && located.place != Place::pinned) {
    state.report_fault(std::string(call.name()) + ": not in one allocation");
    return call.end(cudaErrorInvalidValue);
  }
  located.touch.operation = call.name();
  located.touch.write = true;
  queue(stream, {located.touch}, call.injected(),
        [memory, value, bytes] { std::memset(reach(memory), value, bytes); });
  return cudaSuccess;
}

std::int64_t now_nanoseconds() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

bool device_exists(const State& state, int device) {
  return device >= 0 && device < state.device_count.load();
}

cudaError_t devices_usable(const State& state) {
  if (state.driver_version.load() < CUDART_VERSION / 1000 * 1000) {
    return cudaErrorInsufficientDriver;
  }
  return state.device_count.load() == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t make_stream(Call& call, cudaStream_t* stream, unsigned flags, int priority,
                        const void* site) {
  if (const cudaError_t error = devices_usable(call.state())) return call.end(error);
  if (const cudaError_t error = call.early()) return call.end(error);
  if (stream == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0) {
    return call.end(cudaErrorInvalidValue);
  }
  const StreamPointer made = call.state().make_stream(call.thread().device, flags, priority, site);
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  return cudaSuccess;
}

constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

}  // namespace

}  // namespace simulator

using simulator::Call;
using simulator::Mark;
using simulator::State;
using simulator::StreamPointer;

extern "C" {

// -- devices --

cudaError_t cudaGetDeviceCount(int* count) {
  Call call("cudaGetDeviceCount");
  if (count == nullptr) return call.end(cudaErrorInvalidValue);
  *count = 0;
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  *count = call.state().device_count.load();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  Call call("cudaSetDevice");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (!simulator::device_exists(call.state(), device)) return call.end(cudaErrorInvalidDevice);
  call.thread().device = device;
  return call.end(call.early(device));
}

cudaError_t cudaGetDevice(int* device) {
  Call call("cudaGetDevice");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (device == nullptr) return call.end(cudaErrorInvalidValue);
  *device = call.thread().device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  Call call("cudaGetDeviceProperties");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (properties == nullptr) return call.end(cudaErrorInvalidValue);
  if (!simulator::device_exists(call.state(), device)) return call.end(cudaErrorInvalidDevice);
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof properties->name, "Simulated device");
  properties->uuid.bytes[0] = static_cast<char>(call.state().physical(device));
  properties->totalGlobalMem = static_cast<std::size_t>(call.state().device_bytes.load());
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->asyncEngineCount = 3;
  properties->concurrentKernels = 1;
  properties->unifiedAddressing = 1;
  properties->canMapHostMemory = 1;
  properties->streamPrioritiesSupported = 1;
  properties->pciBusID = call.state().physical(device) + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Call call("cudaDeviceGetAttribute");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (value == nullptr) return call.end(cudaErrorInvalidValue);
  if (!simulator::device_exists(call.state(), device)) return call.end(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrAsyncEngineCount:
      *value = 3;
      return cudaSuccess;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrStreamPrioritiesSupported:
      *value = 1;
      return cudaSuccess;
    default:
      return call.end(cudaErrorNotSupported);
  }
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  Call call("cudaDeviceGetPCIBusId");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (text == nullptr || length < 13) return call.end(cudaErrorInvalidValue);
  if (!simulator::device_exists(call.state(), device)) return call.end(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0",
                static_cast<unsigned>(call.state().physical(device) + 1) & 0xffU);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  Call call("cudaDeviceGetStreamPriorityRange");
  if (const cudaError_t error = call.early()) return call.end(error);
  if (least != nullptr) *least = simulator::kLeastPriority;
  if (greatest != nullptr) *greatest = simulator::kGreatestPriority;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  Call call("cudaDriverGetVersion");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (version == nullptr) return call.end(cudaErrorInvalidValue);
  *version = call.state().driver_version.load();
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  Call call("cudaRuntimeGetVersion");
  if (const cudaError_t error = call.refused()) return call.end(error);
  if (version == nullptr) return call.end(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Call call("cudaDeviceSynchronize");
  if (const cudaError_t error = call.early()) return call.end(error);
  for (const StreamPointer& stream : call.state().streams(call.thread().device)) {
    const Mark mark = call.state().mark(stream);
    if (const cudaError_t error = simulator::synchronize(call.state(), mark))
      return call.end(error);
  }
  return cudaSuccess;
}

// -- memory --

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  Call call("cudaMemGetInfo");
  if (const cudaError_t error = call.early()) return call.end(error);
  if (free_bytes == nullptr || total_bytes == nullptr) return call.end(cudaErrorInvalidValue);
  const std::int64_t total = call.state().device_bytes.load();
  *total_bytes = static_cast<std::size_t>(total);
  *free_bytes = static_cast<std::size_t>(total - simulator::allocated_bytes(call.thread().device));
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  Call call("cudaMalloc");
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (const cudaError_t error = call.early()) return call.end(error);
  if (memory == nullptr) return call.end(cudaErrorInvalidValue);
  return call.end(
      call.state().allocate(call.thread().device, bytes, __builtin_return_address(0), memory));
}

cudaError_t cudaFree(void* memory) {
  Call call("cudaFree");
  if (call.refused() != cudaSuccess) return call.end(call.refused());
  // Even at fault: so that what is left over at the end is what nobody gave back.
  const cudaError_t error = call.state().free(memory);
  if (error != cudaSuccess) {
    call.state().report_fault("cudaFree: not allocated, or freed before");
    return call.end(error);
  }
  return call.end(call.early());
}

cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  Call call("cudaMallocHost");
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (const cudaError_t error = call.early()) return call.end(error);
  if (memory == nullptr) return call.end(cudaErrorInvalidValue);
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  constexpr std::size_t kPage = 4096;
  void* made = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (made == nullptr) return call.end(cudaErrorMemoryAllocation);
  const cudaError_t error = call.state().pin(made, bytes, true, __builtin_return_address(0));
  if (error != cudaSuccess) {
    std::free(made);
    return call.end(error);
  }
  *memory = made;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  Call call("cudaFreeHost");
  if (call.refused() != cudaSuccess) return call.end(call.refused());
  if (memory == nullptr) return cudaSuccess;
  const cudaError_t error = call.state().unpin(memory, true);
  if (error != cudaSuccess) {
    call.state().report_fault("cudaFreeHost: not made by cudaMallocHost, or freed before");
    return call.end(error);
  }
  std::free(memory);
  return call.end(call.early());
}

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned /*flags*/) {
  Call call("cudaHostRegister");
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (const cudaError_t error = call.early()) return call.end(error);
  return call.end(call.state().pin(memory, bytes, false, __builtin_return_address(0)));
}

cudaError_t cudaHostUnregister(void* memory) {
  Call call("cudaHostUnregister");
  if (call.refused() != cudaSuccess) return call.end(call.refused());
  const cudaError_t error = call.state().unpin(memory, false);
  if (error != cudaSuccess) {
    call.state().report_fault("cudaHostUnregister: not registered");
    return call.end(error);
  }
  return call.end(call.early());
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  Call call("cudaPointerGetAttributes");
  if (const cudaError_t error = call.early()) return call.end(error);
  if (attributes == nullptr) return call.end(cudaErrorInvalidValue);
  *attributes = cudaPointerAttributes{};
  const simulator::Located located = call.state().locate(memory, 1);
  void* plain = const_cast<void*>(memory);
  switch (located.place) {
    case simulator::Place::device:
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = located.touch.device;
      attributes->devicePointer = plain;
      break;
    case simulator::Place::pinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->device = call.thread().device;
      attributes->devicePointer = plain;
      attributes->hostPointer = plain;
      break;
    case simulator::Place::pageable:
    case simulator::Place::invalid:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -2;
      attributes->hostPointer = plain;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  Call call("cudaMemcpyAsync");
  return copy(call, target, source, bytes, kind, stream, true);
}

cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
  Call call("cudaMemcpy");
  return copy(call, target, source, bytes, kind, nullptr, false);
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  Call call("cudaMemsetAsync");
  return fill(call, memory, value, bytes, stream);
}

cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  Call call("cudaMemset");
  return fill(call, memory, value, bytes, nullptr);
}

// -- streams --

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  Call call("cudaStreamCreate");
  return make_stream(call, stream, cudaStreamDefault, 0, __builtin_return_address(0));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  Call call("cudaStreamCreateWithFlags");
  return make_stream(call, stream, flags, 0, __builtin_return_address(0));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  Call call("cudaStreamCreateWithPriority");
  return make_stream(call, stream, flags, priority, __builtin_return_address(0));
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Call call("cudaStreamGetPriority");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  Call call("cudaStreamGetFlags");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  *flags = stream->flags;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  Call call("cudaStreamGetDevice");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  *device = stream->device;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Call call("cudaStreamDestroy");
  if (call.refused() != cudaSuccess) return call.end(call.refused());
  if (stream == nullptr || !call.state().destroy_stream(stream)) return call.dead("the stream");
  return call.end(call.early());
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Call call("cudaStreamSynchronize");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  return call.end(simulator::synchronize(call.state(), call.state().mark(stream)));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Call call("cudaStreamQuery");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  Mark mark;
  {
    const std::lock_guard lock(stream->submit);
    mark = {stream, stream->submitted, stream->clock};
  }
  if (!stream->reached(mark.position)) return call.end(cudaErrorNotReady);
  return call.end(simulator::synchronize(call.state(), mark));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned /*flags*/) {
  Call call("cudaStreamWaitEvent");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  const std::shared_ptr<simulator::Event> event = call.state().event(event_handle);
  if (!event) return call.dead("the event");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  std::optional<Mark> mark;
  {
    const std::lock_guard lock(event->mutex);
    mark = event->mark;
  }
  if (mark) call.state().wait(stream, *mark);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Call call("cudaLaunchHostFunc");
  const StreamPointer stream = call.state().stream(handle);
  if (!stream) return call.dead("the stream");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  if (function == nullptr) return call.end(cudaErrorInvalidValue);
  queue(stream, {}, call.injected(), [function, data] { function(data); });
  return cudaSuccess;
}

// -- events --

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Call call("cudaEventCreateWithFlags");
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (const cudaError_t error = call.early()) return call.end(error);
  if (event == nullptr) return call.end(cudaErrorInvalidValue);
  *event = reinterpret_cast<cudaEvent_t>(
      call.state().make_event(call.thread().device, flags, __builtin_return_address(0)).get());
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  Call call("cudaEventCreate");
  if (const cudaError_t error = simulator::devices_usable(call.state())) return call.end(error);
  if (const cudaError_t error = call.early()) return call.end(error);
  if (event == nullptr) return call.end(cudaErrorInvalidValue);
  *event = reinterpret_cast<cudaEvent_t>(
      call.state().make_event(call.thread().device, 0, __builtin_return_address(0)).get());
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Call call("cudaEventDestroy");
  if (call.refused() != cudaSuccess) return call.end(call.refused());
  if (!call.state().destroy_event(event)) return call.dead("the event");
  return call.end(call.early());
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Call call("cudaEventRecord");
  const StreamPointer stream = call.state().stream(stream_handle);
  if (!stream) return call.dead("the stream");
  const std::shared_ptr<simulator::Event> event = call.state().event(handle);
  if (!event) return call.dead("the event");
  if (const cudaError_t error = call.early(stream->device)) return call.end(error);
  if (event->device != stream->device) return call.end(cudaErrorInvalidResourceHandle);
  std::shared_ptr<std::atomic<std::int64_t>> stamp;
  std::function<void()> at_mark;
  if ((event->flags & cudaEventDisableTiming) == 0) {
    stamp = std::make_shared<std::atomic<std::int64_t>>(0);
    at_mark = [stamp] { stamp->store(simulator::now_nanoseconds(), std::memory_order_relaxed); };
  }
  Mark mark = call.state().mark(stream, std::move(at_mark));
  const std::lock_guard lock(event->mutex);
  event->mark = std::move(mark);
  event->stamp = std::move(stamp);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Call call("cudaEventQuery");
  const std::shared_ptr<simulator::Event> event = call.state().event(handle);
  if (!event) return call.dead("the event");
  if (const cudaError_t error = call.early(event->device)) return call.end(error);
  std::optional<Mark> mark;
  {
    const std::lock_guard lock(event->mutex);
    mark = event->mark;
  }
  if (!mark) return cudaSuccess;
  if (!mark->stream->reached(mark->position)) return call.end(cudaErrorNotReady);
  return call.end(simulator::synchronize(call.state(), *mark));
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Call call("cudaEventSynchronize");
  const std::shared_ptr<simulator::Event> event = call.state().event(handle);
  if (!event) return call.dead("the event");
  if (const cudaError_t error = call.early(event->device)) return call.end(error);
  std::optional<Mark> mark;
  {
    const std::lock_guard lock(event->mutex);
    mark = event->mark;
  }
  return mark ? call.end(simulator::synchronize(call.state(), *mark)) : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  Call call("cudaEventElapsedTime");
  if (milliseconds == nullptr) return call.end(cudaErrorInvalidValue);
  std::int64_t stamps[2] = {};
  for (int i = 0; i < 2; ++i) {
    const std::shared_ptr<simulator::Event> event = call.state().event(i == 0 ? first : last);
    if (!event) return call.dead("the event");
    if (const cudaError_t error = call.early(event->device)) return call.end(error);
    const std::lock_guard lock(event->mutex);
    if (!event->mark || !event->stamp) return call.end(cudaErrorInvalidResourceHandle);
    if (!event->mark->stream->reached(event->mark->position)) return call.end(cudaErrorNotReady);
    stamps[i] = event->stamp->load(std::memory_order_relaxed);
  }
  *milliseconds = static_cast<float>(static_cast<double>(stamps[1] - stamps[0]) * 1e-6);
  return cudaSuccess;
}

// -- errors --

cudaError_t cudaGetLastError() {
  simulator::ThreadState& thread = State::get().thread();
  const int fault = State::get().device(thread.device).fault.load(std::memory_order_relaxed);
  const cudaError_t error = std::exchange(thread.last, cudaSuccess);
  return fault != 0 ? static_cast<cudaError_t>(fault) : error;
}

cudaError_t cudaPeekAtLastError() {
  simulator::ThreadState& thread = State::get().thread();
  const int fault = State::get().device(thread.device).fault.load(std::memory_order_relaxed);
  return fault != 0 ? static_cast<cudaError_t>(fault) : thread.last;
}

}  // extern "C"
