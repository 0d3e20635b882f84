#include "runtime/engine/vote.hpp"

#include <mutex>
#include <tuple>

#include "runtime/kernels/kernels.hpp"

namespace zshard::engine {
namespace {

std::int64_t blocks_of(std::int64_t elements) {
  return (elements + kernels::kSquareBlock - 1) / kernels::kSquareBlock;
}

}  // namespace

bool offends_before(const RankSquares& a, const RankSquares& b) {
  if (a.non_finite == 0 || b.non_finite == 0) return a.non_finite != 0;
  return std::tie(a.first_unit, a.first_index, a.first_element) <
         std::tie(b.first_unit, b.first_index, b.first_element);
}

void combine(RankSquares& total, const RankSquares& rank) {
  if (rank.non_finite != 0 && offends_before(rank, total)) {
    total.first_unit = rank.first_unit;
    total.first_index = rank.first_index;
    total.first_element = rank.first_element;
  }
  total.sum += rank.sum;
  total.non_finite += rank.non_finite;
  total.blocks += rank.blocks;
}

BlockStarts block_starts(const shard::Layout& layout, int rank) {
  BlockStarts starts(layout.units().size());
  std::int64_t next = 0;
  for (std::size_t u = 0; u < starts.size(); ++u) {
    for (const shard::Segment& seg : layout.units()[u].segments) {
      std::vector<std::int64_t>& of = starts[u].emplace_back();
      for (const shard::Placed& p : seg.placed) {
        of.push_back(next);
        if (seg.trained()) next += blocks_of(seg.owned(p, rank).count());
      }
    }
  }
  return starts;
}

RankSquares sum_blocks(const shard::Layout& layout, int rank, const double* blocks) {
  RankSquares result;
  for (const shard::UnitLayout& unit : layout.units()) {
    double of_unit = 0.0;
    for (const shard::Segment& seg : unit.segments) {
      if (!seg.trained()) continue;
      for (const shard::Placed& p : seg.placed) {
        const std::int64_t end = result.blocks + blocks_of(seg.owned(p, rank).count());
        while (result.blocks < end) of_unit += blocks[result.blocks++];
      }
    }
    result.sum += of_unit;
  }
  return result;
}

namespace detail {

std::int64_t add_squares(const float* values, std::int64_t count, double* blocks,
                         kernels::Pool& pool, double& of_unit, std::int64_t& non_finite,
                         std::int64_t& first) {
  std::mutex mutex;
  std::int64_t wrong = 0;
  std::int64_t lowest = -1;
  pool.split(count, kernels::kSquareBlock, [&](std::int64_t lo, std::int64_t hi) {
    const kernels::Squares found =
        kernels::block_squares(values + lo, hi - lo, blocks + lo / kernels::kSquareBlock);
    if (found.non_finite == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    wrong += found.non_finite;
    if (lowest < 0 || lo + found.first < lowest) lowest = lo + found.first;
  });
  // The chain over blocks is one order whoever computed them.
  const std::int64_t used = (count + kernels::kSquareBlock - 1) / kernels::kSquareBlock;
  for (std::int64_t b = 0; b < used; ++b) of_unit += blocks[b];
  non_finite = wrong;
  first = lowest;
  return used;
}

}  // namespace detail

}  // namespace zshard::engine
