// What the ranks of a communicator share: one memfd that every process of theirs maps. It has no
// locks, so whoever is killed at any instruction leaves nothing behind that others wait for, but
// for its own part in what is under way. Zero bytes are the initial state of everything.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tests/simulator/futex.hpp"

namespace simulator {

/// Memory that a rank offers to be read.
struct OfferedMemory {
  std::atomic<std::uint64_t> address;  // in the process of the rank
  std::atomic<std::uint64_t> offset;   // in its device's memory, for ranks of other processes
};

struct CliqueBlock {
  static constexpr int kMostRanks = 64;
  static constexpr int kRounds = 4;  // a rank is never more than one ahead of another
  static constexpr int kSends = 16;  // of one rank to another that were posted and not taken
  static constexpr int kMostText = 400;

  struct Member {
    std::atomic<int> claimed;  // a rank of this number came
    std::atomic<int> joined;   // what follows can be read
    std::atomic<int> pid;
    std::atomic<int> device;  // physical
    std::atomic<int> shares_device;
    std::atomic<int> version;
    std::atomic<int> descriptor;  // of its device's memory
    std::atomic<std::uint64_t> inode;
    std::atomic<int> left;  // destroyed its communicator, and may end

    // Its collective number k is in offers[k % kRounds].
    struct Offer {
      std::atomic<std::uint64_t> operation;  // Signature::packed()
      std::atomic<std::uint64_t> count;
      OfferedMemory send;
    } offers[kRounds];
    std::atomic<std::uint64_t> read;  // collectives in which it needs no peer's memory any more
  };

  /// From one rank to another: send number n is in sends[n % kSends].
  struct Channel {
    struct Send {
      std::atomic<std::uint64_t> bytes;
      OfferedMemory source;
    } sends[kSends];
    std::atomic<std::uint64_t> posted;  // by the sender
    /// 2 * (those that the receiver took), + 1 while it takes one; kBroken: nothing more comes
    std::atomic<std::uint64_t> taken;
    static constexpr std::uint64_t kBroken = std::uint64_t{1} << 63;
  };

  std::atomic<std::uint64_t> nonce;
  std::atomic<int> world;  // 0 until the first rank has joined
  std::atomic<int> joined;
  std::atomic<int> connected;
  SharedBell bell;

  /// Ranks that came to collectives, all together: number k is full at (k + 1) * world.
  std::atomic<std::uint64_t> arrived;
  static constexpr std::uint64_t kBroken = std::uint64_t{1} << 63;  // no further one gets full

  // The first failure of the communicator as a whole.
  std::atomic<int> failing;  // claims `why`
  std::atomic<int> failed;   // ncclResult_t; 0 none. `why` can be read once it is set
  std::atomic<int> culprit;  // rank + 1 of the one that has culprit_code instead
  std::atomic<int> culprit_code;
  char why[kMostText];

  Member members[kMostRanks];
  Channel channels[kMostRanks][kMostRanks];
};

}  // namespace simulator
