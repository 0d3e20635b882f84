#include "runtime/comm/thread_group.hpp"

#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "zshard/error.hpp"

namespace zshard::comm {

class ThreadWorld {
 public:
  ThreadWorld(int size, double deadline)
      : deadline_seconds(deadline), ranks(static_cast<std::size_t>(size)) {}

  struct alignas(64) Rank {
    ControlSignature signature;
    const void* data = nullptr;
    std::shared_ptr<void> object;
    std::atomic<std::uint32_t> arrived{0};
    std::atomic<bool> gone{false};
    std::string reason;  // written before gone
    std::atomic<std::int64_t> failing{0};
  };

  /// A rank has come to a call. Whether the call takes place is decided under one lock: either all
  /// ranks move its data, or none does. False: the group has failed before.
  bool arrive(Rank& rank, std::uint32_t call) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (broken.load()) return false;
    rank.arrived.store(call, std::memory_order_release);
    if (++arrivals % ranks.size() == 0) met.add();
    return true;
  }

  /// Gives a call up, unless all ranks have come to it by now: false. After a failed call nothing
  /// can complete any more, since counters no longer match. The first cause stays.
  bool give_up(std::uint32_t call, const std::string& cause) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (met.reached(call)) return false;
    breaks_locked(cause);
    return true;
  }

  void breaks(const std::string& cause) {
    const std::lock_guard<std::mutex> lock(mutex);
    breaks_locked(cause);
  }

  const double deadline_seconds;
  std::vector<Rank> ranks;
  std::mutex mutex;
  std::atomic<bool> broken{false};
  std::string why;             // written before broken
  std::uint64_t arrivals = 0;  // over all calls
  base::Counter met;           // calls that every rank has come to
  base::Counter done;          // ranks that have finished a call, over all calls

 private:
  void breaks_locked(const std::string& cause) {
    if (!broken.load()) {
      why = cause;
      broken.store(true, std::memory_order_release);
    }
    met.nudge();
    done.nudge();
  }
};

std::shared_ptr<ThreadWorld> make_thread_world(int size, double deadline_seconds) {
  return std::make_shared<ThreadWorld>(size, deadline_seconds);
}

std::shared_ptr<Group> make_single_group() {
  return std::make_shared<ThreadGroup>(make_thread_world(1, 600.0), 0);
}

std::string to_string(Operation operation) {
  switch (operation) {
    case Operation::all_gather:
      return "all_gather";
    case Operation::broadcast:
      return "broadcast";
    case Operation::barrier:
      return "barrier";
    case Operation::construct:
      return "construction of an engine";
    case Operation::share:
      return "sharing of memory";
    case Operation::read:
      return "a read of a tensor";
    case Operation::write:
      return "a write of a tensor";
    case Operation::initialize:
      return "initialize";
  }
  return "?";
}

namespace {

std::string describe(const ControlSignature& s) {
  return to_string(s.operation) + " (" + std::to_string(s.bytes) + " bytes, root " +
         std::to_string(s.root) + ")";
}

}  // namespace

ThreadGroup::ThreadGroup(std::shared_ptr<ThreadWorld> world, int rank)
    : world_(std::move(world)), rank_(rank) {}

ThreadGroup::~ThreadGroup() = default;

int ThreadGroup::size() const {
  return static_cast<int>(world_->ranks.size());
}
double ThreadGroup::deadline_seconds() const {
  return world_->deadline_seconds;
}

