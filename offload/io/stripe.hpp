// Arithmetic of striping: which file holds a byte of the store, and where.
#pragma once

#include <cstdint>
#include <vector>

namespace zshard::offload {

/// Deals the store's bytes to files in stripes, in a fixed order in which a file of weight w comes
/// w times. One file: offsets are the store's own.
class StripeMap {
 public:
  /// bytes, stripe: multiples of 4096. weights: at least 1, one a file.
  StripeMap(std::int64_t bytes, std::int64_t stripe, std::vector<int> weights);

  struct Place {
    int file = 0;
    std::int64_t offset = 0;  // in the file
    std::int64_t bytes = 0;   // that lie there in one piece, at most what was asked for
  };
  [[nodiscard]] Place place(std::int64_t offset, std::int64_t bytes) const;

  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] int files() const { return static_cast<int>(weights_.size()); }
  [[nodiscard]] std::int64_t file_bytes(int file) const;

  /// Small weights in proportion to speeds (all > 0), the largest at most 8.
  static std::vector<int> weights_of(const std::vector<double>& speeds);

 private:
  struct Turn {
    int file = 0;
    int index = 0;  // which of the file's stripes of one round
  };
  std::int64_t bytes_;
  std::int64_t stripe_;
  std::vector<int> weights_;
  std::vector<Turn> turns_;  // one round
};

}  // namespace zshard::offload
