// What the system says when a call fails.
#pragma once

#include <string>

namespace zshard::base {

/// The text and number of errno value 'error', followed by the limit to raise where the system
/// names one: "Too many open files (errno 24); raise the limit of open files (ulimit -n)".
std::string system_reason(int error);

}  // namespace zshard::base
