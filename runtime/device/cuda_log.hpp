// The plug-in's log is the program's: this gives it the program's functions, so that levels and the
// sink are those that the user set. Of the plug-in's sources only.
#pragma once

#include "runtime/base/log.hpp"

namespace zshard::device {

using LogEnabled = bool (*)(base::Topic topic, base::LogLevel level) noexcept;
using LogLine = void (*)(base::LogLevel level, base::Topic topic, int rank,
                         std::string_view message) noexcept;

/// Before this, nothing is logged.
void set_log(LogEnabled enabled, LogLine line) noexcept;

}  // namespace zshard::device
