// Layout and model spec beyond the golden vectors: odd shapes, huge sizes, and everything refused.
#include "runtime/shard/layout.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "zshard/error.hpp"
#include "zshard/model_spec.hpp"

namespace zshard {
namespace {

using shard::Layout;

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

/// What make() says about a spec; "" if it is accepted.
std::string refusal(const ModelSpec& spec, int world = 2) {
  try {
    (void)Layout::make(spec, world);
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

ModelSpec one_parameter(const std::string& name, Shape shape, ParameterOptions options = {}) {
  ModelSpec spec;
  spec.unit("u").parameter(name, std::move(shape), std::move(options));
  return spec;
}

const shard::Segment& segment_of(const Layout& layout, ParameterId id) {
  const shard::Place& place = layout.place(id);
  return layout.units()[static_cast<std::size_t>(place.unit)]
      .segments[static_cast<std::size_t>(place.segment)];
}

const shard::Placed& placed_of(const Layout& layout, ParameterId id) {
  return segment_of(layout, id).placed[static_cast<std::size_t>(layout.place(id).index)];
}

/// The ranks' pieces follow one another and cover every element once.
void expect_tiled(const Layout& layout, ParameterId id) {
  const shard::Segment& segment = segment_of(layout, id);
  const shard::Placed& placed = placed_of(layout, id);
  std::int64_t next = placed.start;
  for (int rank = 0; rank < layout.world(); ++rank) {
    const shard::Range own = segment.owned(placed, rank);
    if (!own.empty()) {
      EXPECT_EQ(own.lo, next);
      next = own.hi;
    }
  }
  EXPECT_EQ(next, placed.start + placed.count);
}

TEST(Layout, ParametersSmallerThanTheWorldAreOwnedOnce) {
  ModelSpec spec;
  auto unit = spec.unit("u");
  const ParameterId six = unit.parameter("six", {6});
  const ParameterId one = unit.parameter("one", {});
  const Layout layout = Layout::make(spec, 8);
  expect_tiled(layout, six);
  expect_tiled(layout, one);
  EXPECT_EQ(placed_of(layout, one).count, 1);
  EXPECT_EQ(layout.units()[0].bytes, 8 * 256);
  EXPECT_EQ(segment_of(layout, one).owned(placed_of(layout, one), 7).count(), 0);
}

TEST(Layout, EmptyParametersHaveAPlaceAndNoBytes) {
  for (const int world : {1, 3}) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    const ParameterId first = unit.parameter("first", {0, 4});
    const ParameterId full = unit.parameter("full", {7});
    const ParameterId middle = unit.parameter("middle", {4, 0});
    const ParameterId more = unit.parameter("more", {5});
    const ParameterId last = unit.parameter("last", {0});
    spec.unit("nothing").parameter("only", {0, 4});
    const Layout layout = Layout::make(spec, world);
    for (const ParameterId id : {first, middle, last}) {
      EXPECT_EQ(placed_of(layout, id).count, 0);
      expect_tiled(layout, id);
    }
    EXPECT_EQ(placed_of(layout, full).start, 0);
    EXPECT_EQ(placed_of(layout, more).start, 64);
    EXPECT_EQ(spec.parameter(middle).shape, (Shape{4, 0}));
    EXPECT_EQ(layout.units()[1].bytes, 0);
    EXPECT_EQ(layout.units()[1].gradient_bytes, 0);
  }
}

TEST(Layout, EveryStartIsAligned) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool block : {false, true}) {
      ModelSpec spec;
      spec.block_quantised(block);
      auto unit = spec.unit("u");
      for (std::int64_t size = 1; size <= 33; ++size) {
        unit.parameter("p" + std::to_string(size), {size}, {.dtype = dtype});
      }
      const Layout layout = Layout::make(spec, 3);
      const shard::Segment& segment = layout.units()[0].segments.at(0);
      for (const shard::Placed& placed : segment.placed) {
        EXPECT_EQ(placed.start * size_of(dtype) % shard::kAlignment, 0);
        EXPECT_TRUE(!block || placed.start % 256 == 0);
      }
      EXPECT_EQ(segment.shard_bytes() % shard::kAlignment, 0);
      EXPECT_TRUE(!block || segment.shard % 256 == 0);
    }
  }
}

