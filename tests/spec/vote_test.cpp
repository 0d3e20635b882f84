// The vote's square sums, counts and first offender, as the specification has them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "runtime/engine/plan.hpp"
#include "runtime/engine/vote.hpp"
#include "runtime/kernels/kernels.hpp"
#include "tests/spec/golden.hpp"

namespace zshard::engine {
namespace {

std::string hex(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%016llx",
                static_cast<unsigned long long>(std::bit_cast<std::uint64_t>(x)));
  return text;
}

nlohmann::json first_of(const RankSquares& s) {
  if (s.non_finite == 0) return nullptr;
  return {s.first_unit, s.first_index, s.first_element};
}

TEST(GoldenVote, SumsCountsAndFirstOffenderOfEachRankAndOfAll) {
  ZSHARD_NEED_GOLDEN();
  const ModelSpec spec = golden_model("mixed");
  const shard::Layout layout = shard::Layout::make(spec, 3);
  kernels::Pool pool(2);
  int cases = 0;
  for (const nlohmann::json& expected : golden("reduction", "vote")) {
    RankSquares total;
    for (int rank = 0; rank < 3; ++rank) {
      // The accumulated gradient is 3 * uniform(2, 0, name, i), then infinities.
      std::vector<std::vector<std::vector<float>>> shards(layout.units().size());
      for (std::size_t u = 0; u < layout.units().size(); ++u) {
        for (const shard::Segment& seg : layout.units()[u].segments) {
          auto& shard = shards[u].emplace_back(static_cast<std::size_t>(seg.shard),
                                               std::numeric_limits<float>::quiet_NaN());  // padding
          for (const shard::Placed& p : seg.placed) {
            const std::string& name = spec.parameter(p.parameter).name;
            std::vector<float> values(static_cast<std::size_t>(p.count));
            kernels::uniform(kernels::philox_key(2, name.data(), name.size()), 0, 0, values.data(),
                             p.count);
            for (float& x : values) x *= 3.0f;
            for (const nlohmann::json& bad : expected.at("infinities")) {
              if (bad.at(0) == name) {
                values[bad.at(1).get<std::size_t>()] = std::numeric_limits<float>::infinity();
              }
            }
            const shard::Range own = seg.owned(p, rank);
            for (std::int64_t i = own.lo; i < own.hi; ++i) {
              shard[static_cast<std::size_t>(i - rank * seg.shard)] =
                  values[static_cast<std::size_t>(i - p.start)];
            }
          }
        }
      }
      std::vector<double> blocks(static_cast<std::size_t>(count_blocks(layout, rank)));
      const RankSquares mine = rank_squares(layout, rank, blocks.data(), pool, [&](int u, int s) {
        return shards[static_cast<std::size_t>(u)][static_cast<std::size_t>(s)].data();
      });
      const nlohmann::json& of_rank = expected.at("ranks").at(static_cast<std::size_t>(rank));
      EXPECT_EQ(hex(mine.sum), of_rank.at(0).get<std::string>()) << "rank " << rank;
      EXPECT_EQ(mine.non_finite, of_rank.at(1).get<std::int64_t>());
      EXPECT_EQ(first_of(mine), of_rank.at(2));
      EXPECT_EQ(mine.blocks, of_rank.at(3).get<std::int64_t>());
      combine(total, mine);
    }
    EXPECT_EQ(hex(total.sum), expected.at("sum").get<std::string>());
    EXPECT_EQ(total.non_finite, expected.at("bad").get<std::int64_t>());
    EXPECT_EQ(first_of(total), expected.at("first"));
    ++cases;
  }
  EXPECT_EQ(cases, 2);
}

}  // namespace
}  // namespace zshard::engine
