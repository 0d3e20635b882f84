// The meeting place of the ranks' queues: counters, signatures and small payloads in memory that
// all ranks see. Holds plain words only, so that it may lie in memory shared by processes. What the
// words mean is in endpoint.hpp.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/futex.hpp"

namespace zshard::comm {

/// The two queues of a rank that hold collectives.
enum class Lane : std::uint8_t { gather, reduce };
inline constexpr int kLanes = 2;

/// What all ranks must agree on about one collective, packed by the engine; compared word by word.
using PackedSignature = std::array<std::uint64_t, 4>;

class Board {
 public:
  /// signatures: how many a rank may be ahead of the slowest; payload_bytes: a rank's share of a
  /// byte all-gather.
  Board(int world, std::uint64_t signatures, std::size_t payload_bytes);

  struct Meeting {
    base::Counter arrived;
    base::Counter done;
  };
  /// One rank's words of one lane: written by it before it arrives, read by peers between arrival
  /// and done.
  struct alignas(64) LaneWords {
    std::atomic<std::uint64_t> sequence{0};
    std::atomic<std::uint64_t> payload{0};
    std::atomic<std::uint32_t> arrived{0};
    std::atomic<std::uint32_t> done{0};
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

  [[nodiscard]] int world() const { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] Meeting& meeting(Lane lane) { return meetings_[static_cast<std::size_t>(lane)]; }
  [[nodiscard]] RankWords& rank(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  [[nodiscard]] Signature& signature(int r, std::uint64_t sequence) {
    return signatures_[static_cast<std::size_t>(r) * capacity_ + sequence % capacity_];
  }
  [[nodiscard]] std::uint64_t capacity() const { return capacity_; }
  [[nodiscard]] std::byte* payload(int r) {
    return payloads_.data() + static_cast<std::size_t>(r) * payload_bytes_;
  }
  [[nodiscard]] std::size_t payload_bytes() const { return payload_bytes_; }

  /// The first failure wins; later ones are dropped. Wakes every waiter.
  void fail(const std::string& message);
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire) == 2; }
  [[nodiscard]] std::string failure() const;  // "" while nothing failed

 private:
  std::array<Meeting, kLanes> meetings_;
  std::vector<RankWords> ranks_;
  std::vector<Signature> signatures_;
  std::vector<std::byte> payloads_;
  std::uint64_t capacity_;
  std::size_t payload_bytes_;
  std::atomic<std::uint32_t> failed_{0};  // 0 fine, 1 being written, 2 readable
  std::array<char, 2048> message_{};
};

}  // namespace zshard::comm
