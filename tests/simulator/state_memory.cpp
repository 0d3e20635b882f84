// Allocations of devices, pinned host memory, and what an address is.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "tests/simulator/state.hpp"

namespace simulator {

cudaError_t State::allocate(int ordinal, std::size_t bytes, const void* site, void** memory) {
  SimulatedDevice& on = device(ordinal);
  if (bytes == 0) {
    *memory = nullptr;
    return cudaSuccess;
  }
  const auto capacity = static_cast<std::uintptr_t>(device_bytes.load());
  if (bytes > capacity) return cudaErrorMemoryAllocation;
  const std::uintptr_t size = rounded_size(bytes);
  const std::uintptr_t first = map_device(ordinal);
  std::uintptr_t at = first;
  {
    const std::lock_guard lock(on.memory_mutex);
    for (const auto& [begin, allocation] : on.allocations) {
      if (begin - at >= size) break;
      at = begin + rounded_size(static_cast<std::uintptr_t>(allocation.bytes));
    }
    if (at + size > first + capacity) return cudaErrorMemoryAllocation;
    on.allocations[at] = {static_cast<std::int64_t>(bytes), site};
    on.used += static_cast<std::int64_t>(size);
    on.peak = std::max(on.peak, on.used);
  }
  on.accesses.forget(at, at + size);
  std::memset(reach_address(at), 0xff, size);
  *memory = reinterpret_cast<void*>(at);
  return cudaSuccess;
}

cudaError_t State::free(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const int ordinal = device_of(address);
  if (ordinal < 0) return cudaErrorInvalidValue;
  SimulatedDevice& on = device(ordinal);
  {
    const std::lock_guard lock(on.memory_mutex);
    if (on.allocations.count(address) == 0) return cudaErrorInvalidValue;
  }
  std::vector<StreamPointer> all = streams(ordinal);
  {
    const std::shared_lock lock(handles_mutex_);
    for (const StreamPointer& stream : ending_) {
      if (stream->device == ordinal) all.push_back(stream);
    }
  }
  for (const StreamPointer& stream : all) {
    Mark end;
    {
      const std::lock_guard lock(stream->submit);
      end = {stream, stream->submitted, stream->clock};
    }
    stream->wait_for(end.position);
    learn(ordinal, end.clock);
  }
  std::uintptr_t size = 0;
  {
    const std::lock_guard lock(on.memory_mutex);
    const auto at = on.allocations.find(address);
    if (at == on.allocations.end()) return cudaErrorInvalidValue;
    size = rounded_size(static_cast<std::uintptr_t>(at->second.bytes));
    on.accesses.forget(address, address + size);
    drop_pages(ordinal, address, address + size);
    on.allocations.erase(at);
    on.used -= static_cast<std::int64_t>(size);
  }
  return cudaSuccess;
}

std::shared_ptr<Registration> State::pinned(std::uintptr_t begin, std::uintptr_t end,
                                            bool& partly) {
  partly = false;
  const std::shared_lock lock(handles_mutex_);
  auto next = pinned_.lower_bound(end);
  if (next == pinned_.begin()) return nullptr;
  const std::shared_ptr<Registration>& last = std::prev(next)->second;
  if (last->end <= begin) return nullptr;
  if (last->begin <= begin && end <= last->end) return last;
  partly = true;
  return nullptr;
}

cudaError_t State::pin(void* memory, std::size_t bytes, bool owned, const void* site) {
  auto made = std::make_shared<Registration>();
  made->begin = reinterpret_cast<std::uintptr_t>(memory);
  made->end = made->begin + bytes;
  made->owned = owned;
  made->site = site;
  if (memory == nullptr || bytes == 0 || device_of(made->begin) >= 0) return cudaErrorInvalidValue;
  bool partly = false;
  if (pinned(made->begin, made->end, partly) || partly) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  const std::unique_lock lock(handles_mutex_);
  pinned_[made->begin] = std::move(made);
  return cudaSuccess;
}

cudaError_t State::unpin(void* memory, bool owned) {
  std::shared_ptr<Registration> gone;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  {
    const std::shared_lock lock(handles_mutex_);
    const auto at = pinned_.find(address);
    if (at == pinned_.end() || at->second->owned != owned) {
      return owned ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered;
    }
    gone = at->second;
  }
  // A stream that may still touch it would touch memory that is pageable or gone.
  const int ordinal = thread().device;
  if (device(ordinal).fault.load(std::memory_order_relaxed) == 0) {
    touch(owned ? "cudaFreeHost" : "cudaHostUnregister", gone->begin, gone->end, true);
  }
  const std::unique_lock lock(handles_mutex_);
  pinned_.erase(address);
  return cudaSuccess;
}

Located State::locate(const void* memory, std::int64_t bytes) {
  Located result;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t end = begin + static_cast<std::uintptr_t>(bytes);
  result.touch.begin = begin;
  result.touch.end = end;
  const int ordinal = device_of(begin);
  if (ordinal >= 0) {
    SimulatedDevice& on = device(ordinal);
    const std::lock_guard lock(on.memory_mutex);
    auto at = on.allocations.upper_bound(begin);
    if (at == on.allocations.begin()) return result;
    --at;
    const std::uintptr_t stop = at->first + static_cast<std::uintptr_t>(at->second.bytes);
    if (begin >= stop || end > stop) return result;
    result.place = Place::device;
    result.touch.map = &on.accesses;
    result.touch.device = ordinal;
    return result;
  }
  if (memory == nullptr) return result;
  bool partly = false;
  result.touch.pinned = pinned(begin, end, partly);
  if (partly) return result;
  if (result.touch.pinned) {
    result.place = Place::pinned;
    result.touch.map = &result.touch.pinned->accesses;
  } else {
    result.place = Place::pageable;
  }
  return result;
}

}  // namespace simulator
