#include "runtime/comm/launcher.hpp"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>

#include "zshard/error.hpp"
#include "zshard/options.hpp"

namespace zshard::comm {
namespace {

constexpr int kMostRanks = 1024;

struct Family {
  const char* launcher;
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;  // must equal the world where it is set: one machine
  const char* job;          // names the job; null: the process that started the ranks
};

constexpr Family kFamilies[] = {
    {"torchrun-style variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     "MASTER_PORT"},
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr},
    {"srun (Slurm)", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr,
     "SLURM_JOB_ID"},
};

const char* value_of(const char* name) {
  const char* text = name == nullptr ? nullptr : std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

std::optional<int> whole(const char* text) {
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

int number(const char* name, int low, int high) {
  const char* text = value_of(name);
  if (text == nullptr)
    throw UsageError(std::string(name) + " is not set, but its launcher's other variables are");
  const std::optional<int> value = whole(text);
  if (!value || *value < low || *value > high) {
    throw UsageError(std::string(name) + "=" + text + ": must be a whole number from " +
                     std::to_string(low) + " to " + std::to_string(high));
  }
  return *value;
}

/// The contents of a file of /proc; "" where it cannot be read.
std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Whether a process was started with this variable set to what it is here.
bool has_ours(const std::string& environment, const char* name) {
  const std::string entry = std::string(name) + "=" + std::getenv(name);
  return ('\0' + environment + '\0').find('\0' + entry + '\0') != std::string::npos;
}

/// The launcher's process, the same one for all ranks: the nearest ancestor that was not started as
/// this rank. Scripts that start the program stand between.
pid_t starter(const Family& family) {
  pid_t ancestor = getppid();
  while (ancestor > 1) {
    const std::string proc = "/proc/" + std::to_string(ancestor);
    const std::string environment = contents(proc + "/environ");
    if (!has_ours(environment, family.rank) || !has_ours(environment, family.world)) break;
    // "PID (NAME) STATE PARENT ...", and a name may hold anything.
    const std::string stat = contents(proc + "/stat");
    const std::size_t name_end = stat.rfind(") ");
    if (name_end == std::string::npos || name_end + 4 > stat.size()) break;
    ancestor = static_cast<pid_t>(std::strtol(stat.c_str() + name_end + 4, nullptr, 10));
  }
  return ancestor;
}

/// One launcher may start another, so families may differ. But torchrun-style variables are also
/// what a person exports and forgets: a rank alone where another launcher has several would train
/// by itself without a word, and another rank of as many would wait for its own double.
void refuse_contradictions(const Family& chosen, const Placement& place) {
  if (&chosen != &kFamilies[0]) return;
  for (const Family& other : kFamilies) {
    const char* const world_text = value_of(other.world);
    const char* const rank_text = value_of(other.rank);
    if (&other == &chosen || world_text == nullptr || rank_text == nullptr) continue;
    const std::optional<int> world = whole(world_text);
    const std::optional<int> rank = whole(rank_text);
    if (!world || !rank || *world <= 1) continue;
    if (place.world != 1 && (*world != place.world || *rank == place.rank)) continue;
    throw UsageError(std::string(chosen.rank) + "=" + std::to_string(place.rank) + " of " +
                     chosen.world + "=" + std::to_string(place.world) + ", but " + other.rank +
                     "=" + rank_text + " of " + other.world + "=" + world_text +
                     ": two launchers say which rank this is; unset the variables of one");
  }
}

}  // namespace

std::optional<Placement> placement_from_environment() {
  for (const Family& family : kFamilies) {
    const bool slurm = std::string_view(family.rank) == "SLURM_PROCID";
    // A batch script of Slurm has SLURM_PROCID too; only a step has a number of tasks.
    if (value_of(family.world) == nullptr && (slurm || value_of(family.rank) == nullptr)) continue;
    Placement place;
    place.launcher = family.launcher;
    place.world = number(family.world, 1, kMostRanks);
    place.rank = number(family.rank, 0, kMostRanks - 1);
    if (place.rank >= place.world) {
      throw UsageError(std::string(family.rank) + "=" + std::to_string(place.rank) +
                       " is not below " + family.world + "=" + std::to_string(place.world));
    }
    refuse_contradictions(family, place);
    place.local_rank = value_of(family.local_rank) == nullptr
                           ? place.rank
                           : number(family.local_rank, 0, place.world - 1);
    if (value_of(family.local_world) != nullptr) {
      const int local = number(family.local_world, 1, kMostRanks);
      if (local != place.world) {
        throw UsageError(std::string(family.local_world) + "=" + std::to_string(local) + " but " +
                         family.world + "=" + std::to_string(place.world) +
                         ": ranks on several machines are not served by this version");
      }
    }
    if (slurm && value_of("SLURM_STEP_NUM_NODES") != nullptr &&
        number("SLURM_STEP_NUM_NODES", 1, 1 << 20) > 1) {
      throw UsageError(
          "SLURM_STEP_NUM_NODES > 1: ranks on several machines are not served by this version");
    }
    if (family.job != nullptr) {
      const char* job = value_of(family.job);
      if (job == nullptr && place.world > 1) {
        throw UsageError(std::string(family.job) +
                         " is not set; it tells jobs on one machine apart");
      }
      place.job = job == nullptr ? "" : job;
      if (slurm && value_of("SLURM_STEP_ID") != nullptr)
        place.job += std::string(".") + value_of("SLURM_STEP_ID");
    } else {
      place.job = "parent." + std::to_string(starter(family));
    }
    return place;
  }
  return std::nullopt;
}

double deadline_from_environment() {
  EngineOptions options;
  if (const char* text = value_of("ZSHARD_DEADLINE_SECONDS"))
    set_option(options, "deadline_seconds", text);
  return options.deadline_seconds;
}

}  // namespace zshard::comm
