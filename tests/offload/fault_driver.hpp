// A driver that goes wrong as told, between the backend and the real one.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/io/driver.hpp"

namespace zshard::offload::testing {

inline constexpr std::int64_t kLasting = std::numeric_limits<std::int64_t>::max();

/// One thing that goes wrong.
struct Fault {
  enum class Kind {
    error,        // value: errno; nothing is moved
    short_count,  // value: bytes that are counted; <= 0: that many less than asked. Only whole
                  // pages below are moved, so that who trusts the rest of the count is found out
    lost,         // a write that says it was done
    torn,         // a write of which only the first half was done, and says it all was
    misplaced,    // value: bytes by which the offset is shifted
    overcount,    // value: bytes that are counted beyond what was asked for
    held,         // no answer until Faults::release()
  };
  Kind kind = Kind::error;
  std::int64_t value = 0;
  std::optional<Operation> only{};  // unset: reads and writes
  int rank = -1;                    // -1: all
  std::int64_t after = 0;           // operations of that sort that go well first, from arm() on
  std::int64_t times = 1;           // then so many go wrong
  std::int64_t every = 0;           // > 0: again, in each so many operations
  // Of operations that begin below or from this place in the file on, only those.
  std::int64_t from = 0;
  std::int64_t below = kLasting;
};

/// What goes wrong for all drivers that are made while an Injection lives. Safe from any thread.
class Faults {
 public:
  void arm(const Fault& fault) {
    const std::lock_guard lock(mutex_);
    armed_.push_back({fault, 0});
  }
  /// Everything goes well from now on; held operations too.
  void clear() {
    const std::lock_guard lock(mutex_);
    armed_.clear();
    shuffle_ = false;
    delay_microseconds_ = 0;
    ++releases_;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    ++releases_;
  }
  /// Completions come in random order, each up to `delay_microseconds` late.
  void shuffle(std::uint64_t seed, std::int64_t delay_microseconds = 0) {
    const std::lock_guard lock(mutex_);
    shuffle_ = true;
    seed_ = seed;
    delay_microseconds_ = delay_microseconds;
  }

  /// Operations that drivers were asked for so far; rank -1: all. Retries count.
  [[nodiscard]] std::int64_t operations(std::optional<Operation> only = std::nullopt) const {
    const std::lock_guard lock(mutex_);
    if (only) return counts_[static_cast<std::size_t>(*only)];
    return counts_[0] + counts_[1];
  }
  /// Faults that happened.
  [[nodiscard]] std::int64_t happened() const {
    const std::lock_guard lock(mutex_);
    return happened_;
  }

  /// Operations that the system has at the moment, or that are held.
  [[nodiscard]] std::int64_t outstanding() const {
    const std::lock_guard lock(mutex_);
    return outstanding_;
  }

  // For the driver.
  void outstanding(int change) {
    const std::lock_guard lock(mutex_);
    outstanding_ += change;
  }
  std::optional<Fault> next(const RawRequest& request, int rank) {
    const std::lock_guard lock(mutex_);
    ++counts_[static_cast<std::size_t>(request.operation)];
    std::optional<Fault> chosen;
    for (Armed& one : armed_) {
      const Fault& fault = one.fault;
      if (fault.only && *fault.only != request.operation) continue;
      if (fault.rank >= 0 && fault.rank != rank) continue;
      if (request.offset < fault.from || request.offset >= fault.below) continue;
      const std::int64_t number = one.seen++ - fault.after;
      if (number < 0 || (fault.every > 0 ? number % fault.every : number) >= fault.times) continue;
      if (!chosen) chosen = fault;
    }
    if (chosen) ++happened_;
    return chosen;
  }
  struct Order {
    bool shuffle = false;
    std::uint64_t seed = 0;
    std::int64_t delay_microseconds = 0;
    int releases = 0;
  };
  [[nodiscard]] Order order() const {
    const std::lock_guard lock(mutex_);
    return {shuffle_, seed_, delay_microseconds_, releases_};
  }

 private:
  struct Armed {
    Fault fault;
    std::int64_t seen = 0;
  };
  mutable std::mutex mutex_;
  std::vector<Armed> armed_;
  std::int64_t counts_[2] = {0, 0};
  std::int64_t happened_ = 0;
  std::int64_t outstanding_ = 0;
  bool shuffle_ = false;
  std::uint64_t seed_ = 0;
  std::int64_t delay_microseconds_ = 0;
  int releases_ = 0;
};

class FaultDriver final : public Driver {
 public:
  FaultDriver(std::unique_ptr<Driver> inner, std::shared_ptr<Faults> faults, int rank)
      : inner_(std::move(inner)),
        faults_(std::move(faults)),
        rank_(rank),
        releases_(faults_->order().releases),
        buffer_(static_cast<std::size_t>(inner_->capacity())) {}

