// The engine behind the public interface: one rank's cursor, storage and queues, and who may call
// what when. Every public method takes the lock; the queues' threads never do, so a call may wait
// for them while it holds it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "offload/tiers/store.hpp"
#include "optimizers/rule.hpp"
#include "runtime/base/fork.hpp"
#include "runtime/comm/endpoint.hpp"
#include "runtime/comm/group.hpp"
#include "runtime/engine/blueprint.hpp"
#include "runtime/engine/cursor.hpp"
#include "runtime/engine/data_plane.hpp"
#include "runtime/engine/device_plane.hpp"
#include "runtime/engine/disk_window.hpp"
#include "runtime/engine/state_stream.hpp"
#include "runtime/engine/storage.hpp"
#include "runtime/engine/update_trial.hpp"
#include "runtime/kernels/pool.hpp"
#include "zshard/engine.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {

/// A mutex that tells a thread which holds it already, inside a callback of the engine, or a forked
/// child, whose threads stayed with the parent, instead of hanging for ever.
class CallMutex {
 public:
  void lock() {
    mark_.check("an engine");
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
      throw UsageError(
          "the engine was called from inside one of its own callbacks (on_bind, or the function of "
          "initialize); a callback works on what it is given only");
    }
    mutex_.lock();
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  void unlock() {
    owner_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }
  /// False in a forked child.
  [[nodiscard]] bool here() const noexcept { return mark_.here(); }

 private:
  base::ProcessMark mark_;
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

/// what() of an exception in flight or kept.
std::string text_of(const std::exception_ptr& cause);

class Core final : private CursorSink {
 public:
  Core(const ModelSpec& spec, const Optimizer& optimizer, const ProcessGroup& group,
       const EngineOptions& options);
  ~Core() override;
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // -- the loop (core.cpp) --
  void begin_micro_steps(int n);
  void begin_evaluation_passes(int n);
  bool next_micro_step();
  void finish_evaluation();
  [[nodiscard]] MicroStep micro_step() const;
  /// stream: the caller's, of a device rank.
  GradientMode acquire(UnitId unit, Pass pass, StreamHandle stream);
  void commit(UnitId unit, StreamHandle stream);
  void release(UnitId unit, Pass pass, StreamHandle stream);
  void skip(UnitId unit);
  [[nodiscard]] void* pointer(ParameterId id) const;
  [[nodiscard]] void* gradient(ParameterId id) const;
  [[nodiscard]] UnitId unit_of(ParameterId id) const;  // of the owner, for an alias
  [[nodiscard]] GradientMode gradient_mode(UnitId unit) const;
  void on_bind(std::function<void(const Binding&)> callback);

  // -- the step (core_step.cpp) --
  StepReport step(const StepOptions& options);
  StepReport resume_step();

  // -- contents (core_contents.cpp) --
  void initialize(UnitId unit, const Initializer& fill);
  enum class Content : std::uint8_t { parameter, gradient, state };
  void read(Content content, const std::string& name, const std::string& slot, std::span<float> out,
            std::int64_t first);
  void write(Content content, const std::string& name, const std::string& slot,
             std::span<const float> values, std::int64_t first);
  [[nodiscard]] std::int64_t step_count() const;
  void set_step_count(std::int64_t step);

  // -- facts --
  [[nodiscard]] const Blueprint& blueprint() const { return blueprint_; }
  /// Bytes of memory and disk really taken.
  [[nodiscard]] MemoryPlan ledger() const;
  /// Null if nothing is on disk.
  [[nodiscard]] const offload::Store* store() const { return store_.get(); }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int world() const { return world_; }

  // -- endings --
  /// From now on every call throws `cause`, and peers' collectives throw CommError.
  void poison(std::exception_ptr cause, const std::string& message);
  /// A guard or a range was left by an exception that is still on its way.
  void abandon(const std::string& scope) noexcept;
  /// The Engine is gone; guards may still live.
  void close() noexcept;
  /// False in a forked child: nothing here may be used or destroyed then.
  [[nodiscard]] bool here() const noexcept { return mutex_.here(); }
  /// Releases on behalf of a destructor: errors are kept for the next call.
  void release_quietly(UnitId unit, Pass pass, StreamHandle stream) noexcept;

