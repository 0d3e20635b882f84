#include "runtime/engine/device_plane.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "runtime/base/log.hpp"
#include "runtime/kernels/kernels.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kWatch{20};
constexpr std::chrono::milliseconds kGrace{200};
constexpr std::chrono::microseconds kSpin{50};  // before a wait sleeps
constexpr std::chrono::microseconds kNap{20};
constexpr std::int64_t kPiece = 8 * kernels::kSquareBlock;  // elements; stay in the cache
constexpr double kStopSeconds = 5;  // for streams to end once their communicators were aborted

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

const shard::UnitLayout& unit_of(const shard::Layout& layout, std::int32_t u) {
  return layout.units()[static_cast<std::size_t>(u)];
}

}  // namespace

DevicePlane::DevicePlane(const Blueprint& blueprint, const Storage& storage,
                         comm::Endpoint& endpoint, kernels::Pool& pool, offload::Store* store,
                         comm::Group& group, DeviceParts& parts)
    : DataPlane(blueprint, storage, endpoint, pool, store, group.rank()),
      group_(group),
      parts_(parts),
      device_(*parts.device),
      kernels_(*parts.kernels),
      deadline_(blueprint.options.deadline_seconds),
      accumulators_leave_(blueprint.device.piece_bytes != 0) {
  try {
    gathers_.stream = device_.make_stream("zshard gather");
    reduces_.stream = device_.make_stream("zshard reduce");
    uploads_ = device_.make_stream("zshard upload");
    downloads_ = device_.make_stream("zshard download");
    for (Stream* stream : {&gathers_, &reduces_}) {
      for (device::NativeEvent& event : stream->done) event = device_.make_event();
    }
    for (device::NativeEvent* event : {&mark_, &handed_, &voted_, &copied_, &ring_read_}) {
      *event = device_.make_event();
    }
    for (auto* events : {&brought_, &sent_}) {
      for (device::NativeEvent& event : *events) event = device_.make_event();
    }
    for (device::NativeEvent& event : half_read_) event = device_.make_event();
    for (Piece& piece : pieces_) {
      for (device::NativeEvent* event : {&piece.raised, &piece.summed, &piece.landed}) {
        *event = device_.make_event();
      }
    }
    if (tiers_.gradients) {
      keeper_ =
          device::make_thread_stream(DeviceMap::kPieces, blueprint.options.test_delay_microseconds,
                                     static_cast<std::uint64_t>(rank_) * 2 + 1);
    }
    if (world_ > 1) watchdog_ = std::thread([this] { watch(); });
  } catch (...) {
    destroy();
    throw;
  }
}

DevicePlane::~DevicePlane() {
  stop();
  {
    const std::lock_guard<std::mutex> lock(watch_mutex_);
    stopping_ = true;
  }
  watch_ends_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  destroy();
}

void DevicePlane::destroy() noexcept {
  for (Stream* stream : {&gathers_, &reduces_}) {
    for (const device::NativeEvent event : stream->done) device_.destroy_event(event);
    device_.destroy_stream(stream->stream);
  }
  for (const device::NativeEvent event : {mark_, handed_, voted_, copied_, ring_read_}) {
    device_.destroy_event(event);
  }
  for (const auto* events : {&brought_, &sent_}) {
    for (const device::NativeEvent event : *events) device_.destroy_event(event);
  }
  for (const device::NativeEvent event : half_read_) device_.destroy_event(event);
  for (const Piece& piece : pieces_) {
    for (const device::NativeEvent event : {piece.raised, piece.summed, piece.landed}) {
      device_.destroy_event(event);
    }
  }
  device_.destroy_stream(uploads_);
  device_.destroy_stream(downloads_);
}

// -- order --

void DevicePlane::order(device::NativeStream earlier, device::NativeStream later) {
  device_.record(mark_, earlier);
  device_.wait(later, mark_);
}

void DevicePlane::enter(device::NativeStream stream, bool hands_over) {
  if (stream.handle != compute_.handle) {
    compute_ = stream;
    user_behind_ = true;
    // Its own earlier work first, whatever stream that was on.
    device_.wait(compute_, handed_);
  }
  inside_ = true;
  if (hands_over) device_.record(handed_, compute_);
}

void DevicePlane::leave() {
  if (!std::exchange(inside_, false)) return;
  catch_up();
}

