#include "model.hpp"

#include <algorithm>
#include <cmath>

#include "kernels.hpp"

namespace gpt {

VocabPiece vocab_piece(const ModelShape& shape, std::int64_t piece) {
  const std::int64_t first = shape.vocab * piece / shape.vocab_units;
  return {first, shape.vocab * (piece + 1) / shape.vocab_units - first};
}

std::vector<UnitInfo> unit_list(const ModelShape& shape) {
  constexpr float kDeviation = 0.02f;
  const std::int64_t C = shape.width;
  // Each block adds twice to the residual stream; its variance should not grow with the depth.
  const float residual = kDeviation / std::sqrt(2.0f * static_cast<float>(shape.layers));
  std::vector<UnitInfo> units;
  for (std::int64_t k = 0; k < shape.vocab_units; ++k) {
    const VocabPiece piece = vocab_piece(shape, k);
    const std::string number = shape.vocab_units == 1 ? "" : "." + std::to_string(k);
    units.push_back({"embedding" + number,
                     {{"wte" + number + ".weight",
                       {piece.count, C},
                       0.0f,
                       kDeviation,
                       "wte.weight",
                       piece.first * C}}});
  }
  units.front().parameters.push_back({"wpe.weight", {shape.context, C}, 0.0f, kDeviation});
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const std::string h = "h." + std::to_string(layer);
    units.push_back({h,
                     {{h + ".ln_1.weight", {C}, 1.0f},
                      {h + ".ln_1.bias", {C}},
                      {h + ".attn.c_attn.weight", {C, 3 * C}, 0.0f, kDeviation},
                      {h + ".attn.c_attn.bias", {3 * C}},
                      {h + ".attn.c_proj.weight", {C, C}, 0.0f, residual},
                      {h + ".attn.c_proj.bias", {C}},
                      {h + ".ln_2.weight", {C}, 1.0f},
                      {h + ".ln_2.bias", {C}},
                      {h + ".mlp.c_fc.weight", {C, 4 * C}, 0.0f, kDeviation},
                      {h + ".mlp.c_fc.bias", {4 * C}},
                      {h + ".mlp.c_proj.weight", {4 * C, C}, 0.0f, residual},
                      {h + ".mlp.c_proj.bias", {C}}}});
  }
  units.push_back({"ln_f", {{"ln_f.weight", {C}, 1.0f}, {"ln_f.bias", {C}}}});
  return units;
}

std::int64_t parameter_count(const ModelShape& shape) {
  const std::int64_t C = shape.width;
  return (shape.vocab + shape.context) * C + shape.layers * (12 * C * C + 13 * C) + 2 * C;
}

double Model::bytes(const ModelShape& shape, std::int64_t max_rows) {
  const auto layers = static_cast<double>(shape.layers);
  const auto heads = static_cast<double>(shape.heads);
  const auto width = static_cast<double>(shape.width);
  const auto context = static_cast<double>(shape.context);
  const auto vocab = static_cast<double>(shape.vocab);
  const double per_token_and_layer = 16.0 * width + heads * context + 4.0;
  const double per_token = layers * per_token_and_layer + 8.0 * width + 2.0 + vocab;
  return 4.0 * (static_cast<double>(max_rows) * context * per_token + context * context);
}

Model::Model(const ModelShape& shape, std::int64_t max_rows)
    : shape_(shape), max_rows_(max_rows), blocks_(static_cast<std::size_t>(shape.layers)) {
  const auto tokens = static_cast<std::size_t>(max_rows * shape.context);
  const auto C = static_cast<std::size_t>(shape.width);
  const auto T = static_cast<std::size_t>(shape.context);
  rows_.reserve(static_cast<std::size_t>(max_rows));
  for (BlockActivations& a : blocks_) {
    for (auto* narrow : {&a.input, &a.ln_1, &a.attention, &a.middle, &a.ln_2}) {
      narrow->resize(tokens * C);
    }
    for (auto* statistic : {&a.ln_1_mean, &a.ln_1_istd, &a.ln_2_mean, &a.ln_2_istd}) {
      statistic->resize(tokens);
    }
    a.qkv.resize(tokens * 3 * C);
    a.probabilities.resize(tokens * T * static_cast<std::size_t>(shape.heads));
    a.fc.resize(tokens * 4 * C);
    a.gelu.resize(tokens * 4 * C);
  }
  for (auto* narrow : {&output_, &ln_f_, &d_residual_, &d_narrow_}) narrow->resize(tokens * C);
  ln_f_mean_.resize(tokens);
  ln_f_istd_.resize(tokens);
  logits_.resize(tokens * static_cast<std::size_t>(shape.vocab));
  d_wide_.resize(tokens * 4 * C);
  d_scores_.resize(T * T);
}

