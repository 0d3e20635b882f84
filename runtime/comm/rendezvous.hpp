// How processes of one machine that are ranks of one job find each other: rank 0 listens on an
// abstract Unix socket named after the job, the others connect. The sockets stay open to pass file
// descriptors; they leave nothing in the file system. Only processes of the same user are let in.
#pragma once

#include <sys/types.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/descriptor.hpp"
#include "runtime/comm/launcher.hpp"
#include "zshard/error.hpp"

namespace zshard::comm {

class Rendezvous {
 public:
  /// Returns once all ranks have joined. Throws CommError, on every rank that has come so far, for
  /// a rank that is taken twice, a world size that differs, or ranks that do not come within the
  /// deadline (all are named).
  static std::unique_ptr<Rendezvous> join(const Placement& place, double deadline_seconds);

  /// Collective: returns if every rank gives null, else throws on every rank: its own error, or
  /// that of the first rank that has one, as OutOfMemory or CommError.
  void settle(const std::exception_ptr& own);

  struct Passed {
    base::Descriptor descriptor;
    std::uint64_t number = 0;
  };
  /// Collective: gives one descriptor and a number, and calls use() with those of all ranks in rank
  /// order. Returns on every rank or throws on every rank, as settle() does.
  void pass(const base::Descriptor& mine, std::uint64_t number,
            const std::function<void(std::vector<Passed>&)>& use);

  /// False once the process of rank r has ended. Costs a system call.
  [[nodiscard]] bool alive(int r) const;
  [[nodiscard]] pid_t process(int r) const { return pids_[static_cast<std::size_t>(r)]; }
  [[nodiscard]] int rank() const { return place_.rank; }
  [[nodiscard]] int local_rank() const { return place_.local_rank; }
  [[nodiscard]] int world() const { return place_.world; }

 private:
  Rendezvous(Placement place, double deadline) : place_(std::move(place)), deadline_(deadline) {}
  class Deadline;
  void listen_for_all();
  [[nodiscard]] base::Descriptor make_listener(const Deadline& deadline) const;
  /// Hears who has connected: one of the ranks, or a stranger.
  void admit(base::Descriptor peer);
  [[nodiscard]] std::string absent() const;  // ranks that have not joined
  [[noreturn]] void give_up(const std::string& reason) const;
  void find_rank_zero();
  void watch();
  /// From rank r: rank 0 hears all, the others hear rank 0. A rank that does not answer in time is
  /// not waited for again. Throws CommError.
  void receive(int r, double seconds, void* data, std::size_t bytes,
               std::vector<base::Descriptor>* descriptors = nullptr, std::size_t count = 0);
  void give_all(int r, const std::vector<Passed>& all);
  void take_all(std::vector<Passed>* all);
  /// An error of the call that has just failed (errno).
  [[nodiscard]] CommError lost(int r, const std::string& what) const;
  Placement place_;
  double deadline_;
  std::vector<base::Descriptor> sockets_;  // rank 0: one a peer; others: [0] leads to rank 0
  std::vector<pid_t> pids_;
  std::vector<base::Descriptor> pidfds_;
};

}  // namespace zshard::comm
