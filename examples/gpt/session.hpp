// The whole run of the program: checks the machine, trains, reports.
#pragma once

#include "config.hpp"
#include "data.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// Throws ConfigError if `local_ranks` ranks from local rank `first_local_rank` on, of `world` in
/// all, take more memory than this machine or a GPU of it has left, which is better than being
/// killed in the middle; if a batch is too large for BLAS; or if there is no GPU where one is asked
/// for.
void check_machine(const Config& config, const Dataset& data, int first_local_rank, int local_ranks,
                   int world);

/// Trains on one rank; every rank calls it. Rank 0 prints and logs.
void run_session(const Config& config, const Dataset& data, const zshard::ProcessGroup& group);

}  // namespace gpt
