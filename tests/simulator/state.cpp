#include "tests/simulator/state.hpp"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace simulator {

namespace {

/// Ordinals of the machine's devices that CUDA_VISIBLE_DEVICES leaves; empty: it is not set.
std::vector<int> visible_devices() {
  std::vector<int> result;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return result;
  for (std::istringstream in(text); result.size() < kMostDevices;) {
    std::string one;
    if (!std::getline(in, one, ',')) break;
    result.push_back(std::atoi(one.c_str()));
  }
  return result;
}

constexpr int kDefaultDevices = 8;

}  // namespace

State::State() {
  for (int i = 0; i < kMostDevices; ++i) device(i).ordinal = i;
  nccl_version = NCCL_VERSION_CODE;
  visible_ = visible_devices();
  device_count = visible_.empty() ? kDefaultDevices : static_cast<int>(visible_.size());
}

int State::physical(int ordinal) const {
  const auto at = static_cast<std::size_t>(ordinal);
  return at < visible_.size() ? visible_[at] : ordinal;
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
                   begin + rounded_size(static_cast<std::uintptr_t>(allocation.bytes)));
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
  device_count = visible_.empty() ? kDefaultDevices : static_cast<int>(visible_.size());
  device_bytes = std::int64_t{1} << 30;
  driver_version = CUDART_VERSION;
  nccl_version = NCCL_VERSION_CODE;
  serial_collectives = true;
  remote_errors = true;
  delays().mean_microseconds.store(5);
  delays().seed.store(1);
  delays().version.fetch_add(1);
}

}  // namespace simulator
