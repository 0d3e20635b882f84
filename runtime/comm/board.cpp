#include "runtime/comm/board.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

namespace zshard::comm {

Board::Board(int world, std::uint64_t signatures, std::size_t payload_bytes)
    : ranks_(static_cast<std::size_t>(world)),
      signatures_(static_cast<std::size_t>(world) * signatures),
      payloads_(static_cast<std::size_t>(world) * payload_bytes),
      capacity_(signatures),
      payload_bytes_(payload_bytes) {}

void Board::fail(const std::string& message) {
  std::uint32_t fine = 0;
  if (!failed_.compare_exchange_strong(fine, 1)) {
    // The caller throws the first message, which another rank may be writing just now. It takes
    // microseconds, unless that rank dies in between.
    for (int i = 0; i < 10'000 && !failed(); ++i) std::this_thread::yield();
    return;
  }
  const std::size_t length = std::min(message.size(), message_.size() - 1);
  std::memcpy(message_.data(), message.data(), length);
  message_[length] = '\0';
  failed_.store(2, std::memory_order_release);
  for (Meeting& meeting : meetings_) {
    meeting.arrived.nudge();
    meeting.done.nudge();
  }
}

std::string Board::failure() const {
  return failed() ? std::string(message_.data()) : std::string();
}

}  // namespace zshard::comm
