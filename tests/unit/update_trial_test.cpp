// Which place update_on = auto settles on.
#include "runtime/engine/update_trial.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace zshard::engine {
namespace {

/// The place of each step, and of the one behind the last.
std::vector<bool> places(const std::vector<double>& seconds) {
  UpdateTrial trial;
  std::vector<bool> on_host;
  for (const double each : seconds) {
    on_host.push_back(trial.on_host());
    trial.took(each);
  }
  on_host.push_back(trial.on_host());
  return on_host;
}

TEST(UpdateTrial, EachPlaceInTurnThenTheFaster) {
  static_assert(UpdateTrial::kSteps == 6);
  const auto then = [](bool host) {
    return std::vector{true, false, true, false, true, false, host};
  };
  EXPECT_EQ(places({9, 9, 2, 3, 2, 3}), then(true));
  EXPECT_EQ(places({9, 9, 3, 2, 3, 2}), then(false));
  // The first step of each counts for nothing, and of the others the best.
  EXPECT_EQ(places({9, 1, 2, 3, 2, 3}), then(true));
  EXPECT_EQ(places({1, 9, 3, 2, 3, 7}), then(false));
  EXPECT_EQ(places({9, 9, 8, 3, 2, 3}), then(true));
  // What needs no memory on the GPU, if they are equal.
  EXPECT_EQ(places({9, 9, 2, 2, 2, 2}), then(true));
}

TEST(UpdateTrial, IsOverAfterItsSteps) {
  UpdateTrial trial;
  for (int step = 0; step < UpdateTrial::kSteps; ++step) {
    EXPECT_TRUE(trial.open());
    trial.took(1.0 + step);
  }
  EXPECT_FALSE(trial.open());
  EXPECT_EQ(trial.host_seconds(), 3.0);
  EXPECT_EQ(trial.device_seconds(), 4.0);
}

}  // namespace
}  // namespace zshard::engine