TEST(Layout, OneTrainedParameterOfFourHasTheOnlyGradient) {
  ModelSpec spec;
  auto unit = spec.unit("u");
  for (int i = 0; i < 4; ++i) {
    unit.parameter("p" + std::to_string(i), {1000}, {.frozen = i != 2});
  }
  const Layout layout = Layout::make(spec, 4);
  const shard::UnitLayout& u = layout.units()[0];
  EXPECT_EQ(u.gradient_bytes, 4 * 256 * 4);
  EXPECT_EQ(u.gradient_byte, 3 * 1024 * 4);
  EXPECT_EQ(u.gather_bytes, u.bytes);
  EXPECT_EQ(u.trained_elements, 1024);
}

TEST(Layout, RandomSpecsAreTiledAndContiguous) {
  std::mt19937_64 random(7);
  const auto pick = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  for (int round = 0; round < 60; ++round) {
    ModelSpec spec;
    spec.block_quantised(pick(4) == 0);
    for (int u = 0; u < 3; ++u) {
      auto unit = spec.unit("u" + std::to_string(u));
      for (std::int64_t p = pick(6); p-- > 0;) {
        unit.parameter("p" + std::to_string(u) + "." + std::to_string(p), {pick(5), pick(900)},
                       {.dtype = static_cast<DType>(pick(3)),
                        .frozen = pick(3) == 0,
                        .resident = pick(4) == 0});
      }
    }
    const int world = 1 + static_cast<int>(pick(8));
    const Layout layout = Layout::make(spec, world);
    for (std::int32_t id = 0; id < spec.parameter_count(); ++id) {
      expect_tiled(layout, ParameterId{id});
    }
    for (std::size_t u = 0; u < layout.units().size(); ++u) {
      const shard::UnitLayout& unit = layout.units()[u];
      std::int64_t byte = 0;
      std::int64_t gathered = 0;
      std::int64_t trained = 0;
      std::int32_t index = 0;
      for (const shard::Segment& s : unit.segments) {
        EXPECT_EQ(s.byte, byte);
        EXPECT_EQ(s.padded, s.shard * world);
        byte += s.bytes();
        if (s.gathered()) {
          gathered += s.bytes();
          EXPECT_LE(s.byte + s.bytes(), unit.gather_bytes);
        }
        if (s.trained()) {
          trained += s.bytes();
          EXPECT_GE(s.byte, unit.gradient_byte);
          EXPECT_LE(s.byte + s.bytes(), unit.gradient_byte + unit.gradient_bytes);
        }
        std::int64_t end = 0;
        for (const shard::Placed& placed : s.placed) {
          EXPECT_GE(placed.start, end);
          end = placed.start + placed.count;
          EXPECT_EQ(layout.parameter_at(static_cast<std::int32_t>(u), index++), placed.parameter);
        }
        EXPECT_LE(end, s.padded);
      }
      EXPECT_EQ(byte, unit.bytes);
      EXPECT_EQ(gathered, unit.gather_bytes);
      EXPECT_EQ(trained, unit.gradient_bytes);
      EXPECT_THROW((void)layout.parameter_at(static_cast<std::int32_t>(u), index), UsageError);
    }
  }
}

TEST(Layout, SizesPast32BitsAreExact) {
  for (const std::int64_t elements : {(std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) + 1,
                                      (std::int64_t{1} << 32) + 7, (std::int64_t{1} << 40) + 3}) {
    for (int world = 1; world <= 8; ++world) {
      ModelSpec spec;
      auto unit = spec.unit("u");
      const ParameterId big = unit.parameter("big", {elements}, {.dtype = DType::bf16});
      const ParameterId small = unit.parameter("small", {3}, {.dtype = DType::bf16});
      const Layout layout = Layout::make(spec, world);
      expect_tiled(layout, big);
      expect_tiled(layout, small);
      EXPECT_EQ(placed_of(layout, big).count, elements);
      EXPECT_EQ(placed_of(layout, small).start, (elements + 127) / 128 * 128);
    }
  }
}

TEST(Layout, SizesPast63BitsAreRefused) {
  EXPECT_NE(refusal(one_parameter("w", {std::int64_t{1} << 62})).find("2^63"), std::string::npos);
  EXPECT_NE(
      refusal(one_parameter("w", {std::int64_t{1} << 40, std::int64_t{1} << 40})).find("2^63"),
      std::string::npos);
  EXPECT_NE(refusal(one_parameter("w", {kMost})).find("2^63"), std::string::npos);
  EXPECT_EQ(refusal(one_parameter("w", {kMost, kMost, 0})), "");
  EXPECT_EQ(refusal(one_parameter("w", {std::int64_t{1} << 60})), "");

  ModelSpec sum;  // each unit fits, all together do not
  for (int u = 0; u < 3; ++u) {
    sum.unit("u" + std::to_string(u)).parameter("p" + std::to_string(u), {std::int64_t{1} << 60});
  }
  EXPECT_TRUE(refusal(sum).starts_with("unit u1")) << refusal(sum);
}

