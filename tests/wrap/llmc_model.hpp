// A GPT-2 in the shape of llm.c: one struct of pointers for the parameters, each tensor stacked
// over the layers, kernels that take `pointer + layer * size`, the residual addition fused with the
// next LayerNorm, and the head tied to the embedding. Knows nothing of zshard but the gradient
// mode.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/wrap/kernels.hpp"
#include "tests/wrap/plain.hpp"

namespace zshard::wrap::llmc {

inline constexpr int kLayers = 3, kWidth = 8, kHeads = 2, kVocab = 13, kTime = 5, kBatch = 2;
inline constexpr int kRows = kBatch * kTime;

struct ParameterTensors {
  float* wte = nullptr;       // [kVocab, kWidth]
  float* wpe = nullptr;       // [kTime, kWidth]
  float* ln1w = nullptr;      // [kLayers, kWidth]
  float* ln1b = nullptr;      // [kLayers, kWidth]
  float* qkvw = nullptr;      // [kLayers, 3 * kWidth, kWidth]
  float* qkvb = nullptr;      // [kLayers, 3 * kWidth]
  float* attprojw = nullptr;  // [kLayers, kWidth, kWidth]
  float* attprojb = nullptr;  // [kLayers, kWidth]
  float* ln2w = nullptr;      // [kLayers, kWidth]
  float* ln2b = nullptr;      // [kLayers, kWidth]
  float* fcw = nullptr;       // [kLayers, 4 * kWidth, kWidth]
  float* fcb = nullptr;       // [kLayers, 4 * kWidth]
  float* fcprojw = nullptr;   // [kLayers, kWidth, 4 * kWidth]
  float* fcprojb = nullptr;   // [kLayers, kWidth]
  float* lnfw = nullptr;      // [kWidth]
  float* lnfb = nullptr;      // [kWidth]
};

/// One member of the struct: the shape of one layer's part, and how many layers are stacked.
struct Field {
  const char* name;
  float* ParameterTensors::*member;
  std::vector<std::int64_t> shape;
  int layers;

  [[nodiscard]] std::int64_t size() const {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    return count;
  }
  [[nodiscard]] bool decay() const { return shape.size() > 1; }
};

inline const std::vector<Field>& fields() {
  constexpr int C = kWidth, L = kLayers;
  static const std::vector<Field> table = {
      {"wte", &ParameterTensors::wte, {kVocab, C}, 1},
      {"wpe", &ParameterTensors::wpe, {kTime, C}, 1},
      {"ln1w", &ParameterTensors::ln1w, {C}, L},
      {"ln1b", &ParameterTensors::ln1b, {C}, L},
      {"qkvw", &ParameterTensors::qkvw, {3 * C, C}, L},
      {"qkvb", &ParameterTensors::qkvb, {3 * C}, L},
      {"attprojw", &ParameterTensors::attprojw, {C, C}, L},
      {"attprojb", &ParameterTensors::attprojb, {C}, L},
      {"ln2w", &ParameterTensors::ln2w, {C}, L},
      {"ln2b", &ParameterTensors::ln2b, {C}, L},
      {"fcw", &ParameterTensors::fcw, {4 * C, C}, L},
      {"fcb", &ParameterTensors::fcb, {4 * C}, L},
      {"fcprojw", &ParameterTensors::fcprojw, {C, 4 * C}, L},
      {"fcprojb", &ParameterTensors::fcprojb, {C}, L},
      {"lnfw", &ParameterTensors::lnfw, {C}, 1},
      {"lnfb", &ParameterTensors::lnfb, {C}, 1},
  };
  return table;
}

struct Tokens {
  int inputs[kRows];
  int targets[kRows];
};

inline Tokens tokens_of(int step, int micro, int rank) {
  Tokens t;
  const auto seed = static_cast<std::uint64_t>((step * 16 + micro) * 16 + rank);
  for (int i = 0; i < kRows; ++i) {
    t.inputs[i] = noise_below(kVocab, seed, static_cast<std::uint64_t>(i));
    t.targets[i] = (t.inputs[i] * 5 + 1) % kVocab;
  }
  return t;
}

class Gpt {
 public:
  ParameterTensors params;
  ParameterTensors grads;

