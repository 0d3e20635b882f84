// Sleeping until a 32-bit word changes, across threads and across processes that share the word.
#pragma once

#include <atomic>
#include <cstdint>

namespace zshard::base {

/// Sleeps while *word == seen, at most `microseconds`; may return early for no reason.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                std::int64_t microseconds);
/// Wakes all sleepers of the word.
void futex_wake(const std::atomic<std::uint32_t>& word);

/// Waiting threads spin and yield this long before they sleep, so that they do not eat the cores
/// that compute.
inline constexpr std::int64_t kSpinMicroseconds = 50;

/// How often a sleeper looks at other conditions.
inline constexpr std::int64_t kSliceMicroseconds = 20'000;

/// A word that grows, and its sleepers. Zero-initialised memory is a valid counter: it may lie in
/// shared memory.
class Counter {
 public:
  void add(std::uint32_t amount = 1) {
    value_.fetch_add(amount, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake(value_);
  }
  /// Grows by one and leaves the waking, by nudge(), to the caller.
  void advance() { value_.fetch_add(1, std::memory_order_seq_cst); }
  [[nodiscard]] std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  /// True once the counter has reached target, in arithmetic that wraps.
  [[nodiscard]] bool reached(std::uint32_t target) const {
    return static_cast<std::int32_t>(value() - target) >= 0;
  }
  /// Wakes sleepers without a change, so that they look at other conditions.
  void nudge() { futex_wake(value_); }
  /// Spins, then sleeps in slices of at most kSliceMicroseconds, until reached(target) or until
  /// poll() returns true (asked once a slice). Returns reached(target).
  template <class Poll>
  bool wait(std::uint32_t target, Poll&& poll);

 private:
  bool spin(std::uint32_t target) const;
  std::atomic<std::uint32_t> value_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

template <class Poll>
bool Counter::wait(std::uint32_t target, Poll&& poll) {
  if (spin(target)) return true;
  while (true) {
    if (poll()) return reached(target);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = value_.load(std::memory_order_seq_cst);
    const bool done = static_cast<std::int32_t>(seen - target) >= 0;
    if (!done) futex_wait(value_, seen, kSliceMicroseconds);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    if (reached(target)) return true;
  }
}

}  // namespace zshard::base
