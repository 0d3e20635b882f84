// The step: resolve hyper-parameters, vote, update, gather.
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "runtime/engine/core.hpp"
#include "runtime/kernels/clip.hpp"
#include "runtime/kernels/kernels.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

// Elements of a 16-bit segment that are updated and published together, while they are in the
// cache.
constexpr std::int64_t kPublishChunk = 1024;

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
    update_all(options, clip.factor);
  }
  guarded([&] {
    plane_->drain();
    storage_->clear_local();
    if (blueprint_.options.poison_slots) storage_->poison_gather_arena();
    cursor_->end_step(!report.skipped);
  });
  fill_report_totals(report);
  return report;
}

void Core::update_all(const StepOptions& /*already resolved*/, float factor) {
  const std::int64_t step = cursor_->step_count();
  const std::vector<char>& touched = plane_->vote().touched;
  order_.clear();
  const auto units = static_cast<std::int32_t>(touched.size());
  for (std::int32_t k = 0; k < units; ++k) {
    const std::int32_t u = step % 2 == 0 ? k : units - 1 - k;
    if (touched[static_cast<std::size_t>(u)] != 0 &&
        blueprint_.layout->units()[static_cast<std::size_t>(u)].gradient_bytes != 0) {
      order_.push_back(u);
    }
  }
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
      with_peers([&] { plane_->wait(Queue::gather, arrived); });
      const int half = static_cast<int>(k % 2);
      if (cause != nullptr) {
        plane_->stop();
        plane_->gather_gradient_alone(order_[k], half);
      }
      update_unit(order_[k], factor, half);
    }
  } else {
    for (const std::int32_t u : order_) {
      update_unit(u, factor, 0);
      with_peers([&] {
        cursor_->step_gather(u);
        plane_->kick();  // while the next unit is updated
      });
    }
    with_peers([&] { plane_->drain(); });
  }
  // A failure that came too late to stop a gather of this step still ends it.
  with_peers([&] {
    if (endpoint_->failed()) throw CommError(endpoint_->failure());
  });
  if (cause == nullptr) return;
  updated_ = true;
  try {
    std::rethrow_exception(cause);
  } catch (Error& error) {
    error.set_state_step(step + 1);
    poison(std::current_exception(), "rank " + std::to_string(rank_) + ": " + error.what());
    throw;
  }
}

void Core::update_unit(std::int32_t u, float factor, int half) {
  const auto start = std::chrono::steady_clock::now();
  const bool replicated = blueprint_.options.stage == Stage::replicated;
  const optimizers::Rule& rule = blueprint_.optimizer.rule();
  const std::int64_t step = cursor_->step_count() + 1;
  const auto slots = static_cast<int>(rule.slots().size());
  const std::int64_t sub_group =
      std::max<std::int64_t>(1, blueprint_.options.sub_group_bytes / (4 * (1 + slots)));
  const shard::UnitLayout& unit = blueprint_.layout->units()[static_cast<std::size_t>(u)];
  for (std::int32_t s = 0; s < static_cast<std::int32_t>(unit.segments.size()); ++s) {
    const shard::Segment& seg = unit.segments[static_cast<std::size_t>(s)];
    if (!seg.trained()) continue;
    const std::int64_t base = storage_->state_begin(u, s);
    std::byte* stored = replicated ? storage_->full(rank_, u, s) : storage_->shard(rank_, u, s);
    float* master = storage_->master(rank_, u, s);
    const float* gradient =
        replicated ? storage_->gathered_gradient(half, u, s) : storage_->accumulator(rank_, u, s);
    const std::int64_t chunk = master == nullptr ? sub_group : std::min(sub_group, kPublishChunk);
    for (const shard::Placed& p : seg.placed) {
      const shard::Range range = storage_->updated(u, s, p);
      const optimizers::Constants& constants = constants_[static_cast<std::size_t>(
          class_of_[static_cast<std::size_t>(p.parameter.value)])];
      pool_->split(range.count(), kPublishChunk, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t lo = range.lo + first; lo < range.lo + last; lo += chunk) {
          const std::int64_t at = lo - base;
          optimizers::Elements e;
          e.count = std::min(chunk, range.lo + last - lo);
          e.parameter = (master == nullptr ? reinterpret_cast<float*>(stored) : master) + at;
          for (int k = 0; k < slots; ++k) e.slots[k] = storage_->state(rank_, u, s, k) + at;
          e.gradient = gradient + at;
          e.factor = factor;
          for (const optimizers::Pass pass : rule.passes()) pass(e, constants, step);
          if (master != nullptr) {
            kernels::narrow(e.parameter, seg.dtype, stored + at * size_of(seg.dtype), e.count);
          }
        }
      });
    }
  }
  update_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Core::fill_report_totals(StepReport& report) {
  const Traffic& t = plane_->traffic();
  const Totals now{t.gathered_bytes.load(), t.reduced_bytes.load(), t.gather_nanoseconds.load(),
                   t.reduce_nanoseconds.load(), cursor_->served_behind()};
  report.gathered_bytes = now.gathered - reported_.gathered;
  report.reduced_bytes = now.reduced - reported_.reduced;
  report.gather_seconds = static_cast<double>(now.gather_ns - reported_.gather_ns) * 1e-9;
  report.reduce_seconds = static_cast<double>(now.reduce_ns - reported_.reduce_ns) * 1e-9;
  report.served_behind = static_cast<std::int64_t>(now.behind - reported_.behind);
  report.update_seconds = update_seconds_;
  report.peak_bytes = storage_->reserved_bytes();
  reported_ = now;
  update_seconds_ = 0.0;
}

}  // namespace zshard::engine
