// Sizes of the model.
#pragma once

#include <cstdint>

namespace gpt {

struct ModelShape {
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 128;
  std::int64_t context = 64;
  std::int64_t vocab = 256;
  std::int64_t vocab_units = 1;  ///< pieces of the token table, each a unit of its own
};

/// Rows [first, first + count) of the token table, one piece of it. Never empty while there are at
/// most as many pieces as rows.
struct VocabPiece {
  std::int64_t first = 0;
  std::int64_t count = 0;

  [[nodiscard]] constexpr bool holds(std::int64_t token) const {
    return first <= token && token < first + count;
  }
};

constexpr VocabPiece vocab_piece(const ModelShape& shape, std::int64_t piece) {
  const std::int64_t first = shape.vocab * piece / shape.vocab_units;
  return {first, shape.vocab * (piece + 1) / shape.vocab_units - first};
}

/// Sizes of one causal self-attention over `rows` independent sequences.
struct AttentionShape {
  std::int64_t rows = 0;
  std::int64_t context = 0;
  std::int64_t heads = 0;
  std::int64_t head_width = 0;
};

}  // namespace gpt
