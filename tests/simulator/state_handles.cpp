// Streams and events by their handles.
#include <tuple>
#include <utility>

#include "tests/simulator/state.hpp"

namespace simulator {

std::size_t State::take_id() {
  return next_id_.fetch_add(1, std::memory_order_relaxed);
}

StreamPointer State::start_stream(int ordinal, unsigned flags, int priority, const void* site) {
  SimulatedDevice& on = device(ordinal);
  std::size_t id = 0;
  std::uint64_t start = 0;
  {
    const std::lock_guard lock(on.streams_mutex);
    if (on.free_ids.empty()) {
      id = take_id();
    } else {
      std::tie(id, start) = on.free_ids.back();
      on.free_ids.pop_back();
    }
  }
  const std::uint64_t number = stream_numbers_.fetch_add(1, std::memory_order_relaxed);
  return Stream::make(ordinal, flags, priority, id, start, number, site);
}

StreamPointer State::make_stream(int ordinal, unsigned flags, int priority, const void* site) {
  StreamPointer stream = start_stream(ordinal, flags, priority, site);
  {
    SimulatedDevice& on = device(ordinal);
    const std::lock_guard lock(on.streams_mutex);
    on.streams.push_back(stream);
  }
  const std::unique_lock lock(handles_mutex_);
  std::erase_if(ending_, [](const StreamPointer& s) { return s->ended(); });
  streams_[stream.get()] = stream;
  return stream;
}

StreamPointer State::stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    const int ordinal = thread().device;
    SimulatedDevice& on = device(ordinal);
    {
      const std::lock_guard lock(on.streams_mutex);
      if (on.default_stream) return on.default_stream;
    }
    StreamPointer made = start_stream(ordinal, 0, 0, nullptr);
    {
      const std::lock_guard name_lock(made->submit);
      made->name = "default stream";
    }
    const std::lock_guard lock(on.streams_mutex);
    if (on.default_stream) {
      made->close();
    } else {
      on.default_stream = std::move(made);
    }
    return on.default_stream;
  }
  const std::shared_lock lock(handles_mutex_);
  const auto at = streams_.find(handle);
  return at == streams_.end() ? nullptr : at->second;
}

bool State::destroy_stream(cudaStream_t handle) {
  StreamPointer stream;
  {
    const std::unique_lock lock(handles_mutex_);
    const auto at = streams_.find(handle);
    if (at == streams_.end()) return false;
    stream = at->second;
    streams_.erase(at);
    ending_.push_back(stream);
  }
  const Clock known = knowledge(stream->device);
  SimulatedDevice& on = device(stream->device);
  std::uint64_t submitted = 0;
  {
    const std::lock_guard lock(stream->submit);
    submitted = stream->submitted;
  }
  {
    const std::lock_guard lock(on.streams_mutex);
    std::erase(on.streams, stream);
    // Its place in clocks serves another stream only if the host knows that all its work is done:
    // whatever comes later comes after it then.
    if (known.at(stream->id) >= submitted) on.free_ids.emplace_back(stream->id, submitted);
  }
  stream->close();
  return true;
}

std::shared_ptr<Event> State::make_event(int ordinal, unsigned flags, const void* site) {
  auto event = std::make_shared<Event>();
  event->device = ordinal;
  event->flags = flags;
  event->site = site;
  const std::unique_lock lock(handles_mutex_);
  events_[event.get()] = event;
  return event;
}

std::shared_ptr<Event> State::event(cudaEvent_t handle) {
  const std::shared_lock lock(handles_mutex_);
  const auto at = events_.find(handle);
  return at == events_.end() ? nullptr : at->second;
}

bool State::destroy_event(cudaEvent_t handle) {
  const std::unique_lock lock(handles_mutex_);
  return events_.erase(handle) != 0;
}

std::vector<StreamPointer> State::streams(int ordinal) {
  SimulatedDevice& on = device(ordinal);
  const std::lock_guard lock(on.streams_mutex);
  std::vector<StreamPointer> all = on.streams;
  if (on.default_stream) all.push_back(on.default_stream);
  return all;
}

}  // namespace simulator
