// The data plane of a rank on a device. Collectives are queued on two streams of its own, gather
// and reduce, as soon as the cursor issues them, and copies from and to host memory on two more;
// who waits for what is said by events, and the host waits only where it needs a value (the vote)
// or memory that a transfer still uses. Ranks meet before anything is queued, so that signatures
// are compared before data moves and no rank queues what a peer never will.
//
// Accumulators in host memory are summed on the device: they come up while the unit's gradients
// travel between the ranks, and go down again behind the sum. Those on disk are summed by a thread
// of the host, the keeper, since they have to pass through its memory anyhow.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "optimizers/device_update.hpp"
#include "runtime/comm/communicator.hpp"
#include "runtime/device/device.hpp"
#include "runtime/device/stream.hpp"
#include "runtime/engine/data_plane.hpp"
#include "runtime/kernels/device_kernels.hpp"

namespace zshard::engine {

/// What the plug-in made for a rank. Communicators are null in a world of one.
struct DeviceParts {
  std::unique_ptr<device::Device> device;
  std::unique_ptr<kernels::DeviceKernels> kernels;
  std::unique_ptr<optimizers::DeviceUpdate> update;
  std::unique_ptr<comm::Communicator> gather;
  std::unique_ptr<comm::Communicator> reduce;  // null: `gather` serves both
  [[nodiscard]] comm::Communicator& reducer() { return reduce != nullptr ? *reduce : *gather; }
};

class DevicePlane final : public DataPlane {
 public:
  /// group: says whether peers are gone. `parts` outlives the plane.
  DevicePlane(const Blueprint& blueprint, const Storage& storage, comm::Endpoint& endpoint,
              kernels::Pool& pool, offload::Store* store, comm::Group& group, DeviceParts& parts);
  ~DevicePlane() override;

  /// A call of the user on `stream` begins. hands_over: what the stream has so far comes before
  /// what is issued from now on; of releases and commits.
  void enter(device::NativeStream stream, bool hands_over);
  /// It ends: what the stream gets next comes behind what the call waited for. Between calls the
  /// plane does not touch the stream, which the user may destroy.
  void leave();
  /// It is over, whether it succeeded or not.
  void left() noexcept { inside_ = false; }

  void accumulate_locally(std::int32_t unit) override;
  /// The caller's stream waits, now or when it is next entered; the host does not.
  void wait(Queue queue, std::uint64_t count) override;
  void wait_for_update(Queue queue, std::uint64_t count) override;
  void stop() override;
  void flush_gradients() override;
  void fill(std::span<std::byte> memory, int value) override;

  // -- the update of a step: on the reduce stream --
  void begin_update();
  /// All passes of the rule, device memory only.
  void update(const optimizers::Rule& rule, const optimizers::Elements& elements,
              const optimizers::Constants& constants, std::int64_t step);
  /// Rounds what update() left to the parameter's dtype.
  void publish(const float* master, DType dtype, void* parameter, std::int64_t count);
  void end_update();

  // Buffer b of those that a sub-group's pieces pass through: in memory of the side that updates.
  [[nodiscard]] float* staged_gradient(int b) const;
  [[nodiscard]] std::byte* staged_parameter(int b) const;
  [[nodiscard]] float* staged_state(int b) const;

  // Where the update runs on the host.
  /// Starts to bring elements of a gradient and bytes of its parameter into buffer b, as soon as
  /// what left from it is gone. 0: it is on the host already, or not read.
  void bring(int b, const float* gradient, std::int64_t count, const void* parameter,
             std::int64_t bytes);
  /// Waits until they are there, also when peers are gone: the update is this rank's own.
  void arrived(int b);
  /// Starts to take the buffer's parameter back.
  void send(int b, void* parameter, std::int64_t bytes);

  // Where it runs on the device.
  /// A piece of a sub-group in a buffer, and where it lives in pinned memory of the host.
  struct Move {
    void* buffer = nullptr;
    void* home = nullptr;
    std::int64_t bytes = 0;
  };
  /// Starts to bring pieces into buffer b, as soon as what left from it is gone. The update comes
  /// behind them.
  void raise(int b, std::span<const Move> moves);
  /// Sets the buffer's parameter to zeros: of what no update writes.
  void clear_parameter(int b, std::int64_t bytes);
  /// Starts to take pieces back behind the update.
  void lower(int b, std::span<const Move> moves);
  /// Waits until they are there, also when peers are gone.
  void lowered(int b);

  // -- contents, between steps --
  /// The whole copy of a replicated segment from its shards. Collective.
  void gather_copies(std::int32_t unit, std::int32_t segment);
  /// Copies and waits. At most DeviceMap::kWindowBytes at a time pass through a window.
  void copy_now(void* target, const void* source, std::int64_t bytes);
  [[nodiscard]] std::byte* window(int index) const;
  /// Waits for all that was queued: host memory that copies used is the caller's again.
  void settle();

