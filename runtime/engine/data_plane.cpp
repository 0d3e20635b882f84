#include "runtime/engine/data_plane.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "runtime/kernels/copy.hpp"
#include "runtime/kernels/kernels.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

// What the vote exchanges, followed by one bit a unit.
struct Ballot {
  RankSquares squares;
  std::uint64_t arguments = 0;
};

class Timer {
 public:
  explicit Timer(std::atomic<std::int64_t>& total)
      : total_(total), start_(std::chrono::steady_clock::now()) {}
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    const auto spent = std::chrono::steady_clock::now() - start_;
    total_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count(),
                     std::memory_order_relaxed);
  }

 private:
  std::atomic<std::int64_t>& total_;
  std::chrono::steady_clock::time_point start_;
};

// Bytes of collectives that take longer than to wake their thread.
constexpr std::int64_t kWorthAWake = std::int64_t{4} << 20;
constexpr int kMostRanks = 1024;                            // of a group
constexpr std::int64_t kPiece = 8 * kernels::kSquareBlock;  // elements; stay in the cache

constexpr std::uint64_t field(std::uint64_t value, int shift) {
  return value << shift;
}

std::uint64_t low32(std::int32_t value) {
  return static_cast<std::uint32_t>(value);
}

comm::PackedSignature pack(const Signature& s, std::int64_t bytes) {
  return {field(static_cast<std::uint64_t>(s.kind), 56) | field(s.evaluation ? 1 : 0, 48) |
              low32(s.unit),
          field(low32(s.position), 32) | low32(s.micro),
          field(low32(s.n), 32) | (s.range & 0xFFFFFFFF), static_cast<std::uint64_t>(bytes)};
}

const UnitSpec& unit_of(const Blueprint& b, std::int32_t unit) {
  return b.spec.units()[static_cast<std::size_t>(unit)];
}

}  // namespace

std::string DataPlane::describe(const Blueprint& b, const comm::PackedSignature& p) {
  const auto kind = static_cast<ItemKind>(p[0] >> 56);
  const auto unit = static_cast<std::int32_t>(p[0] & 0xFFFFFFFF);
  const auto position = static_cast<std::int32_t>(p[1] >> 32);
  const auto micro = static_cast<std::int32_t>(p[1] & 0xFFFFFFFF);
  std::string text(to_string(kind));
  if (unit >= 0 && unit < static_cast<std::int32_t>(b.spec.units().size())) {
    text += " of unit " + unit_of(b, unit).name;
  }
  if (position >= 0) text += " for position " + std::to_string(position);
  text += " in micro-step " + std::to_string(micro) + " of " + std::to_string(p[2] >> 32);
  text += (p[0] >> 48 & 1) != 0 ? " of an evaluation" : "";
  return text + ", range " + std::to_string(p[2] & 0xFFFFFFFF) + ", " + std::to_string(p[3]) +
         " bytes";
}

std::size_t DataPlane::vote_bytes(const Blueprint& b) {
  return sizeof(Ballot) + (b.spec.units().size() + 63) / 64 * 8;
}

std::uint64_t DataPlane::queue_capacity(const Blueprint& b) {
  const std::size_t items = b.training.first.size() + b.training.later.size() +
                            b.evaluation.first.size() + b.evaluation.later.size() +
                            2 * b.spec.units().size();
  return std::bit_ceil(static_cast<std::uint64_t>(items) + 64);
}

