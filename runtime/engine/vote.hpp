// The vote of a step: square sums of owned gradients, the first element that is not finite, and
// which units were used. Pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/kernels/pool.hpp"
#include "runtime/shard/layout.hpp"

namespace zshard::engine {

/// What one rank found in the gradients that it owns.
struct RankSquares {
  double sum = 0.0;  // blocks in layout order -> unit, units -> rank; every chain starts from +0.0
  std::int64_t non_finite = 0;
  std::int32_t first_unit = -1;
  std::int32_t first_index =
      -1;  // parameter of the unit in layout order, untrained ones counted too
  std::int64_t first_element = -1;
  std::int64_t blocks = 0;  // of 1024 elements
};

/// Whether a's first offender comes before b's; one without offender comes last.
bool offends_before(const RankSquares& a, const RankSquares& b);

/// accumulator(unit, segment) gives this rank's fp32 shard of a trained segment: [segment.shard].
/// blocks: scratch of count_blocks(layout, rank) elements.
template <class Accumulator>
RankSquares rank_squares(const shard::Layout& layout, int rank, double* blocks, kernels::Pool& pool,
                         Accumulator&& accumulator);

/// Where each parameter's blocks begin among those of a rank: [unit][segment][placed].
using BlockStarts = std::vector<std::vector<std::vector<std::int64_t>>>;
BlockStarts block_starts(const shard::Layout& layout, int rank);

/// What rank_squares gives where every element is finite, from blocks that were summed before.
RankSquares sum_blocks(const shard::Layout& layout, int rank, const double* blocks);

/// Folds one rank's result into the total; call in rank order, starting from a default RankSquares.
void combine(RankSquares& total, const RankSquares& rank);

namespace detail {
/// Adds one parameter's owned range to the unit's sum. Returns the blocks it took.
std::int64_t add_squares(const float* values, std::int64_t count, double* blocks,
                         kernels::Pool& pool, double& of_unit, std::int64_t& non_finite,
                         std::int64_t& first);
}  // namespace detail

template <class Accumulator>
RankSquares rank_squares(const shard::Layout& layout, int rank, double* blocks, kernels::Pool& pool,
                         Accumulator&& accumulator) {
  RankSquares result;
  for (std::size_t u = 0; u < layout.units().size(); ++u) {
    const shard::UnitLayout& unit = layout.units()[u];
    double of_unit = 0.0;
    std::int32_t index = 0;
    for (std::size_t s = 0; s < unit.segments.size(); ++s) {
      const shard::Segment& seg = unit.segments[s];
      for (const shard::Placed& p : seg.placed) {
        const std::int32_t mine = index++;
        const shard::Range own = seg.owned(p, rank);
        if (!seg.trained() || own.empty()) continue;
        const float* values =
            accumulator(static_cast<int>(u), static_cast<int>(s)) + own.lo - rank * seg.shard;
        std::int64_t non_finite = 0;
        std::int64_t first = -1;
        result.blocks += detail::add_squares(values, own.count(), blocks + result.blocks, pool,
                                             of_unit, non_finite, first);
        if (non_finite != 0 && result.non_finite == 0) {
          result.first_unit = static_cast<std::int32_t>(u);
          result.first_index = mine;
          result.first_element = own.lo + first - p.start;
        }
        result.non_finite += non_finite;
      }
    }
    result.sum += of_unit;
  }
  return result;
}

}  // namespace zshard::engine