void DevicePlane::catch_up() {
  if (!std::exchange(user_behind_, false)) return;
  order(gathers_.stream, compute_);
  order(reduces_.stream, compute_);
}

void DevicePlane::finish_item(Stream& stream, const Work& work) {
  const std::uint64_t number = stream.count.load(std::memory_order_relaxed);
  stream.sequence[number % Stream::kEvents].store(work.sequence, std::memory_order_relaxed);
  device_.record(stream.done[number % Stream::kEvents], stream.stream);
  stream.count.store(number + 1, std::memory_order_release);
}

void DevicePlane::wait_item(device::NativeStream waiting, Stream& stream, std::uint64_t count) {
  if (count == 0) return;
  // The event of an item that long ago stands for a later one by now: as good.
  device_.wait(waiting, stream.done[(count - 1) % Stream::kEvents]);
}

void DevicePlane::wait(Queue queue, std::uint64_t count) {
  DataPlane::wait(queue, count);  // throws what a task threw
  check_communicators();
  if (inside_) {
    wait_item(compute_, of(queue), count);
  } else {
    user_behind_ = true;
  }
}

void DevicePlane::wait_for_update(Queue queue, std::uint64_t count) {
  DataPlane::wait(queue, count);
  check_communicators();
  wait_item(reduces_.stream, of(queue), count);
}

void DevicePlane::fill(std::span<std::byte> memory, int value) {
  if (memory.empty()) return;
  const auto bytes = static_cast<std::int64_t>(memory.size());
  if (inside_) {
    catch_up();
    device_.fill(memory.data(), value, bytes, compute_);
    return;
  }
  device_.wait(reduces_.stream, handed_);
  order(gathers_.stream, reduces_.stream);
  device_.fill(memory.data(), value, bytes, reduces_.stream);
  user_behind_ = true;
  gathers_behind_ = true;
}

// -- gathers --

void DevicePlane::any_gather(const Work& work) {
  with_peers(work, [&] { gather_item(work); });
}

void DevicePlane::gather_item(const Work& work) {
  ParameterRing* ring = work.item.kind == ItemKind::gather ? ring_.get() : nullptr;
  if (ring != nullptr) ring->begin(work.item.unit, work.upcoming, work.later);
  Half* half = nullptr;  // what is read here is read behind the vote: peers hear of a failure
  if (work.item.kind == ItemKind::gather_gradient && tiers_.gradients) {
    half = &halves_[work.half];
    await(half_read_[static_cast<std::size_t>(work.half)], "a copy of gradients");
    read_half(work.item.unit, work.half);
  }
  const bool failed = half != nullptr && half->failure != nullptr;
  endpoint_.meet(comm::Lane::gather, work.sequence, failed ? 1 : 0);
  for (int r = 0; r < world_ && half != nullptr; ++r) {
    half->complete = half->complete && endpoint_.payload(comm::Lane::gather, r) == 0;
  }
  if (ring != nullptr) {
    if (std::exchange(ring_pending_, false)) await(ring_read_, "a copy of parameters");
    ring->met();
  }
  // Slots that this overwrites were used by the user's stream, shards that it reads were written by
  // the last update.
  device_.wait(gathers_.stream, handed_);
  if (std::exchange(gathers_behind_, false)) {
    order(reduces_.stream, gathers_.stream);
    order(downloads_, gathers_.stream);
  }
  if (work.item.kind == ItemKind::gather) {
    gather_units(work);
  } else {
    order(reduces_.stream, gathers_.stream);
    if (work.item.kind == ItemKind::gather_parameter) {
      gather_parameters(work.item.unit);
    } else if (half == nullptr || half->complete) {
      // Of an update that a disk interrupted, copies to the host may still read the buffer.
      order(downloads_, gathers_.stream);
      copy_gradients(work.item.unit, work.half);
    }
  }
  finish_item(gathers_, work);
  if (ring != nullptr && ring->must_finish()) {
    await(ring_read_, "a copy of parameters");
    ring_pending_ = false;
    endpoint_.finish(comm::Lane::gather);
    ring->finished();
  } else if (half != nullptr) {  // its payload changes with the next gather
    endpoint_.finish(comm::Lane::gather);
  } else {
    endpoint_.part(comm::Lane::gather);
  }
}

