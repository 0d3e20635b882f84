#include "tests/simulator/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "tests/simulator/launch.hpp"

namespace simulator {

namespace {

constexpr std::uintptr_t kSlot = static_cast<std::uintptr_t>(kMostBytes);
constexpr std::uintptr_t kSpace = kSlot * kMostDevices;

void require(bool held, const char* what) {
  if (held) return;
  std::perror(what);
  std::abort();
}

/// Address space for all devices, once for both mappings, so that their distance is constant.
std::uintptr_t reserve() {
  void* space =
      mmap(nullptr, 2 * kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(space != MAP_FAILED, "simulator: address space for the devices");
  madvise(space, 2 * kSpace, MADV_DONTDUMP);
  return reinterpret_cast<std::uintptr_t>(space);
}

std::uintptr_t space() {
  static const std::uintptr_t first = reserve();
  return first;
}

struct Files {
  std::mutex mutex;
  int descriptor[kMostDevices];
  bool mapped[kMostDevices] = {};
  bool open = false;
};

Files& files() {
  static Files instance;
  return instance;
}

void map_fixed(std::uintptr_t address, int protection, int descriptor) {
  void* result = mmap(reinterpret_cast<void*>(address), kSlot, protection,
                      MAP_SHARED | MAP_FIXED | MAP_NORESERVE, descriptor, 0);
  require(result != MAP_FAILED, "simulator: mapping device memory");
  madvise(result, kSlot, MADV_DONTDUMP);
}

}  // namespace

int device_of(std::uintptr_t address) {
  const std::uintptr_t at = address - space();
  return at < kSpace ? static_cast<int>(at / kSlot) : -1;
}

std::uint64_t offset_of(std::uintptr_t address) {
  return (address - space()) % kSlot;
}

std::uintptr_t map_device(int device) {
  Files& all = files();
  const std::uintptr_t first = space() + static_cast<std::uintptr_t>(device) * kSlot;
  const std::lock_guard lock(all.mutex);
  if (all.mapped[device]) return first;
  const int descriptor = memfd_create("simulated device", MFD_CLOEXEC);
  require(descriptor >= 0, "simulator: memfd_create");
  require(ftruncate(descriptor, kMostBytes) == 0, "simulator: ftruncate");
  map_fixed(first, all.open ? PROT_READ | PROT_WRITE : PROT_NONE, descriptor);
  map_fixed(first + kSpace, PROT_READ | PROT_WRITE, descriptor);
  all.descriptor[device] = descriptor;
  all.mapped[device] = true;
  return first;
}

void open_memory(bool open) {
  Files& all = files();
  const std::lock_guard lock(all.mutex);
  all.open = open;
  for (int device = 0; device < kMostDevices; ++device) {
    if (!all.mapped[device]) continue;
    void* const first =
        reinterpret_cast<void*>(space() + static_cast<std::uintptr_t>(device) * kSlot);
    require(mprotect(first, kSlot, open ? PROT_READ | PROT_WRITE : PROT_NONE) == 0,
            "simulator: access to device memory");
  }
}

void drop_pages(int device, std::uintptr_t begin, std::uintptr_t end) {
  constexpr std::uintptr_t kPage = 4096;
  const std::uintptr_t first = map_device(device);
  const std::uintptr_t from = (begin - first + kPage - 1) / kPage * kPage;
  const std::uintptr_t to = (end - first) / kPage * kPage;
  if (from >= to) return;
  fallocate(files().descriptor[device], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(from), static_cast<off_t>(to - from));
}

std::byte* reach_address(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address + kSpace);
}

MemoryFile memory_file(int device) {
  map_device(device);
  const int descriptor = files().descriptor[device];
  struct stat status {};
  require(fstat(descriptor, &status) == 0, "simulator: fstat");
  return {descriptor, status.st_ino};
}

const std::byte* map_file(pid_t process, const MemoryFile& file) {
  const int descriptor = open_of_process(process, file.descriptor, O_RDONLY);
  if (descriptor < 0) return nullptr;
  struct stat status {};
  // Another file may have the number by now, if another process has that of the owner.
  const bool same = fstat(descriptor, &status) == 0 && status.st_ino == file.inode;
  void* memory = MAP_FAILED;
  if (same) {
    memory = mmap(nullptr, kSlot, PROT_READ, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  }
  close(descriptor);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, kSlot, MADV_DONTDUMP);
  return static_cast<const std::byte*>(memory);
}

void unmap_file(const std::byte* memory) {
  munmap(const_cast<std::byte*>(memory), kSlot);
}

int open_of_process(pid_t process, int descriptor, int flags) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  return open(path.c_str(), flags | O_CLOEXEC);
}

void* reach(const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (device_of(address) < 0) return const_cast<void*>(memory);
  return reach_address(address);
}

}  // namespace simulator
