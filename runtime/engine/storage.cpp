#include "runtime/engine/storage.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "optimizers/rule.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

constexpr Category kShared[] = {Category::parameters,
                                Category::resident,
                                Category::master,
                                Category::moments,
                                Category::gradients,
                                Category::gradient_slots,
                                Category::communication_staging,
                                Category::io_staging};

}  // namespace

Storage::Storage(const Blueprint& blueprint, comm::Group& group, device::Device* device)
    : blueprint_(blueprint),
      rank_(group.rank()),
      world_(blueprint.layout->world()),
      device_(device) {
  for (int c = 0; c < kCategories; ++c) {
    homes_[static_cast<std::size_t>(c)] = home(static_cast<Category>(c));
  }
  for (auto& bases : bases_) bases.assign(static_cast<std::size_t>(world_), nullptr);
  place();
  std::int64_t shared = 0;
  for (std::size_t a = 0; a < kArenas; ++a) {
    if (on_device(a)) {
      slice_[a] = device_bytes_;
      device_bytes_ += memory::round_to_arena(taken_[a]);
    } else if (shown(a)) {
      slice_[a] = shared;
      shared += memory::round_to_arena(taken_[a]);
    }
  }
  shared_ = group.make_arena(shared);
  if (device_ != nullptr) {
    device_memory_ = device_->allocate(device_bytes_);
    if (device_->pin(shared_->data(), shared_->reserved())) pinned_bytes_ = shared_->reserved();
  }
  for (std::size_t a = 0; a < kArenas; ++a) {
    std::byte*& base = bases_[a][static_cast<std::size_t>(rank_)];
    if (on_device(a)) {
      if (taken_[a] != 0) base = device_memory_ + slice_[a];
    } else if (shown(a)) {
      if (taken_[a] != 0) base = shared_->data() + slice_[a];
    } else {
      arenas_[a] = memory::Arena::make(taken_[a]);
      base = arenas_[a]->data();
    }
  }
}

Storage::~Storage() {
  if (device_ == nullptr) return;
  if (pinned_bytes_ != 0) device_->unpin(shared_->data(), pinned_bytes_);
  device_->free_memory(device_memory_);
}

Tier Storage::home(Category category) const {
  const OffloadOptions& tiers = blueprint_.options.offload;
  // What a tier on disk leaves in memory of the state is on the host.
  const auto in_memory = [](Tier tier) { return tier == Tier::device ? tier : Tier::host; };
  switch (category) {
    case Category::parameters:
      return in_memory(tiers.parameters);
    case Category::master:
    case Category::moments:
      return in_memory(tiers.optimizer);
    case Category::gradients:
      // Of the accumulators nothing is left in memory; the other buffers are a device's kernels'.
      return device_ == nullptr && tiers.gradients == Tier::host ? Tier::host : Tier::device;
    case Category::io_staging:
      return Tier::host;
    default:
      return Tier::device;
  }
}

Tier Storage::accumulator_home() const {
  return blueprint_.options.offload.gradients == Tier::host ? Tier::host : Tier::device;
}

bool Storage::on_device(std::size_t arena) const {
  return device_ != nullptr && tier_of(arena) == Tier::device;
}

bool Storage::shown(std::size_t arena) const {
  return std::find(std::begin(kShared), std::end(kShared), category_of(arena)) != std::end(kShared);
}

