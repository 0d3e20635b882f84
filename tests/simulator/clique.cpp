#include "tests/simulator/clique.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/simulator/launch.hpp"
#include "tests/simulator/memory.hpp"
#include "tests/simulator/state.hpp"

namespace simulator {

namespace {

constexpr const char* kIdFormat = "simulated %d %d %llx";  // process, descriptor, nonce

CliqueBlock* map_block(int descriptor) {
  void* memory =
      mmap(nullptr, sizeof(CliqueBlock), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<CliqueBlock*>(memory);
}

std::string rank_text(int rank) {
  return "rank " + std::to_string(rank);
}

bool ended(int pidfd) {
  pollfd watched{pidfd, POLLIN, 0};
  return poll(&watched, 1, 0) == 1;
}

}  // namespace

std::uint64_t Signature::packed() const {
  return static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(type) << 8 |
         static_cast<std::uint64_t>(op) << 16 | static_cast<std::uint64_t>(root) << 32;
}

Signature Signature::unpacked(std::uint64_t packed, std::uint64_t count) {
  return {static_cast<Collective>(packed & 0xff), static_cast<std::size_t>(count),
          static_cast<ncclDataType_t>(packed >> 8 & 0xff),
          static_cast<ncclRedOp_t>(packed >> 16 & 0xffff), static_cast<int>(packed >> 32)};
}

std::string Signature::text() const {
  const char* const names[] = {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce",
                               "ncclBroadcast"};
  return std::string(names[static_cast<std::size_t>(collective)]) + " of " + std::to_string(count) +
         " elements of type " + std::to_string(static_cast<int>(type)) + ", op " +
         std::to_string(static_cast<int>(op)) + ", root " + std::to_string(root);
}

// -- meeting --

Clique::Clique(std::string id, int descriptor, CliqueBlock& block)
    : id_(std::move(id)), descriptor_(descriptor), block_(block), pid_(getpid()) {}

Clique::~Clique() {
  for (const Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
    if (peer.memory != nullptr) unmap_file(peer.memory);
  }
  munmap(&block_, sizeof(CliqueBlock));
  close(descriptor_);
}

std::shared_ptr<Clique> Clique::make() {
  std::uint64_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return nullptr;
  const int descriptor = memfd_create("simulated communicator", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  CliqueBlock* block =
      ftruncate(descriptor, sizeof(CliqueBlock)) == 0 ? map_block(descriptor) : nullptr;
  if (block == nullptr) {
    close(descriptor);
    return nullptr;
  }
  block->nonce.store(nonce);
  char id[NCCL_UNIQUE_ID_BYTES];
  std::snprintf(id, sizeof id, kIdFormat, getpid(), descriptor,
                static_cast<unsigned long long>(nonce));
  return std::shared_ptr<Clique>(new Clique(id, descriptor, *block));
}

std::shared_ptr<Clique> Clique::open(const std::string& id, std::string& why) {
  int process = 0;
  int number = 0;
  unsigned long long nonce = 0;
  if (std::sscanf(id.c_str(), kIdFormat, &process, &number, &nonce) != 3) {
    why = "this is no unique id";
    return nullptr;
  }
  const int descriptor = open_of_process(process, number, O_RDWR);
  if (descriptor < 0) {
    why = "process " + std::to_string(process) +
          ", which made the unique id, is gone: " + std::strerror(errno);
    return nullptr;
  }
  const bool large = lseek(descriptor, 0, SEEK_END) == static_cast<off_t>(sizeof(CliqueBlock));
  CliqueBlock* block = large ? map_block(descriptor) : nullptr;
  if (block == nullptr || block->nonce.load() != nonce) {
    if (block != nullptr) munmap(block, sizeof(CliqueBlock));
    close(descriptor);
    why = "the communicator of this unique id exists no more";
    return nullptr;
  }
  return std::shared_ptr<Clique>(new Clique(id, descriptor, *block));
}

ncclResult_t Clique::join(int rank, int of_world, int device, std::string& why) {
  const State& state = State::get();
  int known = 0;
  if (!block_.world.compare_exchange_strong(known, of_world, std::memory_order_acq_rel) &&
      known != of_world) {
    why = std::to_string(of_world) + " ranks here and " + std::to_string(known) + " elsewhere";
    fail(ncclInvalidUsage, why);
    return ncclInvalidUsage;
  }
  CliqueBlock::Member& mine = member(rank);
  if (mine.claimed.exchange(1) != 0) {
    why = rank_text(rank) + " joined twice";
    fail(ncclInvalidUsage, why);
    return ncclInvalidUsage;
  }
  const int version = state.nccl_version.load();
  const char* allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const MemoryFile file = memory_file(device);
  mine.pid.store(pid_);
  mine.device.store(state.physical(device));
  mine.version.store(version);
  mine.shares_device.store(version >= NCCL_VERSION(2, 30, 0) && allowed != nullptr &&
                           std::strcmp(allowed, "1") == 0);
  mine.descriptor.store(file.descriptor);
  mine.inode.store(file.inode);
  mine.joined.store(1, std::memory_order_release);
  block_.joined.fetch_add(1, std::memory_order_acq_rel);
  bell().ring();
  return ncclSuccess;
}

ncclResult_t Clique::connect(int rank, std::string& why) {
  const int ranks = world();
  if (block_.joined.load(std::memory_order_acquire) != ranks) return ncclInProgress;
  const CliqueBlock::Member& mine = member(rank);
  for (int r = 0; r < ranks; ++r) {
    const CliqueBlock::Member& other = member(r);
    if (other.version.load() != mine.version.load()) {
      why = "Mismatched NCCL version detected : rank " + std::to_string(rank) + " version " +
            std::to_string(mine.version.load()) + " rank " + std::to_string(r) + " version " +
            std::to_string(other.version.load());
      return ncclInvalidUsage;
    }
    for (int s = r + 1; s < ranks; ++s) {
      if (member(s).device.load() != other.device.load()) continue;
      if (member(s).shares_device.load() != 0 && other.shares_device.load() != 0) continue;
      why = "Duplicate GPU detected : rank " + std::to_string(s) + " and rank " +
            std::to_string(r) + " both on CUDA device " + std::to_string(other.device.load());
      return ncclInvalidUsage;
    }
  }
  {
    const std::lock_guard lock(mutex_);
    peers_.resize(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks && !connected_; ++r) {
      if (!remote(r)) continue;
      Peer& peer = peers_[static_cast<std::size_t>(r)];
      peer.memory =
          map_file(member(r).pid.load(), {member(r).descriptor.load(), member(r).inode.load()});
      if (peer.memory == nullptr) {
        why = "the process of " + rank_text(r) + " is gone";
        return ncclRemoteError;
      }
    }
    connected_ = true;
  }
  block_.connected.fetch_add(1, std::memory_order_acq_rel);
  bell().ring();
  return ncclSuccess;
}

bool Clique::dead() {
  const int ranks = world();
  const std::lock_guard lock(mutex_);
  peers_.resize(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    const CliqueBlock::Member& other = member(r);
    if (other.joined.load(std::memory_order_acquire) == 0 || !remote(r)) continue;
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    if (peer.pidfd < 0) {
      peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, other.pid.load(), 0));
      if (peer.pidfd < 0 && errno != ESRCH) continue;
    }
    if (peer.pidfd >= 0 && !ended(peer.pidfd)) continue;
    // Behind the end: whoever leaves does so before it ends.
    if (other.left.load(std::memory_order_acquire) == 0) return true;
  }
  return false;
}

// -- failures --

void Clique::fail(ncclResult_t code, const std::string& why, int by, ncclResult_t by_code) const {
  if (block_.failing.exchange(1) == 0) {
    const std::size_t length = std::min<std::size_t>(why.size(), CliqueBlock::kMostText - 1);
    std::memcpy(block_.why, why.data(), length);
    block_.culprit.store(by + 1);
    block_.culprit_code.store(by_code);
    block_.failed.store(code, std::memory_order_release);
  }
  bell().ring();
}

ncclResult_t Clique::failure(int rank) const {
  const int code = block_.failed.load(std::memory_order_acquire);
  if (code == ncclSuccess) return ncclSuccess;
  const bool culprit = block_.culprit.load() == rank + 1;
  return static_cast<ncclResult_t>(culprit ? block_.culprit_code.load() : code);
}

std::string Clique::failure_text() const {
  if (block_.failed.load(std::memory_order_acquire) == ncclSuccess) return "";
  return block_.why;
}

// -- memory --

void Clique::offer(OfferedMemory& place, const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  place.address.store(address, std::memory_order_relaxed);
  place.offset.store(device_of(address) < 0 ? 0 : offset_of(address), std::memory_order_relaxed);
}

const std::byte* Clique::reach_offer(int rank, const OfferedMemory& offered) const {
  if (remote(rank)) {
    return peers_[static_cast<std::size_t>(rank)].memory +
           offered.offset.load(std::memory_order_relaxed);
  }
  const auto address = offered.address.load(std::memory_order_relaxed);
  return static_cast<const std::byte*>(reach(reinterpret_cast<const void*>(address)));
}

}  // namespace simulator