void DevicePlane::gather_units(const Work& work) {
  const std::int32_t u = work.item.unit;
  const shard::UnitLayout& unit = unit_of(layout_, u);
  if (blueprint_.options.poison_slots && unit.gather_bytes != 0) {
    device_.fill(storage_.slot(work.item.offset, u, 0) - unit.segments[0].byte, 0xFF,
                 unit.gather_bytes, gathers_.stream);
  }
  std::int64_t moved = 0;
  const auto each = [&](auto&& body) {
    for (std::size_t s = 0; s < unit.segments.size(); ++s) {
      const shard::Segment& seg = unit.segments[s];
      if (!seg.gathered() || seg.padded == 0) continue;
      body(seg, static_cast<int>(s), storage_.slot(work.item.offset, u, static_cast<int>(s)));
    }
  };
  each([&](const shard::Segment& seg, int s, std::byte* target) {
    device_.copy(target + rank_ * seg.shard_bytes(),
                 ring_ != nullptr ? ring_->shard(rank_, s) : storage_.shard(rank_, u, s),
                 seg.shard_bytes(), gathers_.stream);
    moved += seg.bytes();
  });
  if (ring_ != nullptr) {
    device_.record(ring_read_, gathers_.stream);
    ring_pending_ = true;
  }
  if (world_ > 1) {
    parts_.gather->group_start();
    each([&](const shard::Segment& seg, int, std::byte* target) {
      parts_.gather->all_gather(target, seg.shard_bytes(), gathers_.stream);
    });
    parts_.gather->group_end();
  }
  add_traffic(moved, 0);
}

void DevicePlane::gather_parameters(std::int32_t u) {
  const shard::UnitLayout& unit = unit_of(layout_, u);
  if (world_ == 1) return;
  std::int64_t moved = 0;
  parts_.gather->group_start();
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained() || !storage_.replicated(u, static_cast<int>(s)) || seg.padded == 0) continue;
    parts_.gather->all_gather(storage_.full(rank_, u, static_cast<int>(s)), seg.shard_bytes(),
                              gathers_.stream);
    moved += seg.bytes() - seg.shard_bytes();
  }
  parts_.gather->group_end();
  add_traffic(moved, 0);
}

void DevicePlane::copy_gradients(std::int32_t u, int half) {
  const shard::UnitLayout& unit = unit_of(layout_, u);
  const auto each = [&](auto&& body) {
    for (std::size_t s = 0; s < unit.segments.size(); ++s) {
      const shard::Segment& seg = unit.segments[s];
      if (!seg.trained() || seg.padded == 0) continue;
      body(seg, static_cast<int>(s), storage_.gathered_gradient(half, u, static_cast<int>(s)));
    }
  };
  each([&](const shard::Segment& seg, int s, float* target) {
    device_.copy(target + rank_ * seg.shard,
                 tiers_.gradients ? staged_accumulator(half, rank_, u, s)
                                  : storage_.accumulator(rank_, u, s),
                 seg.shard * 4, gathers_.stream);
    add_traffic(seg.padded * 4, 0);
  });
  if (tiers_.gradients) {
    device_.record(half_read_[static_cast<std::size_t>(half)], gathers_.stream);
  }
  if (world_ == 1) return;
  parts_.gather->group_start();
  each([&](const shard::Segment& seg, int, float* target) {
    parts_.gather->all_gather(target, seg.shard * 4, gathers_.stream);
  });
  parts_.gather->group_end();
}

void DevicePlane::gather_copies(std::int32_t unit, std::int32_t segment) {
  if (world_ == 1) return;
  const shard::Segment& seg = unit_of(layout_, unit).segments[static_cast<std::size_t>(segment)];
  parts_.gather->all_gather(storage_.full(rank_, unit, segment), seg.shard_bytes(),
                            gathers_.stream);
  user_behind_ = true;
}

// -- reductions --

void DevicePlane::accumulate_on(std::int32_t u, device::NativeStream stream) {
  const shard::UnitLayout& unit = unit_of(layout_, u);
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained()) continue;
    const std::byte* gradient = storage_.gradient(rank_, u, static_cast<int>(s));
    float* buffer = storage_.local(rank_, u, static_cast<int>(s));
    // Parameter by parameter: padding of gradient slots is undefined.
    for (const shard::Placed& p : seg.placed) {
      kernels_.accumulate(gradient + p.start * size_of(seg.dtype), seg.dtype, buffer + p.start,
                          p.count, stream);
    }
  }
}

void DevicePlane::accumulate_locally(std::int32_t unit) {
  // The slot is the user's stream's again afterwards.
  device_.wait(reduces_.stream, handed_);
  accumulate_on(unit, reduces_.stream);
  user_behind_ = true;
}

