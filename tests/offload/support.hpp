// Directories, memory, children and a backend over a file, for the tests of offload/.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "offload/io/backend.hpp"
#include "offload/io/driver.hpp"
#include "offload/io/extent_file.hpp"
#include "offload/io/pages.hpp"
#include "offload/io/stripe.hpp"
#include "offload/tiers/store.hpp"
#include "tests/offload/fault_driver.hpp"
#include "zshard/error.hpp"

namespace zshard::offload::testing {

inline constexpr std::int64_t kPage = 4096;
inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// A directory of this user, gone at the end.
class Directory {
 public:
  explicit Directory(const std::string& below = std::filesystem::temp_directory_path()) {
    std::string pattern = below + "/offload-test-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no directory " + pattern);
    path_ = pattern;
  }
  ~Directory() {
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

/// Bytes that depend on seed and place.
inline void paint(std::span<std::byte> memory, std::uint64_t seed) {
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15U + 1);
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    const std::uint64_t value = random();
    std::memcpy(memory.data() + i, &value, 8);
  }
}

inline bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

inline bool zeros(std::span<const std::byte> memory) {
  return std::all_of(memory.begin(), memory.end(), [](std::byte b) { return b == std::byte{0}; });
}

/// Runs `body` in a forked child: what it returns or throws, or how the child died. "" is good.
inline std::string in_child(const std::function<std::string()>& body, int seconds = 60) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child < 0) return "no child";
  if (child == 0) {
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = std::string("threw ") + error.what();
    }
    [[maybe_unused]] const ssize_t written = write(ends[1], text.data(), text.size());
    _exit(text.empty() ? 0 : 1);
  }
  close(ends[1]);
  int status = 0;
  bool stopped = false;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > limit) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      stopped = true;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::string text;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  if (stopped) return "timed out; " + text;
  if (WIFSIGNALED(status)) return "died of signal " + std::to_string(WTERMSIG(status));
  if (text.empty() && WEXITSTATUS(status) != 0) {
    return "exit code " + std::to_string(WEXITSTATUS(status));
  }
  return text;
}

/// Open descriptors of this process.
inline int descriptors() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

/// "VmRSS", "Threads" and others of /proc/self/status.
inline std::int64_t process_status(const std::string& name) {
  FILE* file = std::fopen("/proc/self/status", "r");
  char line[256];
  std::int64_t value = -1;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strncmp(line, (name + ":").c_str(), name.size() + 1) == 0) {
      value = std::atoll(line + name.size() + 1);
    }
  }
  std::fclose(file);
  return value;
}

inline std::string name_of(IoBackendKind kind) {
  return kind == IoBackendKind::io_uring ? "io_uring" : "posix";
}

/// A backend over files in temporary directories.
struct Rig {
  Rig(IoBackendKind kind, std::int64_t bytes, std::int64_t block, int depth, int files = 1,
      double deadline = 30, std::vector<int> weights = {})
      : memory(std::max(bytes, kPage)) {
    if (weights.empty()) weights.assign(static_cast<std::size_t>(files), 1);
    const StripeMap map(bytes, block, std::move(weights));
    DriverOptions options{.backend = kind,
                          .buffers = memory.bytes(),
                          .block_bytes = kMiB * 4,  // so that posix takes `depth` threads
                          .depth = depth};
    for (int i = 0; i < map.files(); ++i) {
      directories.push_back(std::make_unique<Directory>());
      extents.push_back(ExtentFile::make(directories.back()->path(), map.file_bytes(i), 0));
      options.files.push_back(extents.back().descriptor());
    }
    backend = std::make_unique<IoBackend>(
        make_driver(options).driver, map,
        BackendOptions{.block_bytes = block, .deadline_seconds = deadline});
  }

  IoBackend::Ticket start(Operation operation, std::int64_t offset, std::span<std::byte> at) {
    const IoRequest request{operation, offset, static_cast<std::int64_t>(at.size()), at.data()};
    return backend->submit({&request, 1});
  }
  void read(std::int64_t offset, std::span<std::byte> at) {
    backend->wait(start(Operation::read, offset, at));
  }
  void write(std::int64_t offset, std::span<std::byte> at) {
    backend->wait(start(Operation::write, offset, at));
  }
  /// The failure of a transfer; kind no_answer and bytes -1: there was none.
  IoFailure failure(Operation operation, std::int64_t offset, std::span<std::byte> at) {
    try {
      backend->wait(start(operation, offset, at));
    } catch (const IoFailed& failed) {
      return failed.failure();
    }
    return {.kind = IoFailure::Kind::no_answer, .bytes = -1};
  }

  Pages memory;  // as large as the file
  std::vector<std::unique_ptr<Directory>> directories;
  std::vector<ExtentFile> extents;
  std::unique_ptr<IoBackend> backend;
};

/// Skips the running test where a kind cannot be had.
#define ZSHARD_NEED(kind)                                                \
  do {                                                                   \
    if ((kind) == ::zshard::IoBackendKind::io_uring) {                   \
      const std::string refusal = ::zshard::offload::io_uring_refusal(); \
      if (!refusal.empty()) GTEST_SKIP() << "io_uring: " << refusal;     \
    }                                                                    \
  } while (false)

}  // namespace zshard::offload::testing
