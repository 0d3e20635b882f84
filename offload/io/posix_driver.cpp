#include "offload/io/posix_driver.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "offload/io/thread.hpp"
#include "runtime/base/futex.hpp"

namespace zshard::offload {
namespace {

/// A FIFO that never grows.
template <class Item>
class Ring {
 public:
  explicit Ring(std::size_t capacity) : items_(capacity) {}
  [[nodiscard]] bool empty() const { return size_ == 0; }
  void push(const Item& item) { items_[(first_ + size_++) % items_.size()] = item; }
  Item pop() {
    const Item item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  std::vector<Item> items_;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

class PosixDriver final : public Driver {
 public:
  PosixDriver(std::vector<int> files, int threads)
      : files_(std::move(files)),
        thread_count_(threads),
        requests_(static_cast<std::size_t>(capacity())),
        completions_(static_cast<std::size_t>(capacity())) {
    threads_.reserve(static_cast<std::size_t>(threads));
    try {
      for (int i = 0; i < threads; ++i) {
        threads_.push_back(start_thread("zshard-pio", [this] { work(); }));
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  ~PosixDriver() override { stop(); }

  void start(const RawRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      requests_.push(request);
    }
    posted_.notify_one();
  }

  std::size_t reap(std::span<RawCompletion> out, std::int64_t microseconds) override {
    // Read before the completions are: one that comes later changes it again.
    std::uint32_t now = events_.load(std::memory_order_seq_cst);
    std::size_t count = collect(out);
    // now != seen_: a wake() that came before this call.
    if (count == 0 && microseconds > 0 && now == seen_) {
      base::futex_wait(events_, now, microseconds);
      now = events_.load(std::memory_order_seq_cst);
      count = collect(out);
    }
    seen_ = now;
    return count;
  }

  void wake() noexcept override { event(); }
  // As many again wait for their turn: a thread that is done goes on with the next at once, instead
  // of sleeping until whoever submits has been told.
  int capacity() const override { return 2 * thread_count_; }
  std::string name() const override {
    return fmt::format("posix, {} thread{}", thread_count_, thread_count_ == 1 ? "" : "s");
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    posted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void event() noexcept {
    events_.fetch_add(1, std::memory_order_seq_cst);
    base::futex_wake(events_);
  }

  std::size_t collect(std::span<RawCompletion> out) {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    while (count < out.size() && !completions_.empty()) out[count++] = completions_.pop();
    return count;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      posted_.wait(lock, [this] { return stop_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const RawRequest request = requests_.pop();
      lock.unlock();
      const RawCompletion completion{request.tag, run(request)};
      lock.lock();
      completions_.push(completion);
      lock.unlock();
      event();
      lock.lock();
    }
  }

  std::int64_t run(const RawRequest& request) const {
    const int file = files_[static_cast<std::size_t>(request.file)];
    const auto bytes = static_cast<std::size_t>(request.bytes);
    const ssize_t moved = request.operation == Operation::read
                              ? pread(file, request.memory, bytes, request.offset)
                              : pwrite(file, request.memory, bytes, request.offset);
    return moved < 0 ? -std::int64_t{errno} : std::int64_t{moved};
  }

  std::vector<int> files_;
  int thread_count_;
  std::mutex mutex_;
  std::condition_variable posted_;
  Ring<RawRequest> requests_;
  Ring<RawCompletion> completions_;
  bool stop_ = false;
  std::atomic<std::uint32_t> events_{0};  // completions and wakes
  std::uint32_t seen_ = 0;                // events_ when reap() last looked
  std::vector<std::thread> threads_;
};

}  // namespace

int posix_threads(std::int64_t block_bytes, int depth) {
  constexpr std::int64_t kMostThreads = 64;
  const std::int64_t most = std::min<std::int64_t>(depth, kMostThreads);
  if (block_bytes >= kPosixBlock) return static_cast<int>(most);
  // Two at least: a read and a write then run beside each other.
  const std::int64_t wanted = (block_bytes * most + kPosixBlock - 1) / kPosixBlock;
  return static_cast<int>(std::clamp(wanted, std::min<std::int64_t>(2, most), most));
}

std::unique_ptr<Driver> make_posix_driver(std::vector<int> files, int threads) {
  return std::make_unique<PosixDriver>(std::move(files), threads);
}

}  // namespace zshard::offload
