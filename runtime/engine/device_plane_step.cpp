// A device rank's part of the step: square sums for the vote, the update and what passes between
// device and host for it; and reads and writes of its memory between steps.
#include <algorithm>
#include <cmath>

#include "runtime/engine/device_plane.hpp"
#include "runtime/kernels/kernels.hpp"

namespace zshard::engine {

void DevicePlane::queue_squares() {
  for (std::size_t u = 0; u < layout_.units().size(); ++u) {
    for (std::size_t s = 0; s < layout_.units()[u].segments.size(); ++s) {
      const shard::Segment& seg = layout_.units()[u].segments[s];
      if (!seg.trained()) continue;
      const float* accumulator =
          storage_.accumulator(rank_, static_cast<int>(u), static_cast<int>(s));
      for (std::size_t k = 0; k < seg.placed.size(); ++k) {
        const shard::Range own = seg.owned(seg.placed[k], rank_);
        kernels_.block_squares(
            accumulator + (own.lo - rank_ * seg.shard), own.count(),
            storage_.square_blocks() + block_start(static_cast<std::int32_t>(u), s, k),
            reduces_.stream);
      }
    }
  }
}

RankSquares DevicePlane::squares() {
  device_.wait(reduces_.stream, handed_);
  if (keeper_ != nullptr) {
    settle();
    return DataPlane::squares();
  }
  const bool known = squares_known_.exchange(false);
  if (!known && !accumulators_leave_) queue_squares();
  double* staging = host_blocks();
  const std::int64_t count = count_blocks(layout_, rank_);
  if (count != 0) device_.copy(staging, storage_.square_blocks(), 8 * count, reduces_.stream);
  // The update may write what gathers read, and read what goes down.
  order(gathers_.stream, reduces_.stream);
  order(downloads_, reduces_.stream);
  // The one value of a step that the host waits for.
  device_.record(voted_, reduces_.stream);
  await(voted_, "the norm of the gradients");
  if (known || !accumulators_leave_) {
    const RankSquares result = sum_blocks(layout_, rank_, staging);
    if (std::isfinite(result.sum)) return result;
  }
  if (!accumulators_leave_) return look_up(staging);
  return rank_squares(layout_, rank_, staging, pool_, [&](int u, int s) {
    return static_cast<const float*>(storage_.accumulator(rank_, u, s));
  });
}

/// Rare: which elements were not finite.
RankSquares DevicePlane::look_up(const double* blocks) {
  RankSquares result = sum_blocks(layout_, rank_, blocks);
  constexpr std::int64_t kBlock = kernels::kSquareBlock;
  std::int64_t next = 0;
  for (std::size_t u = 0; u < layout_.units().size(); ++u) {
    std::int32_t index = 0;
    for (std::size_t s = 0; s < layout_.units()[u].segments.size(); ++s) {
      const shard::Segment& seg = layout_.units()[u].segments[s];
      for (const shard::Placed& p : seg.placed) {
        const std::int32_t mine = index++;
        const shard::Range own = seg.owned(p, rank_);
        if (!seg.trained()) continue;
        for (std::int64_t first = 0; first < own.count(); first += kBlock) {
          if (std::isfinite(blocks[next++])) continue;
          const std::int64_t count = std::min(kBlock, own.count() - first);
          auto* values = reinterpret_cast<float*>(window(0));
          copy_now(values,
                   storage_.accumulator(rank_, static_cast<int>(u), static_cast<int>(s)) + own.lo -
                       rank_ * seg.shard + first,
                   count * 4);
          for (std::int64_t i = 0; i < count; ++i) {
            if (std::isfinite(values[i]) || result.non_finite++ != 0) continue;
            result.first_unit = static_cast<std::int32_t>(u);
            result.first_index = mine;
            result.first_element = own.lo + first + i - p.start;
          }
        }
      }
    }
  }
  return result;
}

// -- the update --

void DevicePlane::begin_update() {
  // Forward and backward passes still read what the update overwrites, and gathers the shards.
  device_.wait(reduces_.stream, handed_);
  order(gathers_.stream, reduces_.stream);
}

void DevicePlane::update(const optimizers::Rule& rule, const optimizers::Elements& elements,
                         const optimizers::Constants& constants, std::int64_t step) {
  parts_.update->run(rule, elements, constants, step, reduces_.stream);
}

void DevicePlane::publish(const float* master, DType dtype, void* parameter, std::int64_t count) {
  kernels_.convert(master, DType::f32, parameter, dtype, count, reduces_.stream);
}

void DevicePlane::end_update() {
  user_behind_ = true;
  gathers_behind_ = true;
}

float* DevicePlane::staged_gradient(int b) const {
  const DeviceMap& map = blueprint_.device;
  std::byte* buffers = map.on_host ? storage_.device_staging(map.buffers) : storage_.uploads();
  return reinterpret_cast<float*>(buffers + b * map.buffer_bytes());
}

std::byte* DevicePlane::staged_parameter(int b) const {
  return reinterpret_cast<std::byte*>(staged_gradient(b)) + blueprint_.device.passing().gradient;
}

float* DevicePlane::staged_state(int b) const {
  return reinterpret_cast<float*>(staged_parameter(b) + blueprint_.device.passing().parameter);
}

void DevicePlane::raise(int b, std::span<const Move> moves) {
  const auto at = static_cast<std::size_t>(b);
  device_.wait(uploads_, sent_[at]);
  for (const Move& m : moves) device_.copy(m.buffer, m.home, m.bytes, uploads_);
  device_.record(brought_[at], uploads_);
  device_.wait(reduces_.stream, brought_[at]);
}

void DevicePlane::clear_parameter(int b, std::int64_t bytes) {
  device_.fill(staged_parameter(b), 0, bytes, reduces_.stream);
}

void DevicePlane::lower(int b, std::span<const Move> moves) {
  order(reduces_.stream, downloads_);
  for (const Move& m : moves) device_.copy(m.home, m.buffer, m.bytes, downloads_);
  device_.record(sent_[static_cast<std::size_t>(b)], downloads_);
}

void DevicePlane::lowered(int b) {
  await(sent_[static_cast<std::size_t>(b)], "optimizer state on its way to the host", true);
}

void DevicePlane::bring(int b, const float* gradient, std::int64_t count, const void* parameter,
                        std::int64_t bytes) {
  const auto at = static_cast<std::size_t>(b);
  order(reduces_.stream, downloads_);
  device_.wait(downloads_, sent_[at]);
  device_.copy(staged_gradient(b), gradient, count * 4, downloads_);
  if (bytes != 0) device_.copy(staged_parameter(b), parameter, bytes, downloads_);
  device_.record(brought_[at], downloads_);
}

void DevicePlane::arrived(int b) {
  await(brought_[static_cast<std::size_t>(b)], "gradients on their way to the host", true);
}

void DevicePlane::send(int b, void* parameter, std::int64_t bytes) {
  device_.copy(parameter, staged_parameter(b), bytes, reduces_.stream);
  device_.record(sent_[static_cast<std::size_t>(b)], reduces_.stream);
}

// -- contents --

std::byte* DevicePlane::window(int index) const {
  return storage_.device_staging(blueprint_.device.windows + index * DeviceMap::kWindowBytes);
}

void DevicePlane::copy_now(void* target, const void* source, std::int64_t bytes) {
  // Behind everything: what was issued, and what the user's stream has used.
  device_.wait(downloads_, handed_);
  order(gathers_.stream, downloads_);
  order(reduces_.stream, downloads_);
  device_.copy(target, source, bytes, downloads_);
  device_.record(copied_, downloads_);
  await(copied_, "a copy between device and host");
}

void DevicePlane::settle() {
  for (const device::NativeStream stream : {gathers_.stream, reduces_.stream, uploads_}) {
    order(stream, downloads_);
  }
  device_.record(copied_, downloads_);
  await(copied_, "copies between device and host");
}

}  // namespace zshard::engine
