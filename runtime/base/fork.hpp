// Tells a forked child from the process that made an object: the object's threads, locks and peers
// are the parent's, and using or ending them from the child would hang it or break them.
#pragma once

#include <cstdint>
#include <string_view>

namespace zshard::base {

/// fork()s on the way from the start of the program to this process, as far as they were made with
/// the C library's fork() after the first call of this.
std::uint32_t fork_generation() noexcept;

/// Remembers in which process it was made.
class ProcessMark {
 public:
  ProcessMark() : generation_(fork_generation()) {}
  [[nodiscard]] bool here() const noexcept { return generation_ == fork_generation(); }
  /// Throws UsageError in a forked child. what: "an engine".
  void check(std::string_view what) const {
    if (!here()) refuse(what);
  }

 private:
  [[noreturn]] static void refuse(std::string_view what);
  std::uint32_t generation_;
};

}  // namespace zshard::base