void DevicePlane::reduce(const Work& work) {
  with_peers(work, [&] { reduce_item(work); });
}

void DevicePlane::reduce_item(const Work& work) {
  endpoint_.meet(comm::Lane::reduce, work.sequence, 0);
  device_.wait(reduces_.stream, handed_);  // gradients are written
  reduce_unit(work);
  finish_item(reduces_, work);
  endpoint_.part(comm::Lane::reduce);
}

void DevicePlane::exchange_votes(const Work& work) {
  DataPlane::exchange_votes(work);
  finish_item(reduces_, work);  // an item of the queue like the others
}

void DevicePlane::reduce_unit(const Work& work) {
  const std::int32_t u = work.item.unit;
  const shard::UnitLayout& unit = unit_of(layout_, u);
  const device::NativeStream stream = reduces_.stream;
  if (unit.gradient_bytes == 0) return;
  if (local_) {
    if (work.contributes) accumulate_on(u, stream);
  } else if (!work.contributes) {
    // What a rank did not use contributes +0.0.
    device_.fill(storage_.gradients(u), 0, unit.gradient_bytes, stream);
  }
  struct Contribution {
    const std::byte* whole;    // of this rank, [padded] on the wire
    const std::byte* arrived;  // rank r's piece at arrived + r * stride
    std::int64_t stride;
    DType dtype;
  };
  const auto piece_of = [&](std::size_t s) {
    const shard::Segment& seg = unit.segments[s];
    const int index = static_cast<int>(s);
    Contribution piece{storage_.gradient(rank_, u, index), nullptr, 0, seg.dtype};
    if (local_) {
      piece.whole = reinterpret_cast<const std::byte*>(storage_.local(rank_, u, index));
      piece.dtype = DType::f32;
    } else if (std::byte* staging = storage_.wire_staging(rank_, u, index); staging != nullptr) {
      piece.whole = staging;
      piece.dtype = *blueprint_.options.wire;
    }
    piece.stride = seg.shard * size_of(piece.dtype);
    return piece;
  };
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    std::byte* staging = storage_.wire_staging(rank_, u, static_cast<int>(s));
    if (!seg.trained() || local_ || staging == nullptr) continue;
    const DType wire = *blueprint_.options.wire;
    const std::byte* gradient = storage_.gradient(rank_, u, static_cast<int>(s));
    for (const shard::Placed& p : seg.placed) {
      kernels_.convert(gradient + p.start * size_of(seg.dtype), seg.dtype,
                       staging + p.start * size_of(wire), wire, p.count, stream);
    }
  }
  // The communicator's own sum is one piece, whose parts came in an order of its choice.
  const bool native = blueprint_.options.reduction == Reduction::native && world_ > 1;
  const int pieces = native ? 1 : world_;
  if (world_ > 1) {
    std::byte* received = storage_.received();
    parts_.reducer().group_start();
    for (std::size_t s = 0; s < unit.segments.size(); ++s) {
      if (!unit.segments[s].trained() || unit.segments[s].padded == 0) continue;
      const Contribution piece = piece_of(s);
      if (native) {
        parts_.reducer().reduce_scatter(piece.whole, received, unit.segments[s].shard, piece.dtype,
                                        stream);
      } else {
        parts_.reducer().all_to_all(piece.whole, received, piece.stride, stream);
      }
      received += pieces * piece.stride;
    }
    parts_.reducer().group_end();
  }
  const std::byte* received = world_ > 1 ? storage_.received() : nullptr;
  const int leaving =
      accumulators_leave_ ? open_piece(u, !work.first_of_step) : -1;  // late: it may have to wait
  const bool from_zero = work.first_of_step || keeper_ != nullptr;
  float* next = leaving >= 0 ? reinterpret_cast<float*>(piece_memory(leaving)) : nullptr;
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained()) continue;
    Contribution piece = piece_of(s);
    if (world_ > 1) {
      piece.arrived = received;
      received += pieces * piece.stride;
    } else {
      piece.arrived = piece.whole;
    }
    float* accumulator = next;
    if (leaving >= 0) {
      next += seg.shard;
    } else {
      accumulator = storage_.accumulator(rank_, u, static_cast<int>(s));
    }
    for (std::size_t k = 0; k < seg.placed.size(); ++k) {
      const shard::Range own = seg.owned(seg.placed[k], rank_);
      if (own.empty()) continue;
      const std::int64_t at = own.lo - rank_ * seg.shard;
      kernels_.reduce_add(piece.arrived + at * size_of(piece.dtype), piece.stride, pieces,
                          piece.dtype, native ? 0 : blueprint_.options.reduction_group,
                          accumulator + at, own.count(), from_zero, stream);
      if (work.last_of_step && keeper_ == nullptr) {
        kernels_.block_squares(accumulator + at, own.count(),
                               storage_.square_blocks() + block_start(u, s, k), stream);
      }
      add_traffic(0, own.count() * size_of(piece.dtype) * world_);
    }
  }
  if (leaving >= 0) close_piece(leaving, work);
  if (blueprint_.options.poison_slots) {
    device_.fill(storage_.gradients(u), 0xFF, unit.gradient_bytes, stream);
  }
}