 protected:
  void any_gather(const Work& work) override;
  void reduce(const Work& work) override;
  void exchange_votes(const Work& work) override;
  RankSquares squares() override;
  void copy_gradients(std::int32_t unit, int half) override;
  [[nodiscard]] double* host_blocks() const override;

 private:
  /// The stream of a queue and the events of its last items.
  struct Stream {
    device::NativeStream stream;
    static constexpr std::uint64_t kEvents = 64;
    std::array<device::NativeEvent, kEvents> done{};
    std::array<std::atomic<std::uint64_t>, kEvents> sequence{};  // of the item, for messages
    std::atomic<std::uint64_t> count{0};
  };
  [[nodiscard]] Stream& of(Queue queue) { return queue == Queue::gather ? gathers_ : reduces_; }
  /// Accumulators of one unit on the device, of those that live elsewhere.
  struct Piece {
    std::int32_t unit = -1;
    device::NativeEvent raised;  // they have come up
    device::NativeEvent summed;
    device::NativeEvent landed;  // they are in host memory
    // What the keeper has to know.
    bool first_of_step = false;
    bool last_of_step = false;
  };
  [[nodiscard]] std::byte* piece_memory(int k) const;
  /// What of piece k lands at `landing(k)` on its way to disk.
  [[nodiscard]] float* landing(int k) const;
  /// A buffer for the unit's accumulators, to be written on the reduce stream. adds: they are in it
  /// then, if they live in host memory.
  int open_piece(std::int32_t unit, bool adds);
  /// The reduce stream has summed it: starts to take it where it lives.
  void close_piece(int k, const Work& work);
  static void run_keeper(void* object, std::uint64_t piece);
  void keep(int k);
  void finish_item(Stream& stream, const Work& work);
  void wait_item(device::NativeStream waiting, Stream& stream, std::uint64_t count);
  /// What is queued on `later` from now on comes behind all that is on `earlier`.
  void order(device::NativeStream earlier, device::NativeStream later);
  void catch_up();
  void accumulate_on(std::int32_t unit, device::NativeStream stream);
  void queue_squares();
  RankSquares look_up(const double* blocks);
  void gather_units(const Work& work);
  void gather_parameters(std::int32_t unit);
  void reduce_unit(const Work& work);
  /// The host waits; what: for messages. Throws CommError if a peer or the deadline ends it.
  /// alone: what becomes of peers does not matter.
  void await(device::NativeEvent event, std::string_view what, bool alone = false);
  void check_communicators();
  void watch();
  [[nodiscard]] std::string departed() const;
  /// The stream's first item that the device has not completed; "" if there is none.
  [[nodiscard]] std::string unfinished(const Stream& stream) const;
  /// Says that the deadline has passed for `what`, and what it may have waited for.
  [[nodiscard]] std::string overdue(std::string_view what) const;
  template <class Body>
  void with_peers(const Work& work, Body&& body);
  void gather_item(const Work& work);
  void reduce_item(const Work& work);
  void break_off(const std::string& message) noexcept;
  void destroy() noexcept;

  comm::Group& group_;
  DeviceParts& parts_;
  device::Device& device_;
  kernels::DeviceKernels& kernels_;
  double deadline_;
  device::NativeStream compute_{};  // the user's; to be touched inside a call only
  bool inside_ = false;
  bool user_behind_ = false;     // compute_ has to wait for both streams
  bool gathers_behind_ = false;  // gathers have to wait for the reduce stream
  Stream gathers_;
  Stream reduces_;
  device::NativeStream uploads_{};
  device::NativeStream downloads_{};
  device::NativeEvent mark_{};    // re-recorded for every order()
  device::NativeEvent handed_{};  // what the user's streams had when they last handed over
  device::NativeEvent voted_{};
  device::NativeEvent copied_{};
  device::NativeEvent ring_read_{};  // the last copy out of the parameter ring
  bool ring_pending_ = false;
  std::array<device::NativeEvent, DeviceMap::kBuffers> brought_{};
  std::array<device::NativeEvent, DeviceMap::kBuffers> sent_{};
  std::array<device::NativeEvent, 2> half_read_{};  // the copy of a half's accumulators from disk
  std::array<Piece, DeviceMap::kPieces> pieces_{};
  std::uint64_t piece_count_ = 0;
  bool accumulators_leave_;                 // the device
  std::unique_ptr<device::Stream> keeper_;  // of accumulators on disk
  std::mutex watch_mutex_;
  std::condition_variable watch_ends_;
  bool stopping_ = false;
  std::thread watchdog_;  // of a world of several ranks
};

}  // namespace zshard::engine
