#include "host_compute.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include "kernels.hpp"

namespace gpt {
namespace {

class HostCompute final : public Compute {
 public:
  [[nodiscard]] std::string name() const override { return "host"; }
  [[nodiscard]] void* stream() const override { return nullptr; }

  float* allocate(std::int64_t count) override {
    std::vector<float> memory(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)));
    float* data = memory.data();
    bytes_ += static_cast<std::int64_t>(memory.size() * sizeof(float));
    buffers_.emplace(data, std::move(memory));
    return data;
  }
  void release(float* memory) noexcept override {
    const auto found = buffers_.find(memory);
    if (found == buffers_.end()) return;
    bytes_ -= static_cast<std::int64_t>(found->second.size() * sizeof(float));
    buffers_.erase(found);
  }
  void reserve(const ModelShape& shape, std::int64_t max_rows) override {
    context_ = shape.context;
    rows_.reserve(static_cast<std::size_t>(max_rows));
  }
  [[nodiscard]] std::int64_t bytes() const override { return bytes_; }
  [[nodiscard]] std::int64_t heads_at_once(const ModelShape& /*shape*/) const override { return 1; }

  void start(std::span<const std::uint8_t* const> rows) override {
    rows_.assign(rows.begin(), rows.end());
  }

  void embedding_forward(const float* wte, const float* wpe, float* out, VocabPiece piece,
                         std::int64_t width) override {
    for (const std::uint8_t* row : rows_) {
      for (std::int64_t t = 0; t < context_; ++t, out += width) {
        if (wpe != nullptr) std::copy_n(wpe + t * width, width, out);
        if (piece.holds(row[t])) gpt::add(wte + (row[t] - piece.first) * width, out, width);
      }
    }
  }

  void embedding_backward(const float* d, float* dwte, float* dwpe, VocabPiece piece, float beta,
                          std::int64_t width) override {
    if (beta == 0.0f) {
      std::fill_n(dwte, piece.count * width, 0.0f);
      if (dwpe != nullptr) std::fill_n(dwpe, context_ * width, 0.0f);
    }
    for (const std::uint8_t* row : rows_) {
      for (std::int64_t t = 0; t < context_; ++t, d += width) {
        if (piece.holds(row[t])) gpt::add(d, dwte + (row[t] - piece.first) * width, width);
        if (dwpe != nullptr) gpt::add(d, dwpe + t * width, width);
      }
    }
  }

  void cross_entropy(float* logits, float scale, std::int64_t vocab) override {
    double loss = 0.0;
    for (const std::uint8_t* row : rows_) {
      for (std::int64_t t = 0; t < context_; ++t, logits += vocab) {
        loss += gpt::cross_entropy(logits, row[t + 1], scale, vocab);
      }
    }
    loss_ += loss;
  }
  void queue_loss() override {
    queued_loss_ = loss_;
    loss_ = 0.0;
  }
  double take_loss() override { return queued_loss_; }

  void linear_forward(const float* x, const float* w, const float* b, float* y, std::int64_t rows,
                      std::int64_t in, std::int64_t out) override {
    gpt::linear_forward(x, w, b, y, rows, in, out);
  }
  void linear_backward(const float* dy, const float* x, const float* w, float* dx, float* dw,
                       float* db, float beta, std::int64_t rows, std::int64_t in,
                       std::int64_t out) override {
    gpt::linear_backward(dy, x, w, dx, dw, db, beta, rows, in, out);
  }
  void layer_norm_forward(const float* x, const float* gain, const float* bias, float* y,
                          float* mean, float* inverse_std, std::int64_t rows,
                          std::int64_t width) override {
    gpt::layer_norm_forward(x, gain, bias, y, mean, inverse_std, rows, width);
  }
  void layer_norm_backward(const float* dy, const float* x, const float* gain, const float* mean,
                           const float* inverse_std, float* dx, float* dgain, float* dbias,
                           float beta, std::int64_t rows, std::int64_t width) override {
    gpt::layer_norm_backward(dy, x, gain, mean, inverse_std, dx, dgain, dbias, beta, rows, width);
  }
  void gelu_forward(const float* x, float* y, std::int64_t count) override {
    gpt::gelu_forward(x, y, count);
  }
  void gelu_backward(const float* dy, const float* x, float* dx, std::int64_t count) override {
    gpt::gelu_backward(dy, x, dx, count);
  }
  void attention_forward(const float* qkv, float* probabilities, float* out,
                         const AttentionShape& shape) override {
    gpt::attention_forward(qkv, probabilities, out, shape);
  }
  void attention_backward(const float* dout, const float* qkv, const float* probabilities,
                          float* dqkv, float* scratch, const AttentionShape& shape) override {
    gpt::attention_backward(dout, qkv, probabilities, dqkv, scratch, shape);
  }
  void head_logits(const float* x, const float* wte, float* logits, std::int64_t stride,
                   std::int64_t rows, std::int64_t width, std::int64_t vocab) override {
    gpt::head_logits(x, wte, logits, stride, rows, width, vocab);
  }
  void head_input_backward(const float* dlogits, std::int64_t stride, const float* wte, float* dx,
                           float beta, std::int64_t rows, std::int64_t width,
                           std::int64_t vocab) override {
    gpt::head_input_backward(dlogits, stride, wte, dx, beta, rows, width, vocab);
  }
  void head_weight_backward(const float* dlogits, std::int64_t stride, const float* x, float* dwte,
                            float beta, std::int64_t rows, std::int64_t width,
                            std::int64_t vocab) override {
    gpt::head_weight_backward(dlogits, stride, x, dwte, beta, rows, width, vocab);
  }
  void add(const float* x, float* y, std::int64_t count) override { gpt::add(x, y, count); }
  void zero(float* x, std::int64_t count) override { std::fill_n(x, count, 0.0f); }
  void widen(const std::uint16_t* x, float* y, std::int64_t count) override {
    gpt::widen(x, y, count);
  }
  void narrow(const float* x, std::uint16_t* y, std::int64_t count) override {
    gpt::narrow(x, y, count);
  }
  void narrow_add(const float* x, std::uint16_t* y, std::int64_t count) override {
    gpt::narrow_add(x, y, count);
  }

 private:
  std::map<const float*, std::vector<float>> buffers_;
  std::int64_t bytes_ = 0;
  std::int64_t context_ = 0;
  std::vector<const std::uint8_t*> rows_;
  double loss_ = 0.0;
  double queued_loss_ = 0.0;
};

}  // namespace

std::shared_ptr<Compute> make_host_compute() {
  return std::make_shared<HostCompute>();
}

}  // namespace gpt
