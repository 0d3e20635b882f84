// The meeting place of the ranks' queues: counters, signatures and small payloads in memory that
// all ranks see. Plain words only; zero-filled memory is a valid start. What the words mean is in
// endpoint.hpp.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/base/futex.hpp"
#include "runtime/memory/arena.hpp"

namespace zshard::comm {

/// The two queues of a rank that hold collectives.
enum class Lane : std::uint8_t { gather, reduce };
inline constexpr int kLanes = 2;

/// What all ranks must agree on about one collective, packed by the engine; compared word by word.
using PackedSignature = std::array<std::uint64_t, 4>;

/// One rank's view; every rank has one of its own over the same memory.
class Board {
 public:
  struct alignas(64) Meeting {
    base::Counter arrived;
    base::Counter done;
  };
  /// One rank's words of one lane: written by it before it arrives, read by peers between arrival
  /// and done.
  struct alignas(64) LaneWords {
    std::atomic<std::uint64_t> sequence{0};
    std::atomic<std::uint64_t> payload{0};
    std::atomic<std::uint32_t> arrived{0};
    std::atomic<std::uint32_t> done{0};   // of those that end together
    std::atomic<std::uint32_t> ended{0};  // of all, for the report
  };
  struct Signature {
    std::atomic<std::uint64_t> stamp{0};  // sequence + 1; 0 while it is written
    std::array<std::atomic<std::uint64_t>, 4> words{};
  };
  struct alignas(64) RankWords {
    std::array<LaneWords, kLanes> lane;
    std::atomic<std::uint64_t> published{0};  // signatures so far
    std::atomic<std::uint32_t> left{0};       // the rank's engine is gone
  };

  /// signatures: how many a rank may be ahead of the slowest; payload_bytes: a rank's share of a
  /// byte all-gather. memory: bytes(...) of it; kept as long as the board.
  Board(std::shared_ptr<memory::Arena> memory, int world, std::uint64_t signatures,
        std::size_t payload_bytes);
  static std::size_t bytes(int world, std::uint64_t signatures, std::size_t payload_bytes);

  [[nodiscard]] int world() const { return world_; }
  [[nodiscard]] Meeting& meeting(Lane lane) {
    return header_->meetings[static_cast<std::size_t>(lane)];
  }
  [[nodiscard]] RankWords& rank(int r) { return ranks_[r]; }
  [[nodiscard]] Signature& signature(int r, std::uint64_t sequence) {
    return signatures_[static_cast<std::size_t>(r) * capacity_ + sequence % capacity_];
  }
  /// False if the slot does not hold that sequence number: not published yet, or long overwritten.
  bool read_signature(int r, std::uint64_t sequence, PackedSignature* out);
  [[nodiscard]] std::uint64_t capacity() const { return capacity_; }
  [[nodiscard]] std::byte* payload(int r) {
    return payloads_ + static_cast<std::size_t>(r) * payload_bytes_;
  }
  [[nodiscard]] std::size_t payload_bytes() const { return payload_bytes_; }

  /// The first failure wins; later ones are dropped. Wakes every waiter.
  void fail(const std::string& message);
  [[nodiscard]] bool failed() const { return header_->failed.load(std::memory_order_acquire) == 2; }
  [[nodiscard]] std::string failure() const;  // "" while nothing failed

 private:
  struct alignas(64) Header {
    std::array<Meeting, kLanes> meetings;
    std::atomic<std::uint32_t> failed{0};  // 0 fine, 1 being written, 2 readable
    std::array<char, 2048> message{};
  };

  std::shared_ptr<memory::Arena> memory_;
  int world_;
  std::uint64_t capacity_;
  std::size_t payload_bytes_;
  Header* header_;
  RankWords* ranks_;
  Signature* signatures_;
  std::byte* payloads_;
};

}  // namespace zshard::comm
