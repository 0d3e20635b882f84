// What this machine has and what its system allows: asked, tried, never assumed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zshard::cli {

/// Whether something can be used here, and why not.
struct Usable {
  bool yes = false;
  std::string reason{};  // why not; with yes, what there is to say
};

/// io_uring: a ring is set up and closed again.
struct IoUring {
  Usable ring;
  Usable registered;  // buffers of registered_bytes may be registered
  std::int64_t registered_bytes = 0;
  int disabled = -1;  // kernel.io_uring_disabled; -1: the kernel has no such switch
};
IoUring probe_io_uring();

struct Gpu {
  std::string name;
  std::int64_t memory = 0;  // bytes
};

/// What the CUDA driver says. `none` says precisely why the list is empty.
struct Gpus {
  std::vector<Gpu> list;
  std::string none;
  std::string driver;  // CUDA version that the driver serves; "" no driver
};
Gpus probe_gpus();

struct Cpu {
  std::string model;
  int online = 0;
  int usable = 0;        // of this process: its affinity
  std::string dispatch;  // which clone of the kernels the loader takes
  std::string level;     // the highest x86-64 level of this CPU
};
Cpu probe_cpu();

struct MemoryFacts {
  std::int64_t total = -1;      // bytes; -1: the system does not say
  std::int64_t available = -1;  // without swapping, control groups counted
  std::string huge_pages;       // always, madvise, never; "" unknown
  std::string shared_huge_pages;
  std::int64_t memlock = -1;    // RLIMIT_MEMLOCK, soft; -1: unlimited
  bool memlock_exempt = false;  // CAP_IPC_LOCK: the limit does not count
};
MemoryFacts probe_memory();

/// Free bytes for this user of the file systems that hold the directories, each file system once.
/// Throws IoError for a directory that is not there.
std::int64_t free_disk(const std::vector<std::string>& directories);

}  // namespace zshard::cli
