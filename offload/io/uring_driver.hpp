// io_uring through liburing: one ring, registered buffers and files where the system allows them.
#pragma once

#include <memory>
#include <string>

#include "offload/io/driver.hpp"

namespace zshard::offload {

/// Null, with the reason, where the build has no liburing or the system refuses rings.
std::unique_ptr<Driver> make_uring_driver(const DriverOptions& options, std::string& reason);

}  // namespace zshard::offload