TEST(Layout, TextHoldsOptionsThatAreNotDefaults) {
  ModelSpec spec;
  auto unit = spec.unit("u", {.shard_axis = "expert"});
  unit.parameter("a", {2}, {.lr_scale = 0.1, .group = "g", .tensor_axis = "tp"});
  unit.parameter("b", {2}, {.lr_scale = 0.0});
  unit.parameter("c", {2});
  EXPECT_EQ(Layout::make(spec, 1).text(),
            "zshard-layout 1 world=1 block_quantised=0\n"
            "unit 0 u shard_axis=expert\n"
            "segment trained f32 byte=0 padded=192 shard=192\n"
            "parameter a 2 start=0 count=2 decay=1 lr_scale=0.1 group=g tensor_axis=tp\n"
            "parameter b 2 start=64 count=2 decay=1 lr_scale=0\n"
            "parameter c 2 start=128 count=2 decay=1\n");
}

TEST(Layout, HashFollowsTheOrderOfRegistration) {
  const auto make = [](bool swapped) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter(swapped ? "b" : "a", {4});
    unit.parameter(swapped ? "a" : "b", {4});
    return Layout::make(spec, 2);
  };
  EXPECT_EQ(make(false).hash(), make(false).hash());
  EXPECT_NE(make(false).hash(), make(true).hash());
}

TEST(Layout, EachRuleHasItsMessage) {
  const ModelSpec good = one_parameter("w", {2});
  EXPECT_EQ(refusal(good), "");
  EXPECT_TRUE(refusal(good, 0).starts_with("world size < 1"));
  EXPECT_TRUE(refusal(good, -3).starts_with("world size < 1"));

  for (const char* name : {"", "a b", "a\n", "\t", "a\x7f"}) {
    EXPECT_TRUE(refusal(one_parameter(name, {2})).starts_with("names are not empty")) << name;
    ModelSpec unit;
    unit.unit(name).parameter("p", {2});
    EXPECT_TRUE(refusal(unit).starts_with("names are not empty")) << name;
  }
  EXPECT_TRUE(
      refusal(one_parameter("w", {2}, {.group = "a b"})).starts_with("names are not empty"));
  EXPECT_EQ(refusal(one_parameter("w\xc3\xa9", {2})), "");  // UTF-8 is no control character

  EXPECT_NE(refusal(one_parameter("w", {2, -1})).find("parameter w: bad dtype or shape"),
            std::string::npos);
  EXPECT_NE(refusal(one_parameter("w", {0, -1})).find("bad dtype or shape"), std::string::npos);
  EXPECT_NE(refusal(one_parameter("w", {2}, {.dtype = static_cast<DType>(9)}))
                .find("parameter w: bad dtype or shape"),
            std::string::npos);
  for (const double scale :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_NE(refusal(one_parameter("w", {2}, {.lr_scale = scale})).find("lr_scale"),
              std::string::npos);
  }

  ModelSpec units;
  units.unit("u");
  units.unit("u");
  EXPECT_TRUE(refusal(units).starts_with("two units with one name"));

  ModelSpec twice;
  twice.unit("u").parameter("w", {2});
  twice.unit("v").parameter("w", {2});
  EXPECT_TRUE(refusal(twice).starts_with("parameter w is registered twice"));
  EXPECT_NE(refusal(twice).find("unit u and in unit v"), std::string::npos);
}

TEST(Layout, AliasesOwnNothingAndHaveTheirOwnersPlace) {
  ModelSpec spec;
  const ParameterId owner = spec.unit("u").parameter("wte", {3, 5});
  auto head = spec.unit("head");
  const ParameterId tied = head.parameter("lm_head", {3, 5}, {.alias = "wte"});
  const Layout layout = Layout::make(spec, 2);
  EXPECT_EQ(layout.units()[1].bytes, 0);
  EXPECT_EQ(layout.place(tied).unit, 0);
  EXPECT_EQ(placed_of(layout, tied).parameter, owner);
}

