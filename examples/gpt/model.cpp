#include "model.hpp"

#include <cmath>

namespace gpt {

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

double Model::bytes(const ModelShape& shape, std::int64_t max_rows, std::int64_t heads_at_once) {
  const auto layers = static_cast<double>(shape.layers);
  const auto heads = static_cast<double>(shape.heads);
  const auto width = static_cast<double>(shape.width);
  const auto context = static_cast<double>(shape.context);
  const auto vocab = static_cast<double>(shape.vocab);
  const double per_token_and_layer = 16.0 * width + heads * context + 4.0;
  const double per_token = layers * per_token_and_layer + 8.0 * width + 2.0 + vocab;
  return 4.0 * (static_cast<double>(max_rows) * context * per_token +
                static_cast<double>(heads_at_once) * context * context);
}

Model::Model(const ModelShape& shape, std::int64_t max_rows, std::shared_ptr<Compute> compute)
    : shape_(shape), compute_(std::move(compute)), blocks_(static_cast<std::size_t>(shape.layers)) {
  const std::int64_t tokens = max_rows * shape.context;
  const std::int64_t C = shape.width;
  const auto take = [&](std::int64_t count) { return Buffer(compute_, count); };
  compute_->reserve(shape, max_rows);
  for (BlockActivations& a : blocks_) {
    for (auto* narrow : {&a.input, &a.ln_1, &a.attention, &a.middle, &a.ln_2}) {
      *narrow = take(tokens * C);
    }
    for (auto* statistic : {&a.ln_1_mean, &a.ln_1_istd, &a.ln_2_mean, &a.ln_2_istd}) {
      *statistic = take(tokens);
    }
    a.qkv = take(tokens * 3 * C);
    a.probabilities = take(tokens * shape.context * shape.heads);
    a.fc = take(tokens * 4 * C);
    a.gelu = take(tokens * 4 * C);
  }
  for (auto* narrow : {&output_, &ln_f_, &d_residual_, &d_narrow_}) *narrow = take(tokens * C);
  ln_f_mean_ = take(tokens);
  ln_f_istd_ = take(tokens);
  logits_ = take(tokens * shape.vocab);
  d_wide_ = take(tokens * 4 * C);
  d_scores_ = take(compute_->heads_at_once(shape) * shape.context * shape.context);
}

std::int64_t Model::tokens() const {
  return rows_ * shape_.context;
}

float* Model::block_output(std::int64_t layer) const {
  const auto next = static_cast<std::size_t>(layer + 1);
  return next < blocks_.size() ? blocks_[next].input.data() : output_.data();
}

void Model::start(std::span<const std::uint8_t* const> rows) {
  rows_ = static_cast<std::int64_t>(rows.size());
  compute_->start(rows);
}

void Model::embedding_forward(std::int64_t piece, const EmbeddingWeights& w) {
  compute_->embedding_forward(w.wte, w.wpe, block_output(-1), vocab_piece(shape_, piece),
                              shape_.width);
}

void Model::block_forward(std::int64_t layer, const BlockWeights& w) {
  BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  float* out = block_output(layer);
  const std::int64_t n = tokens();
  const std::int64_t C = shape_.width;

  compute_->layer_norm_forward(a.input.data(), w.ln_1_weight, w.ln_1_bias, a.ln_1.data(),
                               a.ln_1_mean.data(), a.ln_1_istd.data(), n, C);
  compute_->linear_forward(a.ln_1.data(), w.attn_c_attn_weight, w.attn_c_attn_bias, a.qkv.data(), n,
                           C, 3 * C);
  compute_->attention_forward(a.qkv.data(), a.probabilities.data(), a.attention.data(),
                              {n / shape_.context, shape_.context, shape_.heads, C / shape_.heads});
  compute_->linear_forward(a.attention.data(), w.attn_c_proj_weight, w.attn_c_proj_bias,
                           a.middle.data(), n, C, C);
  compute_->add(a.input.data(), a.middle.data(), n * C);

  compute_->layer_norm_forward(a.middle.data(), w.ln_2_weight, w.ln_2_bias, a.ln_2.data(),
                               a.ln_2_mean.data(), a.ln_2_istd.data(), n, C);
  compute_->linear_forward(a.ln_2.data(), w.mlp_c_fc_weight, w.mlp_c_fc_bias, a.fc.data(), n, C,
                           4 * C);
  compute_->gelu_forward(a.fc.data(), a.gelu.data(), n * 4 * C);
  compute_->linear_forward(a.gelu.data(), w.mlp_c_proj_weight, w.mlp_c_proj_bias, out, n, 4 * C, C);
  compute_->add(a.middle.data(), out, n * C);
}

void Model::final_norm_forward(const FinalNormWeights& w) {
  compute_->layer_norm_forward(output_.data(), w.weight, w.bias, ln_f_.data(), ln_f_mean_.data(),
                               ln_f_istd_.data(), tokens(), shape_.width);
}

void Model::head_forward(std::int64_t piece, const EmbeddingWeights& w) {
  const VocabPiece columns = vocab_piece(shape_, piece);
  compute_->head_logits(ln_f_.data(), w.wte, logits_.data() + columns.first, shape_.vocab, tokens(),
                        shape_.width, columns.count);
}

void Model::add_cross_entropy(double loss_scale) {
  compute_->cross_entropy(logits_.data(), static_cast<float>(loss_scale), shape_.vocab);
}

double Model::cross_entropy(double loss_scale) {
  add_cross_entropy(loss_scale);
  compute_->queue_loss();
  return compute_->take_loss();
}

void Model::head_input_backward(std::int64_t piece, const EmbeddingWeights& w) {
  const VocabPiece columns = vocab_piece(shape_, piece);
  const float beta = piece + 1 == shape_.vocab_units ? 0.0f : 1.0f;  // the last one comes first
  compute_->head_input_backward(logits_.data() + columns.first, shape_.vocab, w.wte,
                                d_narrow_.data(), beta, tokens(), shape_.width, columns.count);
}

void Model::final_norm_backward(const FinalNormWeights& w, const FinalNormGradients& g,
                                float beta) {
  compute_->zero(d_residual_.data(), tokens() * shape_.width);
  compute_->layer_norm_backward(d_narrow_.data(), output_.data(), w.weight, ln_f_mean_.data(),
                                ln_f_istd_.data(), d_residual_.data(), g.weight, g.bias, beta,
                                tokens(), shape_.width);
}

void Model::block_backward(std::int64_t layer, const BlockWeights& w, const BlockGradients& g,
                           float beta) {
  const BlockActivations& a = blocks_[static_cast<std::size_t>(layer)];
  const std::int64_t n = tokens();
  const std::int64_t C = shape_.width;
  float* d = d_residual_.data();  // [R, T, C]: of the block's output, of its middle, of its input
  float* narrow = d_narrow_.data();  // [R, T, C]
  float* wide = d_wide_.data();      // [R, T, 4C], or [R, T, 3C]

  compute_->linear_backward(d, a.gelu.data(), w.mlp_c_proj_weight, wide, g.mlp_c_proj_weight,
                            g.mlp_c_proj_bias, beta, n, 4 * C, C);
  compute_->gelu_backward(wide, a.fc.data(), wide, n * 4 * C);
  compute_->linear_backward(wide, a.ln_2.data(), w.mlp_c_fc_weight, narrow, g.mlp_c_fc_weight,
                            g.mlp_c_fc_bias, beta, n, C, 4 * C);
  compute_->layer_norm_backward(narrow, a.middle.data(), w.ln_2_weight, a.ln_2_mean.data(),
                                a.ln_2_istd.data(), d, g.ln_2_weight, g.ln_2_bias, beta, n, C);

  compute_->linear_backward(d, a.attention.data(), w.attn_c_proj_weight, narrow,
                            g.attn_c_proj_weight, g.attn_c_proj_bias, beta, n, C, C);
  compute_->attention_backward(
      narrow, a.qkv.data(), a.probabilities.data(), wide, d_scores_.data(),
      {n / shape_.context, shape_.context, shape_.heads, C / shape_.heads});
  compute_->linear_backward(wide, a.ln_1.data(), w.attn_c_attn_weight, narrow, g.attn_c_attn_weight,
                            g.attn_c_attn_bias, beta, n, C, 3 * C);
  compute_->layer_norm_backward(narrow, a.input.data(), w.ln_1_weight, a.ln_1_mean.data(),
                                a.ln_1_istd.data(), d, g.ln_1_weight, g.ln_1_bias, beta, n, C);
}

void Model::head_weight_backward(std::int64_t piece, const EmbeddingGradients& g, float beta) {
  const VocabPiece columns = vocab_piece(shape_, piece);
  compute_->head_weight_backward(logits_.data() + columns.first, shape_.vocab, ln_f_.data(), g.wte,
                                 beta, tokens(), shape_.width, columns.count);
  if (beta == 0.0f && g.wpe != nullptr) {
    compute_->zero(g.wpe, shape_.context * shape_.width);
  }
}

void Model::embedding_backward(std::int64_t piece, const EmbeddingGradients& g, float beta) {
  compute_->embedding_backward(d_residual_.data(), g.wte, g.wpe, vocab_piece(shape_, piece), beta,
                               shape_.width);
}

}  // namespace gpt