DataPlane::DataPlane(const Blueprint& blueprint, const Storage& storage, comm::Endpoint& endpoint,
                     kernels::Pool& pool, offload::Store* store, int rank)
    : blueprint_(blueprint),
      storage_(storage),
      endpoint_(endpoint),
      pool_(pool),
      store_(store),
      tiers_(blueprint.tiers),
      layout_(*blueprint.layout),
      rank_(rank),
      world_(blueprint.layout->world()),
      local_(blueprint.options.accumulation == Accumulation::local),
      ballot_(vote_bytes(blueprint)),
      segments_(static_cast<std::size_t>(world_)) {
  block_starts_ = block_starts(layout_, rank_);
  vote_.touched.assign(layout_.units().size(), 0);
  if (tiers_.parameters) {
    ring_ = std::make_unique<ParameterRing>(tiers_, storage_, *store_, rank_);
    for (const bool evaluation : {false, true}) {
      const Schedule& schedule = evaluation ? blueprint.evaluation : blueprint.training;
      for (const int micro : {0, 1}) {
        for (const Item& item : schedule.items(micro)) {
          if (item.kind == ItemKind::gather) gather_order_[evaluation][micro].push_back(item.unit);
        }
      }
    }
  }
  for (std::size_t u = 0; u < tiers_.units.size(); ++u) {
    if (tiers_.units[u].gradients.bytes != 0) {
      units_on_disk_.push_back(static_cast<std::int32_t>(u));
    }
  }
  const std::uint64_t capacity = queue_capacity(blueprint);
  const EngineOptions& options = blueprint.options;
  // Disks are to be busy from the first byte on; and tests of missing waits want the threads to
  // run.
  worth_a_wake_ = store != nullptr || options.test_delay_microseconds > 0 ? 0 : kWorthAWake;
  std::uint64_t seed = static_cast<std::uint64_t>(rank) * 2 + 1;
  for (Lane* lane : {&gather_, &reduce_}) {
    lane->ring.resize(2 * capacity);
    // On a device the streams are the queues.
    const bool inline_queues = options.inline_queues || options.device != DeviceKind::host;
    lane->stream = inline_queues ? device::make_inline_stream()
                                 : device::make_thread_stream(
                                       capacity, options.test_delay_microseconds, seed++);
  }
}

DataPlane::~DataPlane() {
  stop();  // the queues' threads use the other members until they have ended
}

void DataPlane::append(Queue queue, const Signature& signature, const Work& work,
                       std::int64_t bytes) {
  endpoint_.publish(signature.sequence, pack(signature, bytes));
  issued_bytes_ += bytes;
  Lane& lane = queue == Queue::gather ? gather_ : reduce_;
  if (2 * (lane.count - lane.stream->completed()) >= lane.ring.size()) kick();  // submit may wait
  const std::uint64_t index = lane.count++ % lane.ring.size();
  lane.ring[index] = work;
  lane.stream->submit({queue == Queue::gather ? &run_gather : &run_reduce, this, index});
}

void DataPlane::issue(const Signature& signature, const Item& item, bool contributes) {
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(item.unit)];
  const bool gather = item.kind == ItemKind::gather;
  Work work{item,
            signature.sequence,
            contributes,
            0,
            local_ || signature.micro == 0,
            local_ || signature.micro + 1 == signature.n};
  if (gather && ring_ != nullptr) foresee(signature, work);
  append(gather ? Queue::gather : Queue::reduce, signature, work,
         gather ? unit.gather_bytes : unit.gradient_bytes);
}

void DataPlane::foresee(const Signature& signature, Work& work) {
  if (signature.range != foreseen_range_ || signature.micro != foreseen_micro_) {
    foreseen_range_ = signature.range;
    foreseen_micro_ = signature.micro;
    foreseen_ = 0;
  }
  const auto& orders = gather_order_[signature.evaluation ? 1 : 0];
  const std::span<const std::int32_t> order = orders[signature.micro == 0 ? 0 : 1];
  work.upcoming = order.subspan(std::min(++foreseen_, order.size()));
  // Behind a step other bytes are to be read.
  if (signature.micro + 1 < signature.n) work.later = orders[1];
}

void DataPlane::issue_step_gather(const Signature& signature, const Item& item, int half) {
  append(Queue::gather, signature, Work{item, signature.sequence, true, half, false, false},
         layout_.units()[static_cast<std::size_t>(item.unit)].gradient_bytes);
}

void DataPlane::wait(Queue queue, std::uint64_t count) {
  device::Stream& awaited = *(queue == Queue::gather ? gather_ : reduce_).stream;
  // The caller may run this queue's tasks itself. Peers that wait in the other one must not wait
  // for that.
  if (awaited.completed() < count) (queue == Queue::gather ? reduce_ : gather_).stream->kick();
  try {
    awaited.wait(count);
  } catch (const CommError&) {
    check_disk();
    throw;
  }
}

void DataPlane::check_disk() {
  const std::lock_guard<std::mutex> lock(disk_mutex_);
  if (disk_failure_ != nullptr) std::rethrow_exception(disk_failure_);
}

void DataPlane::go_on() {
  if (issued_bytes_ >= worth_a_wake_) kick();
}

