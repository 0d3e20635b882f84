// The exported functions of libgpt_cuda.so. Both throw zshard::DeviceError if the GPU cannot be
// used, and take the GPU's number on this machine, or -1 for the local rank modulo the GPUs.
#pragma once

#include <cstdint>

#include "gpt/compute.hpp"

/// A Compute on a stream of its own; the caller deletes it. bf16: matrix products round their
/// operands to bf16 and sum in fp32, for models whose parameters are bf16.
extern "C" gpt::Compute* gpt_cuda_compute(int ordinal, int local_rank, bool bf16);

/// name: of `name_bytes` bytes, ended by a zero.
extern "C" void gpt_cuda_facts(int ordinal, int local_rank, char* name, int name_bytes, int* gpus,
                               std::int64_t* free_bytes, std::int64_t* total_bytes);
