// Reading and writing of whole tensors, and initialisation. Control-plane collectives between
// steps.
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

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

Core::Tensor Core::state_of(const Location& at, const std::string& slot,
                            const std::string& name) const {
  if (!at.layout->trained()) {
    throw UsageError("parameter " + name + " is frozen: it has no optimizer state");
  }
  const auto slots = blueprint_.optimizer.rule().slots();
  const bool master = at.layout->dtype != DType::f32;
  if (slot == "master" && master) return {Content::state, 0};
  std::string known = master ? "master" : "";
  for (std::size_t k = 0; k < slots.size(); ++k) {
    if (slots[k].name == slot) return {Content::state, static_cast<int>(k) + (master ? 1 : 0)};
    known += std::string(known.empty() ? "" : ", ") + std::string(slots[k].name);
  }
  throw UsageError("parameter " + name + " has no state slot " + slot +
                   "; it has: " + (known.empty() ? "none" : known));
}

Core::Spot Core::spot(int r, const Location& at, Tensor tensor, std::int64_t element) const {
  const TierMap::Unit& unit = blueprint_.tiers.units[static_cast<std::size_t>(at.unit)];
  const TierMap::Segment& tier = unit.segments[static_cast<std::size_t>(at.segment)];
  const std::int64_t item = size_of(at.layout->dtype);
  switch (tensor.content) {
    case Content::parameter: {
      const bool replicated = storage_->replicated(at.unit, at.segment);
      const std::int64_t run = (replicated ? at.layout->padded : at.layout->shard) - element;
      if (tier.parameter >= 0) {
        return {nullptr, unit.parameters.offset + tier.parameter + element * item, run};
      }
      std::byte* memory = replicated ? storage_->full(r, at.unit, at.segment)
                                     : storage_->shard(r, at.unit, at.segment);
      return {memory + element * item, -1, run};
    }
    case Content::gradient:
      if (tier.gradient >= 0) {
        return {nullptr, unit.gradients.offset + tier.gradient + element * 4,
                at.layout->shard - element};
      }
      return {reinterpret_cast<std::byte*>(storage_->accumulator(r, at.unit, at.segment) + element),
              -1, at.layout->shard - element};
    case Content::state:
      break;
  }
  const int slot = tensor.part - (at.layout->dtype != DType::f32 ? 1 : 0);
  if (element < tier.kept) {
    float* memory = slot < 0 ? storage_->master(r, at.unit, at.segment)
                             : storage_->state(r, at.unit, at.segment, slot);
    return {reinterpret_cast<std::byte*>(memory + element), -1, tier.kept - element};
  }
  // The last group of the segment that starts at or before the element.
  const auto begin = blueprint_.tiers.groups.begin() + unit.first_group;
  const auto after = std::upper_bound(
      begin, begin + unit.groups, std::pair{at.segment, element},
      [](const std::pair<std::int32_t, std::int64_t>& key, const SubGroup& g) {
        return key.first != g.segment ? key.first < g.segment : key.second < g.first;
      });
  const SubGroup& g = *(after - 1);
  return {nullptr, g.state + 4 * (tensor.part * g.count + element - g.first),
          g.first + g.count - element};
}

void Core::settle() {
  if (device_plane_ != nullptr) device_plane_->settle();
}

bool Core::on_device(const Location& at, Tensor tensor) const {
  if (device_plane_ == nullptr) return false;
  const OffloadOptions& tiers = blueprint_.options.offload;
  switch (tensor.content) {
    case Content::parameter:
      return storage_->replicated(at.unit, at.segment) || tiers.parameters == Tier::device;
    case Content::gradient:
      return tiers.gradients == Tier::device;
    case Content::state:
      return tiers.optimizer == Tier::device;
  }
  return false;
}