 private:
  // A bound pointer pair; offsets in elements of the segment.
  struct Bound {
    ParameterId parameter;
    PointerBinding data;
    PointerBinding gradient;
    std::int32_t segment = 0;
    std::int64_t start = 0;
    std::int64_t item = 4;
    bool trained = false;
  };
  /// A unit's addresses follow from where it was gathered and whether it has gradients.
  struct Announced {
    bool bound = false;
    std::int64_t offset = 0;
    bool backward = false;
    friend bool operator==(const Announced&, const Announced&) = default;
  };
  struct HyperClass {
    std::int32_t group = -1;
    double lr_scale = 1.0;
    bool decay = true;
  };
  struct Location {
    std::int32_t unit = 0;
    std::int32_t segment = 0;
    const shard::Segment* layout = nullptr;
    const shard::Placed* placed = nullptr;
  };

  // CursorSink
  void issue(Queue queue, const Signature& signature, const Item& item) override;
  void accumulate_locally(const Item& item) override;
  void wait(Queue queue, std::uint64_t count) override;
  void use(std::int32_t position, std::int32_t micro) override;
  void released(std::int32_t position) override;

  void construct(std::shared_ptr<memory::Arena> board);
  void open_device();
  void make_communicators();
  /// Why a device is too small: the plan, and what to change.
  [[nodiscard]] std::string device_advice() const;
  /// A call of the user's on a stream of a device rank, while it lives.
  class OnStream {
   public:
    OnStream(DevicePlane* plane, StreamHandle stream, bool hands_over) : plane_(plane) {
      if (plane_ != nullptr) plane_->enter({stream.handle}, hands_over);
    }
    ~OnStream() {
      if (plane_ != nullptr) plane_->left();
    }
    OnStream(const OnStream&) = delete;
    OnStream& operator=(const OnStream&) = delete;
    /// The call succeeded.
    void end() {
      if (plane_ != nullptr) plane_->leave();
    }

   private:
    DevicePlane* plane_;
  };
  [[nodiscard]] offload::StoreOptions store_options() const;
  void make_store();
  /// Writes the endpoint's report to a file, once, where log_dir asks for it.
  void report(const std::string& cause) noexcept;
  void agree(std::uint32_t status, const std::string& text, std::exception_ptr own);
  void prepare_bindings();
  void prepare_hyper_classes();
  void bind(UnitId unit);
  /// Nulls the unit's pointers. What a callback throws poisons the engine.
  void unbind(UnitId unit) noexcept;
  void call_back(const Binding& binding);
  void check_unit(UnitId unit) const;
  void check_poison() const;
  void check_between_steps(std::string_view call) const;
  [[nodiscard]] std::string where() const;
  /// Runs a piece of a call; errors other than UsageError poison the engine.
  template <class Body>
  auto guarded(Body&& body);

