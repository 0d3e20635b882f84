// One rank's communicator of the simulated NCCL.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/simulator/clique.hpp"
#include "tests/simulator/state.hpp"

namespace simulator {

/// The order in which one rank's collectives run on its device. No locks in workers, and no memory
/// order: the queue itself promises none to the collectives.
class Lane {
 public:
  std::mutex launching;  // held from take() until the task is queued
  Bell bell;
  /// The next place in the order.
  std::uint64_t take();
  [[nodiscard]] bool turn(std::uint64_t ticket) const {
    return turn_.load(std::memory_order_relaxed) >= ticket;
  }
  void finish(std::uint64_t ticket);

 private:
  static constexpr std::uint64_t kWindow = 1 << 14;  // most that are outstanding
  std::uint64_t next_ = 0;
  std::atomic<std::uint64_t> turn_{0};
  std::vector<std::atomic<std::uint64_t>> finished_ =
      std::vector<std::atomic<std::uint64_t>>(kWindow);
};

/// A call that was issued, in a group or alone.
struct Issued {
  Signature signature;  // of a collective; of a send or receive the size
  const void* send = nullptr;
  void* received = nullptr;
  int peer = -1;             // of a send or receive
  int way = 0;               // 0 send, 1 receive
  std::uint64_t number = 0;  // of the collective, or of the send or receive between the two ranks
  StreamPointer stream;
  std::vector<Touch> touches;
  std::optional<Injected> injected;
  [[nodiscard]] std::size_t bytes() const;
};

/// What one group issued on one communicator; one task.
using Launch = std::vector<Issued>;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::shared_ptr<Clique> clique, int rank, int world, int device, bool blocking,
               std::shared_ptr<Lane> lane, const void* site);
  const std::shared_ptr<Clique> clique;
  const int rank;
  const int world;
  const int device;
  const bool blocking;
  const void* const site;

  /// The asynchronous error, the first one.
  [[nodiscard]] ncclResult_t error() const {
    const int own = error_.load(std::memory_order_acquire);
    return own != ncclSuccess ? static_cast<ncclResult_t>(own) : clique->failure(rank);
  }
  void set_error(ncclResult_t code, const std::string& why);
  /// Takes the next step of making the communicator, if its peers are there.
  void advance();
  /// Whether all ranks have made it.
  [[nodiscard]] bool made() const { return clique->complete(); }
  /// Whether any peer is another process' rank.
  [[nodiscard]] bool has_remote() const;
  /// As ncclCommGetAsyncError: launches what is pending at one of the first calls.
  ncclResult_t poll();
  /// Launches what is pending.
  void flush();
  /// Whether calls may be issued now; if not, why.
  ncclResult_t ready();
  /// Issues what a group collected, now or at a later poll.
  ncclResult_t issue(Launch calls);
  /// Ends what runs, and what starts from now on at once.
  void abort();
  /// Whether all that was issued is complete on its streams.
  bool idle();
  void wait_idle();
  void finalize() { finalizing_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  std::string last_error();
  void say(const std::string& why);

 private:
  void launch(Launch calls);
  void run(const Launch& calls, bool faulted);
  void run_collective(const Issued& call);
  /// Waits until all ranks came to it; false if that will not be.
  bool meet(const Issued& call);
  void finish_reading(std::uint64_t number);
  void run_pairs(const Launch& calls);
  enum class Progress { waits, ended, broken };
  Progress send(const Issued& call, std::uint64_t& posted);
  Progress receive(const Issued& call);
  /// Waits until the task has to end without result.
  void stall();
  [[nodiscard]] bool stopped() const;

  std::shared_ptr<Lane> lane_;
  std::atomic<int> error_{ncclSuccess};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> finalizing_{false};
  std::atomic<int> running_{0};

  std::mutex mutex_;
  bool connected_ = false;
  std::uint64_t collectives_ = 0;        // issued
  std::vector<std::uint64_t> pairs_[2];  // issued sends, by receiver; receives, by sender
  std::vector<Launch> pending_;
  int polls_ = 0;  // so many more answer ncclInProgress
  std::uint64_t issued_ = 0;
  std::vector<std::pair<StreamPointer, std::uint64_t>> outstanding_;
  std::string last_error_;
};

}  // namespace simulator
