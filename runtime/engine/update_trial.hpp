// With update_on = auto: which of two places updates state that is off the device. They take turns
// in the first steps, and the faster one has the others.
#pragma once

#include <algorithm>
#include <limits>

namespace zshard::engine {

class UpdateTrial {
 public:
  /// The first step of each place is slow for other reasons, and counts for nothing.
  static constexpr int kSteps = 6;

  [[nodiscard]] bool open() const { return steps_ < kSteps; }
  /// Where the next update runs.
  [[nodiscard]] bool on_host() const { return open() ? steps_ % 2 == 0 : host_ <= device_; }
  /// How long an update of all took there. Only while open.
  void took(double seconds) {
    double& best = steps_ % 2 == 0 ? host_ : device_;
    if (steps_ >= 2) best = std::min(best, seconds);
    ++steps_;
  }
  /// The shortest so far.
  [[nodiscard]] double host_seconds() const { return host_; }
  [[nodiscard]] double device_seconds() const { return device_; }

 private:
  int steps_ = 0;
  double host_ = std::numeric_limits<double>::infinity();
  double device_ = std::numeric_limits<double>::infinity();
};

}  // namespace zshard::engine
