// Where every byte of one rank lies: one arena a category, and the offsets inside. Offsets are the
// same on every rank, so a peer's address is its arena's base plus ours. Takes all memory at
// construction, exactly what the plan says.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/comm/group.hpp"
#include "runtime/device/device.hpp"
#include "runtime/engine/blueprint.hpp"
#include "runtime/memory/arena.hpp"

namespace zshard::engine {

class Storage {
 public:
  /// Allocates; touches nothing of peers. device: where the tier device is, null on a host rank;
  /// peers' memory there has no address. Throws OutOfMemory.
  Storage(const Blueprint& blueprint, comm::Group& group, device::Device* device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  /// Collective: maps the peers' arenas. Their memory stays valid as long as this object lives.
  void share(comm::Group& group);

  /// Bytes of memory really allocated, by category and tier.
  [[nodiscard]] MemoryPlan ledger() const;
  [[nodiscard]] std::int64_t reserved_bytes() const;  // of all arenas, rounded

  // Addresses of whole segments, or of this rank's shard of one. u: unit, s: segment of it, r:
  // rank.
  /// True where every rank holds a whole copy between steps (stages 0-2, resident segments).
  [[nodiscard]] bool replicated(int u, int s) const { return segment(u, s).full >= 0; }
  [[nodiscard]] std::byte* full(int r, int u, int s) const;  // whole copy; replicated() only
  [[nodiscard]] std::byte* shard(int r, int u,
                                 int s) const;  // rank r's own shard in its own memory
  [[nodiscard]] std::byte* slot(std::int64_t offset, int u, int s) const;  // gathered, in the arena
  [[nodiscard]] float* accumulator(int r, int u, int s) const;             // [segment.shard]
  [[nodiscard]] float* local(int r, int u, int s) const;  // [segment.padded], accumulation `local`
  // What the tier map has on disk has no address here: shards, accumulators, and the elements of
  // master and state from TierMap::Segment::kept on.
  /// fp32 masters of a 16-bit segment: [padded] at stage 0, else [shard]; null for f32 segments.
  [[nodiscard]] float* master(int r, int u, int s) const;
  [[nodiscard]] float* state(int r, int u, int s, int slot) const;  // like master, for every slot
  [[nodiscard]] std::byte* gradient(int r, int u, int s) const;  // [padded], in the segment's dtype
  [[nodiscard]] std::byte* gradients(int u) const;  // the unit's whole gradient range, own memory
  [[nodiscard]] std::byte* wire_staging(int r, int u, int s) const;  // null where wire == dtype
  [[nodiscard]] float* gathered_gradient(int half, int u,
                                         int s) const;  // stage 0: one of two buffers
  /// Of this rank's staging memory.
  [[nodiscard]] std::shared_ptr<const void> owner() const { return shared_; }
  /// Rank r's staging memory of the nvme tier; offsets are those of the tier map.
  [[nodiscard]] std::byte* staging(int r, std::int64_t offset) const;
  [[nodiscard]] double* square_blocks() const;
  /// Elements of `state` and `master` before the segment's first one: 0 at stage 0, else rank *
  /// shard.
  [[nodiscard]] std::int64_t state_begin(int u, int s) const;
  /// Elements of a parameter that this rank updates: all at stage 0, else the owned ones.
  [[nodiscard]] shard::Range updated(int u, int s, const shard::Placed& p) const;

  /// The fp32 buffers of accumulation `local`, to be cleared after a step. Accumulators need none:
  /// a step's first reduction sets them.
  [[nodiscard]] std::span<std::byte> local_buffers() const;
  /// To be filled with 0xFF, a NaN in every dtype: reads of stale memory show.
  [[nodiscard]] std::span<std::byte> gather_arena() const;
  /// Staging memory of a device rank beside the communicator's; offsets are those of the device
  /// map.
  [[nodiscard]] std::byte* received() const;
  [[nodiscard]] std::byte* pieces() const;
  [[nodiscard]] std::byte* device_staging(std::int64_t offset) const;
  /// The update's buffers in device memory.
  [[nodiscard]] std::byte* uploads() const;

 private:
  struct SegmentPlace {
    std::int64_t full = -1;   // in parameters or resident
    std::int64_t shard = -1;  // in parameters; only where there is no full copy
    bool resident = false;    // full lies in the resident arena
    std::int64_t accumulator = -1;
    std::int64_t gradient = -1;  // in gradients (stages 0-1) or gradient_slots
    std::int64_t local = -1;
    std::int64_t master = -1;
    std::array<std::int64_t, 4> state{-1, -1, -1, -1};
    std::int64_t wire = -1;      // in communication_staging
    std::int64_t gathered = -1;  // in one half of the gathered fp32 gradients
  };
  [[nodiscard]] const SegmentPlace& segment(int u, int s) const {
    return places_[static_cast<std::size_t>(first_[static_cast<std::size_t>(u)] + s)];
  }
  // A category's arena in a tier of memory.
  static constexpr std::size_t kArenas = std::size_t{kCategories} * 2;
  static std::size_t arena_of(Category category, Tier tier) {
    return static_cast<std::size_t>(category) * 2 + (tier == Tier::host ? 1 : 0);
  }
  static Category category_of(std::size_t arena) { return static_cast<Category>(arena / 2); }
  static Tier tier_of(std::size_t arena) { return arena % 2 == 1 ? Tier::host : Tier::device; }
  /// The tier of a category, or of the larger part of it.
  [[nodiscard]] Tier home(Category category) const;
  [[nodiscard]] Tier accumulator_home() const;
  [[nodiscard]] std::byte* base(Category category, int r) const {
    return bases_[arena_of(category, homes_[static_cast<std::size_t>(category)])]
                 [static_cast<std::size_t>(r)];
  }
  void place();
  [[nodiscard]] bool on_device(std::size_t arena) const;
  [[nodiscard]] bool shown(std::size_t arena) const;  // to peers
  void verify(std::size_t arena, std::int64_t end) const;

  const Blueprint& blueprint_;
  int rank_;
  int world_;
  std::vector<std::int32_t> first_;  // per unit, index of its first segment in places_
  std::vector<SegmentPlace> places_;
  std::vector<std::int64_t> unit_gradients_;  // per unit, start of its gradient range
  std::int64_t local_begin_ = 0;
  std::int64_t local_bytes_ = 0;
  std::int64_t gathered_begin_ = 0;
  std::int64_t gathered_bytes_ = 0;
  std::int64_t received_begin_ = 0;
  std::int64_t pieces_begin_ = 0;
  std::array<Tier, kCategories> homes_{};
  std::array<std::int64_t, kArenas> taken_{};  // bytes really placed
  // What peers must see is one memory, so that one descriptor a rank is passed; slices of it are
  // the categories' arenas.
  std::array<std::int64_t, kArenas> slice_{};
  std::shared_ptr<memory::Arena> shared_;
  device::Device* device_;
  std::byte* device_memory_ = nullptr;  // one allocation, cut like shared_
  std::int64_t device_bytes_ = 0;
  std::int64_t pinned_bytes_ = 0;  // of shared_
  std::vector<std::shared_ptr<memory::Arena>> peers_;
  std::array<std::shared_ptr<memory::Arena>, kArenas> arenas_;  // the others
  std::array<std::vector<std::byte*>, kArenas> bases_;
};

}  // namespace zshard::engine