void DataPlane::kick() {
  issued_bytes_ = 0;
  if (gather_.stream != nullptr) gather_.stream->kick();
  if (reduce_.stream != nullptr) reduce_.stream->kick();
}

void DataPlane::drain() {
  issued_bytes_ = 0;
  wait(Queue::gather, gather_.count);
  wait(Queue::reduce, reduce_.count);
}

std::uint64_t DataPlane::issued(Queue queue) const {
  return (queue == Queue::gather ? gather_ : reduce_).count;
}

void DataPlane::stop() {
  gather_.stream.reset();
  reduce_.stream.reset();
}

void DataPlane::run_gather(void* object, std::uint64_t index) {
  auto* self = static_cast<DataPlane*>(object);
  const Timer timer(self->traffic_.gather_nanoseconds);
  self->with_disk([&] { self->any_gather(self->gather_.ring[index]); });
}

void DataPlane::any_gather(const Work& work) {
  ParameterRing* ring = work.item.kind == ItemKind::gather ? ring_.get() : nullptr;
  if (ring != nullptr) ring->begin(work.item.unit, work.upcoming, work.later);
  Half* half = nullptr;  // what is read here is read behind the vote: peers hear of a failure
  if (work.item.kind == ItemKind::gather_gradient && tiers_.gradients) {
    half = &halves_[work.half];
    read_half(work.item.unit, work.half);
  }
  const bool failed = half != nullptr && half->failure != nullptr;
  endpoint_.meet(comm::Lane::gather, work.sequence, failed ? 1 : 0);
  if (ring != nullptr) ring->met();
  for (int r = 0; r < world_ && half != nullptr; ++r) {
    half->complete = half->complete && endpoint_.payload(comm::Lane::gather, r) == 0;
  }
  if (work.item.kind == ItemKind::gather) {
    gather(work);
  } else if (half == nullptr || half->complete) {
    step_gather(work);
  }
  // What a gather reads changes later only: shards behind the next vote or in a write of a tensor,
  // accumulators in the next step's first reduction. Before each of them every rank drains its
  // queues and then meets the others, so no peer still reads. Staging memory changes as soon as the
  // next gather has met, or, where the next one needs this one's place, once all have finished.
  // Payloads change with the next gather too.
  if (ring != nullptr && ring->must_finish()) {
    endpoint_.finish(comm::Lane::gather);
    ring->finished();
  } else if (half != nullptr) {
    endpoint_.finish(comm::Lane::gather);
  } else {
    endpoint_.part(comm::Lane::gather);
  }
}

void DataPlane::run_reduce(void* object, std::uint64_t index) {
  auto* self = static_cast<DataPlane*>(object);
  const Timer timer(self->traffic_.reduce_nanoseconds);
  const Work& work = self->reduce_.ring[index];
  if (work.item.kind == ItemKind::vote) {
    self->exchange_votes(work);
  } else {
    self->with_disk([&] { self->reduce(work); });
  }
}

void DataPlane::copy(void* target, const void* source, std::int64_t bytes) {
  pool_.split(bytes, 4096, [&](std::int64_t lo, std::int64_t hi) {
    kernels::copy(static_cast<std::byte*>(target) + lo, static_cast<const std::byte*>(source) + lo,
                  hi - lo);
  });
}

void DataPlane::gather(const Work& work) {
  const std::int32_t u = work.item.unit;
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(u)];
  if (blueprint_.options.poison_slots) {
    std::memset(storage_.slot(work.item.offset, u, 0) - unit.segments[0].byte, 0xFF,
                static_cast<std::size_t>(unit.gather_bytes));
  }
  std::int64_t moved = 0;
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.gathered() || seg.padded == 0) continue;
    std::byte* target = storage_.slot(work.item.offset, u, static_cast<int>(s));
    // Each rank begins at its own place, so that not all read the same peer at once.
    for (int k = 0; k < world_; ++k) {
      const int r = (rank_ + k) % world_;
      const int segment = static_cast<int>(s);
      copy(target + r * seg.shard_bytes(),
           ring_ != nullptr ? ring_->shard(r, segment) : storage_.shard(r, u, segment),
           seg.shard_bytes());
    }
    moved += seg.bytes();
  }
  traffic_.gathered_bytes.fetch_add(moved, std::memory_order_relaxed);
}