std::int64_t Model::tokens() const {
  return static_cast<std::int64_t>(rows_.size()) * shape_.context;
}

std::vector<float>& Model::block_output(std::int64_t layer) {
  const auto next = static_cast<std::size_t>(layer + 1);
  return next < blocks_.size() ? blocks_[next].input : output_;
}

void Model::start(std::span<const std::uint8_t* const> rows) {
  rows_.assign(rows.begin(), rows.end());
}

void Model::embedding_forward(std::int64_t piece, const EmbeddingWeights& w) {
  const std::int64_t C = shape_.width;
  const VocabPiece tokens = vocab_piece(shape_, piece);
  float* out = block_output(-1).data();  // [R, T, C]
  for (const std::uint8_t* row : rows_) {
    for (std::int64_t t = 0; t < shape_.context; ++t, out += C) {
      if (w.wpe != nullptr) std::copy_n(w.wpe + t * C, C, out);
      if (tokens.holds(row[t])) add(w.wte + (row[t] - tokens.first) * C, out, C);
    }
  }
}

void Model::block_forward(std::int64_t layer, const BlockWeights& w) {
  BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  float* out = block_output(layer).data();
  const std::int64_t n = tokens();
  const std::int64_t C = shape_.width;

  layer_norm_forward(a.input.data(), w.ln_1_weight, w.ln_1_bias, a.ln_1.data(), a.ln_1_mean.data(),
                     a.ln_1_istd.data(), n, C);
  linear_forward(a.ln_1.data(), w.attn_c_attn_weight, w.attn_c_attn_bias, a.qkv.data(), n, C,
                 3 * C);
  attention_forward(a.qkv.data(), a.probabilities.data(), a.attention.data(),
                    {n / shape_.context, shape_.context, shape_.heads, C / shape_.heads});
  linear_forward(a.attention.data(), w.attn_c_proj_weight, w.attn_c_proj_bias, a.middle.data(), n,
                 C, C);
  add(a.input.data(), a.middle.data(), n * C);

  layer_norm_forward(a.middle.data(), w.ln_2_weight, w.ln_2_bias, a.ln_2.data(), a.ln_2_mean.data(),
                     a.ln_2_istd.data(), n, C);
  linear_forward(a.ln_2.data(), w.mlp_c_fc_weight, w.mlp_c_fc_bias, a.fc.data(), n, C, 4 * C);
  gelu_forward(a.fc.data(), a.gelu.data(), n * 4 * C);
  linear_forward(a.gelu.data(), w.mlp_c_proj_weight, w.mlp_c_proj_bias, out, n, 4 * C, C);
  add(a.middle.data(), out, n * C);
}

void Model::final_norm_forward(const FinalNormWeights& w) {
  layer_norm_forward(output_.data(), w.weight, w.bias, ln_f_.data(), ln_f_mean_.data(),
                     ln_f_istd_.data(), tokens(), shape_.width);
}

void Model::head_forward(std::int64_t piece, const EmbeddingWeights& w) {
  const VocabPiece columns = vocab_piece(shape_, piece);
  head_logits(ln_f_.data(), w.wte, logits_.data() + columns.first, shape_.vocab, tokens(),
              shape_.width, columns.count);
}

double Model::cross_entropy(double loss_scale) {
  const std::int64_t V = shape_.vocab;
  float* logits = logits_.data();  // [R, T, V]
  double loss = 0.0;
  for (const std::uint8_t* row : rows_) {
    for (std::int64_t t = 0; t < shape_.context; ++t, logits += V) {
      loss += gpt::cross_entropy(logits, row[t + 1], static_cast<float>(loss_scale), V);
    }
  }
  return loss;
}

