#include "runtime/engine/vote.hpp"

#include <mutex>
#include <tuple>

#include "runtime/kernels/kernels.hpp"

namespace zshard::engine {

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
