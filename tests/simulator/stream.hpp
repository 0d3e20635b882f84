// A simulated stream: a worker thread that runs tasks in order, each after a random delay.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/simulator/clock.hpp"
#include "tests/simulator/futex.hpp"

namespace simulator {

class Stream;
using StreamPointer = std::shared_ptr<Stream>;

/// A point of a stream: what was queued there up to it, and what is ordered before that.
struct Mark {
  StreamPointer stream;
  std::uint64_t position = 0;
  Clock clock;
};

/// The random delay before each task.
struct Delays {
  std::atomic<double> mean_microseconds{5};
  std::atomic<std::uint64_t> seed{1};
  std::atomic<std::uint64_t> version{0};  // streams start their generators anew when it changes
};
Delays& delays();

/// The worker takes no lock, ever; host threads that queue take `submit`.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  /// id: of the stream in clocks. start: positions continue from there, for an id that was in use
  /// before. number: for messages and the random generator.
  static StreamPointer make(int device, unsigned flags, int priority, std::size_t id,
                            std::uint64_t start, std::uint64_t number, const void* site);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  const int device;
  const unsigned flags;
  const int priority;
  const std::size_t id;
  const std::uint64_t start;
  const std::uint64_t number;
  const void* const site;

  /// Held by host threads while they queue something; guards the members below it.
  std::mutex submit;
  Clock clock;
  std::uint64_t submitted;
  std::string name;

  /// Appends a task. The caller holds `submit`. Its position is `submitted` afterwards.
  void push(std::function<void()> run);
  [[nodiscard]] bool reached(std::uint64_t position) const {
    return completed_.load(std::memory_order_acquire) >= position;
  }
  void wait_for(std::uint64_t position) const {
    done_.wait_until([&] { return reached(position); });
  }
  /// No task follows; the worker ends when it has run what there is.
  void close();
  [[nodiscard]] bool ended() const { return ended_.load(std::memory_order_acquire); }
  void wait_end() const {
    done_.wait_until([&] { return ended(); });
  }

 private:
  struct Task {
    std::function<void()> run;
    std::uint64_t position = 0;
    Task* next = nullptr;
  };
  Stream(int device, unsigned flags, int priority, std::size_t id, std::uint64_t start,
         std::uint64_t number, const void* site);
  void work();
  void delay();

  std::atomic<Task*> inbox_{nullptr};
  Bell bell_;  // tasks came
  Bell done_;  // a task is done
  std::atomic<std::uint64_t> completed_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> ended_{false};
  std::uint64_t generator_ = 0;
  std::uint64_t version_ = ~std::uint64_t{0};
};

}  // namespace simulator
