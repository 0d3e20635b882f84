// Executes the collectives that the cursor issues, in order, on two queues: gathers and reductions.
// Knows addresses and sums, not positions or guards. What waits for what is the cursor's affair.
// This class is the plane of host ranks; DevicePlane overrides what touches memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "offload/tiers/store.hpp"
#include "runtime/comm/endpoint.hpp"
#include "runtime/device/stream.hpp"
#include "runtime/engine/cursor.hpp"
#include "runtime/engine/parameter_ring.hpp"
#include "runtime/engine/storage.hpp"
#include "runtime/engine/vote.hpp"
#include "runtime/kernels/pool.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {

/// What all ranks learn from the vote.
struct Vote {
  RankSquares squares;        // over all ranks
  std::vector<char> touched;  // one flag a unit: some rank used it
};

/// Totals since construction; written by the queues, read by anyone.
struct Traffic {
  std::atomic<std::int64_t> gathered_bytes{0};
  std::atomic<std::int64_t> reduced_bytes{0};
  std::atomic<std::int64_t> gather_nanoseconds{0};
  std::atomic<std::int64_t> reduce_nanoseconds{0};
};

class DataPlane {
 public:
  /// store: what the blueprint's tier map has on disk; null if that is nothing.
  DataPlane(const Blueprint& blueprint, const Storage& storage, comm::Endpoint& endpoint,
            kernels::Pool& pool, offload::Store* store, int rank);
  virtual ~DataPlane();
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  /// Appends a gather or a reduction of a micro-step. contributes: this rank wrote the unit's
  /// gradients; final_local: accumulation `local`, the gradients of all micro-steps are to be
  /// reduced.
  void issue(const Signature& signature, const Item& item, bool contributes);
  /// Adds the unit's gradient to its fp32 buffer (accumulation `local`), on the calling thread.
  virtual void accumulate_locally(std::int32_t unit);
  /// Computes this rank's square sums and appends the vote. arguments: hash of the step's
  /// arguments, compared.
  void issue_vote(const Signature& signature, std::span<const char> touched,
                  std::uint64_t arguments);
  /// After the vote is complete. Throws CommError if ranks passed different arguments.
  [[nodiscard]] const Vote& vote() const { return vote_; }
  /// Appends a gather at the end of the step; half: which of the two buffers of gathered gradients
  /// (stage 0).
  void issue_step_gather(const Signature& signature, const Item& item, int half);

  virtual void wait(Queue queue, std::uint64_t count);
  /// The same, before an update of the step reads what arrived.
  virtual void wait_for_update(Queue queue, std::uint64_t count) { wait(queue, count); }
  /// The caller goes on: what it issued runs beside it from now on; at once if it is worth waking
  /// a thread, else with what follows, when the caller waits, or within Stream::kSlice.
  void go_on();
  /// The same, at once.
  void kick();
  /// Everything that was issued.
  void drain();
  [[nodiscard]] std::uint64_t issued(Queue queue) const;
  /// After a failure: waits until the queues' threads no longer touch memory.
  virtual void stop();
  /// Sets bytes of this rank's arenas, in the order of the calling thread.
  virtual void fill(std::span<std::byte> memory, int value);
  /// The last reductions of the range that begins leave the square sums of the vote.
  void expect_squares() { squares_known_ = true; }
  /// A gradient was changed after its last reduction.
  void forget_squares() { squares_known_ = false; }
  /// Waits until accumulators that were written to disk are there. Throws IoError.
  virtual void flush_gradients();
  /// Reads without meeting: after a failure behind the vote, when peers' gradients are final but a
  /// peer may be gone.
  void gather_gradient_alone(std::int32_t unit, int half);
  /// Whether the gradients of a buffer are complete; false: some rank's disk refused its own.
  [[nodiscard]] bool gathered(int half) const { return halves_[half].complete; }
  /// Why this rank's are missing; null: they are not.
  [[nodiscard]] std::exception_ptr gather_failure(int half) const { return halves_[half].failure; }

  [[nodiscard]] const Traffic& traffic() const { return traffic_; }
  /// Text of a signature, for messages.
  static std::string describe(const Blueprint& blueprint, const comm::PackedSignature& signature);
  /// Bytes that the vote exchanges.
  static std::size_t vote_bytes(const Blueprint& blueprint);
  /// Tasks a queue may hold: more than the collectives of two micro-steps.
  static std::uint64_t queue_capacity(const Blueprint& blueprint);

 protected:
  struct Work {
    Item item;
    std::uint64_t sequence = 0;
    bool contributes = false;
    int half = 0;
    bool first_of_step = false;  // a reduction that sets the accumulators instead of adding to them
    bool last_of_step = false;   // one behind which they are final
    // A gather from disk: the gathers that follow it for certain.
    std::span<const std::int32_t> upcoming{};
    std::span<const std::int32_t> later{};
  };

