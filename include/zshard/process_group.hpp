// The ranks that train together. A rank is a thread of one process, or a process.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zshard {

namespace comm {
class Group;
}

/// One axis of the mesh that the ranks form; the product of all sizes is the world size. Outermost
/// first.
struct MeshAxis {
  std::string name;
  int size = 1;
};

/// One rank's handle to its group. Copies refer to the same rank. Calls are collective: every rank
/// makes the same ones in the same order, from one thread at a time; a different call, size or root
/// is a CommError on every rank that names both. A rank that is gone or slower than the deadline is
/// a CommError that names it.
class ProcessGroup {
 public:
  /// The group that the launcher's environment describes: processes of one machine started by
  /// torchrun (RANK, WORLD_SIZE, MASTER_PORT), mpirun, mpiexec or srun. Collective: returns when
  /// all have come. Without a launcher, or in a world of 1, a group of one rank. UsageError for
  /// variables that make no sense, CommError for ranks that do not come within
  /// ZSHARD_DEADLINE_SECONDS (600).
  static ProcessGroup from_environment();
  /// A group of one rank.
  static ProcessGroup single();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// The rank's number on its machine, as its launcher counts (LOCAL_RANK and the like), else
  /// rank(). The engine's GPU is this modulo the GPUs, unless device_index says another.
  [[nodiscard]] int local_rank() const;

  /// all[r * mine.size() ... ) = rank r's `mine`. Throws UsageError if all.size() != size() *
  /// mine.size().
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) const;
  /// Copies root's bytes to every rank.
  void broadcast(std::span<std::byte> data, int root) const;
  /// Returns when every rank has called it.
  void barrier() const;

  /// The same ranks seen as a mesh. One axis of the world's size is served; several axes are a
  /// UsageError in this version.
  [[nodiscard]] ProcessGroup mesh(std::vector<MeshAxis> axes) const;
  [[nodiscard]] const std::vector<MeshAxis>& axes() const;

  explicit ProcessGroup(std::shared_ptr<comm::Group> group);
  [[nodiscard]] const std::shared_ptr<comm::Group>& implementation() const { return group_; }

 private:
  std::shared_ptr<comm::Group> group_;
  std::vector<MeshAxis> axes_;
};

/// Settings of run_ranks.
struct RunOptions {
  /// How long the group's own calls and the construction of engines wait for a slow rank. While an
  /// engine lives, the group's calls wait no longer than its EngineOptions::deadline_seconds.
  double deadline_seconds = 600.0;
};

/// Runs fn(group) on n threads, one a rank, and returns when all have ended. If ranks threw,
/// rethrows the error that came first in time: the cause, not the CommErrors it caused on the
/// others. Throws UsageError if n < 1 or n > 1024.
void run_ranks(int n, const std::function<void(ProcessGroup)>& fn, RunOptions options = {});

}  // namespace zshard
