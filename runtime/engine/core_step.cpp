// The step: resolve hyper-parameters, vote, update, gather.
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>

#include "runtime/base/log.hpp"
#include "runtime/engine/core.hpp"
#include "runtime/kernels/clip.hpp"
#include "runtime/kernels/copy.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

// Elements whose update is worth a thread.
constexpr std::int64_t kUpdateGrain = 1024;
// Elements whose state alone is more than a core's own caches hold.
constexpr std::int64_t kWorthStreaming = std::int64_t{256} << 10;

HyperParameters of(const StepOptions& o) {
  return {o.lr, o.weight_decay, o.beta1, o.beta2, o.eps, o.momentum};
}

}  // namespace

void Core::prepare_hyper_classes() {
  const ModelSpec& spec = blueprint_.spec;
  class_of_.assign(static_cast<std::size_t>(spec.parameter_count()), 0);
  for (const UnitSpec& unit : spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      HyperClass c{-1, p.options.lr_scale, p.options.decay};
      for (std::size_t g = 0; g < spec.groups().size(); ++g) {
        if (spec.groups()[g].name == p.options.group) c.group = static_cast<std::int32_t>(g);
      }
      const auto same = [&](const HyperClass& other) {
        return other.group == c.group && other.lr_scale == c.lr_scale && other.decay == c.decay;
      };
      auto found = std::find_if(classes_.begin(), classes_.end(), same);
      if (found == classes_.end()) found = classes_.insert(classes_.end(), c);
      class_of_[static_cast<std::size_t>(p.id.value)] =
          static_cast<std::int32_t>(found - classes_.begin());
    }
  }
  resolved_.resize(classes_.size());
  constants_.resize(classes_.size());
  argument_words_.reserve(classes_.size() * 6 + 3);
  order_.reserve(spec.units().size());
  if (parts_ != nullptr) staged_.reserve(blueprint_.tiers.groups.size());
}

void Core::order_updates(std::span<const char> touched) {
  const bool descending = cursor_->step_count() % 2 != 0;
  order_.clear();
  streamed_.clear();
  const auto units = static_cast<std::int32_t>(blueprint_.layout->units().size());
  for (std::int32_t k = 0; k < units; ++k) {
    const std::int32_t u = descending ? units - 1 - k : k;
    if ((touched.empty() || touched[static_cast<std::size_t>(u)] != 0) &&
        blueprint_.layout->units()[static_cast<std::size_t>(u)].gradient_bytes != 0) {
      order_.push_back(u);
    }
  }
  if (stream_ == nullptr) return;
  for (const std::int32_t u : order_) {
    each_group(u, [&](std::int32_t g) {
      if (blueprint_.tiers.groups[static_cast<std::size_t>(g)].on_disk()) streamed_.push_back(g);
    });
  }
}

template <class Body>
void Core::each_group(std::int32_t u, Body&& body) const {
  const TierMap::Unit& unit = blueprint_.tiers.units[static_cast<std::size_t>(u)];
  const bool descending = cursor_->step_count() % 2 != 0;
  for (std::int32_t k = 0; k < unit.groups; ++k) {
    body(unit.first_group + (descending ? unit.groups - 1 - k : k));
  }
}

void Core::prefetch_state() {
  prefetched_ = true;
  order_updates({});  // which units are touched is known at the vote only
  stream_->prefetch(streamed_);
}

void Core::resolve(const StepOptions& options, double* lr) {
  const optimizers::Rule& rule = blueprint_.optimizer.rule();
  const std::vector<GroupSpec>& groups = blueprint_.spec.groups();
  for (const GroupStep& g : options.groups) {
    if (std::none_of(groups.begin(), groups.end(),
                     [&](const GroupSpec& s) { return s.name == g.group; })) {
      throw UsageError("step(): there is no group " + g.group +
                       "; declare it with ModelSpec::group");
    }
  }
  const optimizers::Resolved base = optimizers::merged(rule.defaults(), of(options));
  rule.validate(base);
  *lr = base.lr;
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    optimizers::Resolved hyper = base;
    if (classes_[c].group >= 0) {
      const GroupSpec& group = groups[static_cast<std::size_t>(classes_[c].group)];
      hyper = optimizers::merged(hyper, group.hyper);
      for (const GroupStep& g : options.groups) {
        if (g.group == group.name) hyper = optimizers::merged(hyper, g.hyper);
      }
    }
    hyper.lr *= classes_[c].lr_scale;
    if (!classes_[c].decay) hyper.weight_decay = 0.0;
    rule.validate(hyper);
    resolved_[c] = hyper;
    constants_[c] = rule.constants(hyper, cursor_->step_count() + 1);
  }
}

