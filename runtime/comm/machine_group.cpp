#include "runtime/comm/machine_group.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <utility>

#include "zshard/error.hpp"

namespace zshard::comm {

MachineGroup::MachineGroup(const Placement& place, double deadline_seconds)
    : rendezvous_(Rendezvous::join(place, deadline_seconds)) {
  const std::size_t bytes = ControlBoard::bytes(place.world);
  std::shared_ptr<memory::Arena> offered;
  std::exception_ptr own;
  try {
    offered = memory::Arena::make_shared(place.rank == 0 ? static_cast<std::int64_t>(bytes) : 64);
  } catch (...) {
    own = std::current_exception();
  }
  rendezvous_->settle(own);
  board_ = pass(std::move(offered))[0];
  control_ = std::make_unique<Control>(ControlBoard(board_->data(), place.world), place.rank,
                                       deadline_seconds, 2, [this](int r) { return gone(r); });
}

MachineGroup::~MachineGroup() {
  // A forked child's copy must not speak for its parent.
  if (control_ != nullptr && control_->here())
    control_->board().leave(rank(), "it has left its process group");
}

void MachineGroup::exchange(const ControlSignature& signature, const void* mine, void* all) {
  const ControlBoard& board = control_->board();
  std::uint64_t at = 0;
  // A call of any size takes whole chunks; ranks that disagree on the size notice at the first one.
  do {
    const std::size_t part = static_cast<std::size_t>(
        std::min<std::uint64_t>(ControlBoard::kChunk, signature.bytes - at));
    if (part != 0 && !board.broken()) {
      std::memcpy(board.rank(rank()).data.data(), static_cast<const std::byte*>(mine) + at, part);
    }
    // By reference: a function of this size would be put on the heap.
    const auto move = [&] {
      for (int r = 0; r < size() && part != 0; ++r) {
        std::memcpy(
            static_cast<std::byte*>(all) + static_cast<std::uint64_t>(r) * signature.bytes + at,
            board.rank(r).data.data(), part);
      }
    };
    control_->meet(signature, std::cref(move));
    at += part;
  } while (at < signature.bytes);
}

void MachineGroup::broadcast(const ControlSignature& signature, void* data) {
  const ControlBoard& board = control_->board();
  std::uint64_t at = 0;
  do {
    const std::size_t part = static_cast<std::size_t>(
        std::min<std::uint64_t>(ControlBoard::kChunk, signature.bytes - at));
    std::byte* here = static_cast<std::byte*>(data) + at;
    const bool root = signature.root == rank();
    if (root && part != 0 && !board.broken())
      std::memcpy(board.rank(rank()).data.data(), here, part);
    control_->meet(signature, [&] {
      if (!root && part != 0) std::memcpy(here, board.rank(signature.root).data.data(), part);
    });
    at += part;
  } while (at < signature.bytes);
}

std::shared_ptr<memory::Arena> MachineGroup::make_arena(std::int64_t bytes) {
  return memory::Arena::make_shared(std::max<std::int64_t>(bytes, 64));
}

std::vector<std::shared_ptr<memory::Arena>> MachineGroup::pass(
    std::shared_ptr<memory::Arena> mine) {
  std::vector<std::shared_ptr<memory::Arena>> all;
  rendezvous_->pass(
      mine->descriptor(), static_cast<std::uint64_t>(mine->bytes()),
      [&](std::vector<Rendezvous::Passed>& passed) {
        for (std::size_t r = 0; r < passed.size(); ++r) {
          const auto bytes = static_cast<std::int64_t>(passed[r].number);
          all.push_back(static_cast<int>(r) == rank()
                            ? mine
                            : memory::Arena::map(std::move(passed[r].descriptor), bytes));
        }
      });
  return all;
}

std::vector<std::shared_ptr<memory::Arena>> MachineGroup::share(
    std::shared_ptr<memory::Arena> mine) {
  // First the meeting, which has signatures and notices the dead; then the sockets.
  control_->meet({Operation::share, 0, 0, 0}, [] {});
  return pass(std::move(mine));
}

std::optional<Operation> MachineGroup::inside(int r) const {
  return control_->board().inside(r);
}

void MachineGroup::breaks(const std::string& cause) {
  control_->board().breaks(cause);
}

std::optional<std::string> MachineGroup::gone(int r) const {
  if (control_ != nullptr) {
    if (auto reason = control_->board().left(r)) return reason;
  }
  if (rendezvous_->alive(r)) return std::nullopt;
  return "its process " + std::to_string(rendezvous_->process(r)) + " has ended";
}

}  // namespace zshard::comm
