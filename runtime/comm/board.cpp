#include "runtime/comm/board.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace zshard::comm {

std::size_t Board::bytes(int world, std::uint64_t signatures, std::size_t payload_bytes) {
  const auto w = static_cast<std::size_t>(world);
  return sizeof(Header) + w * (sizeof(RankWords) + signatures * sizeof(Signature) + payload_bytes);
}

Board::Board(std::shared_ptr<memory::Arena> memory, int world, std::uint64_t signatures,
             std::size_t payload_bytes)
    : memory_(std::move(memory)),
      world_(world),
      capacity_(signatures),
      payload_bytes_(payload_bytes),
      header_(reinterpret_cast<Header*>(memory_->data())),
      ranks_(reinterpret_cast<RankWords*>(header_ + 1)),
      signatures_(reinterpret_cast<Signature*>(ranks_ + world)),
      payloads_(reinterpret_cast<std::byte*>(signatures_ +
                                             static_cast<std::size_t>(world) * signatures)) {}

bool Board::read_signature(int r, std::uint64_t sequence, PackedSignature* out) {
  const Signature& slot = signature(r, sequence);
  if (slot.stamp.load(std::memory_order_acquire) != sequence + 1) return false;
  for (std::size_t i = 0; i < out->size(); ++i)
    (*out)[i] = slot.words[i].load(std::memory_order_acquire);
  return slot.stamp.load(std::memory_order_acquire) == sequence + 1;
}

void Board::fail(const std::string& message) {
  std::uint32_t fine = 0;
  if (!header_->failed.compare_exchange_strong(fine, 1)) {
    // The caller throws the first message, which another rank may be writing just now. It takes
    // microseconds, unless that rank dies in between.
    for (int i = 0; i < 10'000 && !failed(); ++i) std::this_thread::yield();
    return;
  }
  const std::size_t length = std::min(message.size(), header_->message.size() - 1);
  std::memcpy(header_->message.data(), message.data(), length);
  header_->message[length] = '\0';
  header_->failed.store(2, std::memory_order_release);
  for (Meeting& meeting : header_->meetings) {
    meeting.arrived.nudge();
    meeting.done.nudge();
  }
}

std::string Board::failure() const {
  return failed() ? std::string(header_->message.data()) : std::string();
}

}  // namespace zshard::comm
