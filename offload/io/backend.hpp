// Transfers over a driver: cuts them into blocks, keeps as many in flight as the driver takes,
// reads every result, and mends what can be mended. One thread of its own talks to the driver; any
// thread may submit and wait.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "offload/io/driver.hpp"
#include "offload/io/failure.hpp"
#include "offload/io/pages.hpp"
#include "offload/io/stripe.hpp"
#include "offload/io/traffic.hpp"
#include "offload/io/verifier.hpp"
#include "runtime/base/futex.hpp"

namespace zshard::offload {

struct IoRequest {
  Operation operation = Operation::read;
  std::int64_t offset = 0;      // in the store; a multiple of 4096, like the others
  std::int64_t bytes = 0;       // > 0
  std::byte* memory = nullptr;  // a write only reads it
};

struct BackendOptions {
  std::int64_t block_bytes = std::int64_t{1} << 20;
  double deadline_seconds = 600;
};

/// Allocates nothing after construction.
class IoBackend {
 public:
  /// A batch under way; 0: none.
  using Ticket = std::uint64_t;

  /// Throws std::system_error if its thread cannot be started.
  IoBackend(std::unique_ptr<Driver> driver, StripeMap map, const BackendOptions& options);
  /// stop() must have returned true, or not have been called.
  ~IoBackend();
  IoBackend(const IoBackend&) = delete;
  IoBackend& operator=(const IoBackend&) = delete;

  /// Starts a batch; blocks while its tables are full of batches under way. Requests that overlap,
  /// in this batch or others, run in any order. Throws IoFailed if the tables stay full for
  /// the deadline.
  Ticket submit(std::span<const IoRequest> batch);
  /// Returns once the batch is complete. Throws IoFailed, once, if a request failed, after all
  /// have ended; or if nothing came back within the deadline: then it is still under way.
  void wait(Ticket ticket);
  /// True once wait() would not block.
  [[nodiscard]] bool poll(Ticket ticket) const;
  /// Waits for all batches, at most until the deadline, and forgets failures. False: some still
  /// run.
  bool settle() noexcept;

  /// Writes zeros from `from` to the end in the background; transfers wait until the zeros are
  /// there, as the later of two writes must win. zeros: a block of them, given back to the system
  /// at the end. Once, before transfers.
  void fill(std::int64_t from, Pages zeros);
  [[nodiscard]] bool filled() const;
  /// From the next submit() on; null: none. Not while transfers are under way.
  void set_verifier(Verifier* verifier);

  [[nodiscard]] IoTraffic traffic() const;
  void clear_traffic();
  [[nodiscard]] std::string name() const { return driver_->name(); }
  [[nodiscard]] std::int64_t block_bytes() const { return block_bytes_; }

  /// Ends everything: waits for what is under way. False if that does not end within the
  /// deadline: then this object and the memory of its transfers must stay until ended().
  bool stop() noexcept;
  /// Nothing is under way any more, and nothing can be started: after stop().
  [[nodiscard]] bool ended() const { return ended_.load(); }

 private:
  static constexpr std::size_t kBatches = 256;
  static constexpr std::size_t kEntries = 256;
  static constexpr int kNone = -1;
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  struct Batch {
    std::atomic<Ticket> running{0};
    std::atomic<std::int64_t> last_event{0};  // nanoseconds: submitted, a block started or ended
    std::atomic<int> unissued{0};             // requests of which blocks are still to be started
    int left = 0;                             // requests that are not complete
    Ticket failed = 0;                        // whose failure it is
    IoFailure failure;
    IoRequest request;  // the first one, for messages
    std::uint64_t uses = 0;
  };
  struct Entry {  // one request
    IoRequest request;
    std::size_t batch = 0;
    std::int64_t issued = 0;  // bytes that blocks were made of
    int blocks = 0;           // in flight
    int next = kNone;
  };
  struct Slot {         // one block
    int entry = kNone;  // kNone: zeros
    RawRequest raw;     // as it was first started
    std::int64_t offset = 0;
    std::int64_t done = 0;
    int tries = 0;                // without progress
    int error = 0;                // of the last one
    std::int64_t not_before = 0;  // nanoseconds; 0: in flight
    Verifier* verifier = nullptr;
    bool used = false;
  };
  struct List {
    int first = kNone;
    int last = kNone;
  };

  void run();
  int take();
  int take_block(Operation operation);
  int take_zeros();
  int use_slot(const StripeMap::Place& place, Operation operation, std::byte* memory, int entry,
               std::int64_t offset);
  void start(const Slot& slot);
  void restart_due();
  [[nodiscard]] std::int64_t pause() const;
  void complete(const RawCompletion& completion);
  void retry(Slot& slot, int error);
  void end(Slot& slot, const IoFailure* failure);
  void end_zeros(const IoFailure* failure);
  void fail_batch(Batch& batch, const IoFailure& failure);
  void leave_list(Operation operation);
  void finish_entry(int place);
  void finish_batch(std::size_t index);
  void append(const IoRequest& request, std::size_t batch);
  void count(Operation operation, int change);
  [[nodiscard]] bool hung(const Batch& batch) const;
  [[nodiscard]] bool hung() const;
  template <class Ready>
  bool wait_for(Ready&& ready, const Batch* batch);
  [[nodiscard]] static IoFailure failure_of(const Slot& slot, IoFailure::Kind kind, int error);

  std::unique_ptr<Driver> driver_;
  const StripeMap map_;
  const std::int64_t block_bytes_;
  const std::int64_t deadline_;  // nanoseconds

  mutable std::mutex mutex_;
  std::vector<Batch> batches_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> free_batches_;
  std::vector<int> free_entries_;
  std::array<List, 2> lists_;  // by operation, oldest first
  int turn_ = 0;               // reads, writes, zeros: who may start next
  bool sleeping_ = false;      // the thread waits and could start more
  bool stopping_ = false;
  int active_batches_ = 0;

  Pages zeros_;
  std::int64_t zeros_next_ = 0;                  // where the next block of zeros goes
  std::atomic<std::int64_t> watermark_{kNever};  // everything below is filled
  bool zeros_failed_ = false;
  IoFailure zeros_failure_;
  Verifier* verifier_ = nullptr;

  IoTraffic traffic_;
  std::array<int, 2> active_{};  // requests under way, by operation
  std::array<std::int64_t, 2> active_since_{};

  // The thread's own.
  std::vector<Slot> slots_;
  std::vector<RawCompletion> completions_;
  std::vector<int> free_slots_;
  int delayed_ = 0;  // slots that wait for their next try

  std::atomic<int> busy_{0};  // slots in use
  std::atomic<std::int64_t> last_event_{
      0};                           // nanoseconds: the driver answered, or got work when idle
  base::Counter finished_;          // batches that ended, entries that came free
  std::atomic<bool> ended_{false};  // the thread
  std::thread thread_;
};

}  // namespace zshard::offload
