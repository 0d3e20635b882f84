// What comes before what: the clocks of streams and host threads, and the check for races.
#include <algorithm>
#include <iterator>
#include <utility>

#include "tests/simulator/state.hpp"

namespace simulator {

void State::learn(int ordinal, const Clock& clock) {
  ThreadState& mine = thread();
  if (mine.watching) return;
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

}  // namespace simulator
