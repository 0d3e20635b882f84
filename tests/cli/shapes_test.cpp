// The presets: parameter counts to the unit, and what a spec of a shape is made of.
#include "runtime/cli/shapes.hpp"

#include <gtest/gtest.h>

#include <map>

#include "tests/cli/program.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

std::int64_t formula(const Shape& s) {
  const std::int64_t w = s.width;
  if (s.family == Family::gpt) {
    const std::int64_t block = 4 * w * w + 2 * w * s.ffn + 9 * w + s.ffn;
    return (s.vocab + s.context) * w + s.layers * block + 2 * w;
  }
  const std::int64_t keys = w / s.heads * s.kv_heads;
  const std::int64_t block = 2 * w * w + 2 * keys * w + 3 * w * s.ffn + 2 * w;
  return 2 * s.vocab * w + s.layers * block + w;
}

TEST(Shapes, PresetsHaveTheirPublishedParameters) {
  const std::map<std::string, std::int64_t> published = {
      {"gpt2", 124'439'808},          {"gpt2-xl", 1'557'611'200},
      {"llama-7b", 6'738'415'616},    {"llama-70b", 68'976'648'192},
      {"gpt3-175b", 174'604'259'328}, {"mt-nlg-530b", 529'600'819'200}};
  ASSERT_EQ(presets().size(), published.size());
  for (const Preset& preset : presets()) {
    const ModelSpec spec = make_spec(preset.shape, DType::bf16);
    EXPECT_EQ(parameter_count(spec), published.at(preset.name)) << preset.name;
    EXPECT_EQ(parameter_count(spec), formula(preset.shape)) << preset.name;
    EXPECT_EQ(trained_count(spec), parameter_count(spec)) << preset.name;
    EXPECT_EQ(spec.units().size(), static_cast<std::size_t>(preset.shape.layers) + 2);
  }
}

TEST(Shapes, ToolCountsTheSame) {
  for (const Preset& preset : presets()) {
    const lab::Ending end = lab::run_tool(
        {"plan", "--preset", preset.name, "--world", "64", "--memory", "1024TiB", "--json"});
    ASSERT_EQ(end.code(), 0) << end.text();
    EXPECT_EQ(end.said().at("model").at("parameters"), formula(preset.shape));
  }
}

TEST(Shapes, AnyShapeFollowsTheFormula) {
  for (const Family family : {Family::gpt, Family::llama}) {
    for (const std::int64_t layers : {1, 3}) {
      for (const std::int64_t heads : {1, 4}) {
        Shape s{family, layers, 24, heads, heads, 56, 17, 9};
        if (family == Family::llama) s.kv_heads = heads == 1 ? 1 : heads / 2;
        EXPECT_EQ(parameter_count(make_spec(s, DType::f32)), formula(s));
      }
    }
  }
}

TEST(Shapes, ImpossibleShapesAreRefused) {
  const Shape good{Family::llama, 2, 24, 4, 2, 56, 17, 0};
  EXPECT_NO_THROW(check(good));
  const auto refused = [&](auto&& edit) {
    Shape shape = good;
    edit(shape);
    EXPECT_THROW(check(shape), UsageError);
    EXPECT_THROW(make_spec(shape, DType::f32), UsageError);
  };
  refused([](Shape& s) { s.layers = 0; });
  refused([](Shape& s) { s.width = -1; });
  refused([](Shape& s) { s.heads = 5; });
  refused([](Shape& s) { s.kv_heads = 3; });
  refused([](Shape& s) { s.kv_heads = 0; });
  refused([](Shape& s) { s.ffn = 0; });
  refused([](Shape& s) { s.vocab = 0; });
  refused([](Shape& s) {
    s.family = Family::gpt;
    s.context = 0;
  });
}

TEST(Shapes, TableIsUsedTwiceInAGpt) {
  const ModelSpec spec = make_spec(presets().front().shape, DType::f32);
  int uses = 0;
  for (const Position& position : spec.program()) uses += position.unit == UnitId{0} ? 1 : 0;
  EXPECT_EQ(uses, 4);
}

}  // namespace
}  // namespace zshard::cli
