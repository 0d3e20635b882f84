// Reading and writing of whole tensors, and initialisation. Control-plane collectives between
// steps.
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "runtime/engine/core.hpp"
#include "runtime/kernels/kernels.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

constexpr std::int64_t kMostSteps = std::int64_t{1} << 53;  // exact in fp64 bias corrections
constexpr std::int64_t kPiece = 4096;  // elements of an initializer's piece; on the stack

std::uint64_t mix(std::uint64_t hash, const void* data, std::size_t bytes) {
  return XXH3_64bits_withSeed(data, bytes, hash);
}

std::uint64_t tag_of(Core::Content content, const std::string& name, const std::string& slot,
                     std::int64_t first, std::int64_t count) {
  const std::array<std::int64_t, 3> words{static_cast<std::int64_t>(content), first, count};
  std::uint64_t hash = mix(0, words.data(), sizeof words);
  hash = mix(hash, name.data(), name.size());
  return mix(hash, slot.data(), slot.size());
}

}  // namespace

Core::Location Core::locate(const std::string& name) const {
  return locate(blueprint_.spec.parameter_id(name));
}

void Core::rendezvous(comm::Operation operation, std::uint64_t tag) {
  group_->exchange({operation, 0, 0, tag}, nullptr, nullptr);
}

void Core::rendezvous_outcome(comm::Operation operation, std::uint64_t tag, std::string_view call,
                              const std::exception_ptr& failure) {
  struct Outcome {
    std::uint32_t failed;
    char text[1020];
  };
  Outcome mine{};
  if (failure != nullptr) {
    mine.failed = 1;
    const std::string text = text_of(failure);
    std::memcpy(mine.text, text.data(), std::min(text.size(), sizeof mine.text - 1));
  }
  std::vector<Outcome> all(static_cast<std::size_t>(world_));
  group_->exchange({operation, 0, sizeof mine, tag}, &mine, all.data());
  for (int r = 0; r < world_; ++r) {
    const Outcome& outcome = all[static_cast<std::size_t>(r)];
    if (outcome.failed == 0) continue;
    const std::string message = "rank " + std::to_string(r) + ": the function of " +
                                std::string(call) + " threw: " + outcome.text;
    if (failure != nullptr) {
      poison(failure, message);
      std::rethrow_exception(failure);
    }
    throw CommError(message);
  }
}

float* Core::state_of(int r, const Location& at, const std::string& slot,
                      const std::string& name) const {
  if (!at.layout->trained()) {
    throw UsageError("parameter " + name + " is frozen: it has no optimizer state");
  }
  const auto slots = blueprint_.optimizer.rule().slots();
  if (slot == "master" && at.layout->dtype != DType::f32) {
    return storage_->master(r, at.unit, at.segment);
  }
  std::string known = at.layout->dtype != DType::f32 ? "master" : "";
  for (std::size_t k = 0; k < slots.size(); ++k) {
    if (slots[k].name == slot) return storage_->state(r, at.unit, at.segment, static_cast<int>(k));
    known += std::string(known.empty() ? "" : ", ") + std::string(slots[k].name);
  }
  throw UsageError("parameter " + name + " has no state slot " + slot +
                   "; it has: " + (known.empty() ? "none" : known));
}

namespace {

void check_range(const std::string& name, std::int64_t first, std::size_t size,
                 std::int64_t count) {
  if (first >= 0 && first <= count && static_cast<std::int64_t>(size) <= count - first) return;
  throw UsageError("parameter " + name + " has " + std::to_string(count) + " elements; [" +
                   std::to_string(first) + ", " + std::to_string(first) + " + " +
                   std::to_string(size) + ") is not inside");
}

}  // namespace