void Storage::place() {
  const shard::Layout& layout = *blueprint_.layout;
  const EngineOptions& options = blueprint_.options;
  const Stage stage = options.stage;
  const auto slots = static_cast<int>(blueprint_.optimizer.rule().slots().size());
  std::array<std::int64_t, kArenas> end{};
  const auto take_in = [&](Category category, Tier tier, std::int64_t bytes) {
    std::int64_t& at = end[arena_of(category, tier)];
    const std::int64_t start = at;
    at += bytes;
    return start;
  };
  const auto take = [&](Category category, std::int64_t bytes) {
    return take_in(category, homes_[static_cast<std::size_t>(category)], bytes);
  };
  const TierMap& tiers = blueprint_.tiers;
  for (std::size_t u = 0; u < layout.units().size(); ++u) {
    const shard::UnitLayout& unit = layout.units()[u];
    first_.push_back(static_cast<std::int32_t>(places_.size()));
    for (std::size_t i = 0; i < unit.segments.size(); ++i) {
      const shard::Segment& s = unit.segments[i];
      const TierMap::Segment& tier = tiers.units[u].segments[i];
      SegmentPlace p;
      if (stage == Stage::parameters && s.gathered()) {
        if (tier.parameter < 0) p.shard = take(Category::parameters, s.shard_bytes());
      } else {
        p.resident = stage == Stage::parameters;
        p.full = take(p.resident ? Category::resident : Category::parameters, s.bytes());
      }
      if (s.trained()) {
        if (tier.gradient < 0) {
          p.accumulator = take_in(Category::gradients, accumulator_home(), s.shard * 4);
        }
        if (s.dtype != DType::f32) p.master = take(Category::master, tier.kept * 4);
        for (int k = 0; k < slots; ++k) {
          p.state[static_cast<std::size_t>(k)] = take(Category::moments, tier.kept * 4);
        }
      }
      places_.push_back(p);
    }
  }

  std::int64_t wire = 0;
  unit_gradients_.assign(layout.units().size(), 0);
  for (std::size_t u = 0; u < layout.units().size(); ++u) {
    const shard::UnitLayout& unit = layout.units()[u];
    if (stage < Stage::gradients) {
      unit_gradients_[u] = take(Category::gradients, unit.gradient_bytes);
    } else if (unit.gradient_bytes != 0) {
      unit_gradients_[u] = blueprint_.training.gradient_offset[u];
    }
    std::int64_t staged = 0;
    std::int64_t gathered = 0;
    for (std::size_t s = 0; s < unit.segments.size(); ++s) {
      const shard::Segment& seg = unit.segments[s];
      if (!seg.trained()) continue;
      SegmentPlace& p = places_[static_cast<std::size_t>(first_[u]) + s];
      p.gradient = unit_gradients_[u] + seg.byte - unit.gradient_byte;
      p.gathered = gathered;
      gathered += seg.padded * 4;
      if (options.accumulation == Accumulation::reduced && options.wire &&
          seg.dtype != *options.wire) {
        p.wire = staged;
        staged += seg.padded * size_of(*options.wire);
      }
    }
    wire = std::max(wire, staged);
    gathered_bytes_ = std::max(gathered_bytes_, gathered);
  }
  local_begin_ = take(Category::gradients, 0);
  if (options.accumulation == Accumulation::local) {
    for (std::size_t u = 0; u < layout.units().size(); ++u) {
      for (std::size_t s = 0; s < layout.units()[u].segments.size(); ++s) {
        const shard::Segment& seg = layout.units()[u].segments[s];
        if (!seg.trained()) continue;
        places_[static_cast<std::size_t>(first_[u]) + s].local =
            take(Category::gradients, seg.padded * 4);
      }
    }
  }
  local_bytes_ = take(Category::gradients, 0) - local_begin_;
  take(Category::communication_staging, wire);
  gathered_begin_ = wire;
  if (stage == Stage::replicated) take(Category::communication_staging, 2 * gathered_bytes_);
  const DeviceMap& device = blueprint_.device;
  received_begin_ = take(Category::communication_staging, device.received_bytes);
  pieces_begin_ = take(Category::communication_staging, DeviceMap::kPieces * device.piece_bytes);
  take(Category::gather_slots, blueprint_.gather_arena());
  take(Category::gradient_slots, blueprint_.training.gradient_arena);
  take(Category::io_staging, tiers.staging_bytes + device.staging_bytes);
  take_in(Category::io_staging, Tier::device, device.upload_bytes);
  std::int64_t blocks = 0;
  for (int r = 0; r < world_; ++r) blocks = std::max(blocks, count_blocks(layout, r));
  take(Category::square_sum_blocks, 8 * blocks);
  for (std::size_t a = 0; a < kArenas; ++a) verify(a, end[a]);
  taken_ = end;
}

void Storage::verify(std::size_t arena, std::int64_t end) const {
  const std::int64_t planned = blueprint_.plan.bytes(category_of(arena), tier_of(arena));
  if (end == planned) return;
  throw Error("internal: " + std::string(to_string(category_of(arena))) + " takes " +
              std::to_string(end) + " bytes of the tier " + std::string(to_string(tier_of(arena))) +
              ", the plan says " + std::to_string(planned));
}

void Storage::share(comm::Group& group) {
  peers_ = group.share(shared_);
  for (std::size_t a = 0; a < kArenas; ++a) {
    if (taken_[a] == 0 || on_device(a) || !shown(a)) continue;
    for (std::size_t r = 0; r < peers_.size(); ++r) bases_[a][r] = peers_[r]->data() + slice_[a];
  }
}

MemoryPlan Storage::ledger() const {
  MemoryPlan ledger;
  for (std::size_t a = 0; a < kArenas; ++a) {
    ledger.add(category_of(a), tier_of(a), arenas_[a] ? arenas_[a]->bytes() : taken_[a]);
  }
  return ledger;
}

std::int64_t Storage::reserved_bytes() const {
  std::int64_t sum = shared_->reserved() + device_bytes_;
  for (const auto& arena : arenas_) sum += arena ? arena->reserved() : 0;
  return sum;
}

