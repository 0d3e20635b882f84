// The watchdog's report of an endpoint, as text. docs/errors.md explains it to users.
#include <fmt/format.h>

#include <algorithm>

#include "runtime/comm/endpoint.hpp"

namespace zshard::comm {
namespace {

constexpr int kMostWaiting = 64;  // lines of collectives that are issued and not begun

std::string seconds(std::int64_t nanoseconds) {
  return nanoseconds == 0 ? "-" : fmt::format("{:.6f}", static_cast<double>(nanoseconds) * 1e-9);
}

}  // namespace

std::string Endpoint::report() const {
  std::string out = fmt::format(
      "last collectives of rank {} of {}; times in seconds of the machine's monotonic clock\n"
      "{:>8}  {:<7}{:>16}{:>16}{:>16}{:>16}  what\n",
      rank_, world_, "number", "queue", "issued", "arrived", "all here", "ended");
  const auto line = [&](const Recorder::Times& at, const char* queue) {
    PackedSignature signature{};
    const bool known = board_->read_signature(rank_, at.sequence, &signature);
    out += fmt::format("{:>8}  {:<7}{:>16}{:>16}{:>16}{:>16}  {}\n", at.sequence, queue,
                       seconds(at.issued), seconds(at.arrived), seconds(at.met), seconds(at.done),
                       known ? describe_(signature) : "?");
  };
  const std::vector<Recorder::Times> kept = recorder_.kept();
  for (const Recorder::Times& at : kept) line(at, at.lane == Lane::gather ? "gather" : "reduce");

  // What is issued and not kept has not begun, or is older than what a full ring goes back to.
  std::uint64_t from = 0;
  for (const Lane lane : {Lane::gather, Lane::reduce}) {
    const auto of_lane = [&](const Recorder::Times& t) { return t.lane == lane; };
    if (std::count_if(kept.begin(), kept.end(), of_lane) == Recorder::kKept) {
      from = std::max(from, std::find_if(kept.begin(), kept.end(), of_lane)->sequence);
    }
  }
  const std::uint64_t issued = board_->rank(rank_).published.load(std::memory_order_acquire);
  int waiting = 0;
  for (std::uint64_t sequence = from; sequence < issued; ++sequence) {
    const auto same = [&](const Recorder::Times& t) { return t.sequence == sequence; };
    if (std::any_of(kept.begin(), kept.end(), same) || ++waiting > kMostWaiting) continue;
    line({sequence, Lane::gather, recorder_.issued(sequence)}, "waits");
  }
  if (waiting > kMostWaiting) out += fmt::format("and {} more that wait\n", waiting - kMostWaiting);

  out += fmt::format(
      "\nwhere the ranks stand: collectives issued, and of each queue those that the "
      "rank came to, those it finished, and the number of the last one\n"
      "{:>8}{:>8}  {:>8}{:>8}{:>8}  {:>8}{:>8}{:>8}\n",
      "rank", "issued", "gathers", "done", "last", "reduces", "done", "last");
  for (int r = 0; r < world_; ++r) {
    const Board::RankWords& peer = board_->rank(r);
    out += fmt::format("{:>8}{:>8}", r, peer.published.load(std::memory_order_acquire));
    for (const Board::LaneWords& words : peer.lane) {
      const std::uint32_t arrived = words.arrived.load(std::memory_order_acquire);
      out += fmt::format("  {:>8}{:>8}{:>8}", arrived, words.ended.load(std::memory_order_acquire),
                         arrived == 0 ? "-" : std::to_string(words.sequence.load()));
    }
    if (const auto gone = group_->gone(r)) {
      out += "  gone: " + *gone;
    } else if (peer.left.load(std::memory_order_acquire) != 0) {
      out += "  has destroyed its engine";
    }
    out += '\n';
  }
  return out;
}

}  // namespace zshard::comm
