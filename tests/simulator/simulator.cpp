#include "tests/simulator/simulator.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "tests/simulator/memory.hpp"
#include "tests/simulator/queue.hpp"
#include "tests/simulator/state.hpp"

namespace simulator {

namespace {

void require_unused(const char* call) {
  if (!State::get().in_use()) return;
  std::fprintf(stderr, "simulator::%s after something was made on a device\n", call);
  std::abort();
}

std::string side(const Access& access) {
  return std::string(access.write ? "write" : "read") + " by " + access.operation + " (" +
         access.stream + ", operation " + std::to_string(access.position) + ")";
}

std::uintptr_t address(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

}  // namespace

std::string describe_site(const void* site) {
  if (site == nullptr) return "the runtime";
  Dl_info info{};
  if (dladdr(site, &info) == 0) return "unknown code";
  std::string text;
  char number[32];
  if (info.dli_sname != nullptr) {
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> plain(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
    text = status == 0 ? plain.get() : info.dli_sname;
    std::snprintf(number, sizeof number, "+0x%zx", address(site) - address(info.dli_saddr));
    text += number;
  }
  const std::string file = info.dli_fname == nullptr ? "" : info.dli_fname;
  std::snprintf(number, sizeof number, "+0x%zx", address(site) - address(info.dli_fbase));
  return text + (text.empty() ? "" : " ") + "(" + file.substr(file.rfind('/') + 1) + number + ")";
}

std::string Race::text() const {
  char where[64];
  std::snprintf(where, sizeof where, "[%p, +%lld)", memory, static_cast<long long>(bytes));
  std::string result =
      side(first) + " and " + side(second) + " are not ordered: " + where +
      (device < 0 ? " of pinned host memory" : " on device " + std::to_string(device));
  if (count > 1) result += ", " + std::to_string(count) + " times";
  return result;
}

void reset() {
  State::get().reset();
  open_memory(false);
}

void set_open_memory(bool on) {
  open_memory(on);
}

void set_devices(int count) {
  require_unused("set_devices");
  State::get().device_count = count < 0 ? 0 : count > kMostDevices ? kMostDevices : count;
}

void set_device_memory(std::int64_t bytes) {
  require_unused("set_device_memory");
  State::get().device_bytes = bytes < 0 ? 0 : bytes > kMostBytes ? kMostBytes : bytes;
}

void set_delays(double mean_microseconds, std::uint64_t seed) {
  delays().mean_microseconds.store(mean_microseconds, std::memory_order_relaxed);
  delays().seed.store(seed, std::memory_order_relaxed);
  delays().version.fetch_add(1, std::memory_order_relaxed);
}

void set_driver_version(int version) {
  State::get().driver_version = version;
}
void set_nccl_version(int version) {
  State::get().nccl_version = version;
}
void set_serial_collectives(bool on) {
  State::get().serial_collectives = on;
}
void set_remote_errors(bool on) {
  State::get().remote_errors = on;
}

std::vector<Race> races() {
  return State::get().races();
}
std::vector<std::string> faults() {
  return State::get().faults();
}
void release(const void* token) {
  State::get().release(token);
}
void acquire(const void* token) {
  State::get().acquire(token);
}

Watching::Watching() : before_(std::exchange(State::get().thread().watching, true)) {}
Watching::~Watching() {
  State::get().thread().watching = before_;
}

void touch(const char* name, const void* memory, std::int64_t bytes, bool write) {
  if (bytes <= 0) return;
  State::get().touch(name, address(memory), address(memory) + static_cast<std::uintptr_t>(bytes),
                     write);
}

void ignore_waits(const char* waiting, const char* recorded) {
  State::get().ignore_waits(waiting, recorded);
}
std::int64_t ignored_waits() {
  return State::get().ignored_waits();
}

void fail(const Failure& failure) {
  State::get().add_failure(failure);
}
void fault(int device, cudaError_t code) {
  set_fault(device, code);
}

std::int64_t calls(const std::string& name) {
  return State::get().calls(name);
}
std::vector<std::string> leaks() {
  return State::get().leaks();
}

std::int64_t allocated_bytes(int device) {
  SimulatedDevice& on = State::get().device(device);
  const std::lock_guard lock(on.memory_mutex);
  return on.used;
}

std::int64_t peak_bytes(int device) {
  SimulatedDevice& on = State::get().device(device);
  const std::lock_guard lock(on.memory_mutex);
  return on.peak;
}

void name_stream(cudaStream_t handle, const char* name) {
  const StreamPointer stream = State::get().stream(handle);
  if (!stream || name == nullptr) return;
  const std::lock_guard lock(stream->submit);
  stream->name = name;
}

void launch(const char* name, cudaStream_t handle, const Ranges& reads, const Ranges& writes,
            std::function<void()> body) {
  State& state = State::get();
  ThreadState& mine = state.thread();
  const std::optional<Injected> injected = state.count(name, mine.device);
  if (mine.in_worker) {
    state.report_fault(std::string(name) + ": launched from a host function or a kernel");
    mine.last = cudaErrorNotPermitted;
    return;
  }
  const StreamPointer stream = state.stream(handle);
  if (!stream) {
    state.report_fault(std::string(name) + ": launched on a stream that does not exist");
    mine.last = cudaErrorInvalidResourceHandle;
    return;
  }
  const int sticky = state.device(stream->device).fault.load(std::memory_order_relaxed);
  if (sticky != 0) {
    mine.last = static_cast<cudaError_t>(sticky);
    return;
  }
  if (injected && injected->how == How::refused) {
    mine.last = static_cast<cudaError_t>(injected->code);
    return;
  }
  std::vector<Touch> touches;
  std::optional<Injected> outcome = injected;
  for (const bool write : {false, true}) {
    for (const Range& range : write ? writes : reads) {
      if (range.bytes <= 0) continue;
      Located located = state.locate(range.memory, range.bytes);
      const bool own = located.place == Place::device && located.touch.device == stream->device;
      if (!own && located.place != Place::pinned) {
        char text[128];
        std::snprintf(text, sizeof text, ": %s [%p, +%lld) on device %d, which is %s",
                      write ? "writes" : "reads", range.memory, static_cast<long long>(range.bytes),
                      stream->device,
                      located.place == Place::pageable ? "pageable host memory"
                      : located.place == Place::device ? "memory of another device"
                                                       : "in no allocation");
        state.report_fault(name + std::string(text));
        outcome = Injected{How::fault, cudaErrorIllegalAddress};
        continue;
      }
      located.touch.operation = name;
      located.touch.write = write;
      touches.push_back(std::move(located.touch));
    }
  }
  queue(stream, touches, outcome, std::move(body));
}

}  // namespace simulator
