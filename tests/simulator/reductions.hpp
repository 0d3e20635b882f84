// Element types of NCCL and their reductions.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace simulator {

/// Bytes of one element; 0 for what is no type that can be moved.
std::size_t size_of(ncclDataType_t type);
/// Whether `type` and `op` can be reduced here.
bool can_reduce(ncclDataType_t type, ncclRedOp_t op);

/// out[i] = sources[first][i] op sources[first + 1][i] op ..., round the ring of all sources, each
/// partial result rounded to the type. out overlaps no source.
void reduce(const std::vector<const std::byte*>& sources, std::size_t first, std::byte* out,
            std::size_t count, ncclDataType_t type, ncclRedOp_t op);

}  // namespace simulator