 private:
  struct Lane {
    std::unique_ptr<device::Stream> stream;
    std::vector<Work> ring;  // twice the stream's capacity: an entry outlives its task
    std::uint64_t count = 0;
  };
  void append(Queue queue, const Signature& signature, const Work& work, std::int64_t bytes);
  std::int64_t worth_a_wake_;      // bytes
  std::int64_t issued_bytes_ = 0;  // since the last kick

 protected:
  /// Accumulators of one unit, in staging memory.
  struct AccumulatorSlot {
    std::int32_t unit = -1;
    offload::Ticket read = 0;
    offload::Ticket write = 0;
  };
  /// A gradient buffer of the step, at stage 0 with accumulators on disk.
  struct Half {
    bool complete = true;
    std::exception_ptr failure;
  };
  virtual void any_gather(const Work& work);  // of one of the three kinds
  virtual void reduce(const Work& work);
  virtual void exchange_votes(const Work& work);
  /// Square sums of this rank's accumulators.
  virtual RankSquares squares();
  [[nodiscard]] std::int64_t block_start(std::int32_t u, std::size_t s, std::size_t placed) const {
    return block_starts_[static_cast<std::size_t>(u)][s][placed];
  }
  virtual void copy_gradients(std::int32_t unit, int half);
  /// Square sums in memory of the host: [count of blocks] fp64.
  [[nodiscard]] virtual double* host_blocks() const { return storage_.square_blocks(); }
  void add_traffic(std::int64_t gathered, std::int64_t reduced) {
    traffic_.gathered_bytes.fetch_add(gathered, std::memory_order_relaxed);
    traffic_.reduced_bytes.fetch_add(reduced, std::memory_order_relaxed);
  }
  /// Runs a task. A disk that fails in it ends the collectives of both queues on every rank at
  /// once: a peer may wait for this queue's while this rank's caller waits for the other one's.
  template <class Body>
  void with_disk(Body&& body);
  /// Throws what this rank's own disk has caused, if it has.
  void check_disk();

  // -- accumulators on disk: one unit's at a time in one of kAccumulatorSlots places in memory --
  [[nodiscard]] float* staged_accumulator(int slot, int r, std::int32_t unit, int s) const;
  /// Takes the next place for the unit's accumulators, and starts to read them, unless they are to
  /// be set.
  void open_accumulators(std::int32_t unit, bool read);
  void read_accumulators(int slot, std::int32_t unit);
  void take_accumulators(int slot);
  void write_accumulators(int slot);
  /// Reads those of a unit for the step; a failure is kept in the half.
  void read_half(std::int32_t unit, int half);

 private:
  static void run_gather(void* object, std::uint64_t index);
  static void run_reduce(void* object, std::uint64_t index);
  void gather(const Work& work);
  void step_gather(const Work& work);
  void copy(void* target, const void* source, std::int64_t bytes);
  void prepare_contribution(std::int32_t unit);
  void reduce_segment(std::int32_t unit, std::int32_t s, const Work& work);
  void foresee(const Signature& signature, Work& work);
  RankSquares squares_from_disk();

 protected:
  const Blueprint& blueprint_;
  const Storage& storage_;
  comm::Endpoint& endpoint_;
  kernels::Pool& pool_;
  offload::Store* store_;
  const TierMap& tiers_;
  const shard::Layout& layout_;
  int rank_;
  int world_;
  bool local_;
  std::unique_ptr<ParameterRing> ring_;  // parameters on disk
  // Square sums of the gradients follow their last reduction while they are in the cache.
  BlockStarts block_starts_;
  std::atomic<bool> squares_known_{false};  // of a whole step, all elements finite
  AccumulatorSlot slots_[kAccumulatorSlots];
  int slot_ = 0;  // of the last reduction or gradient gather
  Half halves_[2];

 private:
  Vote vote_;
  std::vector<std::byte> ballot_;           // this rank's, written before the task is appended
  std::vector<const std::byte*> segments_;  // per rank, of the segment being reduced
  // Units of the gathers of a micro-step: training, evaluation; the first one, later ones.
  std::vector<std::int32_t> gather_order_[2][2];
  std::uint64_t foreseen_range_ = 0;
  std::int32_t foreseen_micro_ = -1;
  std::size_t foreseen_ = 0;                 // gathers of that micro-step so far
  std::vector<std::int32_t> units_on_disk_;  // whose accumulators are
  std::mutex disk_mutex_;
  std::exception_ptr disk_failure_;  // the first one of a queue
  Traffic traffic_;
  Lane gather_;
  Lane reduce_;  // last: the workers stop before what they use goes
};

template <class Body>
void DataPlane::with_disk(Body&& body) {
  try {
    body();
  } catch (const IoError& error) {
    {
      const std::lock_guard<std::mutex> lock(disk_mutex_);
      if (disk_failure_ == nullptr) disk_failure_ = std::current_exception();
    }
    endpoint_.fail("rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  } catch (const CommError&) {
    check_disk();
    // A communicator that was aborted knows less than who ended it.
    if (endpoint_.failed()) throw CommError(endpoint_.failure());
    throw;
  }
}

}  // namespace zshard::engine
