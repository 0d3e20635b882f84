// pread and pwrite on a pool of threads: works everywhere.
#pragma once

#include <memory>

#include "offload/io/driver.hpp"

namespace zshard::offload {

/// Blocks of the POSIX driver: threads cost more than entries of a ring, so that fewer and larger
/// requests are in flight.
inline constexpr std::int64_t kPosixBlock = std::int64_t{4} << 20;

/// Threads that have as many bytes in flight, in blocks of at least kPosixBlock, as `depth`
/// requests of block_bytes.
int posix_threads(std::int64_t block_bytes, int depth);

/// `threads` requests run at a time, and as many more may wait. Throws std::system_error.
std::unique_ptr<Driver> make_posix_driver(std::vector<int> files, int threads);

}  // namespace zshard::offload
