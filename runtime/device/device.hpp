// A rank's accelerator as the layers above see it: memory, streams, events and copies, all
// asynchronous. Handles are opaque, so that nothing here needs a CUDA header. The implementation
// lives in the plug-in libzshard_cuda.so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace zshard::device {

/// A cudaStream_t; null is the legacy default stream.
struct NativeStream {
  void* handle = nullptr;
};

/// A cudaEvent_t. What it stands for is the work of the stream that it was last recorded on.
struct NativeEvent {
  void* handle = nullptr;
};

/// One GPU, used by one rank. Calls may come from any thread. They queue work and return; none
/// waits for the device but where the text says so. Every call throws DeviceError (call, file,
/// line, rank) if the runtime refuses it, or reports an earlier fault of the device; those named
/// `free_*` and `destroy_*` never throw.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual int ordinal() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;  // "NVIDIA H200"
  /// Bytes that are free now, and in all.
  virtual void memory(std::int64_t& free_bytes, std::int64_t& total_bytes) const = 0;

  /// Device memory, 256-byte aligned, filled with zeros when the call returns. Throws OutOfMemory,
  /// with what is free.
  virtual std::byte* allocate(std::int64_t bytes) = 0;
  virtual void free_memory(std::byte* memory) noexcept = 0;
  /// Makes existing host memory pinned, piece by piece, so that copies run beside everything else.
  /// False, with the reason said once in the log, where the system refuses: copies are right all
  /// the same, only slower.
  virtual bool pin(std::byte* memory, std::int64_t bytes) = 0;
  virtual void unpin(std::byte* memory, std::int64_t bytes) noexcept = 0;

  /// A stream that does not wait for the default stream. name: static storage, for messages and
  /// profilers.
  virtual NativeStream make_stream(const char* name) = 0;
  virtual void destroy_stream(NativeStream stream) noexcept = 0;
  virtual NativeEvent make_event() = 0;
  virtual void destroy_event(NativeEvent event) noexcept = 0;
  /// From now on the event stands for everything that was queued on `stream` so far.
  virtual void record(NativeEvent event, NativeStream stream) = 0;
  /// What is queued on `stream` from now on starts after the event. An event that was never
  /// recorded counts as complete.
  virtual void wait(NativeStream stream, NativeEvent event) = 0;
  /// Whether the event is complete. Does not wait.
  [[nodiscard]] virtual bool reached(NativeEvent event) = 0;
  /// The same for a thread that only watches: nobody touches memory because of the answer.
  [[nodiscard]] virtual bool passed(NativeEvent event) = 0;

  /// Between any two memories, on `stream`. Host memory must stay as it is until the copy is
  /// complete.
  virtual void copy(void* target, const void* source, std::int64_t bytes, NativeStream stream) = 0;
  /// Sets every byte, on `stream`; device memory only.
  virtual void fill(void* target, int value, std::int64_t bytes, NativeStream stream) = 0;
};

}  // namespace zshard::device
