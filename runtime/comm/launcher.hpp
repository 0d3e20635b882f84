// Which rank this process is, from the variables that launchers set.
#pragma once

#include <optional>
#include <string>

namespace zshard::comm {

/// A process' place in its job.
struct Placement {
  int rank = 0;
  int world = 1;
  int local_rank = 0;    // among the ranks of this machine, as the launcher counts them
  std::string launcher;  // "torchrun-style variables", "mpirun", ...; for messages
  std::string job;  // the same text on every rank of the job and on no other job of this machine
};

/// Reads RANK, WORLD_SIZE (torchrun style), OMPI_COMM_WORLD_* (Open MPI), PMI_* (MPICH), SLURM_*:
/// the first family of which any variable is set counts. nullopt: no launcher. UsageError for a
/// family that is incomplete, is no number, has rank or local rank >= world, a world above 1024, or
/// ranks on several machines, and for torchrun-style variables that another launcher's contradict:
/// a rank alone where that has several, or another rank of as many.
std::optional<Placement> placement_from_environment();

/// ZSHARD_DEADLINE_SECONDS, or 600. UsageError if it makes no sense.
double deadline_from_environment();

}  // namespace zshard::comm
