// io_uring through liburing: one ring, registered buffers and files where the system allows them.
#pragma once

#include <memory>
#include <string>

#include "offload/io/driver.hpp"

namespace zshard::offload {

/// Entries of a ring beside those of requests: the wake-up, and the time limit of kernels that take
/// it as a request.
inline constexpr unsigned kOwnEntries = 2;

/// Null, with the reason, where the build has no liburing or the system refuses rings.
std::unique_ptr<Driver> make_uring_driver(const DriverOptions& options, std::string& reason);

}  // namespace zshard::offload