// -- accumulators off the device --

std::byte* DevicePlane::piece_memory(int k) const {
  return storage_.pieces() + k * blueprint_.device.piece_bytes;
}

float* DevicePlane::landing(int k) const {
  const DeviceMap& map = blueprint_.device;
  return reinterpret_cast<float*>(storage_.device_staging(map.landings + k * map.piece_bytes));
}

int DevicePlane::open_piece(std::int32_t u, bool adds) {
  const auto k = static_cast<int>(piece_count_ % DeviceMap::kPieces);
  Piece& piece = pieces_[static_cast<std::size_t>(k)];
  if (keeper_ != nullptr) {
    // It still reads where the piece lands: the only wait of a pass, if the disk is slow.
    if (piece_count_ >= DeviceMap::kPieces) {
      keeper_->wait(piece_count_ - DeviceMap::kPieces + 1);
    }
  } else if (adds) {
    device_.wait(uploads_, piece.landed);
    // What went down from the other buffer is what comes up here only in a model of one unit.
    const Piece& other = pieces_[static_cast<std::size_t>(1 - k)];
    if (other.unit == u) device_.wait(uploads_, other.landed);
    const shard::UnitLayout& unit = unit_of(layout_, u);
    auto* target = reinterpret_cast<float*>(piece_memory(k));
    for (std::size_t s = 0; s < unit.segments.size(); ++s) {
      const shard::Segment& seg = unit.segments[s];
      if (!seg.trained()) continue;
      device_.copy(target, storage_.accumulator(rank_, u, static_cast<int>(s)), seg.shard * 4,
                   uploads_);
      target += seg.shard;
    }
    device_.record(piece.raised, uploads_);
    device_.wait(reduces_.stream, piece.raised);
  } else {
    device_.wait(reduces_.stream, piece.landed);
  }
  piece.unit = u;
  return k;
}

void DevicePlane::close_piece(int k, const Work& work) {
  Piece& piece = pieces_[static_cast<std::size_t>(k)];
  const shard::UnitLayout& unit = unit_of(layout_, piece.unit);
  device_.record(piece.summed, reduces_.stream);
  device_.wait(downloads_, piece.summed);
  const auto* source = reinterpret_cast<const float*>(piece_memory(k));
  float* landed = keeper_ != nullptr ? landing(k) : nullptr;
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained()) continue;
    float* target = landed;
    if (keeper_ != nullptr) {
      landed += seg.shard;
    } else {
      target = storage_.accumulator(rank_, piece.unit, static_cast<int>(s));
    }
    device_.copy(target, source, seg.shard * 4, downloads_);
    source += seg.shard;
  }
  device_.record(piece.landed, downloads_);
  ++piece_count_;
  if (keeper_ == nullptr) return;
  piece.first_of_step = work.first_of_step;
  piece.last_of_step = work.last_of_step;
  keeper_->submit({&run_keeper, this, static_cast<std::uint64_t>(k)});
  keeper_->kick();
}

void DevicePlane::run_keeper(void* object, std::uint64_t piece) {
  auto* self = static_cast<DevicePlane*>(object);
  self->with_disk([&] { self->keep(static_cast<int>(piece)); });
}