template <class Body>
void Core::change(const Location& at, Tensor tensor, std::int64_t lo, std::int64_t hi,
                  Body&& body) {
  const std::int64_t item = tensor.content == Content::parameter ? size_of(at.layout->dtype) : 4;
  while (lo < hi) {
    const Spot place = spot(rank_, at, tensor, lo);
    std::int64_t count = std::min(place.run, hi - lo);
    std::byte* memory = place.memory;
    if (memory != nullptr && on_device(at, tensor)) {
      count = std::min(count, DeviceMap::kWindowBytes / item);
      std::byte* window = device_plane_->window(0);
      body(window, lo, count);
      device_plane_->copy_now(memory, window, count * item);
      lo += count;
      continue;
    }
    if (memory == nullptr) {
      count = std::min(count, DiskWindows::kMostBytes / item);
      memory = windows_->access(place.offset, count * item, true);
    }
    body(memory, lo, count);
    lo += count;
  }
}

std::exception_ptr Core::agree_on_disks(comm::Operation operation, std::uint64_t tag,
                                        const std::exception_ptr& failure) {
  const std::uint32_t mine = failure == nullptr ? 0 : 1;
  std::vector<std::uint32_t>& all = disk_failures_;
  group_->exchange({operation, 1, sizeof mine, tag}, &mine, all.data());
  const auto first = std::find(all.begin(), all.end(), 1U);
  if (first == all.end()) return nullptr;
  std::array<char, 1024> text{};
  if (failure != nullptr) text_of(failure).copy(text.data(), text.size() - 1);
  std::vector<char> texts(text.size() * static_cast<std::size_t>(world_));
  group_->exchange({operation, 2, text.size(), tag}, text.data(), texts.data());
  if (failure != nullptr) return failure;
  const auto r = first - all.begin();
  return std::make_exception_ptr(
      IoError("rank " + std::to_string(r) + ": " +
              (texts.data() + static_cast<std::size_t>(r) * text.size())));
}

