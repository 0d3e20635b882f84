#include "tests/simulator/stream.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <ctime>
#include <thread>
#include <utility>

namespace simulator {

namespace {

std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9e3779b97f4a7c15;
  std::uint64_t x = state;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Delays& delays() {
  static Delays instance;
  return instance;
}

Stream::Stream(int on_device, unsigned made_flags, int made_priority, std::size_t clock_id,
               std::uint64_t first, std::uint64_t made_number, const void* made_at)
    : device(on_device),
      flags(made_flags),
      priority(made_priority),
      id(clock_id),
      start(first),
      number(made_number),
      site(made_at),
      submitted(first),
      name("stream " + std::to_string(made_number)),
      completed_(first) {
  clock.set(id, first);
}

Stream::~Stream() {
  // The worker owns the stream until it ends, so nothing is left unless it never started.
  for (Task* task = inbox_.load(std::memory_order_acquire); task != nullptr;) {
    delete std::exchange(task, task->next);
  }
}

StreamPointer Stream::make(int device, unsigned flags, int priority, std::size_t id,
                           std::uint64_t start, std::uint64_t number, const void* site) {
  StreamPointer stream(new Stream(device, flags, priority, id, start, number, site));
  // Signals are the program's: a worker must not take them.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  // Detached: a stream that hangs must not keep the process from ending.
  std::thread([stream] { stream->work(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return stream;
}

void Stream::push(std::function<void()> run) {
  auto* task = new Task{std::move(run), ++submitted, nullptr};
  // Release alone: the queueing thread must not be ordered after the worker by queueing.
  task->next = inbox_.load(std::memory_order_relaxed);
  while (!inbox_.compare_exchange_weak(task->next, task, std::memory_order_release,
                                       std::memory_order_relaxed)) {
  }
  bell_.ring();
}

void Stream::close() {
  closing_.store(true, std::memory_order_release);
  bell_.ring();
}

void Stream::delay() {
  const std::uint64_t version = delays().version.load(std::memory_order_relaxed);
  if (version != version_) {
    version_ = version;
    generator_ = delays().seed.load(std::memory_order_relaxed) * 0x2545f4914f6cdd1d + number;
  }
  const double mean = delays().mean_microseconds.load(std::memory_order_relaxed);
  if (mean <= 0) return;
  // Most tasks start at once, some long after: that reorders more than equal delays would.
  const std::uint64_t random = next_random(generator_);
  if (random % 4 != 0) return;
  const double share = static_cast<double>(random >> 11) * 0x1p-53;
  const auto nanoseconds = static_cast<std::int64_t>(share * mean * 8000);
  timespec time{};
  time.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000);
  time.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000);
  nanosleep(&time, nullptr);
}

void Stream::work() {
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  pthread_setname_np(pthread_self(), "simulated");
  while (true) {
    bool closing = false;
    Task* newest = nullptr;
    bell_.wait_until([&] {
      closing = closing_.load(std::memory_order_acquire);
      newest = inbox_.exchange(nullptr, std::memory_order_acquire);
      return closing || newest != nullptr;
    });
    if (newest == nullptr) break;
    Task* oldest = nullptr;
    while (newest != nullptr) {
      Task* task = std::exchange(newest, newest->next);
      task->next = std::exchange(oldest, task);
    }
    while (oldest != nullptr) {
      Task* task = std::exchange(oldest, oldest->next);
      delay();
      task->run();
      const std::uint64_t position = task->position;
      delete task;
      completed_.store(position, std::memory_order_release);
      done_.ring();
    }
  }
  ended_.store(true, std::memory_order_release);
  done_.ring();
}

}  // namespace simulator
