// Where simulated device memory lies. Each device is a memfd that is mapped twice: without access
// at the address that cudaMalloc hands out, and readable and writable at a constant distance from
// it, where only simulated copies, kernels and collectives go.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace simulator {

inline constexpr int kMostDevices = 16;
inline constexpr std::int64_t kMostBytes = std::int64_t{4} << 30;  // of one device

/// The device that an address of device memory belongs to, or -1.
int device_of(std::uintptr_t address);
/// Bytes from the start of its device's memory to an address of device memory.
std::uint64_t offset_of(std::uintptr_t address);
/// Maps the memory of the device, at the first call; its first address.
std::uintptr_t map_device(int device);
/// Whether the address that cudaMalloc hands out may be touched too.
void open_memory(bool open);
/// Gives the pages of [begin, end) back; they read as zeros then.
void drop_pages(int device, std::uintptr_t begin, std::uintptr_t end);
/// The address that code of the simulator uses.
std::byte* reach_address(std::uintptr_t address);

/// The file behind a device's memory, for other processes.
struct MemoryFile {
  int descriptor = -1;  // in the process of the device
  std::uint64_t inode = 0;
};
MemoryFile memory_file(int device);
/// Maps the memory of another process' device, to be read; null if the process has ended.
const std::byte* map_file(pid_t process, const MemoryFile& file);
void unmap_file(const std::byte* memory);
/// Opens what another process of this user has open; -1 with errno. Such a file needs no name, so
/// nothing is left of it whenever its processes are killed.
int open_of_process(pid_t process, int descriptor, int flags);

}  // namespace simulator
