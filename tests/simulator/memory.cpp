#include "tests/simulator/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

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

std::uintptr_t map_device(int device) {
  Files& all = files();
  const std::uintptr_t first = space() + static_cast<std::uintptr_t>(device) * kSlot;
  const std::lock_guard lock(all.mutex);
  if (all.mapped[device]) return first;
  const int descriptor = memfd_create("simulated device", MFD_CLOEXEC);
  require(descriptor >= 0, "simulator: memfd_create");
  require(ftruncate(descriptor, kMostBytes) == 0, "simulator: ftruncate");
  map_fixed(first, PROT_NONE, descriptor);
  map_fixed(first + kSpace, PROT_READ | PROT_WRITE, descriptor);
  all.descriptor[device] = descriptor;
  all.mapped[device] = true;
  return first;
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

void* reach(const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (device_of(address) < 0) return const_cast<void*>(memory);
  return reach_address(address);
}

}  // namespace simulator
