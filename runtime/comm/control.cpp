#include "runtime/comm/control.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

#include "zshard/error.hpp"

namespace zshard::comm {
namespace {

constexpr std::uint64_t kBroken = std::uint64_t{1} << 63;

template <std::size_t N>
void put(std::array<char, N>& into, const std::string& text) {
  const std::size_t length = std::min(text.size(), N - 1);
  std::memcpy(into.data(), text.data(), length);
  into[length] = '\0';
}

std::string describe(const ControlSignature& s) {
  const std::string root =
      s.operation == Operation::broadcast ? ", root " + std::to_string(s.root) : std::string();
  return to_string(s.operation) + " (" + std::to_string(s.bytes) + " bytes" + root + ")";
}

}  // namespace

bool ControlBoard::arrive(Rank& rank, std::uint32_t call) const {
  rank.arrived.store(call, std::memory_order_release);
  std::uint64_t state = header_->state.load();
  do {
    if ((state & kBroken) != 0) return false;
  } while (!header_->state.compare_exchange_weak(state, state + 1));
  if ((state + 1) % static_cast<std::uint64_t>(world_) == 0) header_->met.add();
  return true;
}

bool ControlBoard::give_up(std::uint64_t call, const std::string& cause) const {
  std::uint64_t state = header_->state.load();
  do {
    if ((state & kBroken) != 0) return true;
    if (state >= call * static_cast<std::uint64_t>(world_)) return false;
  } while (!header_->state.compare_exchange_weak(state, state | kBroken));
  put(header_->why, cause);
  header_->readable.store(1, std::memory_order_release);
  header_->met.nudge();
  header_->done.nudge();
  return true;
}

void ControlBoard::breaks(const std::string& cause) const {
  give_up(~std::uint64_t{0} >> 12, cause);
}

bool ControlBoard::broken() const {
  return (header_->state.load() & kBroken) != 0;
}

std::string ControlBoard::why(const std::string& otherwise) const {
  // Written right after the state; a writer that was killed in between leaves no text.
  for (int i = 0; i < 1000 && header_->readable.load(std::memory_order_acquire) == 0; ++i) {
    base::futex_wait(header_->readable, 0, 1000);
  }
  return header_->readable.load(std::memory_order_acquire) != 0 ? header_->why.data() : otherwise;
}

void ControlBoard::leave(int r, const std::string& reason) const {
  Rank& me = rank(r);
  if (me.gone.load() != 0) return;
  put(me.reason, reason);
  me.gone.store(1, std::memory_order_release);
  header_->met.nudge();
}

std::optional<Operation> ControlBoard::inside(int r) const {
  const Rank& peer = rank(r);
  const std::uint32_t word = peer.inside.load(std::memory_order_acquire);
  if (word == 0) return std::nullopt;
  // A call that every rank has finished is over, however long the system keeps r from leaving it.
  const std::uint32_t call = peer.arrived.load(std::memory_order_acquire);
  bool over = true;
  for (int i = 0; i < world_; ++i) {
    const std::uint32_t done = rank(i).done.load(std::memory_order_acquire);
    over = over && static_cast<std::int32_t>(done - call) >= 0;
  }
  if (over) return std::nullopt;
  return static_cast<Operation>(word - 1);
}

std::optional<std::string> ControlBoard::left(int r) const {
  if (rank(r).gone.load(std::memory_order_acquire) == 0) return std::nullopt;
  return std::string(rank(r).reason.data());
}

Control::Control(ControlBoard board, int rank, double deadline_seconds, double finish_deadlines,
                 std::function<std::optional<std::string>(int)> gone)
    : board_(board),
      rank_(rank),
      deadline_(deadline_seconds),
      finish_deadlines_(finish_deadlines),
      gone_(std::move(gone)) {}

double Control::deadline_seconds() const {
  return std::accumulate(limits_.begin(), limits_.end(), deadline_,
                         [](double a, double b) { return std::min(a, b); });
}

void Control::limit_deadline(double seconds) {
  limits_.push_back(seconds);
}

void Control::lift_deadline(double seconds) noexcept {
  const auto one = std::find(limits_.begin(), limits_.end(), seconds);
  if (one != limits_.end()) limits_.erase(one);
}

bool Control::everyone(bool arrival, std::uint32_t call) const {
  for (int r = 0; r < board_.world(); ++r) {
    const ControlBoard::Rank& peer = board_.rank(r);
    const std::uint32_t at = (arrival ? peer.arrived : peer.done).load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(at - call) < 0) return false;
  }
  return true;
}