void DataPlane::step_gather(const Work& work) {
  const std::int32_t u = work.item.unit;
  if (work.item.kind == ItemKind::gather_gradient) {
    copy_gradients(u, work.half);
    return;
  }
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(u)];
  std::int64_t moved = 0;
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained() || !storage_.replicated(u, static_cast<int>(s)) || seg.padded == 0) continue;
    std::byte* target = storage_.full(rank_, u, static_cast<int>(s));
    for (int k = 1; k < world_; ++k) {
      const int r = (rank_ + k) % world_;
      copy(target + r * seg.shard_bytes(), storage_.shard(r, u, static_cast<int>(s)),
           seg.shard_bytes());
    }
    moved += seg.bytes() - seg.shard_bytes();
  }
  traffic_.gathered_bytes.fetch_add(moved, std::memory_order_relaxed);
}

void DataPlane::copy_gradients(std::int32_t u, int half) {
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(u)];
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained() || seg.padded == 0) continue;
    float* target = storage_.gathered_gradient(half, u, static_cast<int>(s));
    for (int k = 0; k < world_; ++k) {
      const int r = (rank_ + k) % world_;
      const float* from = tiers_.gradients ? staged_accumulator(half, r, u, static_cast<int>(s))
                                           : storage_.accumulator(r, u, static_cast<int>(s));
      copy(target + r * seg.shard, from, seg.shard * 4);
    }
    traffic_.gathered_bytes.fetch_add(seg.padded * 4, std::memory_order_relaxed);
  }
}

void DataPlane::gather_gradient_alone(std::int32_t unit, int half) {
  if (tiers_.gradients) {
    throw CommError(
        "a peer is gone, and its gradients are on its disk: the step cannot be finished");
  }
  copy_gradients(unit, half);
}

// -- accumulators on disk --

float* DataPlane::staged_accumulator(int slot, int r, std::int32_t u, int s) const {
  const std::int64_t start =
      tiers_.units[static_cast<std::size_t>(u)].segments[static_cast<std::size_t>(s)].gradient;
  return reinterpret_cast<float*>(
      storage_.staging(r, tiers_.accumulators + slot * tiers_.accumulator_bytes + start));
}

void DataPlane::read_accumulators(int slot, std::int32_t u) {
  // What is on its way to disk may be what is read, and its memory what is read into.
  for (AccumulatorSlot& other : slots_) {
    if (other.write != 0 && (&other == &slots_[slot] || other.unit == u)) {
      store_->wait(std::exchange(other.write, 0));
    }
  }
  const Extent& extent = tiers_.units[static_cast<std::size_t>(u)].gradients;
  AccumulatorSlot& at = slots_[slot];
  at.unit = u;
  at.read =
      store_->read(extent.offset,
                   {storage_.staging(rank_, tiers_.accumulators + slot * tiers_.accumulator_bytes),
                    static_cast<std::size_t>(extent.bytes)});
}

void DataPlane::open_accumulators(std::int32_t u, bool read) {
  slot_ = 1 - slot_;
  if (read) {
    read_accumulators(slot_, u);
    return;
  }
  if (slots_[slot_].write != 0) store_->wait(std::exchange(slots_[slot_].write, 0));
  slots_[slot_].unit = u;
}

void DataPlane::read_half(std::int32_t u, int half) {
  halves_[half] = Half{};
  try {
    read_accumulators(half, u);
    take_accumulators(half);
  } catch (const IoError&) {
    halves_[half].failure = std::current_exception();
  }
}

void DataPlane::take_accumulators(int slot) {
  const offload::Ticket ticket = std::exchange(slots_[slot].read, 0);
  store_->wait(ticket);
}

void DataPlane::write_accumulators(int slot) {
  AccumulatorSlot& at = slots_[slot];
  const Extent& extent = tiers_.units[static_cast<std::size_t>(at.unit)].gradients;
  at.write =
      store_->write(extent.offset,
                    {storage_.staging(rank_, tiers_.accumulators + slot * tiers_.accumulator_bytes),
                     static_cast<std::size_t>(extent.bytes)});
}

void DataPlane::flush_gradients() {
  for (AccumulatorSlot& slot : slots_) {
    if (slot.write != 0) store_->wait(std::exchange(slot.write, 0));
  }
}

