// What transfers have moved so far.
#pragma once

#include <cstdint>

namespace zshard::offload {

/// Bytes of transfers that succeeded, and seconds during which at least one was under way.
struct IoTraffic {
  std::int64_t read_bytes = 0;
  std::int64_t written_bytes = 0;
  double read_seconds = 0.0;
  double write_seconds = 0.0;
};

}  // namespace zshard::offload
