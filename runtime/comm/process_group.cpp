#include "zshard/process_group.hpp"

#include <chrono>
#include <cmath>
#include <exception>
#include <thread>
#include <utility>

#include "runtime/base/system_reason.hpp"
#include "runtime/comm/group.hpp"
#include "runtime/comm/launcher.hpp"
#include "runtime/comm/machine_group.hpp"
#include "runtime/comm/thread_group.hpp"
#include "zshard/error.hpp"

namespace zshard {
namespace {

using comm::ControlSignature;
using comm::Operation;

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<comm::Group> group)
    : group_(std::move(group)), axes_{{"world", group_->size()}} {}

ProcessGroup ProcessGroup::single() {
  return ProcessGroup(comm::make_single_group());
}

ProcessGroup ProcessGroup::from_environment() {
  const std::optional<comm::Placement> place = comm::placement_from_environment();
  if (!place || place->world == 1) return single();
  return ProcessGroup(
      std::make_shared<comm::MachineGroup>(*place, comm::deadline_from_environment()));
}

int ProcessGroup::rank() const {
  return group_->rank();
}
int ProcessGroup::size() const {
  return group_->size();
}
int ProcessGroup::local_rank() const {
  return group_->local_rank();
}

void ProcessGroup::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) const {
  if (all.size() != mine.size() * static_cast<std::size_t>(size())) {
    throw UsageError("all_gather: `all` has " + std::to_string(all.size()) + " bytes, needs " +
                     std::to_string(size()) + " x " + std::to_string(mine.size()));
  }
  group_->exchange({Operation::all_gather, 0, mine.size(), 0}, mine.data(), all.data());
}

void ProcessGroup::broadcast(std::span<std::byte> data, int root) const {
  if (root < 0 || root >= size()) {
    throw UsageError("broadcast: root " + std::to_string(root) + " is not a rank of a group of " +
                     std::to_string(size()));
  }
  group_->broadcast({Operation::broadcast, root, data.size(), 0}, data.data());
}

void ProcessGroup::barrier() const {
  group_->exchange({Operation::barrier, 0, 0, 0}, nullptr, nullptr);
}

ProcessGroup ProcessGroup::mesh(std::vector<MeshAxis> axes) const {
  if (axes.size() != 1) {
    throw UsageError("mesh: " + std::to_string(axes.size()) +
                     " axes; this version serves one axis of the world's size");
  }
  if (axes[0].size != size()) {
    throw UsageError("mesh: axis " + axes[0].name + " has size " + std::to_string(axes[0].size) +
                     ", the group has " + std::to_string(size()) + " ranks");
  }
  ProcessGroup copy = *this;
  copy.axes_ = std::move(axes);
  return copy;
}

const std::vector<MeshAxis>& ProcessGroup::axes() const {
  return axes_;
}

void run_ranks(int n, const std::function<void(ProcessGroup)>& fn, RunOptions options) {
  if (n < 1 || n > 1024) {
    throw UsageError("run_ranks: n is " + std::to_string(n) + ", must be 1 to 1024");
  }
  if (!std::isfinite(options.deadline_seconds) || options.deadline_seconds <= 0) {
    throw UsageError("run_ranks: deadline_seconds must be positive and finite");
  }
  if (!fn) throw UsageError("run_ranks: no function");
  const auto world = comm::make_thread_world(n, options.deadline_seconds);
  struct Failure {
    std::exception_ptr error;
    std::int64_t time = 0;
  };
  std::vector<Failure> failures(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  // An exception is caught here only after destructors have told the peers, whose CommErrors may
  // be caught before it: it counts from when they were told.
  const auto note = [&](const comm::ThreadGroup& group, bool consequence) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::int64_t time = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    if (!consequence && group.failing_since() != 0) time = group.failing_since();
    failures[static_cast<std::size_t>(group.rank())] = {std::current_exception(), time};
  };
  const auto body = [&](int rank) {
    const auto group = std::make_shared<comm::ThreadGroup>(world, rank);
    std::string reason = "its function has returned";
    try {
      fn(ProcessGroup(group));
    } catch (const std::exception& error) {
      note(*group, dynamic_cast<const CommError*>(&error) != nullptr);
      reason = std::string("it threw: ") + error.what();
    } catch (...) {
      note(*group, false);
      reason = "it threw something that is no std::exception";
    }
    group->leave(reason);
  };
  threads.reserve(static_cast<std::size_t>(n));
  try {
    for (int rank = 0; rank < n; ++rank) threads.emplace_back(body, rank);
  } catch (const std::system_error& error) {
    // The ranks that run would wait for those that cannot start.
    for (int rank = static_cast<int>(threads.size()); rank < n; ++rank) {
      comm::ThreadGroup(world, rank)
          .leave(std::string("its thread could not start: ") + error.what());
    }
    for (std::thread& thread : threads) thread.join();
    throw OutOfMemory("run_ranks: cannot start a thread for each rank, " + std::to_string(n) +
                      " in all: " + base::system_reason(error.code().value()) +
                      "; raise the limits (ulimit -u, ulimit -v)");
  }
  for (std::thread& thread : threads) thread.join();
  const Failure* first = nullptr;
  for (const Failure& failure : failures) {
    if (failure.error == nullptr) continue;
    if (first == nullptr || failure.time < first->time) first = &failure;
  }
  if (first != nullptr) std::rethrow_exception(first->error);
}

}  // namespace zshard
