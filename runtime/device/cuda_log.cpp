#include "runtime/device/cuda_log.hpp"

#include <atomic>

namespace zshard {

namespace device {

namespace {
std::atomic<LogEnabled> host_enabled{nullptr};
std::atomic<LogLine> host_line{nullptr};
}  // namespace

void set_log(LogEnabled enabled, LogLine line) noexcept {
  host_line.store(line);
  host_enabled.store(enabled);
}

}  // namespace device

namespace base {

// These two take the place of runtime/base/log.cpp's in the plug-in: the linker finds them first.

bool log_enabled(Topic topic, LogLevel level) noexcept {
  const device::LogEnabled enabled = device::host_enabled.load();
  return enabled != nullptr && enabled(topic, level);
}

void log_line(LogLevel level, Topic topic, int rank, std::string_view message) noexcept {
  if (const device::LogLine line = device::host_line.load()) line(level, topic, rank, message);
}

}  // namespace base

}  // namespace zshard