template <class Move>
void ThreadGroup::meet(const ControlSignature& signature, const void* mine,
                       std::shared_ptr<void> object, Move&& move) {
  const auto refuse = [&] {
    throw CommError(describe(signature) + " on rank " + std::to_string(rank_) +
                    ": the group has failed: " + world_->why);
  };
  // Peers of a failed call may still read this rank's words: they stay.
  if (world_->broken.load(std::memory_order_acquire)) refuse();
  const auto world = static_cast<std::uint32_t>(size());
  ThreadWorld::Rank& me = world_->ranks[static_cast<std::size_t>(rank_)];
  me.signature = signature;
  me.data = mine;
  me.object = std::move(object);
  me.failing.store(0, std::memory_order_relaxed);
  const std::uint32_t call = ++calls_;
  if (!world_->arrive(me, call)) refuse();

  const auto start = std::chrono::steady_clock::now();
  std::string lost;
  const auto poll = [&] {
    if (world_->broken.load(std::memory_order_acquire)) {
      lost = world_->why;
      return true;
    }
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    for (int r = 0; r < size(); ++r) {
      const ThreadWorld::Rank& peer = world_->ranks[static_cast<std::size_t>(r)];
      const auto reason = gone(r);  // before `arrived`: a rank may arrive and then leave
      if (static_cast<std::int32_t>(peer.arrived.load(std::memory_order_acquire) - call) >= 0)
        continue;
      if (reason) {
        lost = "rank " + std::to_string(r) + " is gone (" + *reason + ")";
      } else if (waited.count() > world_->deadline_seconds) {
        lost = "rank " + std::to_string(r) + " did not arrive within " +
               std::to_string(world_->deadline_seconds) +
               " s; raise the deadline if it is only slow";
      }
      if (!lost.empty()) return true;
    }
    return false;
  };
  if (!world_->met.wait(call, poll) && world_->give_up(call, lost)) {
    throw CommError(describe(signature) + " on rank " + std::to_string(rank_) +
                    " cannot complete: " + lost);
  }
  for (int r = 1; r < size(); ++r) {
    const ControlSignature& first = world_->ranks[0].signature;
    const ControlSignature& other = world_->ranks[static_cast<std::size_t>(r)].signature;
    if (first == other) continue;
    // All ranks see the same words, so all of them throw and none waits for the others.
    const std::string cause = "ranks made different calls: rank 0 " + describe(first) + ", rank " +
                              std::to_string(r) + " " + describe(other) +
                              (first.operation == other.operation && first.bytes == other.bytes &&
                                       first.root == other.root
                                   ? " with other arguments or values"
                                   : "") +
                              "; every rank must make the same collective calls in the same order";
    world_->breaks(cause);
    throw CommError(cause);
  }
  move();
  world_->done.add();
  // Peers read this rank's memory until they are done. One that dies in between is never waited for
  // longer than the deadline.
  const auto poll_done = [&] {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    return waited.count() > 2 * world_->deadline_seconds;
  };
  if (!world_->done.wait(call * world, poll_done)) {
    world_->breaks(describe(signature) + ": a rank stopped in the middle of it");
    throw CommError(describe(signature) + ": a rank stopped in the middle of it");
  }
}

void ThreadGroup::exchange(const ControlSignature& signature, const void* mine, void* all) {
  meet(signature, mine, nullptr, [&] {
    if (signature.bytes == 0) return;
    for (int r = 0; r < size(); ++r) {
      std::byte* target =
          static_cast<std::byte*>(all) + static_cast<std::size_t>(r) * signature.bytes;
      const void* source = world_->ranks[static_cast<std::size_t>(r)].data;
      // In place: peers read it now.
      if (source != target) std::memcpy(target, source, signature.bytes);
    }
  });
}

void ThreadGroup::broadcast(const ControlSignature& signature, void* data) {
  meet(signature, data, nullptr, [&] {
    if (signature.bytes == 0 || signature.root == rank_) return;
    std::memcpy(data, world_->ranks[static_cast<std::size_t>(signature.root)].data,
                signature.bytes);
  });
}

std::vector<std::shared_ptr<void>> ThreadGroup::share_objects(const ControlSignature& signature,
                                                              std::shared_ptr<void> mine) {
  std::vector<std::shared_ptr<void>> all;
  meet(signature, nullptr, std::move(mine), [&] {
    for (const ThreadWorld::Rank& rank : world_->ranks) all.push_back(rank.object);
  });
  world_->ranks[static_cast<std::size_t>(rank_)].object.reset();
  return all;
}

std::vector<std::shared_ptr<memory::Arena>> ThreadGroup::share(
    std::shared_ptr<memory::Arena> mine) {
  const ControlSignature signature{Operation::share, 0, static_cast<std::uint64_t>(mine->bytes()),
                                   0};
  std::vector<std::shared_ptr<memory::Arena>> arenas;
  for (auto& object : share_objects(signature, std::move(mine))) {
    arenas.push_back(std::static_pointer_cast<memory::Arena>(object));
  }
  return arenas;
}

std::shared_ptr<Board> ThreadGroup::make_board(std::uint64_t signatures,
                                               std::size_t payload_bytes) {
  const ControlSignature signature{Operation::share, 0, payload_bytes, signatures};
  std::shared_ptr<void> mine;
  if (rank_ == 0) mine = std::make_shared<Board>(size(), signatures, payload_bytes);
  return std::static_pointer_cast<Board>(share_objects(signature, std::move(mine))[0]);
}

std::optional<std::string> ThreadGroup::gone(int r) const {
  const ThreadWorld::Rank& rank = world_->ranks[static_cast<std::size_t>(r)];
  if (!rank.gone.load(std::memory_order_acquire)) return std::nullopt;
  return rank.reason;
}

void ThreadGroup::leave(const std::string& reason) {
  ThreadWorld::Rank& me = world_->ranks[static_cast<std::size_t>(rank_)];
  if (me.gone.load()) return;
  me.reason = reason;
  me.gone.store(true, std::memory_order_release);
  world_->met.nudge();
}

void ThreadGroup::fails() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  std::int64_t never = 0;
  world_->ranks[static_cast<std::size_t>(rank_)].failing.compare_exchange_strong(
      never, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

std::int64_t ThreadGroup::failing_since() const {
  return world_->ranks[static_cast<std::size_t>(rank_)].failing.load();
}

}  // namespace zshard::comm
