// One rank's end of an engine's data plane. A collective is: publish its signature when it is
// issued; on the queue, meet() the other ranks (signatures are compared before any data moves),
// read what peers have published, then finish(), after which inputs may be overwritten and outputs
// read. Memory that peers read is found through Group::share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/comm/board.hpp"
#include "runtime/comm/group.hpp"
#include "runtime/comm/recorder.hpp"

namespace zshard::comm {

class Endpoint {
 public:
  /// describe: text of a signature for messages.
  Endpoint(std::shared_ptr<Group> group, std::shared_ptr<Board> board, double deadline_seconds,
           std::function<std::string(const PackedSignature&)> describe);
  /// Tells peers that this rank makes no further call.
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  /// Sequence numbers count from 0 over both lanes. From the thread that issues.
  void publish(std::uint64_t sequence, const PackedSignature& signature);

  /// Waits until every rank has come to this collective. payload: a word that peers may read until
  /// finish(). Throws CommError, after the board has failed so that every rank throws, for a
  /// signature that differs, a rank that is gone, or the deadline.
  void meet(Lane lane, std::uint64_t sequence, std::uint64_t payload);
  [[nodiscard]] std::uint64_t payload(Lane lane, int r) const;
  /// Waits until every rank has finished it.
  void finish(Lane lane);
  /// Ends it without waiting: for inputs that no rank overwrites before a later meeting of all that
  /// this rank's queue has to be drained for. Every rank ends a collective in the same way.
  void part(Lane lane);

  /// This rank's bytes of a byte all-gather: write before meet(), read peers' between meet() and
  /// finish().
  [[nodiscard]] std::byte* bytes(int r) const { return board_->payload(r); }
  [[nodiscard]] std::size_t byte_capacity() const { return board_->payload_bytes(); }

  /// Makes every rank's present and later collectives throw CommError with this message. The first
  /// one wins.
  void fail(const std::string& message) { board_->fail(message); }
  [[nodiscard]] bool failed() const { return board_->failed(); }
  [[nodiscard]] std::string failure() const { return board_->failure(); }

  /// What a collective that was published is, for messages. From any thread, as is what follows.
  [[nodiscard]] std::string text(std::uint64_t sequence) const;
  /// The meeting that this rank has come to and a peer has not: "gather of unit u0 ... waits for
  /// rank 1"; "" if there is none.
  [[nodiscard]] std::string waits() const;

  /// The watchdog's report: this rank's last collectives, and where every rank stands.
  /// docs/errors.md explains it.
  [[nodiscard]] std::string report() const;

 private:
  struct Call {
    std::uint32_t count = 0;     // collectives of this lane so far, this one included
    std::uint32_t finishes = 0;  // of them, those that ended with finish()
    std::uint64_t sequence = 0;
  };
  void await(Lane lane, bool arrival);
  bool everyone(Lane lane, bool arrival) const;
  std::string mismatch(std::uint64_t sequence) const;
  std::string missing(Lane lane, bool arrival, double waited) const;
  /// own: what this rank says if the board's message cannot be read.
  [[noreturn]] void throw_failure(const std::string& own) const;

  std::shared_ptr<Group> group_;
  std::shared_ptr<Board> board_;
  double deadline_;
  std::function<std::string(const PackedSignature&)> describe_;
  int rank_;
  int world_;
  Call calls_[kLanes];
  Recorder recorder_;
};

}  // namespace zshard::comm
