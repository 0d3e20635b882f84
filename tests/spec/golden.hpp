// Golden vectors of the executable specification. Where golden.json is absent tests skip and say
// why. The directory is the environment's ZSHARD_SPEC_DIR, else the compile definition of that
// name.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::golden_data {

struct Loaded {
  nlohmann::json json;
  std::string problem;  // why there is none; empty if there is
};

inline Loaded load() {
  std::string directory;
  if (const char* named = std::getenv("ZSHARD_SPEC_DIR"); named != nullptr && *named != '\0') {
    directory = named;
  } else {
#ifdef ZSHARD_SPEC_DIR
    directory = ZSHARD_SPEC_DIR;
#endif
  }
  if (directory.empty()) {
    return {{}, "no golden vectors: ZSHARD_SPEC_DIR is not set"};
  }
  const std::string path = directory + "/golden.json";
  std::ifstream file(path);
  if (!file) {
    return {{}, "no golden vectors: cannot read " + path};
  }
  // A damaged file is a failure, not a skip: parse throws.
  return {nlohmann::json::parse(file), {}};
}

inline const Loaded& loaded() {
  static const Loaded data = load();
  return data;
}

}  // namespace zshard::golden_data

/// First statement of every golden test.
#define ZSHARD_NEED_GOLDEN()                                 \
  do {                                                       \
    if (!zshard::golden_data::loaded().problem.empty()) {    \
      GTEST_SKIP() << zshard::golden_data::loaded().problem; \
    }                                                        \
  } while (false)

namespace zshard {

/// The whole file. Throws where it is absent: ZSHARD_NEED_GOLDEN() comes first.
inline const nlohmann::json& golden() {
  const golden_data::Loaded& data = golden_data::loaded();
  if (!data.problem.empty()) {
    throw std::runtime_error(data.problem);
  }
  return data.json;
}

/// Sections that are one object in the specification ("models", "reduction", "adamw", "rounding")
/// are lists of one-key objects in the file.
inline const nlohmann::json& golden(const std::string& section, const std::string& key) {
  for (const nlohmann::json& entry : golden().at(section)) {
    if (entry.contains(key)) {
      return entry.at(key);
    }
  }
  throw std::runtime_error("golden.json: no " + key + " in " + section);
}

inline DType golden_dtype(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (name == to_string(dtype)) {
      return dtype;
    }
  }
  throw std::runtime_error("golden.json: no dtype " + name);
}

inline Pass golden_pass(const std::string& name) {
  for (const Pass pass : {Pass::forward, Pass::recompute, Pass::backward}) {
    if (name == to_string(pass)) {
      return pass;
    }
  }
  throw std::runtime_error("golden.json: no pass " + name);
}

/// A model of the file: [unit, [[name, shape, dtype, frozen, resident, decay, alias]...]].
inline ModelSpec golden_model(const std::string& name, bool block_quantised = false) {
  ModelSpec spec;
  spec.block_quantised(block_quantised);
  for (const nlohmann::json& unit : golden("models", name)) {
    UnitBuilder builder = spec.unit(unit.at(0).get<std::string>());
    for (const nlohmann::json& p : unit.at(1)) {
      ParameterOptions options;
      options.dtype = golden_dtype(p.at(2).get<std::string>());
      options.frozen = p.at(3).get<bool>();
      options.resident = p.at(4).get<bool>();
      options.decay = p.at(5).get<bool>();
      options.alias = p.at(6).get<std::string>();
      builder.parameter(p.at(0).get<std::string>(), p.at(1).get<Shape>(), options);
    }
  }
  return spec;
}

/// Storage bits from "3f800000 c0000000": blank-separated, most significant digit first.
inline std::vector<std::uint64_t> hex_bits(const std::string& text) {
  std::vector<std::uint64_t> values;
  std::size_t at = 0;
  while (at < text.size()) {
    std::size_t used = 0;
    values.push_back(std::stoull(text.substr(at), &used, 16));
    at += used;
    while (at < text.size() && text[at] == ' ') {
      ++at;
    }
  }
  return values;
}

inline std::vector<std::uint32_t> hex_words(const std::string& text) {
  std::vector<std::uint32_t> values;
  for (const std::uint64_t bits : hex_bits(text)) {
    values.push_back(static_cast<std::uint32_t>(bits));
  }
  return values;
}

inline std::vector<std::uint16_t> hex_halves(const std::string& text) {
  std::vector<std::uint16_t> values;
  for (const std::uint64_t bits : hex_bits(text)) {
    values.push_back(static_cast<std::uint16_t>(bits));
  }
  return values;
}

inline std::vector<float> hex_floats(const std::string& text) {
  std::vector<float> values;
  for (const std::uint64_t bits : hex_bits(text)) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  return values;
}

/// One fp64 from 16 digits.
inline double hex_double(const std::string& text) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(std::stoull(text, nullptr, 16)));
}

}  // namespace zshard
