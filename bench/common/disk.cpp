#include "bench/common/disk.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "bench/common/row.hpp"
#include "runtime/base/build_config.hpp"
#include "zshard/error.hpp"

#if ZSHARD_HAS_IO_URING
#include <liburing.h>
#endif

namespace bench {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 20;
constexpr int kDepth = 8;

/// What a shell command prints; "" if it fails.
std::string output_of(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) return "";
  std::string text;
  char chunk[4096];
  for (std::size_t got = 0; (got = std::fread(chunk, 1, sizeof chunk, pipe)) > 0;) {
    text.append(chunk, got);
  }
  return pclose(pipe) == 0 ? text : "";
}

bool has_fio() {
  static const bool has = !output_of("timeout 10 fio --version 2>/dev/null").empty();
  return has;
}

}  // namespace

void fill_random(std::span<std::byte> memory) {
  std::uint64_t state = 0x9e3779b97f4a7c15;
  for (std::size_t at = 0; at + sizeof state <= memory.size(); at += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(memory.data() + at, &state, sizeof state);
  }
}

RawDisk::RawDisk(const std::string& directory, std::int64_t bytes, std::string engine)
    : bytes_(bytes),
      engine_(std::move(engine)),
      file_(zshard::offload::ExtentFile::make(directory, bytes, 0)),
      memory_(zshard::memory::Arena::make(kBlock * kDepth)) {
  if (!file_.direct()) {
    throw zshard::UsageError(
        fmt::format("{} cannot be measured: {}. Name a directory on the disk itself with "
                    "--nvme-dir",
                    directory, file_.refusal()));
  }
  fill_random({memory_->data(), static_cast<std::size_t>(memory_->bytes())});
  for (std::int64_t at = 0; at < bytes_; at += memory_->bytes()) {
    const auto size = static_cast<std::size_t>(std::min(memory_->bytes(), bytes_ - at));
    if (pwrite(file_.descriptor(), memory_->data(), size, at) != static_cast<ssize_t>(size)) {
      throw std::runtime_error(
          fmt::format("cannot write {} bytes in {}: {}", bytes_, directory, std::strerror(errno)));
    }
  }
}

std::string RawDisk::name(const std::string& engine) {
  if (has_fio()) {
    return fmt::format("fio, {}, direct, 1 MiB x {}, huge pages, overwriting a written file",
                       engine, kDepth);
  }
#if ZSHARD_HAS_IO_URING
  return fmt::format("fio is missing; a plain io_uring loop, direct, 1 MiB x {}, huge pages",
                     kDepth);
#else
  return "";
#endif
}

double RawDisk::seconds(Move move, int passes) {
  return has_fio() ? fio(move, passes) : loop(move, passes);
}

double RawDisk::fio(Move move, int passes) const {
  const char* name = move == Move::read ? "read" : "write";
  // malloc's huge pages need no pool of them set aside, as iomem=mmaphuge does.
  const std::string command = fmt::format(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 timeout 300 fio --name=raw --thread "
      "--filename=/proc/{}/fd/{} --rw={} --bs={} --iodepth={} --direct=1 --size={} --loops={} "
      "--ioengine={}{} --iomem=malloc --iomem_align=2M --invalidate=0 --output-format=json 2>&1",
      getpid(), file_.descriptor(), name, kBlock, kDepth, bytes_, passes, engine_,
      engine_ == "io_uring" ? " --fixedbufs=1 --registerfiles=1" : "");
  const std::string text = output_of(command);
  // fio may say something before the JSON.
  const std::size_t begin = text.find('{');
  if (begin == std::string::npos) throw std::runtime_error("fio failed: " + command);
  const auto job = nlohmann::json::parse(text.substr(begin)).at("jobs").at(0);
  const auto moved = job.at(name).at("io_bytes").get<std::int64_t>();
  if (job.at("error") != 0 || moved != bytes_ * passes) {
    throw std::runtime_error(
        fmt::format("fio moved {} bytes of {}: {}", moved, bytes_ * passes, command));
  }
  return job.at(name).at("runtime").get<double>() * 1e-3;
}

#if ZSHARD_HAS_IO_URING

double RawDisk::loop(Move move, int passes) {
  io_uring ring{};
  if (io_uring_queue_init(kDepth, &ring, 0) != 0) throw std::runtime_error("io_uring is refused");
  const std::unique_ptr<io_uring, void (*)(io_uring*)> owner(&ring, io_uring_queue_exit);
  const int file = file_.descriptor();
  const iovec buffers{memory_->data(), static_cast<std::size_t>(memory_->bytes())};
  if (io_uring_register_files(&ring, &file, 1) != 0 ||
      io_uring_register_buffers(&ring, &buffers, 1) != 0) {
    throw std::runtime_error("io_uring does not register the file and its buffers");
  }
  const auto start = [&](std::uint64_t slot, std::int64_t at) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring);
    std::byte* memory = memory_->data() + static_cast<std::int64_t>(slot) * kBlock;
    const auto size = static_cast<unsigned>(std::min(kBlock, bytes_ - at));
    const auto offset = static_cast<std::uint64_t>(at);
    if (move == Move::read) {
      io_uring_prep_read_fixed(entry, 0, memory, size, offset, 0);
    } else {
      io_uring_prep_write_fixed(entry, 0, memory, size, offset, 0);
    }
    entry->flags = static_cast<__u8>(entry->flags | IOSQE_FIXED_FILE);
    entry->user_data = slot;
  };
  return timed([&] {
    for (int pass = 0; pass < passes; ++pass) {
      std::int64_t next = 0;
      std::int64_t moved = 0;
      for (std::uint64_t slot = 0; slot < kDepth && next < bytes_; ++slot, next += kBlock) {
        start(slot, next);
      }
      while (moved < bytes_) {
        io_uring_submit_and_wait(&ring, 1);
        io_uring_cqe* done = nullptr;
        while (io_uring_peek_cqe(&ring, &done) == 0) {
          const int result = done->res;
          const std::uint64_t slot = done->user_data;
          io_uring_cqe_seen(&ring, done);
          if (result <= 0) throw std::runtime_error("io_uring moved nothing");
          moved += result;
          if (next >= bytes_) continue;
          start(slot, next);
          next += kBlock;
        }
      }
    }
  });
}

#else

double RawDisk::loop(Move /*move*/, int /*passes*/) {
  throw std::runtime_error(
      "nothing to compare with: fio is missing, and this build has no "
      "io_uring");
}

#endif

}  // namespace bench
