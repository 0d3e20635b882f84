// A GPT-2 shaped language model: learned positions, pre-LayerNorm blocks, tanh GELU, and a head
// tied to the token embedding. It owns its activations; parameters and gradients are pointers that
// each call gets, valid for that call only. It knows nothing of ranks.
//
// Letters in shapes: R rows (sequences), T context, C width, H heads, V vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compute.hpp"
#include "host_compute.hpp"
#include "shape.hpp"

namespace gpt {

/// A parameter and how it starts: normal with this deviation around this mean.
struct ParameterInfo {
  std::string name;
  std::vector<std::int64_t> shape;
  float mean = 0.0f;
  float deviation = 0.0f;
  std::string tensor{};    ///< the tensor that this is a piece of; empty: a whole one
  std::int64_t first = 0;  ///< element of that tensor where the piece begins

  /// The tensor whose random numbers it starts with, so that pieces start like the whole.
  [[nodiscard]] const std::string& random_stream() const { return tensor.empty() ? name : tensor; }
};

/// Parameters that are used together.
struct UnitInfo {
  std::string name;
  std::vector<ParameterInfo> parameters;
};

/// "embedding", "h.0", ..., "ln_f", with the names and shapes of GPT-2's weight files. With several
/// vocabulary units "embedding.0", "embedding.1", ... stand in place of "embedding", and their
/// "wte.0.weight", "wte.1.weight", ... in place of "wte.weight"; the first one has the positions
/// too. The parameters of a unit are in the order of the pointer structs below.
std::vector<UnitInfo> unit_list(const ModelShape& shape);

/// Parameters of all units.
std::int64_t parameter_count(const ModelShape& shape);

template <class Pointer>
struct EmbeddingPointers {
  Pointer wte;  // [V, C], or the rows of one piece
  Pointer wpe;  // [T, C]; null in pieces after the first

  explicit EmbeddingPointers(std::span<const Pointer> p)
      : wte(p[0]), wpe(p.size() > 1 ? p[1] : nullptr) {}
};

template <class Pointer>
struct BlockPointers {
  Pointer ln_1_weight;         // [C]
  Pointer ln_1_bias;           // [C]
  Pointer attn_c_attn_weight;  // [C, 3C]
  Pointer attn_c_attn_bias;    // [3C]
  Pointer attn_c_proj_weight;  // [C, C]
  Pointer attn_c_proj_bias;    // [C]
  Pointer ln_2_weight;         // [C]
  Pointer ln_2_bias;           // [C]
  Pointer mlp_c_fc_weight;     // [C, 4C]
  Pointer mlp_c_fc_bias;       // [4C]
  Pointer mlp_c_proj_weight;   // [4C, C]
  Pointer mlp_c_proj_bias;     // [C]

  explicit BlockPointers(std::span<const Pointer> p)
      : ln_1_weight(p[0]),
        ln_1_bias(p[1]),
        attn_c_attn_weight(p[2]),
        attn_c_attn_bias(p[3]),
        attn_c_proj_weight(p[4]),
        attn_c_proj_bias(p[5]),
        ln_2_weight(p[6]),
        ln_2_bias(p[7]),
        mlp_c_fc_weight(p[8]),
        mlp_c_fc_bias(p[9]),
        mlp_c_proj_weight(p[10]),
        mlp_c_proj_bias(p[11]) {}
};

template <class Pointer>
struct FinalNormPointers {
  Pointer weight;  // [C]
  Pointer bias;    // [C]

