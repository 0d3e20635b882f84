// Well-known models as specs: what has which shape, and which unit is used when.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::cli {

/// gpt: GPT-2's block (layer norms and projections with biases), learned positions, output tied to
/// the token table. llama: RMS norms, gated feed-forward, grouped-query attention, no biases, no
/// positions, an output matrix of its own.
enum class Family : std::uint8_t { gpt, llama };
std::string to_string(Family family);

struct Shape {
  Family family = Family::gpt;
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;  // llama; gpt has as many as heads
  std::int64_t ffn = 0;       // width of the feed-forward's inner layer
  std::int64_t vocab = 0;
  std::int64_t context = 0;  // gpt: rows of the position table
};

struct Preset {
  std::string name;
  Shape shape;
};

/// The presets, in the order of the help.
const std::vector<Preset>& presets();

/// Extents that follow from the others where the user gives none.
std::int64_t default_ffn(Family family, std::int64_t width);
std::int64_t default_heads(std::int64_t width);

/// Throws UsageError for a shape that is none: extents below 1, a width that is no multiple of the
/// heads.
void check(const Shape& shape);

/// The model with parameters, gradients and program as a training loop would register it: a unit a
/// block, one for the embedding, one for what follows the last block.
ModelSpec make_spec(const Shape& shape, DType dtype);

/// Elements of all parameters, aliases not counted. Throws UsageError past 2^63 - 1.
std::int64_t parameter_count(const ModelSpec& spec);
/// The same without frozen ones.
std::int64_t trained_count(const ModelSpec& spec);

}  // namespace zshard::cli