TEST(Layout, AliasesKeepTheRules) {
  const auto tied = [](ParameterOptions options, Shape shape = {4}) {
    ModelSpec spec;
    auto unit = spec.unit("u");
    unit.parameter("embedding", {4}, {.lr_scale = 0.5});
    unit.parameter("again", {4}, {.alias = "embedding"});
    unit.parameter("tied", std::move(shape), std::move(options));
    unit.parameter("later", {4});
    return spec;
  };
  const std::string rule = "tied: an alias names an earlier parameter that is no alias";
  EXPECT_EQ(refusal(tied({.alias = "embedding"})), "");
  EXPECT_EQ(refusal(tied({.lr_scale = 0.5, .alias = "embedding"})), "");
  EXPECT_TRUE(refusal(tied({.alias = "later"})).starts_with(rule));
  EXPECT_TRUE(refusal(tied({.alias = "tied"})).starts_with(rule));
  EXPECT_TRUE(refusal(tied({.alias = "again"})).starts_with(rule));
  EXPECT_NE(refusal(tied({.alias = "again"})).find("'embedding'"), std::string::npos);
  EXPECT_NE(refusal(tied({.alias = "embeding"})).find("Did you mean 'embedding'?"),
            std::string::npos);
  EXPECT_TRUE(refusal(tied({.alias = "embedding"}, {2, 2})).starts_with("tied: shape or dtype"));
  EXPECT_TRUE(refusal(tied({.dtype = DType::f16, .alias = "embedding"}))
                  .starts_with("tied: shape or dtype"));
  EXPECT_NE(refusal(tied({.lr_scale = 2.0, .alias = "embedding"})).find("set them there"),
            std::string::npos);
}

TEST(ModelSpec, DefaultProgramRunsForwardThenBack) {
  ModelSpec spec;
  EXPECT_TRUE(spec.program().empty());
  spec.unit("a");
  const UnitId b = spec.unit("b").id();
  const std::vector<Position> expected{{UnitId{0}, Pass::forward},
                                       {UnitId{1}, Pass::forward},
                                       {UnitId{1}, Pass::backward},
                                       {UnitId{0}, Pass::backward}};
  EXPECT_EQ(spec.program(), expected);
  spec.program({{b, Pass::forward}});
  EXPECT_EQ(spec.program().size(), 1u);
}

TEST(ModelSpec, UnknownNamesGetTheNearestOne) {
  ModelSpec spec;
  auto unit = spec.unit("block.0");
  const ParameterId id = unit.parameter("block.0.weight", {2});
  EXPECT_EQ(spec.parameter_id("block.0.weight"), id);
  EXPECT_EQ(spec.unit_id("block.0"), unit.id());
  EXPECT_EQ(spec.parameter(id).name, "block.0.weight");
  const auto message = [](auto&& call) -> std::string {
    try {
      (void)call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message([&] { return spec.parameter_id("block.0.wieght"); }).find("'block.0.weight'"),
            std::string::npos);
  EXPECT_NE(message([&] { return spec.unit_id("blok.0"); }).find("'block.0'"), std::string::npos);
  EXPECT_EQ(message([&] { return spec.unit_id("zzz"); }).find("Did you"), std::string::npos);
  EXPECT_THROW((void)spec.parameter(ParameterId{1}), UsageError);
  EXPECT_THROW((void)spec.parameter(ParameterId{}), UsageError);
}

TEST(ModelSpec, PointersMustFitTheDtype) {
  ModelSpec spec;
  auto unit = spec.unit("u");
  float* f = nullptr;
  std::uint16_t* h = nullptr;
  void* any = nullptr;
  EXPECT_THROW(unit.parameter("a", {2}, &h), UsageError);
  EXPECT_THROW(unit.parameter("a", {2}, &f, &f, {.dtype = DType::bf16}), UsageError);
  unit.parameter("a", {2}, &f);
  unit.parameter("b", {2}, &h, &h, {.dtype = DType::bf16});
  const ParameterId c = unit.parameter("c", {2}, &any, &any, {.dtype = DType::f16});
  EXPECT_TRUE(spec.parameter(c).gradient.bound());
  EXPECT_FALSE(spec.units()[0].parameters[0].gradient.bound());
  int value = 0;
  spec.parameter(c).data.assign(&value);
  EXPECT_EQ(any, &value);
}

TEST(ModelSpec, TheLastWordOnAGroupCounts) {
  ModelSpec spec;
  spec.group("g", {.lr = 1.0}).group("h", {.lr = 3.0}).group("g", {.lr = 2.0});
  ASSERT_EQ(spec.groups().size(), 2u);
  EXPECT_EQ(spec.groups()[0].hyper.lr, 2.0);
  EXPECT_THROW(spec.group("", {}), UsageError);
}

}  // namespace
}  // namespace zshard
