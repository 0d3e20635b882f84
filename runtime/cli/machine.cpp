#include "runtime/cli/machine.hpp"

#include <dlfcn.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <system_error>

#include "offload/io/lock_limit.hpp"
#include "runtime/base/build_config.hpp"
#include "runtime/base/descriptor.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

constexpr unsigned kProbeEntries = 8;
constexpr std::int64_t kProbeBytes = std::int64_t{64} << 20;

std::string reason_of(int error) {
  return std::generic_category().message(error);
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// The word in brackets of "always [madvise] never".
std::string selected(const std::string& line) {
  const std::size_t open = line.find('[');
  const std::size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return line.substr(open + 1, close - open - 1);
}

/// The text behind "NAME ... : " in a file of such lines; "" if there is none.
std::string field(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size(), name) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

Usable try_to_register(int ring) {
  void* memory =
      mmap(nullptr, kProbeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {false, reason_of(errno)};
  madvise(memory, kProbeBytes, MADV_HUGEPAGE);
  const iovec buffer{memory, static_cast<std::size_t>(kProbeBytes)};
  const long result = syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1);
  const int error = errno;
  munmap(memory, kProbeBytes);
  if (result == 0) return {true, ""};
  const offload::LockLimit limit = offload::lock_limit();
  return {false, reason_of(error) + (error == ENOMEM && limit.counts() ? "; " + limit.text() : "")};
}

// -- the CUDA driver, by hand: the tool has to start where there is none --

using CuResult = int;
constexpr CuResult kCuNoDevice = 100;

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

struct Driver {
  explicit Driver(void* handle)
      : library(handle),
        init(symbol<CuResult (*)(unsigned)>(handle, "cuInit")),
        version(symbol<CuResult (*)(int*)>(handle, "cuDriverGetVersion")),
        count(symbol<CuResult (*)(int*)>(handle, "cuDeviceGetCount")),
        device(symbol<CuResult (*)(int*, int)>(handle, "cuDeviceGet")),
        name(symbol<CuResult (*)(char*, int, int)>(handle, "cuDeviceGetName")),
        memory(symbol<CuResult (*)(std::size_t*, int)>(handle, "cuDeviceTotalMem_v2")),
        error(symbol<CuResult (*)(CuResult, const char**)>(handle, "cuGetErrorString")) {}
  ~Driver() { dlclose(library); }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  [[nodiscard]] bool complete() const {
    return init != nullptr && version != nullptr && count != nullptr && device != nullptr &&
           name != nullptr && memory != nullptr && error != nullptr;
  }
  [[nodiscard]] std::string text(CuResult result) const {
    const char* words = nullptr;
    if (error(result, &words) != 0 || words == nullptr) words = "unknown error";
    return std::string(words) + " (CUDA error " + std::to_string(result) + ")";
  }

  void* library;
  CuResult (*init)(unsigned);
  CuResult (*version)(int*);
  CuResult (*count)(int*);
  CuResult (*device)(int*, int);
  CuResult (*name)(char*, int, int);
  CuResult (*memory)(std::size_t*, int);
  CuResult (*error)(CuResult, const char**);
};

void list_gpus(Gpus& gpus) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    gpus.none = "no driver library: " + std::string(why == nullptr ? "libcuda.so.1" : why);
    return;
  }
  const Driver driver(library);
  if (!driver.complete()) {
    gpus.none = "the driver library libcuda.so.1 lacks functions of CUDA 11";
    return;
  }
  int version = 0;
  if (driver.version(&version) == 0) {
    gpus.driver = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  }
  int count = 0;
  CuResult result = driver.init(0);
  if (result == 0) result = driver.count(&count);
  if (result != 0 && result != kCuNoDevice) {
    gpus.none = "the driver does not start: " + driver.text(result);
    return;
  }
  if (count == 0) {
    gpus.none = "the driver (CUDA " + gpus.driver + ") finds no device";
    return;
  }
  for (int d = 0; d < count; ++d) {
    int device = 0;
    char name[256] = "?";
    std::size_t memory = 0;
    if (driver.device(&device, d) != 0) continue;
    driver.name(name, sizeof name, device);
    driver.memory(&memory, device);
    gpus.list.push_back({name, static_cast<std::int64_t>(memory)});
  }
}

}  // namespace