void Core::read(Content content, const std::string& name, const std::string& slot,
                std::span<float> out, std::int64_t first) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  const Location at = locate(name);
  check_range(name, first, out.size(), at.placed->count);
  if (content == Content::gradient) {
    if (!at.layout->trained())
      throw UsageError("parameter " + name + " is frozen: it has no gradient");
    if (!cursor_->range_finished()) {
      throw UsageError(
          "read_gradient: gradients are complete after the last micro-step, before step()");
    }
  } else {
    check_between_steps(content == Content::state ? "read_state" : "read_parameter");
  }
  if (content == Content::state) (void)state_of(rank_, at, slot, name);  // checks the names
  guarded([&] {
    if (content == Content::gradient) plane_->drain();
    const std::uint64_t tag =
        tag_of(content, name, slot, first, static_cast<std::int64_t>(out.size()));
    rendezvous(comm::Operation::read, tag);
    const shard::Segment& seg = *at.layout;
    const std::int64_t begin = at.placed->start + first;
    const std::int64_t end = begin + static_cast<std::int64_t>(out.size());
    const bool whole_state = blueprint_.options.stage == Stage::replicated;
    for (int r = 0; r < world_; ++r) {
      const shard::Range own = seg.owned(*at.placed, r);
      const std::int64_t lo = std::max(own.lo, begin);
      const std::int64_t hi = std::min(own.hi, end);
      if (lo >= hi) continue;
      const std::int64_t cut = r * seg.shard;
      float* target = out.data() + (lo - begin);
      const auto bytes = static_cast<std::size_t>(hi - lo) * 4;
      switch (content) {
        case Content::parameter:
          kernels::widen(storage_->shard(r, at.unit, at.segment) + (lo - cut) * size_of(seg.dtype),
                         seg.dtype, target, hi - lo);
          break;
        case Content::gradient:
          std::memcpy(target, storage_->accumulator(r, at.unit, at.segment) + (lo - cut), bytes);
          break;
        case Content::state:
          std::memcpy(target, state_of(r, at, slot, name) + (whole_state ? lo : lo - cut), bytes);
          break;
      }
    }
    rendezvous(comm::Operation::read, tag + 1);
  });
}

void Core::write(Content content, const std::string& name, const std::string& slot,
                 std::span<const float> values, std::int64_t first) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  const Location at = locate(name);
  check_range(name, first, values.size(), at.placed->count);
  if (content == Content::gradient) {
    if (!at.layout->trained())
      throw UsageError("parameter " + name + " is frozen: it has no gradient");
    if (!cursor_->range_finished()) {
      throw UsageError("write_gradient: after the last micro-step, before step()");
    }
  } else {
    check_between_steps(content == Content::state ? "write_state" : "write_parameter");
  }
  if (content == Content::state) (void)state_of(rank_, at, slot, name);  // checks the names
  guarded([&] {
    // Peers that passed over parts of an evaluation still read here.
    plane_->drain();
    const std::uint64_t tag =
        mix(tag_of(content, name, slot, first, static_cast<std::int64_t>(values.size())),
            values.data(), values.size() * 4);
    rendezvous(comm::Operation::write, tag);
    const shard::Segment& seg = *at.layout;
    const std::int64_t begin = at.placed->start + first;
    const std::int64_t end = begin + static_cast<std::int64_t>(values.size());
    const shard::Range mine = seg.owned(*at.placed, rank_);
    const std::int64_t base = storage_->state_begin(at.unit, at.segment);
    // Elements [lo, hi) of the segment that a buffer of this rank holds from element `from` on.
    const auto copy = [&](std::int64_t lo, std::int64_t hi, auto&& body) {
      lo = std::max(lo, begin);
      hi = std::min(hi, end);
      if (lo < hi) body(lo, hi - lo, values.data() + (lo - begin));
    };
    const bool whole_state = blueprint_.options.stage == Stage::replicated;
    const shard::Range state = whole_state ? shard::Range{begin, end} : mine;
    if (content == Content::parameter) {
      const bool replicated = storage_->replicated(at.unit, at.segment);
      std::byte* stored = replicated ? storage_->full(rank_, at.unit, at.segment)
                                     : storage_->shard(rank_, at.unit, at.segment);
      const std::int64_t cut = replicated ? 0 : rank_ * seg.shard;
      const shard::Range held = replicated ? shard::Range{begin, end} : mine;
      copy(held.lo, held.hi, [&](std::int64_t lo, std::int64_t count, const float* from) {
        kernels::narrow(from, seg.dtype, stored + (lo - cut) * size_of(seg.dtype), count);
      });
      if (float* master = storage_->master(rank_, at.unit, at.segment); master != nullptr) {
        copy(state.lo, state.hi, [&](std::int64_t lo, std::int64_t count, const float* from) {
          std::memcpy(master + (lo - base), from, static_cast<std::size_t>(count) * 4);
        });
      }
    } else if (content == Content::gradient) {
      float* accumulator = storage_->accumulator(rank_, at.unit, at.segment);
      copy(mine.lo, mine.hi, [&](std::int64_t lo, std::int64_t count, const float* from) {
        std::memcpy(accumulator + (lo - rank_ * seg.shard), from,
                    static_cast<std::size_t>(count) * 4);
      });
      cursor_->touch(UnitId{at.unit});
    } else {
      float* target = state_of(rank_, at, slot, name);
      copy(state.lo, state.hi, [&](std::int64_t lo, std::int64_t count, const float* from) {
        std::memcpy(target + (lo - base), from, static_cast<std::size_t>(count) * 4);
      });
    }
    rendezvous(comm::Operation::write, tag + 1);
  });
}