std::uint64_t Core::hash_arguments(double unscale, const StepOptions& options) {
  argument_words_.clear();
  for (const optimizers::Resolved& r : resolved_) {
    for (const double x : {r.lr, r.weight_decay, r.beta1, r.beta2, r.eps, r.momentum}) {
      argument_words_.push_back(x);
    }
  }
  argument_words_.push_back(static_cast<double>(cursor_->step_count()));
  argument_words_.push_back(unscale);
  argument_words_.push_back(options.clip_norm.value_or(-1.0));
  return XXH3_64bits(argument_words_.data(), argument_words_.size() * sizeof(double));
}

StepReport Core::step(const StepOptions& options) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  if (!cursor_->in_range() || cursor_->in_evaluation()) {
    throw UsageError("step() without micro_steps()" + where() +
                     "; open a range with micro_steps(n) for each step");
  }
  const double scale =
      options.gradient_scale.value_or(1.0 / (static_cast<double>(world_) * cursor_->n()));
  const double unscale = scale / blueprint_.options.loss_scale;
  if (!std::isfinite(scale) || !std::isfinite(static_cast<float>(unscale))) {
    throw UsageError("step(): gradient_scale " + std::to_string(scale) +
                     " (divided by loss_scale) is not a finite fp32 number");
  }
  if (options.clip_norm && !(std::isfinite(*options.clip_norm) && *options.clip_norm > 0)) {
    throw UsageError("step(): clip_norm is " + std::to_string(*options.clip_norm) +
                     ", must be positive and finite; leave it unset for no clipping");
  }
  StepReport report;
  report.step = cursor_->step_count();
  resolve(options, &report.lr);
  arguments_ = hash_arguments(unscale, options);
  if (windows_ != nullptr) windows_->forget();
  guarded([&] { cursor_->begin_step(); });  // before the vote nothing has changed

  const Vote& vote = plane_->vote();
  report.non_finite = vote.squares.non_finite;
  report.touched_units =
      static_cast<std::int32_t>(std::count(vote.touched.begin(), vote.touched.end(), 1));
  const kernels::Clip clip =
      kernels::clip(vote.squares.sum, scale, blueprint_.options.loss_scale, options.clip_norm);
  report.norm = clip.norm;
  report.skipped = vote.squares.non_finite != 0;
  if (report.skipped) {
    report.first = NonFinite{
        UnitId{vote.squares.first_unit},
        blueprint_.layout->parameter_at(vote.squares.first_unit, vote.squares.first_index),
        vote.squares.first_element};
  } else {
    report.factor = static_cast<double>(clip.factor);
    order_updates(vote.touched);
    if (stream_ != nullptr) stream_->begin(streamed_);
    interrupted_report_ = report;
    interrupted_factor_ = clip.factor;
    choose_place();
    const auto start = std::chrono::steady_clock::now();
    update_all(clip.factor);
    judge_place(start);
  }
  finish_step(report);
  return report;
}

// An interrupted step is resumed where it began.
void Core::choose_place() {
  DeviceMap& map = blueprint_.device;
  if (!map.either || trial_.on_host() == map.on_host) return;
  // What one place has left is what the other one begins with.
  guarded([&] { device_plane_->settle(); });
  map.on_host = trial_.on_host();
}

