// How processes of one machine that are ranks of one job find each other: rank 0 listens on an
// abstract Unix socket named after the job, the others connect. The sockets stay open to pass file
// descriptors; they leave nothing in the file system. Only processes of the same user are let in.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/base/descriptor.hpp"
#include "runtime/comm/launcher.hpp"

namespace zshard::comm {

class Rendezvous {
 public:
  /// Returns once all ranks have joined. Throws CommError, on every rank that has come so far, for
  /// a rank that is taken twice, a world size that differs, or ranks that do not come within the
  /// deadline (all are named).
  static std::unique_ptr<Rendezvous> join(const Placement& place, double deadline_seconds);

  /// Collective: gives one descriptor and a number, gets those of all ranks in rank order. Throws
  /// CommError.
  struct Passed {
    base::Descriptor descriptor;
    std::uint64_t number = 0;
  };
  std::vector<Passed> pass(const base::Descriptor& mine, std::uint64_t number);

  /// False once the process of rank r has ended. Costs a system call.
  [[nodiscard]] bool alive(int r) const;
  [[nodiscard]] pid_t process(int r) const { return pids_[static_cast<std::size_t>(r)]; }
  [[nodiscard]] int rank() const { return place_.rank; }
  [[nodiscard]] int world() const { return place_.world; }
  [[nodiscard]] double deadline_seconds() const { return deadline_; }

 private:
  Rendezvous(Placement place, double deadline) : place_(std::move(place)), deadline_(deadline) {}
  void listen_for_all();
  void find_rank_zero();
  void watch();

  Placement place_;
  double deadline_;
  std::vector<base::Descriptor> sockets_;  // rank 0: one a peer; others: [0] leads to rank 0
  std::vector<pid_t> pids_;
  std::vector<base::Descriptor> pidfds_;
};

}  // namespace zshard::comm