  void start(const RawRequest& request) override {
    const std::optional<Fault> fault = faults_->next(request, rank_);
    if (!fault) {
      forward(request, request.bytes);
      return;
    }
    RawRequest changed = request;
    switch (fault->kind) {
      case Fault::Kind::error:
        finish({request.tag, -fault->value});
        return;
      case Fault::Kind::short_count: {
        const std::int64_t counted = fault->value > 0 ? fault->value : request.bytes + fault->value;
        if (counted <= 0 || counted >= request.bytes) break;
        changed.bytes = counted / kPage * kPage;
        if (changed.bytes == 0) {
          finish({request.tag, counted});
        } else {
          forward(changed, counted);
        }
        return;
      }
      case Fault::Kind::lost:
        finish({request.tag, request.bytes});
        return;
      case Fault::Kind::torn:
        changed.bytes = request.bytes / 2 / kPage * kPage;
        if (changed.bytes == 0) {
          finish({request.tag, request.bytes});
        } else {
          forward(changed, request.bytes);
        }
        return;
      case Fault::Kind::misplaced:
        changed.offset += fault->value;
        forward(changed, request.bytes);
        return;
      case Fault::Kind::overcount:
        forward(request, request.bytes + fault->value);
        return;
      case Fault::Kind::held:
        faults_->outstanding(1);
        held_.push_back(request);
        return;
    }
    forward(request, request.bytes);
  }

  std::size_t reap(std::span<RawCompletion> out, std::int64_t microseconds) override {
    const Faults::Order order = faults_->order();
    if (order.releases != releases_) {
      releases_ = order.releases;
      for (const RawRequest& request : std::exchange(held_, {})) {
        faults_->outstanding(-1);
        forward(request, request.bytes);
      }
    }
    std::int64_t limit = microseconds;
    if (!held_.empty()) limit = std::min<std::int64_t>(limit, 2000);
    const std::int64_t due = next_due();
    if (due >= 0) limit = std::min(limit, due);
    gather(order, limit);
    // Others get the chance to be first.
    if (order.shuffle && !ready_.empty()) gather(order, 50);
    if (order.shuffle) {
      std::mt19937_64 random(order.seed + rounds_++);
      std::shuffle(ready_.begin(), ready_.end(), random);
    }
    std::size_t count = 0;
    const auto now = Clock::now();
    for (std::size_t i = 0; i < ready_.size() && count < out.size();) {
      if (ready_[i].due > now) {
        ++i;
        continue;
      }
      out[count++] = ready_[i].completion;
      ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return count;
  }

  void wake() noexcept override { inner_->wake(); }
  int capacity() const override { return inner_->capacity(); }
  std::string name() const override { return inner_->name(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::int64_t kPage = 4096;
  struct Ready {
    RawCompletion completion;
    Clock::time_point due;
  };
  struct Forwarded {
    std::uint64_t tag = 0;
    std::int64_t bytes = 0;    // that the real driver was asked for
    std::int64_t counted = 0;  // that it shall say if it moves them all
  };

  void forward(const RawRequest& request, std::int64_t counted) {
    forwarded_.push_back({request.tag, request.bytes, counted});
    faults_->outstanding(1);
    inner_->start(request);
  }
  void finish(const RawCompletion& completion) { ready_.push_back({completion, Clock::now()}); }

  /// Microseconds until the first completion is due; -1: there is none.
  std::int64_t next_due() const {
    std::int64_t next = -1;
    for (const Ready& one : ready_) {
      const auto left =
          std::chrono::duration_cast<std::chrono::microseconds>(one.due - Clock::now()).count();
      next = next < 0 ? std::max<std::int64_t>(0, left)
                      : std::min(next, std::max<std::int64_t>(0, left));
    }
    return next;
  }

  void gather(const Faults::Order& order, std::int64_t microseconds) {
    const std::size_t count = inner_->reap(buffer_, microseconds);
    for (std::size_t i = 0; i < count; ++i) {
      RawCompletion completion = buffer_[i];
      const auto mine = std::find_if(forwarded_.begin(), forwarded_.end(),
                                     [&](const Forwarded& f) { return f.tag == completion.tag; });
      if (completion.result == mine->bytes) completion.result = mine->counted;
      forwarded_.erase(mine);
      faults_->outstanding(-1);
      auto due = Clock::now();
      if (order.delay_microseconds > 0) {
        std::mt19937_64 random(order.seed ^ (0x9E37U * ++delays_));
        due += std::chrono::microseconds(
            std::uniform_int_distribution<std::int64_t>(0, order.delay_microseconds)(random));
      }
      ready_.push_back({completion, due});
    }
  }

  std::unique_ptr<Driver> inner_;
  std::shared_ptr<Faults> faults_;
  int rank_;
  int releases_;
  std::vector<RawCompletion> buffer_;
  std::vector<Ready> ready_;
  std::vector<Forwarded> forwarded_;
  std::vector<RawRequest> held_;
  std::uint64_t rounds_ = 0;
  std::uint64_t delays_ = 0;
};

/// While it lives, every driver that is made goes wrong as `faults` says.
class Injection {
 public:
  Injection() {
    set_driver_decorator([faults = faults_](std::unique_ptr<Driver> driver, int rank) {
      return std::unique_ptr<Driver>(
          std::make_unique<FaultDriver>(std::move(driver), faults, rank));
    });
  }
  ~Injection() {
    set_driver_decorator({});
    faults_->clear();
  }
  Injection(const Injection&) = delete;
  Injection& operator=(const Injection&) = delete;
  Faults& operator*() { return *faults_; }
  Faults* operator->() { return faults_.get(); }

 private:
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
};

}  // namespace zshard::offload::testing