IoUring probe_io_uring() {
  IoUring result;
  const std::string disabled = first_line("/proc/sys/kernel/io_uring_disabled");
  if (!disabled.empty()) result.disabled = std::atoi(disabled.c_str());
  io_uring_params parameters{};
  const base::Descriptor ring(
      static_cast<int>(syscall(SYS_io_uring_setup, kProbeEntries, &parameters)));
  const int error = errno;
  if (!ring.valid()) {
    std::string why = "io_uring_setup: " + reason_of(error);
    if (error == ENOSYS) why += " (this kernel has none, or a filter hides it)";
    if (error == ENOMEM && offload::lock_limit().counts()) {
      why += "; " + offload::lock_limit().text();
    }
    if (error == EPERM && result.disabled > 0) {
      why += " (kernel.io_uring_disabled = " + std::to_string(result.disabled) + ")";
    } else if (error == EPERM) {
      why += " (a system call filter, as containers have, refuses it)";
    }
    result.ring = {false, why};
    result.registered = {false, "there is no ring"};
    return result;
  }
  if (ZSHARD_HAS_IO_URING == 0) {
    result.ring = {false, "this build has no liburing; the system would allow a ring"};
  } else {
    result.ring = {true, ""};
  }
  result.registered = try_to_register(ring.get());
  result.registered_bytes = kProbeBytes;
  return result;
}

Gpus probe_gpus() {
  Gpus gpus;
  list_gpus(gpus);
  if (ZSHARD_HAS_CUDA == 0) {
    const std::string found =
        gpus.list.empty() ? gpus.none : std::to_string(gpus.list.size()) + " in the machine";
    gpus.list.clear();
    gpus.none = "no CUDA in this build (" + found + ")";
  }
  return gpus;
}

Cpu probe_cpu() {
  Cpu cpu;
  cpu.model = field("/proc/cpuinfo", "model name");
  cpu.online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  cpu.usable = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : cpu.online;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
  cpu.level = __builtin_cpu_supports("x86-64-v4")   ? "x86-64-v4"
              : __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3"
              : __builtin_cpu_supports("x86-64-v2") ? "x86-64-v2"
                                                    : "x86-64";
#else
  cpu.level = "unknown";
#endif
// The same condition as that of ZSHARD_CLONES.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(ZSHARD_SANITIZER)
  cpu.dispatch = cpu.level == "x86-64-v4" || cpu.level == "x86-64-v3" ? cpu.level : "x86-64";
#else
  cpu.dispatch = "one version only (a sanitizer, another compiler or another CPU)";
#endif
  return cpu;
}

MemoryFacts probe_memory() {
  MemoryFacts facts;
  const std::string total = field("/proc/meminfo", "MemTotal");
  if (!total.empty()) facts.total = std::strtoll(total.c_str(), nullptr, 10) * 1024;
  facts.available = memory::available_memory();
  facts.huge_pages = selected(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  facts.shared_huge_pages =
      selected(first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  const offload::LockLimit limit = offload::lock_limit();
  facts.memlock = limit.bytes;
  facts.memlock_exempt = limit.exempt;
  return facts;
}

std::int64_t free_disk(const std::vector<std::string>& directories) {
  std::int64_t sum = 0;
  std::vector<dev_t> seen;
  for (const std::string& directory : directories) {
    struct stat status {};
    struct statvfs system {};
    if (stat(directory.c_str(), &status) != 0 || statvfs(directory.c_str(), &system) != 0) {
      throw IoError("cannot ask for the free space of " + directory + ": " + reason_of(errno));
    }
    if (!S_ISDIR(status.st_mode)) throw IoError(directory + " is no directory");
    if (std::find(seen.begin(), seen.end(), status.st_dev) != seen.end()) continue;
    seen.push_back(status.st_dev);
    std::int64_t bytes = 0;
    if (__builtin_mul_overflow(system.f_bavail, system.f_frsize, &bytes) ||
        __builtin_add_overflow(sum, bytes, &sum)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return sum;
}

}  // namespace zshard::cli
