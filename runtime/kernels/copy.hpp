// A copy of memory that is larger than the caches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zshard::kernels {

/// memcpy, faster where the memory is the limit. The memories do not overlap.
void copy(void* target, const void* source, std::int64_t bytes);

/// Orders stores that went around the caches before whatever says that they are there.
void finish_streaming();

}  // namespace zshard::kernels
