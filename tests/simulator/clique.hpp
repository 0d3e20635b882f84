// The ranks of a communicator and what passes between them: collectives, which meet by their
// number, and sends and receives, which meet by their number between two ranks. Host threads match
// them as they are issued; workers of streams see what was matched and move data.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulator/futex.hpp"

namespace simulator {

class Communicator;

struct Signature {
  const char* call = nullptr;  // "ncclAllGather"
  std::size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  int root = 0;
  bool operator==(const Signature& other) const;
  [[nodiscard]] std::string text() const;
};

/// One collective.
struct Round {
  Signature signature;
  int first_rank = 0;  // who issued it first
  int issued = 0;
  struct Part {
    const void* send = nullptr;
    void* received = nullptr;
  };
  std::vector<Part> parts;  // by rank; each is set before its rank arrives
  static constexpr std::uint32_t kBroken = 1U << 31;
  std::atomic<std::uint32_t> arrived{0};  // ranks whose streams came to it; kBroken: never full
  std::atomic<std::uint32_t> read{0};     // ranks that need no peer's memory any more
};

/// One send and its receive.
struct Pair {
  enum : std::uint32_t { kSender = 1, kReceiver = 2, kTaken = 4, kDone = 8, kBroken = 16 };
  std::size_t bytes[2] = {};  // of the send and of the receive
  bool issued[2] = {};
  const void* source = nullptr;
  std::atomic<std::uint32_t> state{0};
};

class Clique {
 public:
  Clique(std::string id, int world);
  const std::string id;
  const int world;
  Bell bell;

  /// A rank joins. Returns ncclSuccess, or why it cannot, in `why`.
  ncclResult_t join(const std::shared_ptr<Communicator>& member, std::string& why);
  [[nodiscard]] bool complete() const { return joined_.load(std::memory_order_acquire) == world; }
  /// This rank's next collective. Tells all members if it does not fit.
  std::shared_ptr<Round> issue(int rank, const Signature& signature, const void* send,
                               void* received);
  /// The next send (way 0) or receive (way 1) between two ranks.
  std::shared_ptr<Pair> issue(int from, int to, int way, std::size_t bytes, const void* source);
  /// Every member has the asynchronous error from now on; `by` another one than the rest.
  void fail(ncclResult_t code, const std::string& why, const Communicator* by = nullptr,
            ncclResult_t by_code = ncclSuccess);

 private:
  void fail_locked(ncclResult_t code, const std::string& why, const Communicator* by,
                   ncclResult_t by_code);

  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> members_;
  std::vector<int> devices_;
  std::atomic<int> joined_{0};
  std::map<std::uint64_t, std::shared_ptr<Round>> rounds_;
  std::vector<std::uint64_t> next_round_;
  struct Channel {
    std::map<std::uint64_t, std::shared_ptr<Pair>> pairs;
    std::uint64_t next[2] = {};
  };
  std::map<std::pair<int, int>, Channel> channels_;
};

}  // namespace simulator