void DataPlane::accumulate_locally(std::int32_t u) {
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(u)];
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained()) continue;
    const std::byte* gradient = storage_.gradient(rank_, u, static_cast<int>(s));
    float* buffer = storage_.local(rank_, u, static_cast<int>(s));
    // Parameter by parameter: padding of gradient slots is undefined.
    for (const shard::Placed& p : seg.placed) {
      kernels::accumulate(gradient + p.start * size_of(seg.dtype), seg.dtype, buffer + p.start,
                          p.count);
    }
  }
}

void DataPlane::prepare_contribution(std::int32_t u) {
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(u)];
  if (local_) {
    accumulate_locally(u);
    return;
  }
  constexpr std::int64_t kChunk = 2048;
  float chunk[kChunk];
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained()) continue;
    std::byte* staging = storage_.wire_staging(rank_, u, static_cast<int>(s));
    if (staging == nullptr) continue;
    const DType wire = *blueprint_.options.wire;
    const std::byte* gradient = storage_.gradient(rank_, u, static_cast<int>(s));
    for (const shard::Placed& p : seg.placed) {
      for (std::int64_t at = p.start; at < p.start + p.count; at += kChunk) {
        const std::int64_t count = std::min(kChunk, p.start + p.count - at);
        kernels::widen(gradient + at * size_of(seg.dtype), seg.dtype, chunk, count);
        kernels::narrow(chunk, wire, staging + at * size_of(wire), count);
      }
    }
  }
}

void DataPlane::reduce(const Work& work) {
  const std::int32_t u = work.item.unit;
  const shard::UnitLayout& unit = layout_.units()[static_cast<std::size_t>(u)];
  if (tiers_.gradients) open_accumulators(u, !work.first_of_step);
  if (work.contributes) prepare_contribution(u);
  // In accumulation `local` the buffers of all micro-steps count, also of a rank that skipped the
  // last one.
  endpoint_.meet(comm::Lane::reduce, work.sequence, work.contributes || local_ ? 1 : 0);
  if (tiers_.gradients) take_accumulators(slot_);
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    if (unit.segments[s].trained()) {
      reduce_segment(u, static_cast<std::int32_t>(s), work);
    }
  }
  if (tiers_.gradients) write_accumulators(slot_);
  endpoint_.finish(comm::Lane::reduce);
  if (blueprint_.options.poison_slots) {
    std::memset(storage_.gradients(u), 0xFF, static_cast<std::size_t>(unit.gradient_bytes));
  }
}

void DataPlane::reduce_segment(std::int32_t u, std::int32_t s, const Work& work) {
  const shard::Segment& seg =
      layout_.units()[static_cast<std::size_t>(u)].segments[static_cast<std::size_t>(s)];
  DType dtype = seg.dtype;
  for (int r = 0; r < world_; ++r) {
    const std::byte* from = nullptr;
    if (endpoint_.payload(comm::Lane::reduce, r) != 0) {
      if (local_) {
        from = reinterpret_cast<const std::byte*>(storage_.local(r, u, s));
      } else {
        from = storage_.wire_staging(r, u, s);
        if (from == nullptr) from = storage_.gradient(r, u, s);
      }
    }
    segments_[static_cast<std::size_t>(r)] = from;
  }
  if (local_) {
    dtype = DType::f32;
  } else if (storage_.wire_staging(rank_, u, s) != nullptr) {
    dtype = *blueprint_.options.wire;
  }
  float* accumulator =
      tiers_.gradients ? staged_accumulator(slot_, rank_, u, s) : storage_.accumulator(rank_, u, s);
  for (std::size_t k = 0; k < seg.placed.size(); ++k) {
    const shard::Range own = seg.owned(seg.placed[k], rank_);
    if (own.empty()) continue;
    double* blocks = storage_.square_blocks() + block_start(u, static_cast<std::size_t>(s), k);
    pool_.split(own.count(), kPiece, [&](std::int64_t first, std::int64_t last) {
      const void* sources[kMostRanks];
      // Piece by piece: what was summed is squared while it is in the cache.
      for (std::int64_t lo = first; lo < last; lo += kPiece) {
        const std::int64_t count = std::min(kPiece, last - lo);
        for (std::size_t r = 0; r < segments_.size(); ++r) {
          sources[r] =
              segments_[r] == nullptr ? nullptr : segments_[r] + (own.lo + lo) * size_of(dtype);
        }
        float* sums = accumulator + own.lo + lo - rank_ * seg.shard;
        kernels::reduce_add(sources, world_, dtype, dtype, blueprint_.options.reduction_group, sums,
                            count, work.first_of_step);
        if (!work.last_of_step) continue;
        const kernels::Squares found =
            kernels::block_squares(sums, count, blocks + lo / kernels::kSquareBlock);
        if (found.non_finite != 0) squares_known_.store(false, std::memory_order_relaxed);
      }
    });
    traffic_.reduced_bytes.fetch_add(own.count() * size_of(dtype) * world_,
                                     std::memory_order_relaxed);
  }
}