  void resolve(const StepOptions& options, double* lr);
  [[nodiscard]] std::uint64_t hash_arguments(double unscale, const StepOptions& options);
  void order_updates(std::span<const char> touched);
  /// The unit's sub-groups, in update order.
  template <class Body>
  void each_group(std::int32_t unit, Body&& body) const;
  void prefetch_state();
  void update_all(float factor);
  void update_unit(std::int32_t unit, float factor, int half);
  void update_group(std::int32_t group, float factor, int half);
  /// The group's place in memory: gradient, parameter, [master] and slots, from its first element.
  struct GroupMemory {
    const float* gradient = nullptr;
    std::byte* parameter = nullptr;
    float* state[1 + optimizers::kMaxSlots] = {};
  };
  /// buffer: that its pieces on disk were read into; null leaves them out.
  [[nodiscard]] GroupMemory memory_of(const SubGroup& g, std::byte* buffer, int half) const;
  [[nodiscard]] const shard::Segment& segment_of(const SubGroup& g) const;
  /// Zeros behind the parameter of a group, up to the end of its piece on disk.
  void zero_behind(const SubGroup& g, const GroupMemory& at) const;
  /// For each parameter of the group, the elements of it that this rank updates, counted within
  /// what the rank updates of the segment.
  template <class Body>
  void each_range(const SubGroup& g, Body&& body) const;
  /// With update_on = auto: where the coming update runs; and how long it took there.
  void choose_place();
  void judge_place(std::chrono::steady_clock::time_point start);
  /// A group, by a device rank's kernels: what is not on the device passes through a buffer there.
  void update_by_device(std::int32_t group, float factor, int half);
  void update_on_device(const SubGroup& g, const GroupMemory& at, float factor);
  void update_on_host(const SubGroup& g, const GroupMemory& at, float factor, bool zero_padding);
  /// Brings the group's gradient and parameter to the host, and starts to bring the next ones.
  /// Returns their buffer.
  int bring_group(std::int32_t group, int half);
  /// Sends groups that the device has updated to disk, in order, but for the last `left`. Throws
  /// IoError.
  void publish_updates(std::size_t left);
  /// After an IoError: keeps what is updated and not on disk, for resume_step().
  void keep_updates();
  void finish_step(StepReport& report);
  void fill_report_totals(StepReport& report);

  [[nodiscard]] Location locate(ParameterId id) const;       // of the owner, for an alias
  [[nodiscard]] Location locate_held(ParameterId id) const;  // UsageError if its unit is not held
  [[nodiscard]] Location locate(const std::string& name) const;
  void fill_own(UnitId unit, const Initializer& fill);
  /// Host memory that a device's copies use is the caller's afterwards.
  void settle();
  void rendezvous(comm::Operation operation, std::uint64_t tag);
  /// After a tensor was written: brings it to disk, and drops what buffers held of it.
  void forget_buffers();
  /// Ends a collective change; throws on every rank if a disk failed.
  void finish_change(comm::Operation operation, std::uint64_t tag,
                     const std::exception_ptr& failure);
  /// Compares how the ranks' own functions ended. `failure`: what this rank's threw, or null.
  void rendezvous_outcome(comm::Operation operation, std::uint64_t tag, std::string_view call,
                          const std::exception_ptr& failure);
  /// One tensor of a parameter: itself, its accumulator, or part `part` of its state (the master
  /// weights come first).
  struct Tensor {
    Content content = Content::parameter;
    int part = 0;
  };
  /// Where elements of what a rank holds of a tensor lie.
  struct Spot {
    std::byte* memory = nullptr;  // null: on disk
    std::int64_t offset = -1;     // in the store
    std::int64_t run = 0;         // elements that follow one another from here on
  };
  [[nodiscard]] bool on_device(const Location& at, Tensor tensor) const;
  [[nodiscard]] Spot spot(int r, const Location& at, Tensor tensor, std::int64_t element) const;
  [[nodiscard]] Tensor state_of(const Location& at, const std::string& slot,
                                const std::string& name) const;
  /// Elements [lo, hi) of what this rank holds, piece by piece, to be written by body(memory, lo,
  /// count).
  template <class Body>
  void change(const Location& at, Tensor tensor, std::int64_t lo, std::int64_t hi, Body&& body);
  /// Elements [lo, hi) of what rank r holds, read on every rank by body(memory, lo, count).
  /// Collective where they are on disk. Returns why a rank's disk failed, or null.
  template <class Body>
  std::exception_ptr visit(int r, const Location& at, Tensor tensor, std::int64_t lo,
                           std::int64_t hi, comm::Operation operation, Body&& body);
  /// Tells all ranks whether a disk failed. Returns null, or what every rank is to throw.
  std::exception_ptr agree_on_disks(comm::Operation operation, std::uint64_t tag,
                                    const std::exception_ptr& failure);

