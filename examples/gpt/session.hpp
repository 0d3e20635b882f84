// The whole run of the program: checks the machine, trains, reports.
#pragma once

#include "config.hpp"
#include "data.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// Throws ConfigError if `local_ranks` ranks, of `world` in all, take more memory than this machine
/// has left, which is better than being killed in the middle; or if a batch is too large for BLAS.
void check_memory(const Config& config, const Dataset& data, int local_ranks, int world);

/// Trains on one rank; every rank calls it. Rank 0 prints and logs.
void run_session(const Config& config, const Dataset& data, const zshard::ProcessGroup& group);

}  // namespace gpt