std::byte* Storage::full(int r, int u, int s) const {
  const SegmentPlace& p = segment(u, s);
  return base(p.resident ? Category::resident : Category::parameters, r) + p.full;
}

std::byte* Storage::shard(int r, int u, int s) const {
  const SegmentPlace& p = segment(u, s);
  if (p.full < 0) return base(Category::parameters, r) + p.shard;
  const shard::Segment& seg =
      blueprint_.layout->units()[static_cast<std::size_t>(u)].segments[static_cast<std::size_t>(s)];
  return full(r, u, s) + r * seg.shard_bytes();
}

std::byte* Storage::slot(std::int64_t offset, int u, int s) const {
  // -1: the unit has no gathered bytes, and nothing but empty tensors to point at.
  return base(Category::gather_slots, rank_) + std::max<std::int64_t>(offset, 0) +
         blueprint_.layout->units()[static_cast<std::size_t>(u)]
             .segments[static_cast<std::size_t>(s)]
             .byte;
}

float* Storage::accumulator(int r, int u, int s) const {
  return reinterpret_cast<float*>(
      bases_[arena_of(Category::gradients, accumulator_home())][static_cast<std::size_t>(r)] +
      segment(u, s).accumulator);
}

float* Storage::local(int r, int u, int s) const {
  return reinterpret_cast<float*>(base(Category::gradients, r) + segment(u, s).local);
}

float* Storage::master(int r, int u, int s) const {
  const SegmentPlace& p = segment(u, s);
  if (p.master < 0) return nullptr;
  return reinterpret_cast<float*>(base(Category::master, r) + p.master);
}

float* Storage::state(int r, int u, int s, int slot) const {
  return reinterpret_cast<float*>(base(Category::moments, r) +
                                  segment(u, s).state[static_cast<std::size_t>(slot)]);
}

std::byte* Storage::gradient(int r, int u, int s) const {
  const bool slots = blueprint_.options.stage >= Stage::gradients;
  return base(slots ? Category::gradient_slots : Category::gradients, r) + segment(u, s).gradient;
}

std::byte* Storage::gradients(int u) const {
  const bool slots = blueprint_.options.stage >= Stage::gradients;
  return base(slots ? Category::gradient_slots : Category::gradients, rank_) +
         unit_gradients_[static_cast<std::size_t>(u)];
}

std::byte* Storage::wire_staging(int r, int u, int s) const {
  const SegmentPlace& p = segment(u, s);
  return p.wire < 0 ? nullptr : base(Category::communication_staging, r) + p.wire;
}

float* Storage::gathered_gradient(int half, int u, int s) const {
  return reinterpret_cast<float*>(base(Category::communication_staging, rank_) + gathered_begin_ +
                                  half * gathered_bytes_ + segment(u, s).gathered);
}

std::byte* Storage::staging(int r, std::int64_t offset) const {
  return base(Category::io_staging, r) + offset;
}

double* Storage::square_blocks() const {
  return reinterpret_cast<double*>(base(Category::square_sum_blocks, rank_));
}

std::int64_t Storage::state_begin(int u, int s) const {
  if (blueprint_.options.stage == Stage::replicated) return 0;
  return rank_ * blueprint_.layout->units()[static_cast<std::size_t>(u)]
                     .segments[static_cast<std::size_t>(s)]
                     .shard;
}

shard::Range Storage::updated(int u, int s, const shard::Placed& p) const {
  if (blueprint_.options.stage == Stage::replicated) return {p.start, p.start + p.count};
  return blueprint_.layout->units()[static_cast<std::size_t>(u)]
      .segments[static_cast<std::size_t>(s)]
      .owned(p, rank_);
}

std::span<std::byte> Storage::local_buffers() const {
  if (local_bytes_ == 0) return {};
  return {base(Category::gradients, rank_) + local_begin_, static_cast<std::size_t>(local_bytes_)};
}

std::span<std::byte> Storage::gather_arena() const {
  return {base(Category::gather_slots, rank_), static_cast<std::size_t>(blueprint_.gather_arena())};
}

std::byte* Storage::received() const {
  return base(Category::communication_staging, rank_) + received_begin_;
}

std::byte* Storage::pieces() const {
  return base(Category::communication_staging, rank_) + pieces_begin_;
}

std::byte* Storage::uploads() const {
  return bases_[arena_of(Category::io_staging, Tier::device)][static_cast<std::size_t>(rank_)];
}

std::byte* Storage::device_staging(std::int64_t offset) const {
  return base(Category::io_staging, rank_) + offset;
}

}  // namespace zshard::engine