void Model::head_input_backward(std::int64_t piece, const EmbeddingWeights& w) {
  const VocabPiece columns = vocab_piece(shape_, piece);
  const float beta = piece + 1 == shape_.vocab_units ? 0.0f : 1.0f;  // the last one comes first
  gpt::head_input_backward(logits_.data() + columns.first, shape_.vocab, w.wte, d_narrow_.data(),
                           beta, tokens(), shape_.width, columns.count);
}

void Model::final_norm_backward(const FinalNormWeights& w, const FinalNormGradients& g,
                                float beta) {
  std::fill_n(d_residual_.data(), tokens() * shape_.width, 0.0f);
  layer_norm_backward(d_narrow_.data(), output_.data(), w.weight, ln_f_mean_.data(),
                      ln_f_istd_.data(), d_residual_.data(), g.weight, g.bias, beta, tokens(),
                      shape_.width);
}

void Model::block_backward(std::int64_t layer, const BlockWeights& w, const BlockGradients& g,
                           float beta) {
  const BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  const std::int64_t n = tokens();
  const std::int64_t C = shape_.width;
  float* d = d_residual_.data();  // [R, T, C]: of the block's output, of its middle, of its input
  float* narrow = d_narrow_.data();  // [R, T, C]
  float* wide = d_wide_.data();      // [R, T, 4C], or [R, T, 3C]

  linear_backward(d, a.gelu.data(), w.mlp_c_proj_weight, wide, g.mlp_c_proj_weight,
                  g.mlp_c_proj_bias, beta, n, 4 * C, C);
  gelu_backward(wide, a.fc.data(), wide, n * 4 * C);
  linear_backward(wide, a.ln_2.data(), w.mlp_c_fc_weight, narrow, g.mlp_c_fc_weight,
                  g.mlp_c_fc_bias, beta, n, C, 4 * C);
  layer_norm_backward(narrow, a.middle.data(), w.ln_2_weight, a.ln_2_mean.data(),
                      a.ln_2_istd.data(), d, g.ln_2_weight, g.ln_2_bias, beta, n, C);

  linear_backward(d, a.attention.data(), w.attn_c_proj_weight, narrow, g.attn_c_proj_weight,
                  g.attn_c_proj_bias, beta, n, C, C);
  attention_backward(narrow, a.qkv.data(), a.probabilities.data(), wide, d_scores_.data(),
                     {n / shape_.context, shape_.context, shape_.heads, C / shape_.heads});
  linear_backward(wide, a.ln_1.data(), w.attn_c_attn_weight, narrow, g.attn_c_attn_weight,
                  g.attn_c_attn_bias, beta, n, C, 3 * C);
  layer_norm_backward(narrow, a.input.data(), w.ln_1_weight, a.ln_1_mean.data(), a.ln_1_istd.data(),
                      d, g.ln_1_weight, g.ln_1_bias, beta, n, C);
}

void Model::head_weight_backward(std::int64_t piece, const EmbeddingGradients& g, float beta) {
  const VocabPiece columns = vocab_piece(shape_, piece);
  gpt::head_weight_backward(logits_.data() + columns.first, shape_.vocab, ln_f_.data(), g.wte, beta,
                            tokens(), shape_.width, columns.count);
  if (beta == 0.0f && g.wpe != nullptr) {
    std::fill_n(g.wpe, shape_.context * shape_.width, 0.0f);
  }
}

void Model::embedding_backward(std::int64_t piece, const EmbeddingGradients& g, float beta) {
  const std::int64_t C = shape_.width;
  const VocabPiece tokens = vocab_piece(shape_, piece);
  if (beta == 0.0f) {
    std::fill_n(g.wte, tokens.count * C, 0.0f);
    if (g.wpe != nullptr) std::fill_n(g.wpe, shape_.context * C, 0.0f);
  }
  const float* d = d_residual_.data();  // [R, T, C]
  for (const std::uint8_t* row : rows_) {
    for (std::int64_t t = 0; t < shape_.context; ++t, d += C) {
      if (tokens.holds(row[t])) add(d, g.wte + (row[t] - tokens.first) * C, C);
      if (g.wpe != nullptr) add(d, g.wpe + t * C, C);
    }
  }
}

}  // namespace gpt
