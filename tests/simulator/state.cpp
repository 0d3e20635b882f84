#include "tests/simulator/state.hpp"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace simulator {

namespace {

constexpr std::uintptr_t kAlignment = 256;

std::uintptr_t rounded(std::uintptr_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

State::State() {
  for (int i = 0; i < kMostDevices; ++i) device(i).ordinal = i;
  nccl_version = NCCL_VERSION_CODE;
}

State& State::get() {
  // Never destroyed: workers of streams may run until the process ends.
  static State* instance = new State;
  return *instance;
}

ThreadState& State::thread() {
  thread_local ThreadState mine;
  const std::uint64_t now = generation.load(std::memory_order_relaxed);
  if (mine.generation != now) {
    mine = ThreadState{};
    mine.generation = now;
  }
  return mine;
}

// -- calls --

std::optional<Injected> State::count(const std::string& name, int current) {
  bool known = false;
  {
    const std::shared_lock lock(calls_mutex_);
    const auto at = calls_.find(name);
    if (at != calls_.end()) {
      at->second->fetch_add(1, std::memory_order_relaxed);
      known = true;
    }
  }
  if (!known) {
    const std::unique_lock lock(calls_mutex_);
    auto& counter = calls_[name];
    if (!counter) counter = std::make_unique<std::atomic<std::int64_t>>(0);
    counter->fetch_add(1, std::memory_order_relaxed);
  }
  if (armed_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  const std::lock_guard lock(failures_mutex_);
  for (Armed& armed : failures_) {
    const Failure& failure = armed.failure;
    if (failure.call != name || (failure.device >= 0 && failure.device != current)) continue;
    const int seen = armed.seen++;
    if (seen < failure.after) continue;
    if (failure.times >= 0 && seen >= failure.after + failure.times) continue;
    return Injected{failure.how, failure.code};
  }
  return std::nullopt;
}

std::int64_t State::calls(const std::string& name) {
  const std::shared_lock lock(calls_mutex_);
  const auto at = calls_.find(name);
  return at == calls_.end() ? 0 : at->second->load(std::memory_order_relaxed);
}

void State::add_failure(const Failure& failure) {
  const std::lock_guard lock(failures_mutex_);
  failures_.push_back({failure, 0});
  armed_.store(static_cast<int>(failures_.size()), std::memory_order_relaxed);
}

void State::report_fault(std::string text) {
  constexpr std::size_t kMost = 1000;
  const std::lock_guard lock(reports_mutex_);
  if (faults_.size() < kMost) faults_.push_back(std::move(text));
}

// -- handles --

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

// -- memory --

cudaError_t State::allocate(int ordinal, std::size_t bytes, const void* site, void** memory) {
  SimulatedDevice& on = device(ordinal);
  if (bytes == 0) {
    *memory = nullptr;
    return cudaSuccess;
  }
  const auto capacity = static_cast<std::uintptr_t>(device_bytes.load());
  if (bytes > capacity) return cudaErrorMemoryAllocation;
  const std::uintptr_t size = rounded(bytes);
  const std::uintptr_t first = map_device(ordinal);
  std::uintptr_t at = first;
  {
    const std::lock_guard lock(on.memory_mutex);
    for (const auto& [begin, allocation] : on.allocations) {
      if (begin - at >= size) break;
      at = begin + rounded(static_cast<std::uintptr_t>(allocation.bytes));
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
    size = rounded(static_cast<std::uintptr_t>(at->second.bytes));
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

// -- order --

void State::learn(int ordinal, const Clock& clock) {
  ThreadState& mine = thread();
  mine.known.join(clock);
  SimulatedDevice& on = device(ordinal);
  const std::lock_guard lock(on.host_mutex);
  on.host.join(clock);
  on.host_version.fetch_add(1, std::memory_order_relaxed);
}

const Clock& State::knowledge(int ordinal) {
  ThreadState& mine = thread();
  SimulatedDevice& on = device(ordinal);
  std::uint64_t& seen = mine.seen[static_cast<std::size_t>(ordinal)];
  // Without the lock if there is nothing new: it would order threads that have nothing to do with
  // each other.
  if (on.host_version.load(std::memory_order_relaxed) != seen) {
    const std::lock_guard lock(on.host_mutex);
    seen = on.host_version.load(std::memory_order_relaxed);
    mine.known.join(on.host);
  }
  return mine.known;
}

bool State::legacy(const Stream& stream) {
  return (stream.flags & cudaStreamNonBlocking) == 0;
}

std::vector<Mark> State::legacy_waits(const StreamPointer& stream) {
  std::vector<StreamPointer> before;
  {
    SimulatedDevice& on = device(stream->device);
    const std::lock_guard lock(on.streams_mutex);
    if (stream != on.default_stream) {
      if (on.default_stream) before.push_back(on.default_stream);
    } else {
      std::copy_if(on.streams.begin(), on.streams.end(), std::back_inserter(before),
                   [&](const StreamPointer& s) { return legacy(*s); });
    }
  }
  std::vector<Mark> waits;
  for (const StreamPointer& s : before) {
    const std::lock_guard lock(s->submit);
    waits.push_back({s, s->submitted, s->clock});
  }
  return waits;
}

std::uint64_t State::submit(const StreamPointer& stream, const std::vector<Touch>& touches,
                            std::function<void(bool faulted)> body) {
  SimulatedDevice& on = device(stream->device);
  const Clock& known = knowledge(stream->device);
  std::unique_lock<std::mutex> legacy_lock;
  std::vector<Mark> waits;
  if (legacy(*stream)) {
    legacy_lock = std::unique_lock(on.legacy_mutex);
    waits = legacy_waits(stream);
  }
  const std::lock_guard lock(stream->submit);
  stream->clock.join(known);
  for (const Mark& mark : waits) stream->clock.join(mark.clock);
  const std::uint64_t position = stream->submitted + 1;
  stream->clock.set(stream->id, position);
  auto operation = std::make_shared<Operation>();
  operation->stream = stream->name;
  operation->id = stream->id;
  operation->count = position;
  operation->position = position - stream->start;
  check(touches, operation, stream->clock);
  stream->push([&on, waits = std::move(waits), body = std::move(body)] {
    for (const Mark& mark : waits) mark.stream->wait_for(mark.position);
    State::get().thread().in_worker = true;
    body(on.fault.load(std::memory_order_relaxed) != 0);
  });
  return position;
}

Mark State::mark(const StreamPointer& stream, std::function<void()> at_mark) {
  if (at_mark || legacy(*stream)) {
    submit(stream, {}, [run = std::move(at_mark)](bool) {
      if (run) run();
    });
  }
  const Clock& known = knowledge(stream->device);
  const std::lock_guard lock(stream->submit);
  stream->clock.join(known);
  return {stream, stream->submitted, stream->clock};
}

void State::wait(const StreamPointer& stream, const Mark& mark) {
  if (mark.stream == stream) return;
  if (!ignored(stream, mark.stream)) {
    const std::lock_guard lock(stream->submit);
    stream->clock.join(mark.clock);
  }
  // A task even if the mark is reached already: positions must not depend on timing.
  submit(stream, {},
         [before = mark.stream, position = mark.position](bool) { before->wait_for(position); });
}

void State::check(const std::vector<Touch>& touches, const OperationPointer& like,
                  const Clock& clock) {
  std::vector<Conflict> conflicts;
  // Reads first: what an operation writes would hide what it reads from the next one's check.
  for (const bool write : {false, true}) {
    for (const Touch& touch : touches) {
      if (touch.write != write || touch.map == nullptr) continue;
      auto operation = std::make_shared<Operation>(*like);
      operation->name = touch.operation;
      conflicts.clear();
      touch.map->access(touch.begin, touch.end, write, operation, clock, conflicts);
      if (!conflicts.empty()) report(conflicts, touch.device);
    }
  }
}

void State::report(const std::vector<Conflict>& conflicts, int ordinal) {
  const std::lock_guard lock(reports_mutex_);
  for (const Conflict& conflict : conflicts) {
    Race race;
    race.first = {conflict.first->name, conflict.first->stream, conflict.first->position,
                  conflict.first_writes};
    race.second = {conflict.second->name, conflict.second->stream, conflict.second->position,
                   conflict.second_writes};
    race.memory = reinterpret_cast<const void*>(conflict.begin);
    race.bytes = static_cast<std::int64_t>(conflict.end - conflict.begin);
    race.device = ordinal;
    race.count = 1;
    const auto known = std::find_if(races_.begin(), races_.end(), [&](const Race& r) {
      return r.device == ordinal && r.first.operation == race.first.operation &&
             r.first.stream == race.first.stream && r.first.write == race.first.write &&
             r.second.operation == race.second.operation && r.second.write == race.second.write &&
             r.second.stream == race.second.stream;
    });
    if (known == races_.end()) {
      races_.push_back(std::move(race));
    } else {
      ++known->count;
    }
  }
}

void State::touch(const char* name, std::uintptr_t begin, std::uintptr_t end, bool write) {
  ThreadState& mine = thread();
  Clock known = knowledge(mine.device);
  if (!mine.id) mine.id = take_id();
  ++mine.touches;
  known.set(*mine.id, mine.touches);
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->stream = "host";
  operation->id = *mine.id;
  operation->count = mine.touches;
  operation->position = mine.touches;
  std::vector<std::shared_ptr<Registration>> touched;
  {
    const std::shared_lock lock(handles_mutex_);
    for (auto at = pinned_.begin(); at != pinned_.lower_bound(end); ++at) {
      if (at->second->end > begin) touched.push_back(at->second);
    }
  }
  for (const std::shared_ptr<Registration>& pinned : touched) {
    std::vector<Conflict> conflicts;
    pinned->accesses.access(std::max(begin, pinned->begin), std::min(end, pinned->end), write,
                            operation, known, conflicts);
    if (!conflicts.empty()) report(conflicts, -1);
  }
  learn(mine.device, known);
}

void State::release(const void* token) {
  const Clock& known = knowledge(thread().device);
  const std::lock_guard lock(tokens_mutex_);
  tokens_[token].join(known);
}

void State::acquire(const void* token) {
  ThreadState& mine = thread();
  const std::lock_guard lock(tokens_mutex_);
  const auto at = tokens_.find(token);
  if (at != tokens_.end()) mine.known.join(at->second);
}

void State::ignore_waits(const char* waiting, const char* recorded) {
  const auto text = [](const char* name) {
    return name == nullptr ? std::nullopt : std::optional<std::string>(name);
  };
  const std::lock_guard lock(ignored_mutex_);
  ignored_names_.emplace_back(text(waiting), text(recorded));
  ignoring_.fetch_add(1, std::memory_order_relaxed);
}

bool State::ignored(const StreamPointer& waiting, const StreamPointer& recorded) {
  if (ignoring_.load(std::memory_order_relaxed) == 0) return false;
  const auto name = [](const StreamPointer& stream) {
    const std::lock_guard lock(stream->submit);
    return stream->name;
  };
  const std::string first = name(waiting);
  const std::string second = name(recorded);
  const std::lock_guard lock(ignored_mutex_);
  for (const auto& [a, b] : ignored_names_) {
    if ((a && *a != first) || (b && *b != second)) continue;
    ++ignored_count_;
    return true;
  }
  return false;
}

std::int64_t State::ignored_waits() {
  const std::lock_guard lock(ignored_mutex_);
  return ignored_count_;
}

// -- reports --

std::vector<Race> State::races() {
  const std::lock_guard lock(reports_mutex_);
  return races_;
}

std::vector<std::string> State::faults() {
  const std::lock_guard lock(reports_mutex_);
  return faults_;
}

std::vector<std::string> State::leaks() {
  std::vector<std::string> lines;
  {
    const std::shared_lock lock(handles_mutex_);
    for (const auto& [handle, stream] : streams_) {
      const std::lock_guard name_lock(stream->submit);
      lines.push_back("stream \"" + stream->name + "\" of device " +
                      std::to_string(stream->device) + ", made in " + describe_site(stream->site));
    }
    for (const auto& [handle, event] : events_) {
      lines.push_back("event of device " + std::to_string(event->device) + ", made in " +
                      describe_site(event->site));
    }
    for (const auto& [begin, pinned] : pinned_) {
      lines.push_back(std::string(pinned->owned ? "pinned allocation" : "registration") + " of " +
                      std::to_string(pinned->end - pinned->begin) +
                      " bytes of host memory, made in " + describe_site(pinned->site));
    }
  }
  for (SimulatedDevice& on : devices_) {
    const std::lock_guard lock(on.memory_mutex);
    for (const auto& [begin, allocation] : on.allocations) {
      lines.push_back("allocation of " + std::to_string(allocation.bytes) + " bytes on device " +
                      std::to_string(on.ordinal) + ", made in " + describe_site(allocation.site));
    }
  }
  if (communicator_leaks) communicator_leaks(lines);
  std::sort(lines.begin(), lines.end());
  return lines;
}

bool State::in_use() {
  for (SimulatedDevice& on : devices_) {
    {
      const std::lock_guard lock(on.memory_mutex);
      if (!on.allocations.empty()) return true;
    }
    const std::lock_guard lock(on.streams_mutex);
    if (!on.streams.empty()) return true;
  }
  return false;
}

void State::reset() {
  generation.fetch_add(1, std::memory_order_relaxed);
  if (end_communicators) end_communicators();
  std::vector<StreamPointer> all;
  for (SimulatedDevice& on : devices_) {
    for (StreamPointer& stream : streams(on.ordinal)) all.push_back(std::move(stream));
  }
  {
    const std::unique_lock lock(handles_mutex_);
    all.insert(all.end(), ending_.begin(), ending_.end());
    ending_.clear();
    streams_.clear();
    events_.clear();
  }
  for (const StreamPointer& stream : all) stream->close();
  for (const StreamPointer& stream : all) stream->wait_end();
  if (forget_communicators) forget_communicators();
  {
    const std::unique_lock lock(handles_mutex_);
    for (const auto& [begin, pinned] : pinned_) {
      if (pinned->owned) std::free(reinterpret_cast<void*>(begin));
    }
    pinned_.clear();
  }
  for (SimulatedDevice& on : devices_) {
    {
      const std::lock_guard lock(on.memory_mutex);
      for (const auto& [begin, allocation] : on.allocations) {
        drop_pages(on.ordinal, begin,
                   begin + rounded(static_cast<std::uintptr_t>(allocation.bytes)));
      }
      on.allocations.clear();
      on.used = 0;
      on.peak = 0;
    }
    on.accesses.forget(0, ~std::uintptr_t{0});
    {
      const std::lock_guard lock(on.host_mutex);
      on.host.clear();
    }
    on.host_version.store(0, std::memory_order_relaxed);
    on.fault.store(0, std::memory_order_relaxed);
    const std::lock_guard lock(on.streams_mutex);
    on.default_stream.reset();
    on.streams.clear();
    on.free_ids.clear();
  }
  stream_numbers_.store(0);
  next_id_.store(0);
  {
    const std::unique_lock lock(calls_mutex_);
    calls_.clear();
  }
  {
    const std::lock_guard lock(failures_mutex_);
    failures_.clear();
    armed_.store(0);
  }
  {
    const std::lock_guard lock(reports_mutex_);
    races_.clear();
    faults_.clear();
  }
  {
    const std::lock_guard lock(tokens_mutex_);
    tokens_.clear();
  }
  {
    const std::lock_guard lock(ignored_mutex_);
    ignored_names_.clear();
    ignored_count_ = 0;
    ignoring_.store(0);
  }
  device_count = 8;
  device_bytes = std::int64_t{1} << 30;
  driver_version = CUDART_VERSION;
  nccl_version = NCCL_VERSION_CODE;
  serial_collectives = true;
  delays().mean_microseconds.store(5);
  delays().seed.store(1);
  delays().version.fetch_add(1);
}

}  // namespace simulator