  Blueprint blueprint_;
  std::shared_ptr<comm::Group> group_;
  int rank_;
  int world_;
  std::unique_ptr<kernels::Pool> pool_;
  std::unique_ptr<DeviceParts> parts_;         // null on a host rank
  std::array<comm::CommunicatorId, 2> ids_{};  // rank 0's
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<offload::Store> store_;  // the fields up to here outlive its transfers
  std::unique_ptr<StateStream> stream_;
  std::unique_ptr<DiskWindows> windows_;
  std::unique_ptr<comm::Endpoint> endpoint_;
  std::unique_ptr<DataPlane> plane_;
  DevicePlane* device_plane_ = nullptr;  // plane_, on a device rank
  std::unique_ptr<Cursor> cursor_;

  mutable CallMutex mutex_;
  std::exception_ptr poison_;
  bool closed_ = false;
  bool reported_failure_ = false;
  bool updated_ = false;  // the step that failed has updated all the same
  int exceptions_;        // on their way at construction
  std::function<void(const Binding&)> on_bind_;
  std::vector<std::vector<Bound>> bound_;  // per unit, aliases of its parameters included
  std::vector<Announced> announced_;       // per unit: what its pointers are set to
  std::vector<GradientMode> modes_;        // per unit, of the last backward acquire
  bool fresh_gradient_ = false;            // set by use() within acquire
  bool step_vote_ = false;                 // the next issue is the vote of step()
  std::uint64_t arguments_ = 0;            // hash of step()'s arguments
  int half_ = 0;                           // buffer of the next gathered gradient (stage 0)
  std::vector<HyperClass> classes_;
  std::vector<std::int32_t> class_of_;            // per parameter
  std::vector<optimizers::Resolved> resolved_;    // per class, of the present step
  std::vector<optimizers::Constants> constants_;  // per class
  std::vector<double> argument_words_;
  std::vector<std::int32_t> order_;     // touched units in update order
  std::vector<std::int32_t> streamed_;  // their sub-groups on disk, likewise
  bool prefetched_ = false;             // for the coming step
  UpdateTrial trial_;
  std::vector<std::int32_t> staged_;  // groups that a device rank updates on the host
  std::size_t staged_next_ = 0;       // the next one to be updated
  std::size_t staged_brought_ = 0;    // the next one to be brought
  // Groups in buffers of the stream that the device updates: the oldest first.
  struct Lowered {
    std::int32_t group = -1;
    int buffer = 0;
  };
  std::array<Lowered, DeviceMap::kBuffers> lowered_{};
  std::size_t lowered_count_ = 0;
  int raised_ = 0;                            // groups that passed through the device's buffers
  std::vector<std::uint32_t> disk_failures_;  // per rank, of the last agree_on_disks()
  std::exception_ptr interrupted_;            // the I/O error that resume_step() has to make good
  StepReport interrupted_report_;
  float interrupted_factor_ = 0.0f;
  double update_seconds_ = 0.0;
  double raw_share_ = 0.0;  // of the present step
  // Bytes a second: what the device was seen to reach, in the probe at construction or since.
  bool register_buffers_ = true;  // of the store
  double raw_read_ = 0.0;
  double raw_write_ = 0.0;
  struct Totals {
    std::int64_t gathered = 0;
    std::int64_t reduced = 0;
    std::int64_t gather_ns = 0;
    std::int64_t reduce_ns = 0;
    std::uint64_t behind = 0;
    offload::IoTraffic disk;
    double disk_wait = 0.0;
  } reported_;  // up to the last report
};

template <class Body>
auto Core::guarded(Body&& body) {
  // However the call ends, what it issued runs on.
  struct Kick {
    Core& core;
    ~Kick() {
      if (core.plane_ != nullptr) core.plane_->go_on();
    }
  } const kick{*this};
  try {
    return body();
  } catch (const UsageError&) {
    throw;  // thrown before anything changed
  } catch (Error& error) {
    if (cursor_ != nullptr && !error.state_step()) error.set_state_step(cursor_->step_count());
    poison(std::current_exception(), "rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  } catch (const std::exception& error) {
    poison(std::current_exception(), "rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  } catch (...) {
    poison(std::current_exception(), "rank " + std::to_string(rank_) + ": an unknown exception");
    throw;
  }
}

}  // namespace zshard::engine
