#include "runtime/comm/thread_group.hpp"

#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <utility>

namespace zshard::comm {

class ThreadWorld {
 public:
  ThreadWorld(int size, double deadline)
      : deadline_seconds(deadline),
        ranks(static_cast<std::size_t>(size)),
        memory_(new (std::align_val_t{64}) std::byte[ControlBoard::bytes(size)]()) {}
  ~ThreadWorld() { ::operator delete[](memory_, std::align_val_t{64}); }
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  /// What a rank shows in a call: written before it arrives, read by peers until they are done.
  struct alignas(64) Rank {
    const void* data = nullptr;
    std::shared_ptr<memory::Arena> arena;
    std::atomic<std::int64_t> failing{0};
  };
  [[nodiscard]] ControlBoard board() const { return {memory_, static_cast<int>(ranks.size())}; }

  const double deadline_seconds;
  std::vector<Rank> ranks;

 private:
  std::byte* memory_;
};

std::shared_ptr<ThreadWorld> make_thread_world(int size, double deadline_seconds) {
  return std::make_shared<ThreadWorld>(size, deadline_seconds);
}

std::shared_ptr<Group> make_single_group() {
  return std::make_shared<ThreadGroup>(make_thread_world(1, 600.0), 0);
}

ThreadGroup::ThreadGroup(std::shared_ptr<ThreadWorld> world, int rank)
    : world_(std::move(world)),
      rank_(rank),
      // Peers read this rank's memory itself: it cannot go on before they have finished, and a
      // thread of this process does finish.
      control_(world_->board(), rank, world_->deadline_seconds,
               std::numeric_limits<double>::infinity(),
               [board = world_->board()](int r) { return board.left(r); }) {}

ThreadGroup::~ThreadGroup() = default;

int ThreadGroup::size() const {
  return static_cast<int>(world_->ranks.size());
}
double ThreadGroup::deadline_seconds() const {
  return control_.deadline_seconds();
}
void ThreadGroup::limit_deadline(double seconds) {
  control_.limit_deadline(seconds);
}
void ThreadGroup::lift_deadline(double seconds) noexcept {
  control_.lift_deadline(seconds);
}

void ThreadGroup::exchange(const ControlSignature& signature, const void* mine, void* all) {
  ThreadWorld::Rank& me = world_->ranks[static_cast<std::size_t>(rank_)];
  // Peers of a failed call may still read this rank's pointer: it stays.
  if (!control_.board().broken()) {
    me.data = mine;
    me.failing.store(0, std::memory_order_relaxed);
  }
  // By reference: a function of this size would be put on the heap.
  const auto move = [&] {
    if (signature.bytes == 0) return;
    for (int r = 0; r < size(); ++r) {
      std::byte* target =
          static_cast<std::byte*>(all) + static_cast<std::size_t>(r) * signature.bytes;
      const void* source = world_->ranks[static_cast<std::size_t>(r)].data;
      // In place: peers read it now.
      if (source != target) std::memcpy(target, source, signature.bytes);
    }
  };
  control_.meet(signature, std::cref(move));
}

void ThreadGroup::broadcast(const ControlSignature& signature, void* data) {
  ThreadWorld::Rank& me = world_->ranks[static_cast<std::size_t>(rank_)];
  if (!control_.board().broken()) {
    me.data = data;
    me.failing.store(0, std::memory_order_relaxed);
  }
  control_.meet(signature, [&] {
    if (signature.bytes == 0 || signature.root == rank_) return;
    std::memcpy(data, world_->ranks[static_cast<std::size_t>(signature.root)].data,
                signature.bytes);
  });
}

std::shared_ptr<memory::Arena> ThreadGroup::make_arena(std::int64_t bytes) {
  return memory::Arena::make(bytes);
}

std::vector<std::shared_ptr<memory::Arena>> ThreadGroup::share(
    std::shared_ptr<memory::Arena> mine) {
  std::vector<std::shared_ptr<memory::Arena>> all;
  ThreadWorld::Rank& me = world_->ranks[static_cast<std::size_t>(rank_)];
  if (!control_.board().broken()) {
    me.arena = std::move(mine);
    me.failing.store(0, std::memory_order_relaxed);
  }
  control_.meet({Operation::share, 0, 0, 0}, [&] {
    for (const ThreadWorld::Rank& rank : world_->ranks) all.push_back(rank.arena);
  });
  me.arena.reset();
  return all;
}

std::optional<Operation> ThreadGroup::inside(int r) const {
  return control_.board().inside(r);
}

void ThreadGroup::breaks(const std::string& cause) {
  control_.board().breaks(cause);
}

std::optional<std::string> ThreadGroup::gone(int r) const {
  return control_.board().left(r);
}

void ThreadGroup::leave(const std::string& reason) {
  control_.board().leave(rank_, reason);
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