void DevicePlane::keep(int k) {
  const Piece& piece = pieces_[static_cast<std::size_t>(k)];
  const std::int32_t u = piece.unit;
  open_accumulators(u, !piece.first_of_step);
  await(piece.landed, "gradients on their way to the disk");
  take_accumulators(slot_);
  const shard::UnitLayout& unit = unit_of(layout_, u);
  const float* source = landing(k);
  for (std::size_t s = 0; s < unit.segments.size(); ++s) {
    const shard::Segment& seg = unit.segments[s];
    if (!seg.trained()) continue;
    float* sums = staged_accumulator(slot_, rank_, u, static_cast<int>(s));
    for (std::size_t p = 0; p < seg.placed.size(); ++p) {
      const shard::Range own = seg.owned(seg.placed[p], rank_);
      if (own.empty()) continue;
      const std::int64_t at = own.lo - rank_ * seg.shard;
      double* blocks = host_blocks() + block_start(u, s, p);
      pool_.split(own.count(), kPiece, [&](std::int64_t first, std::int64_t last) {
        // Piece by piece: what was summed is squared while it is in the cache.
        for (std::int64_t lo = first; lo < last; lo += kPiece) {
          const std::int64_t count = std::min(kPiece, last - lo);
          const void* term = source + at + lo;
          kernels::reduce_add(&term, 1, DType::f32, DType::f32, 0, sums + at + lo, count,
                              piece.first_of_step);
          if (!piece.last_of_step) continue;
          const kernels::Squares found =
              kernels::block_squares(sums + at + lo, count, blocks + lo / kernels::kSquareBlock);
          if (found.non_finite != 0) squares_known_.store(false, std::memory_order_relaxed);
        }
      });
    }
    source += seg.shard;
  }
  write_accumulators(slot_);
}

void DevicePlane::flush_gradients() {
  if (keeper_ != nullptr) keeper_->wait(piece_count_);
  DataPlane::flush_gradients();
}

double* DevicePlane::host_blocks() const {
  return reinterpret_cast<double*>(storage_.device_staging(blueprint_.device.squares));
}

// -- endings --

void DevicePlane::check_communicators() {
  if (!endpoint_.failed()) return;
  check_disk();
  (void)device_.passed(handed_);  // a fault of this rank's own device is the cause: it throws
  throw CommError(endpoint_.failure());
}

void DevicePlane::await(device::NativeEvent event, std::string_view what, bool alone) {
  const Clock::time_point start = Clock::now();
  while (!device_.reached(event)) {
    const auto waited = Clock::now() - start;
    if (!alone && endpoint_.failed()) {
      break_off(endpoint_.failure());
      check_communicators();
    }
    if (seconds_since(start) > deadline_) {
      const std::string message = overdue(what);
      break_off(message);
      throw CommError(message);
    }
    if (waited > kSpin) std::this_thread::sleep_for(kNap);
  }
}

/// A peer of which no more is to come: "rank 1 is gone (its process 7 has ended)"; "" none.
std::string DevicePlane::departed() const {
  for (int r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    if (const auto why = group_.gone(r)) {
      return "rank " + std::to_string(r) + " is gone (" + *why + ")";
    }
  }
  return "";
}

/// One item of a queue. NCCL knows of a peer's failure neither who it was nor why; and on a rank
/// whose watchdog has aborted its communicators that is all that a call says.
template <class Body>
void DevicePlane::with_peers(const Work& work, Body&& body) {
  try {
    body();
  } catch (const CommError& error) {
    std::string who;
    for (const Clock::time_point start = Clock::now();
         !endpoint_.failed() && who.empty() && Clock::now() - start < kGrace;) {
      who = departed();
      std::this_thread::sleep_for(kNap);
    }
    if (!endpoint_.failed()) {
      const std::string what = endpoint_.text(work.sequence) + " on rank " + std::to_string(rank_);
      endpoint_.fail(what + " cannot complete: " + (who.empty() ? "" : who + ": ") + error.what());
    }
    check_communicators();
    throw;
  } catch (const DeviceError& error) {
    throw DeviceError(endpoint_.text(work.sequence) + ": " + error.what());
  }
}

std::string DevicePlane::unfinished(const Stream& stream) const {
  const std::uint64_t count = stream.count.load(std::memory_order_acquire);
  for (std::uint64_t i = count - std::min(count, Stream::kEvents); i < count; ++i) {
    if (!device_.passed(stream.done[i % Stream::kEvents])) {
      return endpoint_.text(stream.sequence[i % Stream::kEvents].load(std::memory_order_relaxed));
    }
  }
  return "";
}