  explicit FinalNormPointers(std::span<const Pointer> p) : weight(p[0]), bias(p[1]) {}
};

using EmbeddingWeights = EmbeddingPointers<const float*>;
using EmbeddingGradients = EmbeddingPointers<float*>;
using BlockWeights = BlockPointers<const float*>;
using BlockGradients = BlockPointers<float*>;
using FinalNormWeights = FinalNormPointers<const float*>;
using FinalNormGradients = FinalNormPointers<float*>;

/// Forward and backward over a batch of rows, one unit at a time. Calls go in this order:
///
///   start, embedding_forward(0 .. pieces - 1), block_forward(0 .. layers - 1), final_norm_forward,
///   head_forward(0 .. pieces - 1), cross_entropy, then
///   head_input_backward(pieces - 1 .. 0), final_norm_backward, block_backward(layers - 1 .. 0),
///   and for each piece head_weight_backward and embedding_backward.
///
/// The head's gradient of wte is a call of its own, because it needs nothing but activations: made
/// at the end, next to the lookup's, both gradients of a piece are there at once, and it need not
/// be kept through the blocks' backward pass.
///
/// A gradient call overwrites the gradients where `beta` is 0 and adds to them where it is 1.
class Model {
 public:
  /// Takes all memory for batches of at most `max_rows` rows. Pointers that later calls get are
  /// such that `compute` can use them.
  Model(const ModelShape& shape, std::int64_t max_rows,
        std::shared_ptr<Compute> compute = make_host_compute());

  /// Bytes that a Model takes, of which attention's backward pass keeps the scores of so many heads
  /// at once; a double, because sizes that no machine has must not overflow.
  static double bytes(const ModelShape& shape, std::int64_t max_rows,
                      std::int64_t heads_at_once = 1);

  /// Sets the batch, at least one row. Each pointer shows T + 1 bytes, which must live until the
  /// last call of the batch: tokens 0 .. T - 1 are the input, 1 .. T the targets. A token is less
  /// than V.
  void start(std::span<const std::uint8_t* const> rows);

  /// Tokens of other pieces are left to those.
  void embedding_forward(std::int64_t piece, const EmbeddingWeights& w);
  void block_forward(std::int64_t layer, const BlockWeights& w);
  void final_norm_forward(const FinalNormWeights& w);
  /// The logits of the piece's tokens.
  void head_forward(std::int64_t piece, const EmbeddingWeights& w);
  /// The cross entropy summed over all targets, once all pieces have given their logits: added to
  /// the compute's loss. The gradient that starts the backward pass is that of the same sum, times
  /// loss_scale.
  void add_cross_entropy(double loss_scale);
  /// The same, at once: returns all that was added since the last time, and waits for it.
  double cross_entropy(double loss_scale = 1.0);

  /// Sums the pieces' parts of the gradient of the head's input.
  void head_input_backward(std::int64_t piece, const EmbeddingWeights& w);
  void final_norm_backward(const FinalNormWeights& w, const FinalNormGradients& g, float beta);
  void block_backward(std::int64_t layer, const BlockWeights& w, const BlockGradients& g,
                      float beta);
  /// The head uses wte only; wpe gets zeros where gradients are overwritten.
  void head_weight_backward(std::int64_t piece, const EmbeddingGradients& g, float beta);
  void embedding_backward(std::int64_t piece, const EmbeddingGradients& g, float beta);

 private:
  // What the backward pass of a block needs again.
  struct BlockActivations {
    Buffer input;                 // [R, T, C]
    Buffer ln_1;                  // [R, T, C]
    Buffer ln_1_mean, ln_1_istd;  // [R, T]
    Buffer qkv;                   // [R, T, 3C]
    Buffer probabilities;         // [R, H, T, T]
    Buffer attention;             // [R, T, C]
    Buffer middle;                // [R, T, C], the residual stream between the halves
    Buffer ln_2;                  // [R, T, C]
    Buffer ln_2_mean, ln_2_istd;  // [R, T]
    Buffer fc;                    // [R, T, 4C], before GELU
    Buffer gelu;                  // [R, T, 4C]
  };

  [[nodiscard]] std::int64_t tokens() const;  // R T
  [[nodiscard]] float* block_output(std::int64_t layer) const;

  ModelShape shape_;
  std::shared_ptr<Compute> compute_;
  std::int64_t rows_ = 0;
  std::vector<BlockActivations> blocks_;
  Buffer output_;                 // [R, T, C], of the last block
  Buffer ln_f_;                   // [R, T, C]
  Buffer ln_f_mean_, ln_f_istd_;  // [R, T]
  Buffer logits_;                 // [R, T, V], then their gradient
  Buffer d_residual_;             // [R, T, C], of the residual stream
  Buffer d_narrow_;               // [R, T, C]
  Buffer d_wide_;                 // [R, T, 4C]
  Buffer d_scores_;               // [heads at once, T, T]
};

}  // namespace gpt
