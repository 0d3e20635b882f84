// Ranks as processes of one machine: each shows its memory as a sealed memfd, passed over the
// rendezvous' sockets, so that peers read it as threads would.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/control.hpp"
#include "runtime/comm/group.hpp"
#include "runtime/comm/rendezvous.hpp"

namespace zshard::comm {

class MachineGroup final : public Group {
 public:
  /// Collective: meets the other processes. Throws CommError.
  MachineGroup(const Placement& place, double deadline_seconds);
  /// Peers see that this rank has left.
  ~MachineGroup() override;

  int rank() const override { return rendezvous_->rank(); }
  int local_rank() const override { return rendezvous_->local_rank(); }
  int size() const override { return rendezvous_->world(); }
  double deadline_seconds() const override { return control_->deadline_seconds(); }
  void limit_deadline(double seconds) override { control_->limit_deadline(seconds); }
  void lift_deadline(double seconds) noexcept override { control_->lift_deadline(seconds); }
  void exchange(const ControlSignature& signature, const void* mine, void* all) override;
  void broadcast(const ControlSignature& signature, void* data) override;
  std::shared_ptr<memory::Arena> make_arena(std::int64_t bytes) override;
  std::vector<std::shared_ptr<memory::Arena>> share(std::shared_ptr<memory::Arena> mine) override;
  std::optional<std::string> gone(int r) const override;
  std::optional<Operation> inside(int r) const override;
  void breaks(const std::string& cause) override;
  int ranks_here() const override { return size(); }

 private:
  std::vector<std::shared_ptr<memory::Arena>> pass(std::shared_ptr<memory::Arena> mine);

  std::unique_ptr<Rendezvous> rendezvous_;
  std::shared_ptr<memory::Arena> board_;  // rank 0's memory
  std::unique_ptr<Control> control_;
};

}  // namespace zshard::comm
