#include "runtime/engine/parameter_ring.hpp"

#include "zshard/error.hpp"

namespace zshard::engine {

ParameterRing::ParameterRing(const TierMap& map, const Storage& storage, offload::Store& store,
                             int rank)
    : map_(map), storage_(storage), store_(store), rank_(rank), entries_(kMostEntries) {}

bool ParameterRing::push(std::int32_t unit) {
  if (end_ - live_ == kMostEntries) return false;
  const Extent& extent = map_.units[static_cast<std::size_t>(unit)].parameters;
  const std::int64_t at = next_ + extent.bytes <= map_.ring_bytes ? next_ : 0;
  for (std::uint64_t i = live_; i < end_; ++i) {
    const Entry& e = entry(i);
    if (at < e.offset + e.bytes && e.offset < at + extent.bytes) return false;
  }
  entry(end_) = {unit, at, extent.bytes,
                 store_.read(extent.offset, {storage_.staging(rank_, map_.ring + at),
                                             static_cast<std::size_t>(extent.bytes)})};
  ++end_;
  next_ = at + extent.bytes;
  return true;
}

void ParameterRing::read_ahead() {
  while (true) {
    const std::uint64_t ahead = end_ - begun_;
    std::int32_t unit = -1;
    if (ahead < upcoming_.size()) {
      unit = upcoming_[ahead];
    } else if (ahead - upcoming_.size() < later_.size()) {
      unit = later_[ahead - upcoming_.size()];
    } else {
      return;
    }
    if (!push(unit)) return;
  }
}

void ParameterRing::begin(std::int32_t unit, std::span<const std::int32_t> upcoming,
                          std::span<const std::int32_t> later) {
  if (end_ == begun_ && !push(unit)) throw Error("internal: no room to read a unit's parameters");
  present_ = begun_++;
  if (present().unit != unit) throw Error("internal: another unit's parameters were read ahead");
  upcoming_ = upcoming;
  later_ = later;
  read_ahead();
  Entry& e = entry(present_);
  const offload::Ticket ticket = e.ticket;
  e.ticket = 0;
  store_.wait(ticket);
}

void ParameterRing::met() {
  live_ = present_;
  read_ahead();
}

const std::byte* ParameterRing::shard(int r, int segment) const {
  const TierMap::Unit& unit = map_.units[static_cast<std::size_t>(present().unit)];
  return storage_.staging(r, map_.ring + present().offset) +
         unit.segments[static_cast<std::size_t>(segment)].parameter;
}

bool ParameterRing::must_finish() const {
  const std::int64_t end = present().offset + present().bytes;
  return end + map_.largest_parameters > map_.ring_bytes &&
         map_.largest_parameters > present().offset;
}

void ParameterRing::finished() {
  live_ = begun_;
}

}  // namespace zshard::engine
