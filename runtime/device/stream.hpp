// A queue of work that runs in order. On a host rank it is a worker thread with a FIFO, or the
// calling thread itself; the count of finished tasks is the event that others wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

#include "runtime/base/futex.hpp"

namespace zshard::device {

/// One piece of work: a function, its object and an argument. Plain, so that submitting allocates
/// nothing.
struct Task {
  void (*run)(void* object, std::uint64_t argument) = nullptr;
  void* object = nullptr;
  std::uint64_t argument = 0;
};

/// FIFO of tasks. submit and wait may be called from any thread, but submits are ordered by the
/// caller. After a task has thrown, later tasks are not run; wait() throws that task's error from
/// then on.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Appends a task. Blocks only while the queue is full (`capacity` of make_*).
  virtual void submit(const Task& task) = 0;
  /// Says that the caller goes on without waiting: what it has submitted runs beside it from now
  /// on. Without it the tasks run once somebody waits for them, and within kSlice.
  virtual void kick() = 0;
  static constexpr std::chrono::microseconds kSlice{base::kSliceMicroseconds};
  /// Returns once the first `count` tasks are complete. Everything they wrote is visible
  /// afterwards. Throws the first task's error that stopped the stream.
  virtual void wait(std::uint64_t count) = 0;
  [[nodiscard]] virtual std::uint64_t submitted() const = 0;
  [[nodiscard]] virtual std::uint64_t completed() const = 0;
};

/// Runs each task on the thread that submits it; its error leaves submit().
std::unique_ptr<Stream> make_inline_stream();

/// A worker thread. capacity: tasks that may be outstanding (a power of two). delay_microseconds: a
/// random pause of up to that before each task, for tests of missing waits; 0 none. Destruction
/// waits for the running task and drops the queue: what makes a task return early is the owner's
/// affair.
std::unique_ptr<Stream> make_thread_stream(std::uint64_t capacity, int delay_microseconds,
                                           std::uint64_t seed);

}  // namespace zshard::device