void Core::fill_own(UnitId unit, const Initializer& fill) {
  const std::int32_t u = unit.value;
  const shard::UnitLayout& layout = blueprint_.layout->units()[static_cast<std::size_t>(u)];
  std::array<float, kPiece> piece;
  for (std::int32_t s = 0; s < static_cast<std::int32_t>(layout.segments.size()); ++s) {
    const shard::Segment& seg = layout.segments[static_cast<std::size_t>(s)];
    std::byte* shard = storage_->shard(rank_, u, s);
    float* master = seg.trained() ? storage_->master(rank_, u, s) : nullptr;
    const std::int64_t cut = rank_ * seg.shard;
    const std::int64_t base = storage_->state_begin(u, s);
    for (const shard::Placed& p : seg.placed) {
      const ParameterSpec& spec = blueprint_.spec.parameter(p.parameter);
      const shard::Range own = seg.owned(p, rank_);
      for (std::int64_t lo = own.lo; lo < own.hi; lo += kPiece) {
        const std::int64_t count = std::min(kPiece, own.hi - lo);
        fill({p.parameter, spec.name, spec.shape, lo - p.start, count},
             std::span<float>(piece.data(), static_cast<std::size_t>(count)));
        kernels::narrow(piece.data(), seg.dtype, shard + (lo - cut) * size_of(seg.dtype), count);
        if (master != nullptr) {
          std::memcpy(master + (lo - base), piece.data(), static_cast<std::size_t>(count) * 4);
        }
      }
    }
  }
}

void Core::initialize(UnitId unit, const Initializer& fill) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_unit(unit);
  check_between_steps("initialize");
  if (!fill) throw UsageError("initialize: no function");
  const std::int32_t u = unit.value;
  const shard::UnitLayout& layout = blueprint_.layout->units()[static_cast<std::size_t>(u)];
  const bool whole_state = blueprint_.options.stage == Stage::replicated;
  guarded([&] {
    const auto tag = static_cast<std::uint64_t>(u);
    plane_->drain();
    rendezvous(comm::Operation::initialize, 4 * tag);
    std::exception_ptr failure;
    try {
      fill_own(unit, fill);
    } catch (...) {
      failure = std::current_exception();
    }
    rendezvous_outcome(comm::Operation::initialize, 4 * tag + 1,
                       "initialize of unit " + layout.name, failure);
    for (std::int32_t s = 0; s < static_cast<std::int32_t>(layout.segments.size()); ++s) {
      const shard::Segment& seg = layout.segments[static_cast<std::size_t>(s)];
      if (!storage_->replicated(u, s) || seg.padded == 0) continue;
      std::byte* full = storage_->full(rank_, u, s);
      float* master = seg.trained() && whole_state ? storage_->master(rank_, u, s) : nullptr;
      for (int r = 0; r < world_; ++r) {
        if (r == rank_) continue;
        std::memcpy(full + r * seg.shard_bytes(), storage_->shard(r, u, s),
                    static_cast<std::size_t>(seg.shard_bytes()));
        if (master != nullptr) {
          std::memcpy(master + r * seg.shard, storage_->master(r, u, s) + r * seg.shard,
                      static_cast<std::size_t>(seg.shard) * 4);
        }
      }
    }
    rendezvous(comm::Operation::initialize, 4 * tag + 2);
  });
}

std::int64_t Core::step_count() const {
  const std::lock_guard<CallMutex> lock(mutex_);
  return cursor_->step_count() + (updated_ ? 1 : 0);
}

void Core::set_step_count(std::int64_t step) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_between_steps("set_step_count");
  if (step < 0 || step > kMostSteps) {
    throw UsageError("set_step_count: " + std::to_string(step) + " is not in 0 to 2^53");
  }
  cursor_->set_step_count(step);
}

}  // namespace zshard::engine
