#include "offload/io/driver.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "offload/io/posix_driver.hpp"
#include "offload/io/uring_driver.hpp"
#include "runtime/base/log.hpp"

namespace zshard::offload {
namespace {

std::mutex decorator_mutex;
DriverDecorator& decorator() {
  static DriverDecorator instance;
  return instance;
}

/// True the first time that a process asks.
bool first(std::atomic_flag& said) {
  return !said.test_and_set();
}

void say_refused(IoBackendKind asked, int rank, const std::string& reason) {
  static std::atomic_flag said_asked;
  static std::atomic_flag said_automatic;
  if (asked == IoBackendKind::io_uring) {
    if (first(said_asked)) {
      base::log_warning(base::Topic::offload, rank,
                        "io_backend = io_uring cannot be had: {}. Using posix: same bits.", reason);
    }
  } else if (first(said_automatic)) {
    base::log_info(base::Topic::offload, rank, "io_backend = auto takes posix: {}", reason);
  }
}

ChosenDriver choose(const DriverOptions& options) {
  if (options.backend != IoBackendKind::posix) {
    std::string reason;
    if (auto driver = make_uring_driver(options, reason)) {
      static std::atomic_flag said;
      if (first(said))
        base::log_info(base::Topic::offload, options.rank, "I/O by {}", driver->name());
      return {std::move(driver), options.block_bytes};
    }
    say_refused(options.backend, options.rank, reason);
  }
  return {make_posix_driver(options.files, posix_threads(options.block_bytes, options.depth)),
          std::max(options.block_bytes, kPosixBlock)};
}

}  // namespace

ChosenDriver make_driver(const DriverOptions& options) {
  ChosenDriver chosen = choose(options);
  DriverDecorator decorate;
  {
    const std::lock_guard lock(decorator_mutex);
    decorate = decorator();
  }
  if (decorate) chosen.driver = decorate(std::move(chosen.driver), options.rank);
  return chosen;
}

void set_driver_decorator(DriverDecorator next) {
  const std::lock_guard lock(decorator_mutex);
  decorator() = std::move(next);
}

}  // namespace zshard::offload
