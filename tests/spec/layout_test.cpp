// Section 1 of the specification: offsets, cuts and the text form.
#include "runtime/shard/layout.hpp"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <string>

#include "tests/spec/golden.hpp"

namespace zshard {
namespace {

ModelSpec model_of(const nlohmann::json& entry) {
  const auto name = entry.at("model").get<std::string>();
  if (name != "big") {
    return golden_model(name, entry.at("block_quantised").get<int>() != 0);
  }
  ModelSpec spec;  // not in the file's models: 2^33 elements
  auto unit = spec.unit("big");
  unit.parameter("w", {1 << 17, 1 << 16});
  unit.parameter("x", {3});
  return spec;
}

TEST(GoldenLayout, TextIsEqualToTheByte) {
  ZSHARD_NEED_GOLDEN();
  ASSERT_EQ(golden().at("layouts").size(), 13u);
  for (const nlohmann::json& entry : golden().at("layouts")) {
    SCOPED_TRACE(entry.at("model").dump() + " world " + entry.at("world").dump());
    const auto layout = shard::Layout::make(model_of(entry), entry.at("world").get<int>());
    EXPECT_EQ(layout.text(), entry.at("text").get<std::string>());
    EXPECT_EQ(layout.hash(), XXH3_64bits(layout.text().data(), layout.text().size()));
  }
}

TEST(GoldenLayout, RanksOwnTheSameRanges) {
  ZSHARD_NEED_GOLDEN();
  int compared = 0;
  for (const nlohmann::json& entry : golden().at("layouts")) {
    const ModelSpec spec = model_of(entry);
    const auto layout = shard::Layout::make(spec, entry.at("world").get<int>());
    for (const nlohmann::json& owned : entry.at("owned")) {
      const ParameterId id = spec.parameter_id(owned.at(0).get<std::string>());
      const shard::Place& place = layout.place(id);
      const shard::Segment& segment = layout.units()[static_cast<std::size_t>(place.unit)]
                                          .segments[static_cast<std::size_t>(place.segment)];
      const shard::Placed& placed = segment.placed[static_cast<std::size_t>(place.index)];
      EXPECT_EQ(placed.parameter, id);
      for (int rank = 0; rank < layout.world(); ++rank) {
        const nlohmann::json& range = owned.at(1).at(static_cast<std::size_t>(rank));
        const shard::Range own = segment.owned(placed, rank);
        EXPECT_EQ(own.lo, range.at(0).get<std::int64_t>()) << owned.at(0) << " rank " << rank;
        EXPECT_EQ(own.hi, range.at(1).get<std::int64_t>()) << owned.at(0) << " rank " << rank;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 60);
}

}  // namespace
}  // namespace zshard
