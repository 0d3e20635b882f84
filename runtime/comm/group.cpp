#include "runtime/comm/group.hpp"

#include <utility>

namespace zshard::comm {

std::string to_string(Operation operation) {
  switch (operation) {
    case Operation::all_gather:
      return "all_gather";
    case Operation::broadcast:
      return "broadcast";
    case Operation::barrier:
      return "barrier";
    case Operation::construct:
      return "construction of an engine";
    case Operation::share:
      return "sharing of memory";
    case Operation::read:
      return "a read of a tensor";
    case Operation::write:
      return "a write of a tensor";
    case Operation::initialize:
      return "initialize";
    case Operation::step:
      return "the end of a step from nvme";
  }
  return "?";
}

std::shared_ptr<memory::Arena> Group::make_board_memory(std::uint64_t signatures,
                                                        std::size_t payload_bytes) {
  const std::size_t bytes = Board::bytes(size(), signatures, payload_bytes);
  return make_arena(rank() == 0 ? static_cast<std::int64_t>(bytes) : 64);
}

std::shared_ptr<Board> Group::make_board(std::shared_ptr<memory::Arena> memory,
                                         std::uint64_t signatures, std::size_t payload_bytes) {
  std::shared_ptr<memory::Arena> used = share(std::move(memory))[0];
  return std::make_shared<Board>(std::move(used), size(), signatures, payload_bytes);
}

}  // namespace zshard::comm
