// Ranks as threads of one process: they see each other's memory as it is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/control.hpp"
#include "runtime/comm/group.hpp"

namespace zshard::comm {

class ThreadWorld;

/// One rank of a ThreadWorld. leave() is called by run_ranks when the rank's function has ended.
class ThreadGroup final : public Group {
 public:
  ThreadGroup(std::shared_ptr<ThreadWorld> world, int rank);
  ~ThreadGroup() override;

  int rank() const override { return rank_; }
  int size() const override;
  double deadline_seconds() const override;
  void limit_deadline(double seconds) override;
  void lift_deadline(double seconds) noexcept override;
  void exchange(const ControlSignature& signature, const void* mine, void* all) override;
  void broadcast(const ControlSignature& signature, void* data) override;
  std::shared_ptr<memory::Arena> make_arena(std::int64_t bytes) override;
  std::vector<std::shared_ptr<memory::Arena>> share(std::shared_ptr<memory::Arena> mine) override;
  std::optional<std::string> gone(int r) const override;
  std::optional<Operation> inside(int r) const override;
  void breaks(const std::string& cause) override;
  int ranks_here() const override { return size(); }
  void fails() noexcept override;

  void leave(const std::string& reason);
  /// When fails() was called first since the last collective call: nanoseconds of steady_clock; 0
  /// if not.
  [[nodiscard]] std::int64_t failing_since() const;

 private:
  std::shared_ptr<ThreadWorld> world_;
  int rank_;
  Control control_;
};

std::shared_ptr<ThreadWorld> make_thread_world(int size, double deadline_seconds);

}  // namespace zshard::comm
