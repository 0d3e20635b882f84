// The raw seam to the system: single requests go in, the system's own results come out. No result
// is interpreted here; the backend above does that. Tests put themselves between the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zshard/types.hpp"

namespace zshard::offload {

enum class Operation : std::uint8_t { read, write };

struct RawRequest {
  Operation operation = Operation::read;
  int file = 0;             // index into DriverOptions::files
  std::int64_t offset = 0;  // in that file
  std::int64_t bytes = 0;   // > 0
  std::byte* memory =
      nullptr;            // a write only reads it; the system's until the completion is reaped
  std::uint64_t tag = 0;  // comes back with the completion
};

struct RawCompletion {
  std::uint64_t tag = 0;
  std::int64_t result = 0;  // bytes moved, or -errno
};

/// "Until something happens" for Driver::reap.
inline constexpr std::int64_t kForever = std::int64_t{3600} * 1'000'000;

/// start() and reap() are called by one thread, wake() by any. None allocates.
class Driver {
 public:
  virtual ~Driver() = default;
  /// Takes one request; at most capacity() may be in flight. What the system refuses comes back as
  /// a completion.
  virtual void start(const RawRequest& request) = 0;
  /// Hands what start() took to the system, then fills `out` with completions and returns their
  /// number. Waits for the first one at most `microseconds`; returns early, with none, after
  /// wake(), also if that came before the call, and may do so for no reason.
  virtual std::size_t reap(std::span<RawCompletion> out, std::int64_t microseconds) = 0;
  virtual void wake() noexcept = 0;
  [[nodiscard]] virtual int capacity() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;  // "io_uring, registered buffers"
};

struct DriverOptions {
  IoBackendKind backend = IoBackendKind::automatic;
  std::vector<int> files;        // descriptors; the caller's, open for the driver's whole life
  std::span<std::byte> buffers;  // memory of most requests, to be registered
  std::int64_t block_bytes = std::int64_t{1} << 20;
  int depth = 8;
  int rank = 0;  // for log lines
};

struct ChosenDriver {
  std::unique_ptr<Driver> driver;
  std::int64_t block_bytes = 0;  // what one request should move at most
};

/// Makes the driver that was asked for, or the next simpler one that the system allows; says once
/// a process why. With the test hook's decorator around it. Throws std::system_error if threads
/// cannot be started.
ChosenDriver make_driver(const DriverOptions& options);

/// Why io_uring cannot be used in this process; "" if it can.
std::string io_uring_refusal();

/// For tests: stands between the backend and every driver that is made from now on, in any thread.
/// An empty function ends it.
using DriverDecorator =
    std::function<std::unique_ptr<Driver>(std::unique_ptr<Driver> driver, int rank)>;
void set_driver_decorator(DriverDecorator decorator);

}  // namespace zshard::offload
