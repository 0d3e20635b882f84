// The ranks as the library sees them: a control plane for rare collectives (construction, reads and
// writes of whole tensors, the user's own barrier), and what an engine needs to build its data
// plane on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/comm/board.hpp"
#include "runtime/memory/arena.hpp"

namespace zshard::comm {

/// Which control collective; all ranks must make the same one.
enum class Operation : std::uint8_t {
  all_gather,
  broadcast,
  barrier,
  construct,
  share,
  read,
  write,
  initialize,
  step,
};
std::string to_string(Operation operation);

/// What is compared before a control collective moves data. tag: whatever else must agree, hashed
/// by the caller.
struct ControlSignature {
  Operation operation = Operation::barrier;
  std::int32_t root = 0;
  std::uint64_t bytes = 0;
  std::uint64_t tag = 0;
  friend bool operator==(const ControlSignature&, const ControlSignature&) = default;
};

/// One rank's end. Collectives are made by one thread of the rank at a time. CommError, on every
/// rank and with both ranks named, if signatures differ; with the missing rank named, if one is
/// gone or later than the deadline.
class Group {
 public:
  virtual ~Group() = default;
  [[nodiscard]] virtual int rank() const = 0;
  /// Among the ranks of this machine, as its launcher counts them: which GPU is its own.
  [[nodiscard]] virtual int local_rank() const { return rank(); }
  [[nodiscard]] virtual int size() const = 0;
  /// How long calls wait for a slow rank.
  [[nodiscard]] virtual double deadline_seconds() const = 0;
  /// Until the same number is lifted, calls wait no longer than this either.
  virtual void limit_deadline(double /*seconds*/) {}
  virtual void lift_deadline(double /*seconds*/) noexcept {}

  /// all[r * bytes ...) = rank r's `mine`; signature.bytes is the size. all may be null for a
  /// barrier of 0 bytes.
  virtual void exchange(const ControlSignature& signature, const void* mine, void* all) = 0;
  /// data of signature.root on every rank.
  virtual void broadcast(const ControlSignature& signature, void* data) = 0;
  /// Memory that share() can show to peers. Not collective. Throws OutOfMemory.
  virtual std::shared_ptr<memory::Arena> make_arena(std::int64_t bytes) = 0;
  /// Collective: every rank's arena of make_arena, in rank order, as this rank can address it.
  /// Peers' memory stays mapped while held.
  virtual std::vector<std::shared_ptr<memory::Arena>> share(
      std::shared_ptr<memory::Arena> mine) = 0;
  /// Why rank r will make no further call; nullopt while it may.
  [[nodiscard]] virtual std::optional<std::string> gone(int r) const = 0;
  /// This rank is on its way out by an exception. Called before peers can notice it, so that the
  /// cause can be told from what it causes.
  virtual void fails() noexcept {}
  /// The control collective that rank r is in now; nullopt: in none. From any thread.
  [[nodiscard]] virtual std::optional<Operation> inside(int /*r*/) const { return std::nullopt; }
  /// Makes every rank's present and later control collectives throw CommError with this cause.
  virtual void breaks(const std::string& /*cause*/) {}
  /// Ranks of this group on this machine: they share its memory and cores.
  [[nodiscard]] virtual int ranks_here() const = 0;

  /// What make_board() takes; not collective. Every rank offers memory, since share() is symmetric.
  /// Throws OutOfMemory.
  std::shared_ptr<memory::Arena> make_board_memory(std::uint64_t signatures,
                                                   std::size_t payload_bytes);
  /// Collective: one board for all ranks, in memory of rank 0.
  std::shared_ptr<Board> make_board(std::shared_ptr<memory::Arena> memory, std::uint64_t signatures,
                                    std::size_t payload_bytes);
  std::shared_ptr<Board> make_board(std::uint64_t signatures, std::size_t payload_bytes) {
    return make_board(make_board_memory(signatures, payload_bytes), signatures, payload_bytes);
  }
};

/// A group of one rank, in this thread.
std::shared_ptr<Group> make_single_group();

}  // namespace zshard::comm