template <class Body>
std::exception_ptr Core::visit(int r, const Location& at, Tensor tensor, std::int64_t lo,
                               std::int64_t hi, comm::Operation operation, Body&& body) {
  const std::int64_t item = tensor.content == Content::parameter ? size_of(at.layout->dtype) : 4;
  while (lo < hi) {
    const bool device = on_device(at, tensor);
    const Spot place = spot(device ? rank_ : r, at, tensor, lo);
    std::int64_t count = std::min(place.run, hi - lo);
    if (place.memory != nullptr && device) {  // a peer's has no address here
      count = std::min(count, DeviceMap::kWindowBytes / item);
      std::byte* window = device_plane_->window(1);
      if (r == rank_) device_plane_->copy_now(window, place.memory, count * item);
      group_->broadcast(
          {operation, r, static_cast<std::uint64_t>(count * item), static_cast<std::uint64_t>(lo)},
          window);
      body(window, lo, count);
      lo += count;
      continue;
    }
    if (place.memory != nullptr) {
      body(place.memory, lo, count);
      lo += count;
      continue;
    }
    count = std::min(count, DiskWindows::kMostBytes / item);
    std::exception_ptr failure;
    if (r == rank_) {
      try {
        windows_->show(place.offset, count * item);
      } catch (const IoError&) {
        failure = std::current_exception();
      }
    }
    const auto tag = static_cast<std::uint64_t>(place.offset) * 2;
    if (auto cause = agree_on_disks(operation, tag, failure); cause != nullptr) return cause;
    body(windows_->shown(r, place.offset), lo, count);
    rendezvous(operation, tag + 1);
    lo += count;
  }
  return nullptr;
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
  const Tensor tensor = content == Content::state ? state_of(at, slot, name) : Tensor{content, 0};
  std::exception_ptr failure;  // of a disk: nothing has changed
  guarded([&] {
    if (content == Content::gradient) {
      plane_->drain();
      plane_->flush_gradients();
    }
    settle();
    const std::uint64_t tag =
        tag_of(content, name, slot, first, static_cast<std::int64_t>(out.size()));
    rendezvous(comm::Operation::read, tag);
    const shard::Segment& seg = *at.layout;
    const std::int64_t begin = at.placed->start + first;
    const std::int64_t end = begin + static_cast<std::int64_t>(out.size());
    const bool whole = content == Content::state ? blueprint_.options.stage == Stage::replicated
                                                 : content == Content::parameter &&
                                                       storage_->replicated(at.unit, at.segment);
    for (int r = 0; r < world_ && failure == nullptr; ++r) {
      const shard::Range own = seg.owned(*at.placed, r);
      const std::int64_t lo = std::max(own.lo, begin);
      const std::int64_t hi = std::min(own.hi, end);
      if (lo >= hi) continue;
      const std::int64_t cut = whole ? 0 : r * seg.shard;
      failure = visit(r, at, tensor, lo - cut, hi - cut, comm::Operation::read,
                      [&](const std::byte* memory, std::int64_t from, std::int64_t count) {
                        float* target = out.data() + (from + cut - begin);
                        if (content == Content::parameter) {
                          kernels::widen(memory, seg.dtype, target, count);
                        } else {
                          std::memcpy(target, memory, static_cast<std::size_t>(count) * 4);
                        }
                      });
    }
    if (failure == nullptr) rendezvous(comm::Operation::read, tag + 1);
  });
  if (failure != nullptr) std::rethrow_exception(failure);
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
  const Tensor tensor = content == Content::state ? state_of(at, slot, name) : Tensor{content, 0};
  guarded([&] {
    // Peers that passed over parts of an evaluation still read here.
    plane_->drain();
    plane_->flush_gradients();
    settle();
    const std::uint64_t tag =
        mix(tag_of(content, name, slot, first, static_cast<std::int64_t>(values.size())),
            values.data(), values.size() * 4);
    rendezvous(comm::Operation::write, tag);
    const shard::Segment& seg = *at.layout;
    const std::int64_t begin = at.placed->start + first;
    const std::int64_t end = begin + static_cast<std::int64_t>(values.size());
    const shard::Range mine = seg.owned(*at.placed, rank_);
    // What this rank holds of [held.lo, held.hi), which its memory counts from `cut` on.
    const auto set = [&](Tensor which, shard::Range held, std::int64_t cut) {
      const std::int64_t lo = std::max(held.lo, begin) - cut;
      const std::int64_t hi = std::min(held.hi, end) - cut;
      change(at, which, lo, hi, [&](std::byte* memory, std::int64_t from, std::int64_t count) {
        const float* source = values.data() + (from + cut - begin);
        if (which.content == Content::parameter) {
          kernels::narrow(source, seg.dtype, memory, count);
        } else {
          std::memcpy(memory, source, static_cast<std::size_t>(count) * 4);
        }
      });
    };
    const bool whole_state = blueprint_.options.stage == Stage::replicated;
    const shard::Range state = whole_state ? shard::Range{begin, end} : mine;
    const std::int64_t base = storage_->state_begin(at.unit, at.segment);
    std::exception_ptr failure;
    try {
      switch (content) {
        case Content::parameter:
          if (storage_->replicated(at.unit, at.segment)) {
            set(tensor, {begin, end}, 0);
          } else {
            set(tensor, mine, rank_ * seg.shard);
          }
          if (seg.trained() && seg.dtype != DType::f32) set({Content::state, 0}, state, base);
          break;
        case Content::gradient:
          set(tensor, mine, rank_ * seg.shard);
          break;
        case Content::state:
          set(tensor, state, base);
          break;
      }
      forget_buffers();
    } catch (const IoError&) {
      failure = std::current_exception();
    }
    if (content == Content::gradient) {
      cursor_->touch(UnitId{at.unit});
      plane_->forget_squares();
    }
    finish_change(comm::Operation::write, tag + 1, failure);
  });
}

void Core::forget_buffers() {
  if (store_ == nullptr) return;
  windows_->flush();
  stream_->forget();
}

void Core::finish_change(comm::Operation operation, std::uint64_t tag,
                         const std::exception_ptr& failure) {
  if (store_ == nullptr) {
    rendezvous(operation, tag);
    return;
  }
  // Half written: the engine cannot go on.
  if (auto cause = agree_on_disks(operation, tag, failure); cause != nullptr) {
    std::rethrow_exception(cause);
  }
}