void Control::meet(const ControlSignature& signature, const std::function<void()>& move) {
  mark_.check("a process group");
  const auto refuse = [&] {
    throw CommError(describe(signature) + " on rank " + std::to_string(rank_) +
                    ": the group has failed: " + board_.why());
  };
  // Peers of a failed call may still read this rank's words: they stay.
  if (board_.broken()) refuse();
  const auto world = static_cast<std::uint32_t>(board_.world());
  ControlBoard::Rank& me = board_.rank(rank_);
  me.signature = signature;
  struct Inside {
    std::atomic<std::uint32_t>& word;
    ~Inside() { word.store(0, std::memory_order_release); }
  } const inside{me.inside};
  me.inside.store(static_cast<std::uint32_t>(signature.operation) + 1, std::memory_order_release);
  const std::uint32_t call = ++calls_;
  if (!board_.arrive(me, call)) refuse();

  const double most = deadline_seconds();
  const auto start = std::chrono::steady_clock::now();
  const auto waited = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::string lost;
  // A rank that is missing at this stage; "" if none is lost yet.
  const auto missing = [&](bool arrival, double deadline) {
    // A rank writes its word, then counts itself; it may die or be stopped in between.
    const bool uncounted = everyone(arrival, call);
    for (int r = 0; r < board_.world(); ++r) {
      const auto reason = gone_(r);  // before its words: a rank may arrive and then leave
      const ControlBoard::Rank& peer = board_.rank(r);
      const std::uint32_t at = (arrival ? peer.arrived : peer.done).load(std::memory_order_acquire);
      if (static_cast<std::int32_t>(at - call) >= 0 && !(uncounted && reason)) continue;
      if (reason) return "rank " + std::to_string(r) + " is gone (" + *reason + ")";
      if (waited() > deadline) {
        return "rank " + std::to_string(r) + " did not " + (arrival ? "arrive" : "finish") +
               fmt::format(
                   " within {:g} s; raise the deadline (deadline_seconds) if it is only slow",
                   deadline);
      }
    }
    // All that is missing is one instruction of some rank.
    if (uncounted && waited() > 2 * deadline) {
      return fmt::format("a rank that arrived was stopped for {:g} s", deadline);
    }
    return std::string();
  };
  // Whoever is gone may have left because the group had failed: that is the cause then.
  const auto cause_of = [&](const std::string& found) {
    if (!board_.broken()) return found;
    return found.empty() ? board_.why() : board_.why(found);
  };
  const auto poll = [&] {
    lost = cause_of(missing(true, most));
    return !lost.empty();
  };
  if (!board_.met().wait(call, poll) && board_.give_up(call, lost)) {
    throw CommError(describe(signature) + " on rank " + std::to_string(rank_) +
                    " cannot complete: " + board_.why(lost));
  }
  for (int r = 1; r < board_.world(); ++r) {
    const ControlSignature& first = board_.rank(0).signature;
    const ControlSignature& other = board_.rank(r).signature;
    if (first == other) continue;
    // All ranks see the same words, so all of them throw and none waits for the others.
    const std::string cause = "ranks made different calls: rank 0 " + describe(first) + ", rank " +
                              std::to_string(r) + " " + describe(other) +
                              (first.operation == other.operation && first.bytes == other.bytes &&
                                       first.root == other.root
                                   ? " with other arguments or values"
                                   : "") +
                              "; every rank must make the same collective calls in the same order";
    board_.breaks(cause);
    throw CommError(cause);
  }
  move();
  me.done.store(call, std::memory_order_release);
  board_.done().add();
  // Peers read this rank's memory until they are done.
  bool complete = false;
  const auto poll_done = [&] {
    complete = everyone(false, call);  // whatever the counter lost by a rank's death
    if (!complete) lost = missing(false, finish_deadlines_ * most);
    if (!lost.empty()) lost = cause_of(lost);
    return complete || !lost.empty();
  };
  if (!board_.done().wait(call * world, poll_done) && !complete) {
    board_.breaks(describe(signature) + ": " + lost);
    throw CommError(describe(signature) + " on rank " + std::to_string(rank_) + ": " + lost);
  }
}

}  // namespace zshard::comm
