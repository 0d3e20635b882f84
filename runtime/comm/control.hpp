// The control plane's meeting place, and the one algorithm that every control collective runs: come
// to it, compare signatures, move data, finish. Plain words in memory that all ranks see;
// zero-filled memory is a valid start. Lock-free, since a rank may die at any instruction.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/fork.hpp"
#include "runtime/base/futex.hpp"
#include "runtime/comm/group.hpp"

namespace zshard::comm {

class ControlBoard {
 public:
  static constexpr std::size_t kChunk =
      16384;  // bytes a rank can show at a time, where memory is not shared

  struct alignas(64) Rank {
    ControlSignature
        signature;  // written before it arrives, read by peers between arrival and done
    std::atomic<std::uint32_t> arrived{0};  // calls it has come to
    std::atomic<std::uint32_t> done{0};     // calls it has finished
    std::atomic<std::uint32_t> inside{0};   // the operation of the call it is in, + 1; 0: in none
    std::atomic<std::uint32_t> gone{0};     // 1: reason can be read
    std::array<char, 500> reason{};
    alignas(64) std::array<std::byte, kChunk> data{};
  };

  /// memory: bytes(world) of it, zero-filled, 64-byte aligned, not owned.
  ControlBoard(std::byte* memory, int world)
      : header_(reinterpret_cast<Header*>(memory)), world_(world) {}
  static std::size_t bytes(int world) {
    return sizeof(Header) + static_cast<std::size_t>(world) * sizeof(Rank);
  }

  [[nodiscard]] int world() const { return world_; }
  [[nodiscard]] Rank& rank(int r) const { return reinterpret_cast<Rank*>(header_ + 1)[r]; }

  /// Whether a call takes place is decided by one word: either all ranks move its data, or none
  /// does. False: the group has failed.
  bool arrive(Rank& rank, std::uint32_t call) const;
  /// Gives a call up, unless all ranks have come to it by now: false. After a failed call nothing
  /// can complete any more, since counters no longer match. The first cause stays.
  bool give_up(std::uint64_t call, const std::string& cause) const;
  void breaks(const std::string& cause) const;
  [[nodiscard]] bool broken() const;
  /// The first cause of a failure; otherwise: if whoever had it died before it was written.
  [[nodiscard]] std::string why(const std::string& otherwise = "a rank failed") const;
  void leave(int r, const std::string& reason) const;
  /// The call that rank r is in, and that some rank has not finished.
  [[nodiscard]] std::optional<Operation> inside(int r) const;
  [[nodiscard]] std::optional<std::string> left(int r) const;

  [[nodiscard]] base::Counter& met() const { return header_->met; }
  [[nodiscard]] base::Counter& done() const { return header_->done; }

 private:
  struct alignas(64) Header {
    std::atomic<std::uint64_t> state{0};     // arrivals over all calls; the top bit: broken
    base::Counter met;                       // calls that every rank has come to
    base::Counter done;                      // ranks that have finished a call, over all calls
    std::atomic<std::uint32_t> readable{0};  // why can be read
    std::array<char, 1000> why{};
  };
  Header* header_;
  int world_;
};

/// One rank's view of the control plane.
class Control {
 public:
  /// finish_deadlines: in how many deadlines a rank that has come to a call is to finish it.
  Control(ControlBoard board, int rank, double deadline_seconds, double finish_deadlines,
          std::function<std::optional<std::string>(int)> gone);

  /// move() runs between arrival and done of all ranks. CommError as Group says; UsageError in a
  /// forked child.
  void meet(const ControlSignature& signature, const std::function<void()>& move);
  [[nodiscard]] double deadline_seconds() const;
  void limit_deadline(double seconds);
  void lift_deadline(double seconds) noexcept;
  [[nodiscard]] const ControlBoard& board() const { return board_; }
  /// False in a forked child, whose parent's words these are.
  [[nodiscard]] bool here() const { return mark_.here(); }

 private:
  /// Whether every rank's own word says that it has come to the call, or finished it.
  [[nodiscard]] bool everyone(bool arrival, std::uint32_t call) const;

  ControlBoard board_;
  int rank_;
  double deadline_;
  double finish_deadlines_;
  std::vector<double> limits_;  // of the deadline
  std::function<std::optional<std::string>(int)> gone_;
  std::uint32_t calls_ = 0;
  base::ProcessMark mark_;
};

}  // namespace zshard::comm
