#include "runtime/comm/endpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "zshard/error.hpp"

namespace zshard::comm {
namespace {

// Seconds after which a rank that is in another call has not just been on its way out of it.
constexpr double kCrossed = 0.1;

/// Counts wrap around.
bool behind(const std::atomic<std::uint32_t>& word, std::uint32_t wanted) {
  return static_cast<std::int32_t>(word.load(std::memory_order_acquire) - wanted) < 0;
}

}  // namespace

Endpoint::Endpoint(std::shared_ptr<Group> group, std::shared_ptr<Board> board,
                   double deadline_seconds,
                   std::function<std::string(const PackedSignature&)> describe)
    : group_(std::move(group)),
      board_(std::move(board)),
      deadline_(deadline_seconds),
      describe_(std::move(describe)),
      rank_(group_->rank()),
      world_(group_->size()),
      recorder_(board_->capacity()) {}

Endpoint::~Endpoint() {
  board_->rank(rank_).left.store(1, std::memory_order_release);
  for (int lane = 0; lane < kLanes; ++lane) {
    board_->meeting(static_cast<Lane>(lane)).arrived.nudge();
    board_->meeting(static_cast<Lane>(lane)).done.nudge();
  }
}

void Endpoint::publish(std::uint64_t sequence, const PackedSignature& signature) {
  recorder_.issue(sequence);
  Board::Signature& slot = board_->signature(rank_, sequence);
  slot.stamp.store(0, std::memory_order_release);
  for (std::size_t i = 0; i < signature.size(); ++i) {
    slot.words[i].store(signature[i], std::memory_order_release);
  }
  slot.stamp.store(sequence + 1, std::memory_order_release);
  board_->rank(rank_).published.store(sequence + 1, std::memory_order_release);
}

void Endpoint::meet(Lane lane, std::uint64_t sequence, std::uint64_t payload) {
  // Who does not come keeps all others from going on.
  if (board_->failed()) throw_failure({});
  Call& call = calls_[static_cast<std::size_t>(lane)];
  ++call.count;
  call.sequence = sequence;
  Board::LaneWords& words = board_->rank(rank_).lane[static_cast<std::size_t>(lane)];
  recorder_.arrive(lane, sequence);
  words.sequence.store(sequence, std::memory_order_relaxed);
  words.payload.store(payload, std::memory_order_relaxed);
  words.arrived.store(call.count, std::memory_order_release);
  board_->meeting(lane).arrived.add();
  await(lane, true);
  recorder_.meet(lane);
  // Ranks may meet in one lane with different numbers; then they differ at the lower one.
  std::uint64_t lowest = sequence;
  for (int r = 0; r < world_; ++r) {
    lowest = std::min(lowest, board_->rank(r).lane[static_cast<std::size_t>(lane)].sequence.load(
                                  std::memory_order_relaxed));
  }
  std::string different = mismatch(lowest);
  if (different.empty() && lowest != sequence) {
    different =
        "ranks issued different numbers of collectives before number " + std::to_string(sequence);
  }
  if (!different.empty()) {
    board_->fail(different);
    throw_failure(different);
  }
}

std::uint64_t Endpoint::payload(Lane lane, int r) const {
  return board_->rank(r).lane[static_cast<std::size_t>(lane)].payload.load(
      std::memory_order_relaxed);
}

void Endpoint::finish(Lane lane) {
  Call& call = calls_[static_cast<std::size_t>(lane)];
  ++call.finishes;
  Board::LaneWords& words = board_->rank(rank_).lane[static_cast<std::size_t>(lane)];
  words.done.store(call.finishes, std::memory_order_release);
  board_->meeting(lane).done.add();
  await(lane, false);
  part(lane);
}

void Endpoint::part(Lane lane) {
  board_->rank(rank_).lane[static_cast<std::size_t>(lane)].ended.store(
      calls_[static_cast<std::size_t>(lane)].count, std::memory_order_release);
  recorder_.finish(lane);
}

// The ranks' own words decide; the counter, of one word, is the quick way to see the same. A rank
// that dies or is stopped between its word and the counter has come all the same.
bool Endpoint::everyone(Lane lane, bool arrival) const {
  const Call& call = calls_[static_cast<std::size_t>(lane)];
  for (int r = 0; r < world_; ++r) {
    const Board::LaneWords& words = board_->rank(r).lane[static_cast<std::size_t>(lane)];
    if (arrival ? behind(words.arrived, call.count) : behind(words.done, call.finishes)) {
      return false;
    }
  }
  return true;
}

void Endpoint::await(Lane lane, bool arrival) {
  const Call& call = calls_[static_cast<std::size_t>(lane)];
  Board::Meeting& meeting = board_->meeting(lane);
  base::Counter& counter = arrival ? meeting.arrived : meeting.done;
  const auto start = std::chrono::steady_clock::now();
  bool complete = false;
  std::string cause;
  const bool reached = counter.wait(
      (arrival ? call.count : call.finishes) * static_cast<std::uint32_t>(world_), [&] {
        // A failure does not undo a meeting that took place: what every rank has come to is still
        // completed.
        complete = everyone(lane, arrival);
        if (complete || board_->failed()) return true;
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        cause = mismatch(call.sequence);
        if (cause.empty()) cause = missing(lane, arrival, waited.count());
        if (cause.empty()) return false;
        // First there: once the board has failed this rank may be on its way out, which would hide
        // the cause from a rank that waits in another call.
        if (cause.starts_with("ranks made different calls")) group_->breaks(cause);
        board_->fail(cause);
        return true;
      });
  if (!reached && !complete) throw_failure(cause);
}

std::string Endpoint::mismatch(std::uint64_t sequence) const {
  PackedSignature mine;
  if (!board_->read_signature(rank_, sequence, &mine)) return {};
  for (int r = 0; r < world_; ++r) {
    PackedSignature other;
    if (r == rank_ || !board_->read_signature(r, sequence, &other) || other == mine) continue;
    const auto text = [&](int who, const PackedSignature& what) {
      return "rank " + std::to_string(who) + ": " + describe_(what);
    };
    const bool low = rank_ < r;
    return "ranks issued different collectives (number " + std::to_string(sequence) +
           "): " + text(low ? rank_ : r, low ? mine : other) + "; " +
           text(low ? r : rank_, low ? other : mine) +
           ". Every rank must run the same ranges, micro-steps and steps";
  }
  return {};
}

std::string Endpoint::missing(Lane lane, bool arrival, double waited) const {
  const Call& call = calls_[static_cast<std::size_t>(lane)];
  for (int r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    Board::RankWords& peer = board_->rank(r);
    // Asked before the counters: a rank may arrive and then leave.
    const bool left = peer.left.load(std::memory_order_acquire) != 0;
    const auto gone = group_->gone(r);
    const Board::LaneWords& words = peer.lane[static_cast<std::size_t>(lane)];
    if (!(arrival ? behind(words.arrived, call.count) : behind(words.done, call.finishes))) {
      continue;
    }
    // Only for an error: a wait allocates nothing.
    const auto what = [&] {
      return text(call.sequence) + " on rank " + std::to_string(rank_) + " cannot complete: rank " +
             std::to_string(r);
    };
    if (gone) return what() + " is gone (" + *gone + ")";
    if (left) return what() + " has destroyed its engine";
    const auto elsewhere = group_->inside(r);
    // A rank drains its queues before such a call: it cannot come here while it waits for this rank
    // there.
    const bool crossed = elsewhere == Operation::read || elsewhere == Operation::write ||
                         elsewhere == Operation::initialize;
    if (crossed && waited > kCrossed) {
      return "ranks made different calls: " + what() + " is in " + to_string(*elsewhere) +
             "; reads, writes and initialize are collective: every rank calls them, between steps";
    }
    if (waited > deadline_) {
      return what() + " did not " + (arrival ? "arrive" : "finish") + " within " +
             fmt::format("{:g}", deadline_) + " s" +
             (elsewhere
                  ? ": it is in " + to_string(*elsewhere) +
                        ", and every rank must make the same collective calls in the same order"
                  : std::string("; raise deadline_seconds if it is only slow"));
    }
  }
  return {};
}

std::string Endpoint::text(std::uint64_t sequence) const {
  PackedSignature mine{};
  board_->read_signature(rank_, sequence, &mine);
  return describe_(mine);
}

std::string Endpoint::waits() const {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const Board::LaneWords& mine = board_->rank(rank_).lane[lane];
    const std::uint32_t arrived = mine.arrived.load(std::memory_order_acquire);
    const std::uint32_t done = mine.done.load(std::memory_order_acquire);
    for (int r = 0; r < world_; ++r) {
      const Board::LaneWords& peer = board_->rank(r).lane[lane];
      if (behind(peer.arrived, arrived) || behind(peer.done, done)) {
        return text(mine.sequence.load(std::memory_order_relaxed)) + " waits for rank " +
               std::to_string(r);
      }
    }
  }
  return {};
}

void Endpoint::throw_failure(const std::string& own) const {
  // A rank that dies as it writes the board's message leaves none.
  std::string message = board_->failure();
  if (message.empty()) message = own;
  throw CommError(message.empty() ? "a peer failed" : message);
}

}  // namespace zshard::comm