RankSquares DataPlane::squares_from_disk() {
  // The next unit is read while the present one is summed.
  std::size_t next = 0;
  const auto start = [&] {
    if (next == units_on_disk_.size()) return;
    read_accumulators(static_cast<int>(next % kAccumulatorSlots), units_on_disk_[next]);
    ++next;
  };
  start();
  std::int32_t taken = -1;
  const RankSquares squares =
      rank_squares(layout_, rank_, host_blocks(), pool_, [&](int u, int seg) {
        while (taken != u) {  // a unit of which this rank owns nothing is passed over
          slot_ = static_cast<int>((next - 1) % kAccumulatorSlots);
          take_accumulators(slot_);
          taken = units_on_disk_[next - 1];
          start();
        }
        return staged_accumulator(slot_, rank_, u, seg);
      });
  for (int slot = 0; slot < kAccumulatorSlots; ++slot) take_accumulators(slot);
  return squares;
}

RankSquares DataPlane::squares() {
  if (tiers_.gradients) flush_gradients();  // a disk that fails shall do so before the vote
  if (squares_known_.exchange(false)) {
    return sum_blocks(layout_, rank_, host_blocks());
  }
  if (tiers_.gradients) return squares_from_disk();
  return rank_squares(layout_, rank_, host_blocks(), pool_,
                      [&](int u, int seg) { return storage_.accumulator(rank_, u, seg); });
}

void DataPlane::fill(std::span<std::byte> memory, int value) {
  if (!memory.empty()) std::memset(memory.data(), value, memory.size());
}

void DataPlane::issue_vote(const Signature& signature, std::span<const char> touched,
                           std::uint64_t arguments) {
  const Ballot ballot{squares(), arguments};
  std::memset(ballot_.data(), 0, ballot_.size());
  std::memcpy(ballot_.data(), &ballot, sizeof ballot);
  for (std::size_t u = 0; u < touched.size(); ++u) {
    if (touched[u]) ballot_[sizeof ballot + u / 8] |= static_cast<std::byte>(1U << (u % 8));
  }
  append(Queue::reduce, signature,
         Work{{ItemKind::vote, -1, -1, -1, -1}, signature.sequence, true, 0, false, false},
         static_cast<std::int64_t>(ballot_.size()));
}

void DataPlane::exchange_votes(const Work& work) {
  std::memcpy(endpoint_.bytes(rank_), ballot_.data(), ballot_.size());
  endpoint_.meet(comm::Lane::reduce, work.sequence, 0);
  vote_.squares = {};
  std::fill(vote_.touched.begin(), vote_.touched.end(), char{0});
  int different = -1;
  std::uint64_t arguments = 0;
  for (int r = 0; r < world_; ++r) {
    Ballot ballot;
    std::memcpy(&ballot, endpoint_.bytes(r), sizeof ballot);
    if (r == 0) arguments = ballot.arguments;
    if (ballot.arguments != arguments && different < 0) different = r;
    combine(vote_.squares, ballot.squares);
    const std::byte* bits = endpoint_.bytes(r) + sizeof ballot;
    for (std::size_t u = 0; u < vote_.touched.size(); ++u) {
      if ((bits[u / 8] & static_cast<std::byte>(1U << (u % 8))) != std::byte{0})
        vote_.touched[u] = 1;
    }
  }
  endpoint_.finish(comm::Lane::reduce);
  if (different >= 0) {
    const std::string message = "ranks 0 and " + std::to_string(different) +
                                " called step() with different arguments; learning rate, scales, "
                                "clipping, groups and the step counter must be the same on every "
                                "rank";
    endpoint_.fail(message);
    throw CommError(message);
  }
}

}  // namespace zshard::engine
