// The ranks of a communicator, threads of this process or of others on this machine, and what
// passes between them: collectives, which meet by their number, and sends and receives, which meet
// by their number between two ranks. Workers of streams meet in memory that all map
// (clique_block.hpp) and take no lock; host threads join and watch for processes that end.
#pragma once

#include <nccl.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/simulator/clique_block.hpp"

namespace simulator {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce, broadcast };

struct Signature {
  Collective collective = Collective::all_gather;
  std::size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  int root = 0;
  /// All but the count.
  [[nodiscard]] std::uint64_t packed() const;
  static Signature unpacked(std::uint64_t packed, std::uint64_t count);
  bool operator==(const Signature& other) const = default;
  [[nodiscard]] std::string text() const;
};

class Clique {
 public:
  /// A new one, whose id every rank joins by. Null if the system refuses.
  static std::shared_ptr<Clique> make();
  /// That of another process. Null, with the reason, if it is gone.
  static std::shared_ptr<Clique> open(const std::string& id, std::string& why);
  ~Clique();
  Clique(const Clique&) = delete;
  Clique& operator=(const Clique&) = delete;

  [[nodiscard]] const std::string& id() const { return id_; }
  [[nodiscard]] int world() const { return block_.world.load(std::memory_order_acquire); }
  [[nodiscard]] CliqueBlock& block() const { return block_; }
  [[nodiscard]] CliqueBlock::Member& member(int rank) const { return block_.members[rank]; }
  [[nodiscard]] CliqueBlock::Channel& channel(int from, int to) const {
    return block_.channels[from][to];
  }
  [[nodiscard]] SharedBell& bell() const { return block_.bell; }

  /// A rank of this process joins. Returns ncclSuccess, or why it cannot, in `why`: then the others
  /// hear of it too.
  ncclResult_t join(int rank, int world, int device, std::string& why);
  /// Once all have joined: whether they fit together, and their memory. ncclInProgress before.
  ncclResult_t connect(int rank, std::string& why);
  /// All ranks are connected.
  [[nodiscard]] bool complete() const {
    const int world = this->world();
    return world != 0 && block_.connected.load(std::memory_order_acquire) == world;
  }
  /// Whether the process of any rank has ended without leaving.
  bool dead();
  /// The rank has destroyed its communicator: its process may end.
  void leave(int rank) const { member(rank).left.store(1, std::memory_order_release); }

  /// Every rank has the asynchronous error from now on, `by` another one than the rest; the first
  /// failure counts.
  void fail(ncclResult_t code, const std::string& why, int by = -1,
            ncclResult_t by_code = ncclSuccess) const;
  /// The error that the rank has by fail().
  [[nodiscard]] ncclResult_t failure(int rank) const;
  [[nodiscard]] std::string failure_text() const;

  // -- for workers --

  [[nodiscard]] bool remote(int rank) const {
    return member(rank).pid.load(std::memory_order_relaxed) != pid_;
  }
  static void offer(OfferedMemory& place, const void* memory);
  /// Where this process reads what `rank` has offered.
  [[nodiscard]] const std::byte* reach_offer(int rank, const OfferedMemory& offered) const;

 private:
  struct Peer {
    int pidfd = -1;
    const std::byte* memory = nullptr;  // its device's
  };
  Clique(std::string id, int descriptor, CliqueBlock& block);

  const std::string id_;
  const int descriptor_;
  CliqueBlock& block_;
  const pid_t pid_;
  std::mutex mutex_;
  bool connected_ = false;
  std::vector<Peer> peers_;  // set by connect()
};

}  // namespace simulator
