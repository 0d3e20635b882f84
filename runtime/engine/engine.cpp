// The public interface: guards, ranges and the engine's calls, each one line to the core.
#include "zshard/engine.hpp"

#include <exception>
#include <utility>
#include <vector>

#include "runtime/base/log.hpp"
#include "runtime/base/quote.hpp"
#include "runtime/engine/core.hpp"
#include "zshard/error.hpp"

namespace zshard {

// -- Guard --

Guard::Guard(std::shared_ptr<engine::Core> core, UnitId unit, Pass pass, StreamHandle stream)
    : core_(std::move(core)),
      unit_(unit),
      pass_(pass),
      stream_(stream),
      exceptions_(std::uncaught_exceptions()) {}

Guard::Guard(Guard&& other) noexcept
    : core_(std::exchange(other.core_, nullptr)),
      unit_(other.unit_),
      pass_(other.pass_),
      stream_(other.stream_),
      mode_(other.mode_),
      exceptions_(other.exceptions_) {}

Guard& Guard::operator=(Guard&& other) noexcept {
  if (this != &other) {
    Guard old(std::move(*this));
    core_ = std::exchange(other.core_, nullptr);
    unit_ = other.unit_;
    pass_ = other.pass_;
    stream_ = other.stream_;
    mode_ = other.mode_;
    exceptions_ = other.exceptions_;
  }
  return *this;
}

Guard::~Guard() {
  if (core_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) {
    core_->abandon("a " + std::string(to_string(pass_)) + " guard of unit " +
                   core_->blueprint().spec.units()[static_cast<std::size_t>(unit_.value)].name);
  }
  core_->release_quietly(unit_, pass_, stream_);
}

void* Guard::pointer(ParameterId parameter) const {
  if (core_ == nullptr) throw UsageError("pointer() of a guard that holds nothing");
  if (core_->unit_of(parameter) != unit_) {
    throw UsageError("parameter " + core_->blueprint().spec.parameter(parameter).name +
                     " is not in the guard's unit");
  }
  return core_->pointer(parameter);
}

void* Guard::gradient(ParameterId parameter) const {
  if (core_ == nullptr) throw UsageError("gradient() of a guard that holds nothing");
  if (core_->unit_of(parameter) != unit_) {
    throw UsageError("parameter " + core_->blueprint().spec.parameter(parameter).name +
                     " is not in the guard's unit");
  }
  return pass_ == Pass::backward ? core_->gradient(parameter) : nullptr;
}

GradientMode Guard::gradient_mode() const {
  if (core_ == nullptr) throw UsageError("gradient_mode() of a guard that holds nothing");
  return mode_;
}

void Guard::commit() {
  if (core_ == nullptr) throw UsageError("commit() of a guard that holds nothing");
  if (pass_ != Pass::backward) throw UsageError("commit() of a guard that is not backward");
  core_->commit(unit_, stream_);
}

void Guard::release() {
  if (core_ == nullptr) throw UsageError("release() of a guard that holds nothing");
  const std::shared_ptr<engine::Core> core = std::exchange(core_, nullptr);
  core->release(unit_, pass_, stream_);
}

// -- MicroSteps --

MicroSteps::MicroSteps(std::shared_ptr<engine::Core> core)
    : core_(std::move(core)), exceptions_(std::uncaught_exceptions()) {}

MicroSteps::~MicroSteps() {
  if (std::uncaught_exceptions() > exceptions_) core_->abandon("a range of micro-steps");
}

MicroSteps::Iterator MicroSteps::begin() {
  return Iterator(core_->next_micro_step() ? core_.get() : nullptr);
}

MicroStep MicroSteps::Iterator::operator*() const {
  return core_->micro_step();
}

MicroSteps::Iterator& MicroSteps::Iterator::operator++() {
  if (!core_->next_micro_step()) core_ = nullptr;
  return *this;
}

// -- Engine --

Engine::Engine(const ModelSpec& spec, const Optimizer& optimizer, const ProcessGroup& group,
               EngineOptions options)
    : core_(std::make_shared<engine::Core>(spec, optimizer, group, options)) {
  // The directory alone moves nothing to a disk: whoever names one has likely forgotten the tier.
  const OffloadOptions& tiers = options.offload;
  if (!tiers.nvme_dir.empty() && tiers.optimizer != Tier::nvme && tiers.gradients != Tier::nvme &&
      tiers.parameters != Tier::nvme && group.rank() == 0) {
    base::log_warning(base::Topic::engine, group.rank(),
                      "offload.nvme_dir is {}, but no tier is nvme: nothing lies there. Set "
                      "offload.optimizer, offload.gradients or offload.parameters = nvme.",
                      base::quoted(tiers.nvme_dir));
  }
}

Engine::~Engine() {
  if (!core_->here()) {
    // In a forked child: its threads cannot be joined, and its peers are the parent's.
    static auto* const kept = new std::vector<std::shared_ptr<engine::Core>>;
    kept->push_back(core_);
    return;
  }
  core_->close();
}

MicroSteps Engine::micro_steps(int n) {
  core_->begin_micro_steps(n);
  return MicroSteps(core_);
}

MicroSteps Engine::evaluation_passes(int n) {
  core_->begin_evaluation_passes(n);
  return MicroSteps(core_);
}

void Engine::finish_evaluation() {
  core_->finish_evaluation();
}
void Engine::begin_micro_steps(int n) {
  core_->begin_micro_steps(n);
}
void Engine::begin_evaluation_passes(int n) {
  core_->begin_evaluation_passes(n);
}
bool Engine::next_micro_step() {
  return core_->next_micro_step();
}

Guard Engine::forward(UnitId unit, StreamHandle stream) {
  return guard(unit, Pass::forward, stream);
}
Guard Engine::recompute(UnitId unit, StreamHandle stream) {
  return guard(unit, Pass::recompute, stream);
}
Guard Engine::backward(UnitId unit, StreamHandle stream) {
  return guard(unit, Pass::backward, stream);
}

Guard Engine::guard(UnitId unit, Pass pass, StreamHandle stream) {
  Guard guard(nullptr, unit, pass, stream);
  guard.mode_ = acquire(unit, pass, stream);
  guard.core_ = core_;
  return guard;
}

GradientMode Engine::acquire(UnitId unit, Pass pass, StreamHandle stream) {
  return core_->acquire(unit, pass, stream);
}

void Engine::commit(UnitId unit, StreamHandle stream) {
  core_->commit(unit, stream);
}
void Engine::release(UnitId unit, Pass pass, StreamHandle stream) {
  core_->release(unit, pass, stream);
}
void Engine::skip(UnitId unit) {
  core_->skip(unit);
}
void* Engine::pointer(ParameterId parameter) const {
  return core_->pointer(parameter);
}
void* Engine::gradient(ParameterId parameter) const {
  return core_->gradient(parameter);
}
GradientMode Engine::gradient_mode(UnitId unit) const {
  return core_->gradient_mode(unit);
}

void Engine::on_bind(std::function<void(const Binding&)> callback) {
  core_->on_bind(std::move(callback));
}

StepReport Engine::step(const StepOptions& options) {
  return core_->step(options);
}

StepReport Engine::resume_step() {
  return core_->resume_step();
}

void Engine::initialize(UnitId unit, const Initializer& fill) {
  core_->initialize(unit, fill);
}

void Engine::read_parameter(const std::string& name, std::span<float> out, std::int64_t first) {
  core_->read(engine::Core::Content::parameter, name, "", out, first);
}

void Engine::write_parameter(const std::string& name, std::span<const float> values,
                             std::int64_t first) {
  core_->write(engine::Core::Content::parameter, name, "", values, first);
}

void Engine::read_gradient(const std::string& name, std::span<float> out, std::int64_t first) {
  core_->read(engine::Core::Content::gradient, name, "", out, first);
}

void Engine::write_gradient(const std::string& name, std::span<const float> values,
                            std::int64_t first) {
  core_->write(engine::Core::Content::gradient, name, "", values, first);
}

void Engine::read_state(const std::string& name, const std::string& slot, std::span<float> out,
                        std::int64_t first) {
  core_->read(engine::Core::Content::state, name, slot, out, first);
}

void Engine::write_state(const std::string& name, const std::string& slot,
                         std::span<const float> values, std::int64_t first) {
  core_->write(engine::Core::Content::state, name, slot, values, first);
}

std::int64_t Engine::step_count() const {
  return core_->step_count();
}
void Engine::set_step_count(std::int64_t step) {
  core_->set_step_count(step);
}

void Engine::materialize(Tier tier) {
  if (tier == options().offload.optimizer) return;
  throw UsageError(
      "materialize(" + std::string(to_string(tier)) +
      "): moving state between tiers is not served by this version; choose the tier with "
      "offload.optimizer");
}

void Engine::save(const std::string& directory) {
  throw UsageError(
      "save(" + directory +
      "): checkpoints are not served by this version; read_parameter and read_state give "
      "whole tensors");
}

void Engine::load(const std::string& directory) {
  throw UsageError(
      "load(" + directory +
      "): checkpoints are not served by this version; write_parameter, write_state and "
      "set_step_count set whole tensors");
}

const MemoryPlan& Engine::plan() const {
  return core_->blueprint().plan;
}
MemoryPlan Engine::ledger() const {
  return core_->ledger();
}
const ModelSpec& Engine::spec() const {
  return core_->blueprint().spec;
}
const EngineOptions& Engine::options() const {
  return core_->blueprint().options;
}
int Engine::rank() const {
  return core_->rank();
}
int Engine::size() const {
  return core_->world();
}
const std::string& Engine::layout_text() const {
  return core_->blueprint().layout->text();
}
std::uint64_t Engine::layout_hash() const {
  return core_->blueprint().layout->hash();
}
std::string Engine::schedule_text() const {
  return core_->blueprint().training.text();
}

std::string Engine::describe(const NonFinite& place) const {
  const ModelSpec& s = spec();
  if (place.unit.value < 0 || place.unit.value >= static_cast<std::int32_t>(s.units().size())) {
    throw UsageError("describe: no such unit");
  }
  return "parameter " + s.parameter(place.parameter).name + " (unit " +
         s.units()[static_cast<std::size_t>(place.unit.value)].name + "), element " +
         std::to_string(place.element);
}

}  // namespace zshard
