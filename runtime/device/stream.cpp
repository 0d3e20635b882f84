#include "runtime/device/stream.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/futex.hpp"

namespace zshard::device {
namespace {

class InlineStream final : public Stream {
 public:
  void submit(const Task& task) override {
    const std::uint64_t mine = submitted_.fetch_add(1) + 1;
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    try {
      task.run(task.object, task.argument);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    completed_.store(mine);
  }
  void kick() override {}
  void wait(std::uint64_t /*count: a task is complete when submit returns*/) override {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  std::uint64_t submitted() const override { return submitted_.load(); }
  std::uint64_t completed() const override { return completed_.load(); }

 private:
  std::atomic<std::uint64_t> submitted_{0};
  std::atomic<std::uint64_t> completed_{0};
  std::exception_ptr failure_;
};

class ThreadStream final : public Stream {
 public:
  ThreadStream(std::uint64_t capacity, int delay_microseconds, std::uint64_t seed)
      : tasks_(capacity),
        delay_(delay_microseconds),
        random_(seed * 2 + 1),
        worker_([this] { work(); }) {}

  ~ThreadStream() override {
    stop_.store(true);
    wakes_.add();
    worker_.join();
  }

  void submit(const Task& task) override {
    // A full queue: the oldest task frees its place.
    if (submitted_.load() >= tasks_.size()) wait(submitted_.load() + 1 - tasks_.size());
    tasks_[submitted_.load() % tasks_.size()] = task;
    submitted_.fetch_add(1);
  }

  void kick() override {
    if (completed_.load() < submitted_.load()) wakes_.add();
  }

  void wait(std::uint64_t count) override {
    const auto low = static_cast<std::uint32_t>(count);
    while (completed_.load(std::memory_order_acquire) < count && !failed_.load()) {
      // What the worker has not begun is done here: waking it would take longer.
      if (std::unique_lock<std::mutex> turn(turn_, std::try_to_lock); turn.owns_lock()) {
        while (completed_.load() < count && run_next()) {
        }
        turn.unlock();
        if (declined_.exchange(false)) kick();  // what is left is the worker's
        continue;
      }
      kick();  // who has the turn may have taken its last look at the queue before the submit
      completes_.wait(low, [this, count] {
        std::uint64_t lowest = awaited_.load();
        while (count < lowest && !awaited_.compare_exchange_weak(lowest, count)) {
        }
        return failed_.load();
      });
    }
    if (failed_.load() && completed_.load() < count) std::rethrow_exception(failure_);
  }

  std::uint64_t submitted() const override { return submitted_.load(); }
  std::uint64_t completed() const override { return completed_.load(); }

 private:
  void work() {
    std::uint32_t seen = 0;
    while (true) {
      // Every slice it looks for tasks that nobody woke it for.
      bool slept = false;
      wakes_.wait(seen + 1, [&] {
        const bool waiting = !failed_.load() && completed_.load() < submitted_.load();
        return stop_.load() || (std::exchange(slept, true) && waiting);
      });
      if (stop_.load()) return;
      seen = wakes_.value();  // before the tasks: a later wake is for later ones
      // Not waiting for the turn: who has it says when there is something left to do.
      declined_.store(true);
      const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
      if (!turn.owns_lock()) continue;
      declined_.store(false);
      while (!stop_.load() && run_next()) {
      }
    }
  }

  /// Runs the oldest task that has not run; false if there is none or the stream has failed. By the
  /// holder of turn_.
  bool run_next() {
    const std::uint64_t next = completed_.load();
    if (failed_.load() || next >= submitted_.load()) return false;
    const Task task = tasks_[next % tasks_.size()];
    pause();
    try {
      task.run(task.object, task.argument);
    } catch (...) {
      failure_ = std::current_exception();
      failed_.store(true);
      completes_.nudge();
      return false;
    }
    completed_.store(next + 1, std::memory_order_release);
    completes_.advance();
    // A sleeper is woken for what it waits for, not for every task before that.
    if (next + 1 >= awaited_.load()) {
      awaited_.store(kNobody);
      completes_.nudge();
    }
    return true;
  }

  void pause() {
    if (delay_ <= 0) return;
    random_ = random_ * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto time =
        static_cast<std::int64_t>((random_ >> 33) % static_cast<std::uint64_t>(delay_ + 1));
    std::this_thread::sleep_for(std::chrono::microseconds(time));
  }

  std::vector<Task> tasks_;
  const int delay_;
  std::uint64_t random_;
  std::atomic<std::uint64_t> submitted_{0};
  std::atomic<std::uint64_t> completed_{0};
  base::Counter wakes_;
  std::mutex turn_;  // of the thread that runs tasks: the worker, or one that waits
  base::Counter completes_;
  static constexpr std::uint64_t kNobody = std::numeric_limits<std::uint64_t>::max();
  std::atomic<std::uint64_t> awaited_{kNobody};  // the lowest count that a sleeper waits for
  std::atomic<bool> declined_{false};  // the worker was woken while another thread had the turn
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // written before failed_, read after it
  std::thread worker_;          // last: starts when all else stands
};

}  // namespace

std::unique_ptr<Stream> make_inline_stream() {
  return std::make_unique<InlineStream>();
}

std::unique_ptr<Stream> make_thread_stream(std::uint64_t capacity, int delay_microseconds,
                                           std::uint64_t seed) {
  return std::make_unique<ThreadStream>(std::max<std::uint64_t>(capacity, 2), delay_microseconds,
                                        seed);
}

}  // namespace zshard::device