std::string DevicePlane::overdue(std::string_view what) const {
  std::string cause;
  const auto add = [&](const std::string& text) {
    if (!text.empty()) cause += (cause.empty() ? "" : ", ") + text;
  };
  for (const Stream* stream : {&gathers_, &reduces_}) {
    const std::string item = unfinished(*stream);
    if (!item.empty()) add(item + " is not complete");
  }
  add(endpoint_.waits());
  return fmt::format(
      "rank {}: the device has not finished {} within {:g} s: {}; raise deadline_seconds if a step "
      "takes that long",
      rank_, what, deadline_,
      cause.empty() ? "a peer, or the work queued before it, is late" : cause);
}

/// Ends the collectives under way, on every rank: each one's watchdog sees the failure.
void DevicePlane::break_off(const std::string& message) noexcept {
  try {
    endpoint_.fail(message);
  } catch (...) {  // no memory for the message: peers find the deadline
  }
  for (comm::Communicator* c : {parts_.gather.get(), parts_.reduce.get()}) {
    if (c != nullptr) c->abort();
  }
}

/// A collective that was queued waits for peers on the device, where no error reaches it. Runs on a
/// thread of its own, since the caller may wait for its stream meanwhile.
void DevicePlane::watch() {
  struct Seen {
    std::uint64_t done = 0;
    Clock::time_point since = Clock::now();
  } seen[2];
  std::optional<Clock::time_point> troubled;  // since when NCCL reports an error
  std::unique_lock<std::mutex> lock(watch_mutex_);
  while (!watch_ends_.wait_for(lock, kWatch, [&] { return stopping_; })) {
    lock.unlock();
    std::string failure;
    try {
      if (endpoint_.failed()) failure = endpoint_.failure();
      (void)device_.passed(handed_);  // throws what has become of the device
      for (comm::Communicator* c : {parts_.gather.get(), parts_.reduce.get()}) {
        if (c == nullptr) continue;
        const auto text = c->failure();
        if (!failure.empty() || !text) continue;
        // The rank where it began knows more than that a peer failed: its word comes first.
        if (!troubled) troubled = Clock::now();
        if (Clock::now() - *troubled > kGrace) {
          failure = "rank " + std::to_string(rank_) + ": NCCL reports: " + *text;
        }
      }
      const std::string who = failure.empty() ? departed() : "";
      int which = 0;
      for (Stream* stream : {&gathers_, &reduces_}) {
        Seen& last = seen[which++];
        const std::uint64_t count = stream->count.load(std::memory_order_acquire);
        while (last.done < count) {
          if (count - last.done > Stream::kEvents) last.done = count - Stream::kEvents;
          if (!device_.passed(stream->done[last.done % Stream::kEvents])) break;
          ++last.done;
          last.since = Clock::now();
        }
        if (last.done == count) last.since = Clock::now();
        if (!failure.empty() || last.done == count) continue;
        if (!who.empty()) {  // what it has queued before it went may still complete
          const std::string item = unfinished(*stream);
          if (item.empty()) continue;
          failure =
              item + " on the device of rank " + std::to_string(rank_) + " cannot complete: " + who;
        } else if (seconds_since(last.since) > deadline_) {
          failure = overdue("a collective");
        }
      }
    } catch (const std::exception& error) {
      failure = "rank " + std::to_string(rank_) + ": " + error.what();
    }
    if (!failure.empty()) {
      break_off(failure);
      base::log_error(base::Topic::comm, rank_, "{}", failure);
      lock.lock();
      watch_ends_.wait(lock, [&] { return stopping_; });
      return;
    }
    lock.lock();
  }
}

void DevicePlane::stop() {
  DataPlane::stop();
  keeper_.reset();  // it reads what the copies leave, and uses the store
  // Memory must not go while a stream uses it.
  const Clock::time_point start = Clock::now();
  bool aborted = false;
  for (const device::NativeStream stream :
       {gathers_.stream, reduces_.stream, uploads_, downloads_}) {
    try {
      device_.record(copied_, stream);
      while (!device_.reached(copied_)) {
        const double waited = seconds_since(start);
        if (!aborted && (endpoint_.failed() || waited > deadline_)) {
          break_off("rank " + std::to_string(rank_) + " stops");
          aborted = true;
        }
        if (waited > deadline_ + kStopSeconds) return;
        std::this_thread::sleep_for(kNap);
      }
    } catch (const std::exception&) {  // a device that is lost uses nothing
      return;
    }
  }
}

}  // namespace zshard::engine
