// The engine: owns parameters, gradients and optimizer state of one rank, and decides where each
// byte lives and when it moves. All calls that the text calls collective are made by every rank in
// the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zshard/memory_plan.hpp"
#include "zshard/model_spec.hpp"
#include "zshard/optimizer.hpp"
#include "zshard/options.hpp"
#include "zshard/process_group.hpp"
#include "zshard/types.hpp"

namespace zshard {

class Engine;
namespace engine {
class Core;
}

/// Addresses of one parameter, as on_bind reports them. Both are null once the last guard of the
/// unit is gone.
struct Binding {
  ParameterId parameter;
  void* data = nullptr;      ///< gathered parameter, contiguous, 256-byte aligned, in its dtype
  void* gradient = nullptr;  ///< in backward, of a trained parameter; same shape and dtype
  GradientMode mode = GradientMode::accumulate;
};

/// Holds a gathered unit. Move-only. While it lives the unit's pointers stay valid; leaving its
/// scope by an exception poisons the engine. The destructor releases; it never hands gradients
/// over: that is commit().
class Guard {
 public:
  Guard() = default;
  Guard(Guard&& other) noexcept;
  Guard& operator=(Guard&& other) noexcept;
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard();

  /// The gathered parameter. Owned by the engine; valid until the last guard of the unit is
  /// released. An alias gives its owner's address if the owner is in this unit. Throws UsageError
  /// for a parameter of another unit.
  [[nodiscard]] void* pointer(ParameterId parameter) const;
  /// The gradient buffer of a trained parameter in a backward guard; null for frozen ones and in
  /// other passes.
  [[nodiscard]] void* gradient(ParameterId parameter) const;
  template <class T>
  [[nodiscard]] T* pointer(ParameterId parameter) const {
    return static_cast<T*>(pointer(parameter));
  }
  template <class T>
  [[nodiscard]] T* gradient(ParameterId parameter) const {
    return static_cast<T*>(gradient(parameter));
  }
  /// How the loop writes this use's gradients.
  [[nodiscard]] GradientMode gradient_mode() const;

  /// Hands the unit's gradients over, once a backward guard. Nested guards each commit; the last
  /// one hands over.
  void commit();
  /// Releases before the scope ends, where errors can be thrown.
  void release();

 private:
  friend class Engine;
  Guard(std::shared_ptr<engine::Core> core, UnitId unit, Pass pass, StreamHandle stream);
  std::shared_ptr<engine::Core> core_;  // an engine that goes first leaves a guard that only throws
  UnitId unit_;
  Pass pass_ = Pass::forward;
  StreamHandle stream_;
  GradientMode mode_ = GradientMode::accumulate;
  int exceptions_ = 0;
};

/// One micro-step of a range.
class MicroStep {
 public:
  MicroStep(int index, int count, double loss_scale)
      : index_(index), count_(count), loss_scale_(loss_scale) {}
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int count() const { return count_; }
  /// The factor that the loop puts on its loss gradient (EngineOptions::loss_scale); step() takes
  /// it out again.
  [[nodiscard]] double loss_scale() const { return loss_scale_; }

 private:
  int index_;
  int count_;
  double loss_scale_;
};

/// `for (MicroStep micro : engine.micro_steps(n))`. Going to the next one finishes the one before:
/// what this rank did not use contributes +0.0. Leaving the loop early is legal for micro_steps
/// (step() finishes the rest); leaving it by an exception poisons the engine.
class MicroSteps {
 public:
  class Iterator {
   public:
    using value_type = MicroStep;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    MicroStep operator*() const;
    Iterator& operator++();
    friend bool operator==(const Iterator& i, std::default_sentinel_t) {
      return i.core_ == nullptr;
    }

   private:
    friend class MicroSteps;
    explicit Iterator(engine::Core* core) : core_(core) {}
    engine::Core* core_;
  };
  MicroSteps(const MicroSteps&) = delete;
  MicroSteps& operator=(const MicroSteps&) = delete;
  ~MicroSteps();
  Iterator begin();
  [[nodiscard]] std::default_sentinel_t end() const { return {}; }