void Core::judge_place(std::chrono::steady_clock::time_point start) {
  if (!blueprint_.device.either || !trial_.open()) return;
  const std::vector<shard::UnitLayout>& units = blueprint_.layout->units();
  const auto trained = std::count_if(units.begin(), units.end(), [](const shard::UnitLayout& unit) {
    return unit.gradient_bytes != 0;
  });
  if (static_cast<std::size_t>(trained) != order_.size()) return;  // a part tells nothing
  // The device may still be at it. From the last trial on nothing waits for it here.
  guarded([&] { device_plane_->settle(); });
  trial_.took(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (trial_.open()) return;
  base::log_info(
      base::Topic::engine, rank_,
      "update_on = auto: an update takes {:.3f} ms by the host's cores, {:.3f} ms by the "
      "GPU; {} has the others",
      trial_.host_seconds() * 1e3, trial_.device_seconds() * 1e3,
      trial_.on_host() ? "the host" : "the GPU");
}

StepReport Core::resume_step() {
  const std::lock_guard<CallMutex> lock(mutex_);
  if (poison_ != nullptr) std::rethrow_exception(poison_);
  if (interrupted_ == nullptr) {
    throw UsageError("resume_step: no step was interrupted by an I/O error");
  }
  std::exception_ptr failure;
  try {
    stream_->resume();
  } catch (const IoError&) {
    failure = std::current_exception();
    stream_->settle();
  }
  // Every rank's disk must take what it refused before any rank goes on.
  std::exception_ptr cause;
  guarded([&] {
    cause = agree_on_disks(comm::Operation::step,
                           static_cast<std::uint64_t>(cursor_->step_count()) * 2 + 1, failure);
  });
  if (cause != nullptr) {
    interrupted_ = cause;
    std::rethrow_exception(cause);
  }
  interrupted_ = nullptr;
  update_all(interrupted_factor_);
  StepReport report = interrupted_report_;
  finish_step(report);
  return report;
}

void Core::finish_step(StepReport& report) {
  guarded([&] {
    plane_->drain();
    plane_->fill(storage_->local_buffers(), 0);
    if (blueprint_.options.poison_slots) plane_->fill(storage_->gather_arena(), 0xFF);
    cursor_->end_step(!report.skipped);
  });
  prefetched_ = false;
  fill_report_totals(report);
}

void Core::update_all(float factor) {
  const auto start = std::chrono::steady_clock::now();
  const offload::IoTraffic before = store_ == nullptr ? offload::IoTraffic{} : store_->traffic();
  const std::int64_t step = cursor_->step_count();
  // After the vote every rank finishes its own update, whatever becomes of its peers.
  std::exception_ptr cause;
  const auto with_peers = [&](auto&& body) {
    if (cause != nullptr) return;
    try {
      body();
    } catch (const std::exception& error) {
      cause = std::current_exception();
      endpoint_->fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  };
  // A disk that fails leaves the rest of the update to resume_step(). Until all ranks know, this
  // one still takes part in the step's gathers.
  std::exception_ptr disk;
  bool stalled = false;  // by a peer's disk
  // Gradients that a gone peer has on its disk or device, or what a device that failed has not
  // updated.
  bool lost = false;
  const auto alone = [&](auto&& body) {
    try {
      body();
    } catch (const IoError&) {
      disk = std::current_exception();
    } catch (const Error& error) {
      if (cause == nullptr) cause = std::current_exception();
      endpoint_->fail("rank " + std::to_string(rank_) + ": " + error.what());
      lost = true;
    }
  };
  const auto from_disk = [&](auto&& body) {
    if (disk != nullptr || stalled || lost) return;
    alone(body);
    if (disk != nullptr) alone([&] { keep_updates(); });
  };
  if (device_plane_ != nullptr) {
    staged_.clear();
    staged_next_ = 0;
    staged_brought_ = 0;
    lowered_count_ = 0;
    for (const std::int32_t u : order_) {
      each_group(u, [&](std::int32_t g) { staged_.push_back(g); });
    }
    from_disk([&] { device_plane_->begin_update(); });
  }
  if (blueprint_.options.stage == Stage::replicated) {
    const auto gather = [&](std::size_t k) {
      half_ = static_cast<int>(k % 2);
      cursor_->step_gather(order_[k]);
      plane_->kick();
    };
    // Two buffers: the next unit's gradients arrive while this one is updated.
    std::uint64_t arrived = plane_->issued(Queue::gather);
    if (!order_.empty()) with_peers([&] { gather(0); });
    for (std::size_t k = 0; k < order_.size(); ++k) {
      if (k + 1 < order_.size()) with_peers([&] { gather(k + 1); });
      ++arrived;
      with_peers([&] { plane_->wait_for_update(Queue::gather, arrived); });
      const int half = static_cast<int>(k % 2);
      if (cause != nullptr) {
        plane_->stop();
        if (blueprint_.tiers.gradients || device_plane_ != nullptr) {
          lost = true;
          break;
        }
        plane_->gather_gradient_alone(order_[k], half);
      } else if (!plane_->gathered(half)) {
        stalled = true;
        if (disk == nullptr) disk = plane_->gather_failure(half);
        alone([&] { keep_updates(); });
      }
      from_disk([&] { update_unit(order_[k], factor, half); });
    }
  } else {
    for (const std::int32_t u : order_) {
      from_disk([&] { update_unit(u, factor, 0); });
      with_peers([&] {
        cursor_->step_gather(u);
        plane_->go_on();  // while the next unit is updated
      });
    }
    with_peers([&] { plane_->drain(); });
  }
  if (device_plane_ != nullptr) with_peers([&] { device_plane_->end_update(); });
  const auto check_peers = [&] {
    if (endpoint_->failed()) throw CommError(endpoint_->failure());
  };
  if (stream_ != nullptr) {
    from_disk([&] {
      publish_updates(0);
      stream_->finish();
    });
    with_peers([&] {
      plane_->drain();
      check_peers();
      interrupted_ = agree_on_disks(comm::Operation::step,
                                    static_cast<std::uint64_t>(cursor_->step_count()) * 2, disk);
    });
  }
  // A failure that came too late to stop a gather of this step still ends it. A peer that gives an
  // interrupted step up at once does not hide the interruption.
  if (interrupted_ == nullptr) with_peers(check_peers);
  if (store_ != nullptr) {
    const offload::IoTraffic after = store_->traffic();
    const auto read = static_cast<double>(after.read_bytes - before.read_bytes);
    const auto written = static_cast<double>(after.written_bytes - before.written_bytes);
    const double spent =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (spent > 0) raw_share_ = (read / raw_read_ + written / raw_write_) / spent;
    if (raw_share_ > 1.0) {  // the probe shared the device with other ranks, this step did not
      raw_read_ *= raw_share_;
      raw_write_ *= raw_share_;
      raw_share_ = 1.0;
    }
  }
  if (cause == nullptr) {
    if (interrupted_ != nullptr) std::rethrow_exception(interrupted_);
    return;
  }
  interrupted_ = nullptr;
  const bool whole = disk == nullptr && !stalled && !lost;
  updated_ = whole;
  try {
    std::rethrow_exception(cause);
  } catch (Error& error) {
    if (whole) error.set_state_step(step + 1);
    poison(std::current_exception(), "rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  }
}

void Core::update_unit(std::int32_t u, float factor, int half) {
  each_group(u, [&](std::int32_t g) { update_group(g, factor, half); });
}

void Core::update_group(std::int32_t index, float factor, int half) {
  const SubGroup& g = blueprint_.tiers.groups[static_cast<std::size_t>(index)];
  if (stream_ != nullptr && stream_->updated(index)) return;  // before the interruption
  const DeviceMap& map = blueprint_.device;
  if (device_plane_ != nullptr && !map.on_host) {
    update_by_device(index, factor, half);
    return;
  }
  GroupMemory at = memory_of(g, g.on_disk() ? stream_->fetch(index) : nullptr, half);
  // Padding of parameters is zero; what a buffer only writes has it from here.
  bool zero_padding = g.parameter_bytes != 0 && !g.reads_parameter;
  const shard::Segment& seg = segment_of(g);
  std::byte* home = nullptr;  // on the device
  int staging = 0;
  if (device_plane_ != nullptr && map.staged()) {
    staging = bring_group(index, half);
    if (DeviceMap::gradient_on_device(blueprint_.options)) {
      at.gradient = device_plane_->staged_gradient(staging);
    }
    if (DeviceMap::parameter_on_device(seg, blueprint_.options)) {
      home = at.parameter;
      at.parameter = device_plane_->staged_parameter(staging);
      zero_padding = seg.dtype != DType::f32;
    }
  }
  const auto start = std::chrono::steady_clock::now();
  update_on_host(g, at, factor, zero_padding);
  if (zero_padding) zero_behind(g, at);
  update_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (home != nullptr) device_plane_->send(staging, home, g.count * size_of(seg.dtype));
  if (stream_ == nullptr) return;
  if (g.on_disk()) {
    stream_->publish(index);
  } else {
    stream_->set_done(index);
  }
}

const shard::Segment& Core::segment_of(const SubGroup& g) const {
  return blueprint_.layout->units()[static_cast<std::size_t>(g.unit)]
      .segments[static_cast<std::size_t>(g.segment)];
}

void Core::zero_behind(const SubGroup& g, const GroupMemory& at) const {
  const std::int64_t used = g.count * size_of(segment_of(g).dtype);
  if (g.parameter_bytes > used) {
    std::memset(at.parameter + used, 0, static_cast<std::size_t>(g.parameter_bytes - used));
  }
}

void Core::update_by_device(std::int32_t index, float factor, int half) {
  const SubGroup& g = blueprint_.tiers.groups[static_cast<std::size_t>(index)];
  std::byte* buffer = nullptr;
  if (g.on_disk()) {
    // One buffer stays free for the group to come.
    publish_updates(
        static_cast<std::size_t>(std::min(DeviceMap::kBuffers, stream_->buffers()) - 1));
    buffer = stream_->fetch(index);
  }
  const GroupMemory home = memory_of(g, buffer, half);
  GroupMemory at = home;
  const EngineOptions& options = blueprint_.options;
  if (!blueprint_.device.staged()) {
    update_on_device(g, at, factor);
    if (stream_ != nullptr) stream_->set_done(index);
    return;
  }
  const shard::Segment& seg = segment_of(g);
  const std::int64_t bytes = 4 * g.count;
  const std::int64_t parameter_bytes = g.count * size_of(seg.dtype);
  const int b = raised_++ % DeviceMap::kBuffers;
  using Move = DevicePlane::Move;
  std::array<Move, 3 + optimizers::kMaxSlots> up;
  std::array<Move, 2 + optimizers::kMaxSlots> down;
  std::size_t ups = 0;
  std::size_t downs = 0;
  bool made = false;  // a parameter off the device, of its master: padding is not read
  if (!DeviceMap::gradient_on_device(options)) {
    at.gradient = device_plane_->staged_gradient(b);
    up[ups++] = {device_plane_->staged_gradient(b), const_cast<float*>(home.gradient), bytes};
  }
  if (options.offload.optimizer != Tier::device) {
    for (int part = 0; part < 1 + optimizers::kMaxSlots; ++part) {
      if (home.state[part] == nullptr) continue;
      at.state[part] = device_plane_->staged_state(b) + part * g.count;
      up[ups++] = down[downs++] = {at.state[part], home.state[part], bytes};
    }
  }
  if (!DeviceMap::parameter_on_device(seg, options)) {
    at.parameter = device_plane_->staged_parameter(b);
    const Move move{at.parameter, home.parameter, parameter_bytes};
    down[downs++] = move;
    made = seg.dtype != DType::f32;
    if (!made) up[ups++] = move;
  }
  device_plane_->raise(b, std::span(up).first(ups));
  if (made) {
    device_plane_->clear_parameter(b, parameter_bytes);
    if (buffer != nullptr) zero_behind(g, home);
  }
  update_on_device(g, at, factor);
  device_plane_->lower(b, std::span(down).first(downs));
  if (g.on_disk()) {
    lowered_[lowered_count_++] = {index, b};
  } else if (stream_ != nullptr) {
    stream_->set_done(index);
  }
}

void Core::publish_updates(std::size_t left) {
  while (lowered_count_ > left) {
    const Lowered oldest = lowered_[0];
    device_plane_->lowered(oldest.buffer);
    std::copy(lowered_.begin() + 1, lowered_.end(), lowered_.begin());
    --lowered_count_;
    stream_->publish(oldest.group);
  }
}

void Core::keep_updates() {
  while (lowered_count_ != 0) {
    try {
      publish_updates(0);
    } catch (const IoError&) {  // kept in its buffer
    }
  }
  stream_->settle();
}

Core::GroupMemory Core::memory_of(const SubGroup& g, std::byte* buffer, int half) const {
  const bool replicated = blueprint_.options.stage == Stage::replicated;
  const std::int32_t u = g.unit;
  const std::int32_t s = g.segment;
  const shard::Segment& seg =
      blueprint_.layout->units()[static_cast<std::size_t>(u)].segments[static_cast<std::size_t>(s)];
  GroupMemory at;
  if (g.parameter_bytes != 0 && buffer != nullptr) {
    at.parameter = buffer + g.state_bytes;
  } else if (g.parameter_bytes == 0) {
    at.parameter = (replicated ? storage_->full(rank_, u, s) : storage_->shard(rank_, u, s)) +
                   g.first * size_of(seg.dtype);
  }
  if (g.gradient_bytes != 0 && buffer == nullptr) {
    // Left out.
  } else if (g.gradient_bytes != 0) {
    at.gradient = reinterpret_cast<const float*>(buffer + g.state_bytes + g.parameter_bytes);
  } else {
    at.gradient = (replicated ? storage_->gathered_gradient(half, u, s)
                              : storage_->accumulator(rank_, u, s)) +
                  g.first;
  }
  const int masters = seg.dtype != DType::f32 ? 1 : 0;
  const auto slots = static_cast<int>(blueprint_.optimizer.rule().slots().size());
  for (int part = 0; part < slots + masters; ++part) {
    const int slot = part - masters;
    if (g.state >= 0 && buffer == nullptr) continue;
    if (g.state >= 0) {
      at.state[part] = reinterpret_cast<float*>(buffer) + part * g.count;
    } else {
      at.state[part] =
          (slot < 0 ? storage_->master(rank_, u, s) : storage_->state(rank_, u, s, slot)) + g.first;
    }
  }
  return at;
}

template <class Body>
void Core::each_range(const SubGroup& g, Body&& body) const {
  const shard::Segment& seg = blueprint_.layout->units()[static_cast<std::size_t>(g.unit)]
                                  .segments[static_cast<std::size_t>(g.segment)];
  const std::int64_t begin = storage_->state_begin(g.unit, g.segment) + g.first;
  const std::int64_t end = begin + g.count;
  const auto ends_before = [](const shard::Placed& p, std::int64_t element) {
    return p.start + p.count <= element;
  };
  for (auto p = std::lower_bound(seg.placed.begin(), seg.placed.end(), begin, ends_before);
       p != seg.placed.end() && p->start < end; ++p) {
    const shard::Range all = storage_->updated(g.unit, g.segment, *p);
    const shard::Range range{std::max(all.lo, begin) - begin, std::min(all.hi, end) - begin};
    if (range.empty()) continue;
    body(range, constants_[static_cast<std::size_t>(
                    class_of_[static_cast<std::size_t>(p->parameter.value)])]);
  }
}

void Core::update_on_device(const SubGroup& g, const GroupMemory& at, float factor) {
  const DType dtype = blueprint_.layout->units()[static_cast<std::size_t>(g.unit)]
                          .segments[static_cast<std::size_t>(g.segment)]
                          .dtype;
  const bool narrow = dtype != DType::f32;
  const optimizers::Rule& rule = blueprint_.optimizer.rule();
  const auto slots = static_cast<int>(rule.slots().size());
  const std::int64_t step = cursor_->step_count() + 1;
  each_range(g, [&](shard::Range range, const optimizers::Constants& constants) {
    optimizers::Elements e;
    e.count = range.count();
    e.parameter = (narrow ? at.state[0] : reinterpret_cast<float*>(at.parameter)) + range.lo;
    for (int k = 0; k < slots; ++k) e.slots[k] = at.state[k + (narrow ? 1 : 0)] + range.lo;
    e.gradient = at.gradient + range.lo;
    e.factor = factor;
    device_plane_->update(rule, e, constants, step);
    if (narrow) {
      device_plane_->publish(e.parameter, dtype, at.parameter + range.lo * size_of(dtype), e.count);
    }
  });
}

void Core::update_on_host(const SubGroup& g, const GroupMemory& at, float factor,
                          bool zero_padding) {
  const DType dtype = blueprint_.layout->units()[static_cast<std::size_t>(g.unit)]
                          .segments[static_cast<std::size_t>(g.segment)]
                          .dtype;
  const std::int64_t item = size_of(dtype);
  const bool narrow = dtype != DType::f32;
  const optimizers::Rule& rule = blueprint_.optimizer.rule();
  const auto slots = static_cast<int>(rule.slots().size());
  const std::int64_t step = cursor_->step_count() + 1;
  std::int64_t filled = 0;
  const auto zero_to = [&](std::int64_t to) {
    if (zero_padding && to > filled) {
      std::memset(at.parameter + filled * item, 0, static_cast<std::size_t>((to - filled) * item));
    }
  };
  each_range(g, [&](shard::Range range, const optimizers::Constants& constants) {
    zero_to(range.lo);
    filled = range.hi;
    pool_->split(range.count(), kUpdateGrain, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t lo = range.lo + first;
      optimizers::Elements e;
      e.count = last - first;
      e.parameter = (narrow ? at.state[0] : reinterpret_cast<float*>(at.parameter)) + lo;
      for (int k = 0; k < slots; ++k) e.slots[k] = at.state[k + (narrow ? 1 : 0)] + lo;
      e.gradient = at.gradient + lo;
      e.factor = factor;
      if (narrow) {
        e.published = at.parameter + lo * item;
        e.dtype = dtype;
        e.streams = e.count >= kWorthStreaming;
      }
      for (const optimizers::Pass pass : rule.passes()) pass(e, constants, step);
      if (e.streams) kernels::finish_streaming();
    });
  });
  zero_to(g.count);
}

int Core::bring_group(std::int32_t index, int half) {
  const bool gradient = DeviceMap::gradient_on_device(blueprint_.options);
  const auto bring = [&](std::size_t k) {
    const SubGroup& g = blueprint_.tiers.groups[static_cast<std::size_t>(staged_[k])];
    const GroupMemory at = memory_of(g, nullptr, half);
    const shard::Segment& seg = segment_of(g);
    // A 16-bit parameter is made from its master.
    const bool reads =
        seg.dtype == DType::f32 && DeviceMap::parameter_on_device(seg, blueprint_.options);
    device_plane_->bring(static_cast<int>(k % DeviceMap::kBuffers), at.gradient,
                         gradient ? g.count : 0, at.parameter, reads ? 4 * g.count : 0);
  };
  while (staged_[staged_next_] != index) ++staged_next_;
  staged_brought_ = std::max(staged_brought_, staged_next_);
  const auto unit_of = [&](std::size_t k) {
    return blueprint_.tiers.groups[static_cast<std::size_t>(staged_[k])].unit;
  };
  const std::size_t end = std::min(staged_.size(), staged_next_ + DeviceMap::kBuffers - 1);
  // At stage 0 the gradients of the next unit may still be on their way.
  const bool whole = blueprint_.options.stage == Stage::replicated;
  for (; staged_brought_ < end; ++staged_brought_) {
    if (whole && unit_of(staged_brought_) != unit_of(staged_next_)) break;
    bring(staged_brought_);
  }
  const auto buffer = static_cast<int>(staged_next_++ % DeviceMap::kBuffers);
  device_plane_->arrived(buffer);
  return buffer;
}

void Core::fill_report_totals(StepReport& report) {
  const Traffic& t = plane_->traffic();
  const Totals now{t.gathered_bytes.load(),
                   t.reduced_bytes.load(),
                   t.gather_nanoseconds.load(),
                   t.reduce_nanoseconds.load(),
                   cursor_->served_behind(),
                   {},
                   0.0};
  report.gathered_bytes = now.gathered - reported_.gathered;
  report.reduced_bytes = now.reduced - reported_.reduced;
  report.gather_seconds = static_cast<double>(now.gather_ns - reported_.gather_ns) * 1e-9;
  report.reduce_seconds = static_cast<double>(now.reduce_ns - reported_.reduce_ns) * 1e-9;
  report.served_behind = static_cast<std::int64_t>(now.behind - reported_.behind);
  report.update_seconds = update_seconds_;
  report.peak_bytes = storage_->reserved_bytes();
  if (store_ != nullptr) {
    const offload::IoTraffic disk = store_->traffic();
    const offload::IoTraffic& old = reported_.disk;
    report.disk_read_bytes = disk.read_bytes - old.read_bytes;
    report.disk_written_bytes = disk.written_bytes - old.written_bytes;
    report.read_seconds = disk.read_seconds - old.read_seconds;
    report.write_seconds = disk.write_seconds - old.write_seconds;
    report.wait_seconds = stream_->wait_seconds() - reported_.disk_wait;
    report.raw_share = raw_share_;
  }
  const offload::IoTraffic disk = store_ == nullptr ? offload::IoTraffic{} : store_->traffic();
  const double disk_wait = stream_ == nullptr ? 0.0 : stream_->wait_seconds();
  reported_ = now;
  reported_.disk = disk;
  reported_.disk_wait = disk_wait;
  raw_share_ = 0.0;
  update_seconds_ = 0.0;
}

}  // namespace zshard::engine
