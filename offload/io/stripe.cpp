#include "offload/io/stripe.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace zshard::offload {

StripeMap::StripeMap(std::int64_t bytes, std::int64_t stripe, std::vector<int> weights)
    : bytes_(bytes), stripe_(stripe), weights_(std::move(weights)) {
  // Each turn goes to the file that is furthest behind its share, so that neighbouring stripes lie
  // on different devices.
  const int round = std::accumulate(weights_.begin(), weights_.end(), 0);
  std::vector<int> taken(weights_.size(), 0);
  for (int turn = 0; turn < round; ++turn) {
    std::size_t best = 0;
    for (std::size_t file = 1; file < weights_.size(); ++file) {
      if ((taken[file] + 1) * weights_[best] < (taken[best] + 1) * weights_[file]) best = file;
    }
    turns_.push_back({static_cast<int>(best), taken[best]++});
  }
}

StripeMap::Place StripeMap::place(std::int64_t offset, std::int64_t bytes) const {
  if (weights_.size() == 1) return {0, offset, bytes};
  const auto turns = static_cast<std::int64_t>(turns_.size());
  const std::int64_t stripe = offset / stripe_;
  const std::int64_t within = offset % stripe_;
  const Turn turn = turns_[static_cast<std::size_t>(stripe % turns)];
  const std::int64_t weight = weights_[static_cast<std::size_t>(turn.file)];
  return {turn.file, (stripe / turns * weight + turn.index) * stripe_ + within,
          std::min(bytes, stripe_ - within)};
}

std::int64_t StripeMap::file_bytes(int file) const {
  if (weights_.size() == 1) return bytes_;
  const std::int64_t round = stripe_ * static_cast<std::int64_t>(turns_.size());
  std::int64_t total = bytes_ / round * weights_[static_cast<std::size_t>(file)] * stripe_;
  std::int64_t left = bytes_ % round;
  for (const Turn& turn : turns_) {
    const std::int64_t part = std::min(left, stripe_);
    if (turn.file == file) total += part;
    left -= part;
  }
  return total;
}

std::vector<int> StripeMap::weights_of(const std::vector<double>& speeds) {
  constexpr double kMost = 8.0;
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  std::vector<int> weights;
  for (const double speed : speeds) {
    weights.push_back(std::max(1, static_cast<int>(std::lround(kMost * speed / fastest))));
  }
  int divisor = 0;
  for (const int weight : weights) divisor = std::gcd(divisor, weight);
  for (int& weight : weights) weight /= divisor;
  return weights;
}

}  // namespace zshard::offload