  void embed_forward(const Tokens& tokens) {
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kWidth; ++i) {
        encoded_[at(r, i)] =
            params.wte[tokens.inputs[r] * kWidth + i] + params.wpe[(r % kTime) * kWidth + i];
      }
    }
  }

  /// Layer 0 has no layer before it that its LayerNorm could be fused into.
  void first_norm_forward() {
    layernorm_forward(layers_[0].ln1.data(), layers_[0].ln1_mean.data(), layers_[0].ln1_rstd.data(),
                      encoded_.data(), params.ln1w, params.ln1b, kRows, kWidth);
  }

  /// All of layer l but the bias and the residual addition at its end.
  void block_forward(int l) {
    Layer& a = layers_[idx(l)];
    const int C = kWidth;
    linear_forward(a.qkv.data(), a.ln1.data(), params.qkvw + l * 3 * C * C, params.qkvb + l * 3 * C,
                   kRows, C, 3 * C);
    attention_forward(a.atty.data(), a.att.data(), a.qkv.data(), kBatch, kTime, C, kHeads);
    linear_forward(a.residual2.data(), a.atty.data(), params.attprojw + l * C * C,
                   params.attprojb + l * C, kRows, C, C);
    for (int i = 0; i < kRows * C; ++i) a.residual2[idx(i)] += input(l)[i];
    layernorm_forward(a.ln2.data(), a.ln2_mean.data(), a.ln2_rstd.data(), a.residual2.data(),
                      params.ln2w + l * C, params.ln2b + l * C, kRows, C);
    linear_forward(a.fch.data(), a.ln2.data(), params.fcw + l * 4 * C * C, params.fcb + l * 4 * C,
                   kRows, C, 4 * C);
    gelu_forward(a.gelu.data(), a.fch.data(), kRows * 4 * C);
    linear_forward(a.residual3.data(), a.gelu.data(), params.fcprojw + l * C * 4 * C, nullptr,
                   kRows, 4 * C, C);
  }

  /// Bias and residual addition of layer l, fused with the LayerNorm that follows: ln1 of layer l +
  /// 1 or the final one. fcprojb[kWidth] is layer l's.
  void fused_norm_forward(int l, const float* fcprojb) {
    Layer& a = layers_[idx(l)];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kWidth; ++i)
        a.residual3[at(r, i)] = a.residual2[at(r, i)] + (a.residual3[at(r, i)] + fcprojb[i]);
    }
    if (l + 1 < kLayers) {
      Layer& next = layers_[idx(l + 1)];
      layernorm_forward(next.ln1.data(), next.ln1_mean.data(), next.ln1_rstd.data(),
                        a.residual3.data(), params.ln1w + (l + 1) * kWidth,
                        params.ln1b + (l + 1) * kWidth, kRows, kWidth);
    } else {
      layernorm_forward(lnf_.data(), lnf_mean_.data(), lnf_rstd_.data(), a.residual3.data(),
                        params.lnfw, params.lnfb, kRows, kWidth);
    }
  }

  float head_forward(const Tokens& tokens) {
    linear_forward(logits_.data(), lnf_.data(), params.wte, nullptr, kRows, kWidth, kVocab);
    return cross_entropy(logits_.data(), tokens.targets, kRows, kVocab);
  }

  void head_backward(GradientMode mode) {
    linear_backward(d_norm_.data(), grads.wte, nullptr, logits_.data(), lnf_.data(), params.wte,
                    kRows, kWidth, kVocab, mode);
  }

  void final_norm_backward(GradientMode mode) {
    std::fill(d_residual_.begin(), d_residual_.end(), 0.0f);
    layernorm_backward(d_residual_.data(), grads.lnfw, grads.lnfb, d_norm_.data(), input(kLayers),
                       params.lnfw, lnf_mean_.data(), lnf_rstd_.data(), kRows, kWidth, mode);
  }

  /// All of layer l but its ln1.
  void block_backward(int l, GradientMode mode) {
    Layer& a = layers_[idx(l)];
    const int C = kWidth;
    linear_backward(d_wide_.data(), grads.fcprojw + l * C * 4 * C, grads.fcprojb + l * C,
                    d_residual_.data(), a.gelu.data(), params.fcprojw + l * C * 4 * C, kRows, 4 * C,
                    C, mode);
    gelu_backward(d_wide_.data(), a.fch.data(), kRows * 4 * C);
    linear_backward(d_norm_.data(), grads.fcw + l * 4 * C * C, grads.fcb + l * 4 * C,
                    d_wide_.data(), a.ln2.data(), params.fcw + l * 4 * C * C, kRows, C, 4 * C,
                    mode);
    layernorm_backward(d_residual_.data(), grads.ln2w + l * C, grads.ln2b + l * C, d_norm_.data(),
                       a.residual2.data(), params.ln2w + l * C, a.ln2_mean.data(),
                       a.ln2_rstd.data(), kRows, C, mode);
    linear_backward(d_norm_.data(), grads.attprojw + l * C * C, grads.attprojb + l * C,
                    d_residual_.data(), a.atty.data(), params.attprojw + l * C * C, kRows, C, C,
                    mode);
    attention_backward(d_wide_.data(), d_norm_.data(), a.att.data(), a.qkv.data(), kBatch, kTime, C,
                       kHeads);
    linear_backward(d_norm_.data(), grads.qkvw + l * 3 * C * C, grads.qkvb + l * 3 * C,
                    d_wide_.data(), a.ln1.data(), params.qkvw + l * 3 * C * C, kRows, C, 3 * C,
                    mode);
  }

  void first_norm_backward(int l, GradientMode mode) {
    Layer& a = layers_[idx(l)];
    layernorm_backward(d_residual_.data(), grads.ln1w + l * kWidth, grads.ln1b + l * kWidth,
                       d_norm_.data(), input(l), params.ln1w + l * kWidth, a.ln1_mean.data(),
                       a.ln1_rstd.data(), kRows, kWidth, mode);
  }

  /// The second use of wte in a backward pass: adds.
  void embed_backward(const Tokens& tokens) {
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kWidth; ++i) {
        grads.wte[tokens.inputs[r] * kWidth + i] += d_residual_[at(r, i)];
        grads.wpe[(r % kTime) * kWidth + i] += d_residual_[at(r, i)];
      }
    }
  }

 private:
  struct Layer {
    Tensor ln1 = Tensor(kRows * kWidth), ln1_mean = Tensor(kRows), ln1_rstd = Tensor(kRows);
    Tensor qkv = Tensor(kRows * 3 * kWidth), att = Tensor(kBatch * kHeads * kTime * kTime);
    Tensor atty = Tensor(kRows * kWidth), residual2 = Tensor(kRows * kWidth);
    Tensor ln2 = Tensor(kRows * kWidth), ln2_mean = Tensor(kRows), ln2_rstd = Tensor(kRows);
    Tensor fch = Tensor(kRows * 4 * kWidth), gelu = Tensor(kRows * 4 * kWidth);
    Tensor residual3 = Tensor(kRows * kWidth);
  };
  static std::size_t idx(int i) { return static_cast<std::size_t>(i); }
  static std::size_t at(int row, int i) { return static_cast<std::size_t>(row * kWidth + i); }
  [[nodiscard]] const float* input(int l) const {
    return l == 0 ? encoded_.data() : layers_[idx(l - 1)].residual3.data();
  }

  std::vector<Layer> layers_ = std::vector<Layer>(kLayers);
  Tensor encoded_ = Tensor(kRows * kWidth);
  Tensor lnf_ = Tensor(kRows * kWidth), lnf_mean_ = Tensor(kRows), lnf_rstd_ = Tensor(kRows);
  Tensor logits_ = Tensor(kRows * kVocab);
  Tensor d_residual_ = Tensor(kRows * kWidth), d_norm_ = Tensor(kRows * kWidth);
  Tensor d_wide_ = Tensor(kRows * 4 * kWidth);
};

}  // namespace zshard::wrap::llmc
