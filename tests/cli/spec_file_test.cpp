// The JSON form of a ModelSpec: everything it names is read, everything else is refused with its
// place.
#include "runtime/cli/spec_file.hpp"

#include <gtest/gtest.h>

#include <string>

#include "runtime/cli/shapes.hpp"
#include "tests/cli/program.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

TEST(SpecFile, EverythingIsRead) {
  const ModelSpec spec = parse_spec(lab::kFullSpec, DType::f32);
  ASSERT_EQ(spec.units().size(), 3U);
  EXPECT_EQ(spec.hold(), 2);
  EXPECT_FALSE(spec.block_quantised());
  ASSERT_EQ(spec.groups().size(), 1U);
  EXPECT_EQ(spec.groups()[0].name, "slow");
  EXPECT_EQ(spec.groups()[0].hyper.lr, 1e-4);
  EXPECT_EQ(spec.groups()[0].hyper.beta1, 0.5);
  EXPECT_FALSE(spec.groups()[0].hyper.eps);
  const auto p = [&](const char* name) { return spec.parameter(spec.parameter_id(name)); };
  EXPECT_EQ(p("table").shape, (zshard::Shape{11, 8}));
  EXPECT_EQ(p("table").options.dtype, DType::bf16);
  EXPECT_TRUE(p("base").options.frozen);
  EXPECT_EQ(p("base").options.dtype, DType::f16);
  EXPECT_EQ(p("w").options.group, "slow");
  EXPECT_EQ(p("w").options.lr_scale, 0.5);
  EXPECT_TRUE(p("w").options.decay);
  EXPECT_FALSE(p("b").options.decay);
  EXPECT_EQ(p("b").options.dtype, DType::f32);
  EXPECT_TRUE(p("s").shape.empty());
  EXPECT_TRUE(p("s").options.resident);
  EXPECT_EQ(p("head").options.alias, "table");
  const std::vector<Position> program = spec.program();
  ASSERT_EQ(program.size(), 9U);
  EXPECT_EQ(program[6], (Position{UnitId{1}, Pass::recompute}));
  EXPECT_EQ(parameter_count(spec), 88 + 64 + 192 + 24 + 1 + 0 + 8);
  EXPECT_EQ(trained_count(spec), 88 + 192 + 24 + 1);
}

TEST(SpecFile, DtypeAndProgramHaveDefaults) {
  const ModelSpec spec = parse_spec(
      R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [3]}]}]})", DType::f16);
  EXPECT_EQ(spec.parameter(ParameterId{0}).options.dtype, DType::f16);
  EXPECT_EQ(spec.program().size(), 2U);
  EXPECT_EQ(spec.hold(), 1);
}

TEST(SpecFile, WhatIsWrongIsSaidWithItsPlace) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "JSON"},
      {"[]", "expected an object"},
      {"{}", "\"units\" is missing"},
      {R"({"units": 1})", "expected an array"},
      {R"({"units": [], "unitz": 1})", "Did you mean 'units'"},
      {R"({"units": [{"name": 1, "parameters": []}]})", "units[0].name"},
      {R"({"units": [{"name": "u"}]})", "\"parameters\" is missing"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p"}]}]})", "\"shape\" is missing"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [1.5]}]}]})",
       "units[0].parameters[0].shape"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [9223372036854775808]}]}]})",
       "below 2^63"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [1e30]}]}]})",
       "whole number"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [1], "dtype": "f64"}]}]})",
       "f32, bf16 or f16"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [1], "frozen": 1}]}]})",
       "true or false"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [1], "frosen": true}]}]})",
       "Did you mean 'frozen'"},
      {R"({"units": [], "hold": 0})", "hold"},
      {R"({"units": [], "hold": 99999999999})", "hold"},
      {R"({"units": [], "program": []})", "program"},
      {R"({"units": [{"name": "u", "parameters": []}], "program": [["v", "forward"]]})",
       "program[0]"},
      {R"({"units": [{"name": "u", "parameters": []}], "program": [["u", "sideways"]]})",
       "forward, recompute or backward"},
      {R"({"units": [{"name": "u", "parameters": []}], "program": ["u"]})", "program[0]"},
      {R"({"units": [], "groups": {"g": {"lr": "x"}}})", "groups.g.lr"},
      {R"({"units": [], "groups": []})", "groups"},
      {R"({"units": [], "groups": {"g": {"lr": -1}}})",
       "groups.g.lr: it is -1, must be at least 0"},
      {R"({"units": [], "groups": {"g": {"beta2": 1}}})", "at least 0 and less than 1"},
      {R"({"units": []})", "units: the model has no parameters"},
      {R"({"units": [{"name": "u", "parameters": []}]})", "has no parameters"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [0, 4]}]}]})",
       "has no parameters"},
      {R"({"units": [{"name": "u", "parameters": [{"name": "p", "shape": [1], "group": "ma"}]}],
           "groups": {"mat": {}}})",
       "units[0].parameters[0].group: there is no group 'ma' in \"groups\". Did you mean 'mat'?"},
  };
  for (const auto& [text, part] : cases) {
    try {
      parse_spec(text, DType::f32);
      ADD_FAILURE() << text << " is taken";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << text << "\n"
                                                                         << error.what();
      EXPECT_EQ(std::string(error.what()).find("json.exception"), std::string::npos)
          << error.what();
    }
  }
}

// Cut or changed anywhere, a document is read or refused, never anything else.
TEST(SpecFile, DamagedDocumentsAreRefusedInOrder) {
  const std::string whole = lab::kFullSpec;
  int refused = 0;
  const auto attempt = [&](const std::string& text) {
    try {
      parse_spec(text, DType::f32);
    } catch (const UsageError&) {
      ++refused;
    }
  };
  for (std::size_t end = 0; end < whole.size(); ++end) attempt(whole.substr(0, end));
  EXPECT_EQ(refused, static_cast<int>(whole.size()));
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const char c : {'\0', '"', '[', '}', '9', '-', '\xff'}) {
      std::string text = whole;
      text[at] = c;
      attempt(text);
    }
  }
  EXPECT_GT(refused, static_cast<int>(4 * whole.size()));
}

TEST(SpecFile, FilesThatCannotBeReadAreIoErrors) {
  const lab::Directory directory;
  EXPECT_THROW(read_spec(directory.file("none"), DType::f32), IoError);
  EXPECT_THROW(read_spec(directory.path(), DType::f32), IoError);
  EXPECT_THROW(read_spec("", DType::f32), UsageError);
  try {
    read_spec(directory.write("bad.json", "{"), DType::f32);
    ADD_FAILURE() << "taken";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("bad.json"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace zshard::cli
