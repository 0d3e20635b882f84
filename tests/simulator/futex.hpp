// Sleeping until a word changes, without a lock. The thread sanitizer does not look into the system
// call, so only the loads and stores that carry a meaning order anything for it: a lock that all
// streams take would hide the races that the simulated device is there to show.
#pragma once

#include <atomic>
#include <cstdint>

namespace simulator {

/// Who may sleep on a word: threads of this process, or of all that map it.
enum class Sleepers { here, everywhere };

/// Sleeps while *word == seen, at most `microseconds`; may return early.
void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t microseconds,
              Sleepers sleepers);
/// Wakes all sleepers of the word.
void wake_all(const std::atomic<std::uint32_t>& word, Sleepers sleepers);

/// A place to wait at for conditions that are kept elsewhere. Zero bytes are its initial state.
template <Sleepers kSleepers>
class BasicBell {
 public:
  void ring() {
    word_.fetch_add(1, std::memory_order_relaxed);
    wake_all(word_, kSleepers);
  }
  /// Returns when done() is true. done() must read what it needs with acquire.
  template <class Done>
  void wait_until(Done&& done) const {
    while (true) {
      const std::uint32_t seen = word_.load(std::memory_order_relaxed);
      if (done()) return;
      // A slice, for conditions whose change rings no bell.
      sleep_on(word_, seen, 2000, kSleepers);
    }
  }

 private:
  std::atomic<std::uint32_t> word_{0};
};
using Bell = BasicBell<Sleepers::here>;
using SharedBell = BasicBell<Sleepers::everywhere>;

}  // namespace simulator