 private:
  friend class Engine;
  explicit MicroSteps(std::shared_ptr<engine::Core> core);
  std::shared_ptr<engine::Core> core_;
  int exceptions_;
};

/// Hyper-parameters of one group in one step.
struct GroupStep {
  std::string group{};
  HyperParameters hyper;
};

/// Arguments of one step; must be the same on every rank. What is unset comes from the group, then
/// from the optimizer.
struct StepOptions {
  std::optional<double> lr{};
  std::optional<double> weight_decay{};
  std::optional<double> beta1{};
  std::optional<double> beta2{};
  std::optional<double> eps{};
  std::optional<double> momentum{};
  /// Factor on the summed gradient. Default 1 / (world * micro-steps); a loop with uneven batches
  /// passes its own.
  std::optional<double> gradient_scale{};
  /// Largest global norm of the scaled gradient; larger ones are scaled down. Unset: no clipping.
  std::optional<double> clip_norm{};
  std::vector<GroupStep> groups{};
};

/// The first element that was not finite, in (unit, layout order, element) order over all ranks.
struct NonFinite {
  UnitId unit;
  ParameterId parameter;
  std::int64_t element = 0;
};

/// What a step did. The same on every rank, except times and bytes.
struct StepReport {
  std::int64_t step = 0;  ///< step counter before this step, from 0
  bool skipped = false;   ///< a gradient was not finite: nothing changed, the counter neither
  double norm = 0.0;  ///< global norm of the scaled gradient before clipping; NaN or inf if skipped
  double factor = 0.0;  ///< fp32 factor that the update put on the summed gradient; 0 if skipped
  double lr = 0.0;      ///< of the default group
  std::int64_t non_finite = 0;       ///< elements that were not finite
  std::optional<NonFinite> first{};  ///< where the first one is
  std::int32_t touched_units = 0;    ///< units that some rank used
  std::int64_t served_behind =
      0;  ///< uses out of program order since the last step, served from the plan
  std::int64_t gathered_bytes = 0;  ///< received by gathers since the last step
  std::int64_t reduced_bytes = 0;   ///< read from peers by reductions since the last step
  double gather_seconds =
      0.0;  ///< spent in gathers since the last step, waiting for peers included
  double reduce_seconds = 0.0;  ///< spent in reductions and the vote, likewise
  double update_seconds = 0.0;  ///< spent in the optimizer's kernels
  std::int64_t peak_bytes = 0;  ///< largest sum of this rank's arenas so far
  // The nvme tier since the last step, forward and backward passes included:
  std::int64_t disk_read_bytes = 0;
  std::int64_t disk_written_bytes = 0;
  double read_seconds = 0.0;   ///< during which at least one read was under way
  double write_seconds = 0.0;  ///< likewise; reads and writes overlap
  double wait_seconds = 0.0;   ///< for which the update waited for the disk
  /// Share of the raw device reached while the step updated: the time that its bytes take at the
  /// best speeds seen, at the engine's construction or since, over the time of the update. 0
  /// without disk.
  double raw_share = 0.0;
};

/// A range of a parameter that an initializer fills.
struct ParameterRange {
  ParameterId parameter;
  std::string_view name;
  std::span<const std::int64_t> shape;
  std::int64_t first = 0;  ///< element of the parameter, row-major
  std::int64_t count = 0;
};

/// Fills values[0, range.count) with elements [range.first, range.first + range.count).
using Initializer = std::function<void(const ParameterRange& range, std::span<float> values)>;

/// One rank of a sharded training job. Construction is collective, takes all memory at once, and
/// compares spec, options that change bits, layout and schedule across ranks. Parameters and state
/// start as zero. acquire, commit, release, skip and the guards may be called from any thread;
/// everything else from one at a time. After an error other than UsageError the engine is poisoned:
/// every later call throws the first cause again.
class Engine {
 public:
  /// Throws UsageError for a spec or option that cannot be served or differs between ranks,
  /// OutOfMemory (with the plan's table and the cheapest change that fits) if a budget is exceeded,
  /// CommError if a peer is missing.
  Engine(const ModelSpec& spec, const Optimizer& optimizer, const ProcessGroup& group,
         EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // -- the loop --
  /// Opens a range of n micro-steps; the same n on every rank.
  [[nodiscard]] MicroSteps micro_steps(int n);
  /// Opens a range of n forward-only passes outside a step. A loop that breaks out of it calls
  /// finish_evaluation().
  [[nodiscard]] MicroSteps evaluation_passes(int n);
  /// Finishes an evaluation range that was left early.
  void finish_evaluation();
  /// The range as plain calls: open, then next_micro_step() until it returns false.
  void begin_micro_steps(int n);
  void begin_evaluation_passes(int n);
  bool next_micro_step();

  /// Gathers the unit if it is not there, waits for it, and holds it. On a host rank the caller's
  /// thread is the stream; on a device the wait is put on `stream`. Legal order: spec's program;
  /// see docs/wrapping.md. Throws UsageError otherwise.
  [[nodiscard]] Guard forward(UnitId unit, StreamHandle stream = {});
  [[nodiscard]] Guard recompute(UnitId unit, StreamHandle stream = {});
  [[nodiscard]] Guard backward(UnitId unit, StreamHandle stream = {});
  /// The same as plain calls, for autograd engines.
  /// acquire returns how the loop writes the gradients of this use (backward only).
  GradientMode acquire(UnitId unit, Pass pass, StreamHandle stream = {});
  void commit(UnitId unit, StreamHandle stream = {});
  void release(UnitId unit, Pass pass, StreamHandle stream = {});
  /// This rank uses nothing more of the unit in this micro-step.
  void skip(UnitId unit);
  /// Addresses of a held unit's parameter; UsageError if the unit is not held.
  [[nodiscard]] void* pointer(ParameterId parameter) const;
  [[nodiscard]] void* gradient(ParameterId parameter) const;
  [[nodiscard]] GradientMode gradient_mode(UnitId unit) const;
  /// Called for every parameter of a unit when its addresses appear and when they go (null). Must
  /// not call the engine.
  void on_bind(std::function<void(const Binding&)> callback);

  /// Finishes the range, votes, and updates (collective). UsageError outside a range; the range
  /// stays open then.
  StepReport step(const StepOptions& options = {});
  /// Rolls a step forward that an I/O error of the nvme tier has interrupted behind the vote, on
  /// some rank, once its cause is gone (collective). Until then every other call throws that error.
  /// Throws IoError again, and may be repeated, if the cause is not gone; UsageError if no step was
  /// interrupted.
  StepReport resume_step();

  // -- contents, all collective, between steps --
  /// Fills a unit's parameters, and their master weights, piece by piece: each rank is asked for
  /// what it owns only, in pieces of at most 4096 elements, and replicated copies are then
  /// gathered. No rank ever holds the whole model.
  void initialize(UnitId unit, const Initializer& fill);
  /// Elements [first, first + out.size()) of the parameter, widened to fp32, on every rank.
  void read_parameter(const std::string& name, std::span<float> out, std::int64_t first = 0);
  /// Sets them, and the master weights; every rank passes the same values.
  void write_parameter(const std::string& name, std::span<const float> values,
                       std::int64_t first = 0);
  /// The gradient summed over ranks and micro-steps, before scaling: after the last micro-step and
  /// before step().
  void read_gradient(const std::string& name, std::span<float> out, std::int64_t first = 0);
  /// Replaces it; the norm is computed afterwards, by step().
  void write_gradient(const std::string& name, std::span<const float> values,
                      std::int64_t first = 0);
  /// A state slot (Optimizer::slots, or "master" for 16-bit parameters).
  void read_state(const std::string& name, const std::string& slot, std::span<float> out,
                  std::int64_t first = 0);
  void write_state(const std::string& name, const std::string& slot, std::span<const float> values,
                   std::int64_t first = 0);
  /// The step counter: updates done so far, skipped steps not counted.
  [[nodiscard]] std::int64_t step_count() const;
  void set_step_count(std::int64_t step);
  /// Moves optimizer state to a tier.
  void materialize(Tier tier);
  void save(const std::string& directory);
  void load(const std::string& directory);

  // -- facts --
  [[nodiscard]] const MemoryPlan& plan() const;
  /// What is really allocated, by the same categories; equal to plan().
  [[nodiscard]] MemoryPlan ledger() const;
  [[nodiscard]] const ModelSpec& spec() const;
  [[nodiscard]] const EngineOptions& options() const;
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] const std::string& layout_text() const;
  [[nodiscard]] std::uint64_t layout_hash() const;  ///< XXH3-64 of layout_text()
  [[nodiscard]] std::string schedule_text() const;
  /// "parameter h.0.w (unit h.0), element 17", for StepReport::first.
  [[nodiscard]] std::string describe(const NonFinite& place) const;

 private:
  Guard guard(UnitId unit, Pass pass, StreamHandle stream);
  std::shared_ptr<engine::Core> core_;
};

}  // namespace zshard