void Core::fill_own(UnitId unit, const Initializer& fill) {
  const std::int32_t u = unit.value;
  const shard::UnitLayout& layout = blueprint_.layout->units()[static_cast<std::size_t>(u)];
  std::array<float, kPiece> piece;
  for (std::int32_t s = 0; s < static_cast<std::int32_t>(layout.segments.size()); ++s) {
    const shard::Segment& seg = layout.segments[static_cast<std::size_t>(s)];
    const Location at{u, s, &seg, nullptr};
    const bool whole_state = blueprint_.options.stage == Stage::replicated;
    // Replicated copies hold the whole segment, others this rank's shard.
    const std::int64_t cut = storage_->replicated(u, s) ? 0 : rank_ * seg.shard;
    const std::int64_t base = whole_state ? 0 : rank_ * seg.shard;
    for (const shard::Placed& p : seg.placed) {
      const ParameterSpec& spec = blueprint_.spec.parameter(p.parameter);
      const shard::Range own = seg.owned(p, rank_);
      for (std::int64_t lo = own.lo; lo < own.hi; lo += kPiece) {
        const std::int64_t count = std::min(kPiece, own.hi - lo);
        fill({p.parameter, spec.name, spec.shape, lo - p.start, count},
             std::span<float>(piece.data(), static_cast<std::size_t>(count)));
        change(at, {Content::parameter, 0}, lo - cut, lo - cut + count,
               [&](std::byte* memory, std::int64_t from, std::int64_t n) {
                 kernels::narrow(piece.data() + (from - (lo - cut)), seg.dtype, memory, n);
               });
        if (!seg.trained() || seg.dtype == DType::f32) continue;
        change(at, {Content::state, 0}, lo - base, lo - base + count,
               [&](std::byte* memory, std::int64_t from, std::int64_t n) {
                 std::memcpy(memory, piece.data() + (from - (lo - base)),
                             static_cast<std::size_t>(n) * 4);
               });
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
    settle();
    rendezvous(comm::Operation::initialize, 4 * tag);
    std::exception_ptr failure;
    std::exception_ptr disk;
    try {
      fill_own(unit, fill);
    } catch (const IoError&) {
      failure = std::current_exception();
      disk = failure;
    } catch (...) {
      failure = std::current_exception();
    }
    if (disk == nullptr && failure == nullptr) {
      try {
        forget_buffers();
      } catch (const IoError&) {
        disk = std::current_exception();
      }
    }
    finish_change(comm::Operation::initialize, 4 * tag + 3, disk);
    rendezvous_outcome(comm::Operation::initialize, 4 * tag + 1,
                       "initialize of unit " + layout.name, failure);
    disk = nullptr;
    for (std::int32_t s = 0; s < static_cast<std::int32_t>(layout.segments.size()); ++s) {
      const shard::Segment& seg = layout.segments[static_cast<std::size_t>(s)];
      if (!storage_->replicated(u, s) || seg.padded == 0) continue;
      std::byte* full = storage_->full(rank_, u, s);
      if (device_plane_ != nullptr) device_plane_->gather_copies(u, s);
      for (int r = 0; r < world_; ++r) {
        if (r == rank_ || device_plane_ != nullptr) continue;
        std::memcpy(full + r * seg.shard_bytes(), storage_->shard(r, u, s),
                    static_cast<std::size_t>(seg.shard_bytes()));
      }
      if (!whole_state || !seg.trained() || seg.dtype == DType::f32) continue;
      const Location at{u, s, &seg, nullptr};
      const Tensor master{Content::state, 0};
      for (int r = 0; r < world_; ++r) {
        const std::exception_ptr cause =
            visit(r, at, master, r * seg.shard, (r + 1) * seg.shard, comm::Operation::initialize,
                  [&](const std::byte* memory, std::int64_t from, std::int64_t count) {
                    if (r == rank_ || disk != nullptr) return;
                    try {
                      change(at, master, from, from + count,
                             [&](std::byte* to, std::int64_t first, std::int64_t n) {
                               std::memcpy(to, memory + (first - from) * 4,
                                           static_cast<std::size_t>(n) * 4);
                             });
                    } catch (const IoError&) {
                      disk = std::current_exception();
                    }
                  });
        if (cause != nullptr) std::rethrow_exception(cause);
      }
    }
    try {
      forget_buffers();
    } catch (const IoError&) {
      disk = std::current_exception();
    }
    finish_change(comm::Operation::initialize, 4 * tag + 2, disk);
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
