// The model's arithmetic on a GPU: kernels of its own, and matrix products of the queue. Every sum
// has one order, which depends on sizes only; there are no atomics. Tests compile this file as C++,
// where the same kernels run on the host.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "launch.cuh"
#include "queue.hpp"

namespace gpt::gpu {
namespace {

constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;
constexpr int kTokens = 256;               // a token is a byte
constexpr std::int64_t kChunkRows = 128;   // rows that one thread adds for sums over rows
constexpr std::int64_t kChunkPlaces = 64;  // places of a token that one warp adds
constexpr int kSlots = 4;                  // batches on their way to the GPU
constexpr int kLossMark = kSlots;
static_assert(kLossMark < Queue::kMarks);

constexpr std::int64_t divided_up(std::int64_t count, std::int64_t by) {
  return (count + by - 1) / by;
}
constexpr std::int64_t aligned(std::int64_t bytes) {
  return divided_up(bytes, 256) * 256;
}

GPT_DEVICE float from_bf16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16U;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

GPT_DEVICE std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const std::uint32_t rounded = bits + 0x7FFFU + ((bits >> 16U) & 1U);
  const std::uint32_t quiet = bits | 0x400000U;
  return static_cast<std::uint16_t>((x == x ? rounded : quiet) >> 16U);
}

// e^(-2u) of GELU's u; see kernels.cpp.
GPT_DEVICE float gelu_exponential(float x) {
  const float exponent = -kTwoRootTwoOverPi * (x + kCubic * x * x * x);
  return expf(exponent < 88.0f ? exponent : 88.0f);  // infinity would become NaN below
}

// -- kernels: free functions, because lambdas for the device must not stand in private members --

void bias_rows(void* stream, const float* b, float* y, std::int64_t rows, std::int64_t width) {
  for_rows(
      "bias", stream, rows, GPT_BODY(Lanes lanes, std::int64_t row) {
        float* out = y + row * width;
        lanes.each(width, [&](std::int64_t j) { out[j] = b[j]; });
      });
}

// The sums of chunks of rows, [chunks, width].
void column_chunks(void* stream, const float* x, float* partial, std::int64_t rows,
                   std::int64_t width) {
  for_elements(
      "column chunks", stream, divided_up(rows, kChunkRows) * width, GPT_BODY(std::int64_t i) {
        const std::int64_t first = i / width * kChunkRows;
        const std::int64_t last = first + kChunkRows < rows ? first + kChunkRows : rows;
        const std::int64_t column = i % width;
        float sum = 0.0f;
        for (std::int64_t row = first; row < last; ++row) sum += x[row * width + column];
        partial[i] = sum;
      });
}

// y = beta y + the sum of `chunks` rows of partial, whose rows are `stride` apart.
void add_chunks(void* stream, const float* partial, std::int64_t stride, float* y, float beta,
                std::int64_t chunks, std::int64_t width) {
  for_elements(
      "column sums", stream, width, GPT_BODY(std::int64_t column) {
        float sum = beta == 0.0f ? 0.0f : y[column];
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
          sum += partial[chunk * stride + column];
        y[column] = sum;
      });
}

void norm_forward(void* stream, const float* x, const float* gain, const float* bias, float* y,
                  float* mean, float* inverse_std, std::int64_t rows, std::int64_t width) {
  const float inverse_width = 1.0f / static_cast<float>(width);
  for_rows(
      "layer norm", stream, rows, GPT_BODY(Lanes lanes, std::int64_t row) {
        const float* in = x + row * width;
        float* out = y + row * width;
        const float m =
            lanes.sum<float>(width, [&](std::int64_t i) { return in[i]; }) * inverse_width;
        const float variance = lanes.sum<float>(width, [&](std::int64_t i) {
          return (in[i] - m) * (in[i] - m);
        }) * inverse_width;
        const float s = 1.0f / sqrtf(variance + 1e-5f);
        lanes.each(width, [&](std::int64_t i) { out[i] = (in[i] - m) * s * gain[i] + bias[i]; });
        lanes.once([&] {
          mean[row] = m;
          inverse_std[row] = s;
        });
      });
}

void norm_input_backward(void* stream, const float* dy, const float* x, const float* gain,
                         const float* mean, const float* inverse_std, float* dx, std::int64_t rows,
                         std::int64_t width) {
  const float inverse_width = 1.0f / static_cast<float>(width);
  for_rows(
      "layer norm backward", stream, rows, GPT_BODY(Lanes lanes, std::int64_t row) {
        const float* d = dy + row * width;
        const float* in = x + row * width;
        float* out = dx + row * width;
        const float m = mean[row];
        const float s = inverse_std[row];
        const float e_mean =
            lanes.sum<float>(width, [&](std::int64_t i) { return d[i] * gain[i]; }) * inverse_width;
        const float en_mean = lanes.sum<float>(width, [&](std::int64_t i) {
          return d[i] * gain[i] * ((in[i] - m) * s);
        }) * inverse_width;
        lanes.each(width, [&](std::int64_t i) {
          const float n = (in[i] - m) * s;
          out[i] += s * (d[i] * gain[i] - e_mean - n * en_mean);
        });
      });
}

// The sums of chunks of rows, [chunks, 2, width]: of the gain's gradient and of the bias'.
void norm_parameter_chunks(void* stream, const float* dy, const float* x, const float* mean,
                           const float* inverse_std, float* partial, std::int64_t rows,
                           std::int64_t width) {
  for_elements(
      "layer norm chunks", stream, divided_up(rows, kChunkRows) * width, GPT_BODY(std::int64_t i) {
        const std::int64_t chunk = i / width;
        const std::int64_t column = i % width;
        const std::int64_t first = chunk * kChunkRows;
        const std::int64_t last = first + kChunkRows < rows ? first + kChunkRows : rows;
        float gain = 0.0f;
        float bias = 0.0f;
        for (std::int64_t row = first; row < last; ++row) {
          const float d = dy[row * width + column];
          gain += d * ((x[row * width + column] - mean[row]) * inverse_std[row]);
          bias += d;
        }
        partial[2 * chunk * width + column] = gain;
        partial[(2 * chunk + 1) * width + column] = bias;
      });
}

void gelu(void* stream, const float* x, float* y, std::int64_t count) {
  for_elements(
      "gelu", stream, count,
      GPT_BODY(std::int64_t i) { y[i] = x[i] / (1.0f + gelu_exponential(x[i])); });
}

void gelu_gradient(void* stream, const float* dy, const float* x, float* dx, std::int64_t count) {
  for_elements(
      "gelu backward", stream, count, GPT_BODY(std::int64_t i) {
        const float e = gelu_exponential(x[i]);
        const float gate = 1.0f / (1.0f + e);
        const float rest = e * gate;
        const float slope = kTwoRootTwoOverPi * (1.0f + 3.0f * kCubic * x[i] * x[i]);
        dx[i] = dy[i] * (gate + x[i] * (gate * rest) * slope);
      });
}

// In place on [count, context]: row i sees i % context + 1 scores, the rest become zeros.
void causal_softmax(void* stream, float* scores, float scale, std::int64_t count,
                    std::int64_t context) {
  for_rows(
      "softmax", stream, count, GPT_BODY(Lanes lanes, std::int64_t row) {
        float* p = scores + row * context;
        const std::int64_t seen = row % context + 1;
        const float largest = lanes.max(seen, [&](std::int64_t i) { return p[i]; });
        lanes.each(context, [&](std::int64_t i) {
          p[i] = i < seen ? expf((p[i] - largest) * scale) : 0.0f;
        });
        const float inverse = 1.0f / lanes.sum<float>(seen, [&](std::int64_t i) { return p[i]; });
        lanes.each(seen, [&](std::int64_t i) { p[i] *= inverse; });
      });
}

// In place on dp, the gradient of p: the gradient of the scores before they were scaled.
void causal_softmax_gradient(void* stream, const float* p, float* dp, float scale,
                             std::int64_t count, std::int64_t context) {
  for_rows(
      "softmax backward", stream, count, GPT_BODY(Lanes lanes, std::int64_t row) {
        const float* of_row = p + row * context;
        float* d = dp + row * context;
        const std::int64_t seen = row % context + 1;
        const float mean = lanes.sum<float>(seen, [&](std::int64_t i) { return d[i] * of_row[i]; });
        lanes.each(context, [&](std::int64_t i) {
          d[i] = i < seen ? of_row[i] * (d[i] - mean) * scale : 0.0f;
        });
      });
}

void lookup(void* stream, const std::uint8_t* inputs, const float* wte, const float* wpe,
            float* out, VocabPiece piece, std::int64_t tokens, std::int64_t context,
            std::int64_t width) {
  const std::int64_t first = piece.first;
  const std::int64_t count = piece.count;
  for_rows(
      "embedding", stream, tokens, GPT_BODY(Lanes lanes, std::int64_t place) {
        const std::int64_t token = inputs[place] - first;
        const bool held = token >= 0 && token < count;
        const float* position = wpe + (wpe != nullptr ? place % context * width : 0);
        const float* row = wte + (held ? token * width : 0);
        float* to = out + place * width;
        lanes.each(width, [&](std::int64_t i) {
          const float before = wpe != nullptr ? position[i] : to[i];
          to[i] = held ? before + row[i] : before;
        });
      });
}

/// Places [first, last) of the list of places, all of one token.
struct Chunk {
  std::int32_t first = 0;
  std::int32_t last = 0;
};

void token_chunks(void* stream, const float* d, const std::int32_t* places, const Chunk* chunks,
                  float* partial, std::int64_t count, std::int64_t width) {
  for_rows(
      "embedding chunks", stream, count, GPT_BODY(Lanes lanes, std::int64_t chunk) {
        const Chunk range = chunks[chunk];
        lanes.each(width, [&](std::int64_t i) {
          float sum = 0.0f;
          for (std::int32_t k = range.first; k < range.last; ++k) sum += d[places[k] * width + i];
          partial[chunk * width + i] = sum;
        });
      });
}

// first_chunk: [kTokens + 1].
void add_token_chunks(void* stream, const float* partial, const std::int32_t* first_chunk,
                      float* dwte, VocabPiece piece, std::int64_t width) {
  const std::int64_t first = piece.first;
  const std::int64_t count = piece.count < kTokens - first ? piece.count : kTokens - first;
  for_rows(
      "embedding backward", stream, count, GPT_BODY(Lanes lanes, std::int64_t row) {
        const std::int32_t begin = first_chunk[first + row];
        const std::int32_t end = first_chunk[first + row + 1];
        float* out = dwte + row * width;
        lanes.each(width, [&](std::int64_t i) {
          float sum = out[i];
          for (std::int32_t chunk = begin; chunk < end; ++chunk) sum += partial[chunk * width + i];
          out[i] = sum;
        });
      });
}

void position_sums(void* stream, const float* d, float* dwpe, float beta, std::int64_t rows,
                   std::int64_t context, std::int64_t width) {
  for_elements(
      "position sums", stream, context * width, GPT_BODY(std::int64_t i) {
        float sum = beta == 0.0f ? 0.0f : dwpe[i];
        for (std::int64_t row = 0; row < rows; ++row) sum += d[row * context * width + i];
        dwpe[i] = sum;
      });
}

// In place: logits become their gradient; losses[place] is what the place adds.
void cross_entropies(void* stream, float* logits, const std::uint8_t* targets, double* losses,
                     float scale, std::int64_t tokens, std::int64_t vocab) {
  for_rows(
      "cross entropy", stream, tokens, GPT_BODY(Lanes lanes, std::int64_t place) {
        float* x = logits + place * vocab;
        const std::int64_t target = targets[place];
        const float largest = lanes.max(vocab, [&](std::int64_t i) { return x[i]; });
        const double distance = static_cast<double>(largest) - static_cast<double>(x[target]);
        // No lane may write before all have read the target's logit: this sum is read by all.
        const float sum =
            lanes.sum<float>(vocab, [&](std::int64_t i) { return expf(x[i] - largest); });
        const float factor = scale / sum;
        lanes.each(vocab, [&](std::int64_t i) {
          const float gradient = expf(x[i] - largest) * factor;
          x[i] = i == target ? gradient - scale : gradient;
        });
        lanes.once([&] { losses[place] = log(static_cast<double>(sum)) + distance; });
      });
}

void add_losses(void* stream, const double* losses, double* total, std::int64_t tokens) {
  for_rows(
      "loss", stream, 1, GPT_BODY(Lanes lanes, std::int64_t) {
        const double sum = lanes.sum<double>(tokens, [&](std::int64_t i) { return losses[i]; });
        lanes.once([&] { *total += sum; });
      });
}

void add_elements(void* stream, const float* x, float* y, std::int64_t count) {
  for_elements(
      "add", stream, count, GPT_BODY(std::int64_t i) { y[i] += x[i]; });
}

void widen_elements(void* stream, const std::uint16_t* x, float* y, std::int64_t count) {
  for_elements(
      "widen", stream, count, GPT_BODY(std::int64_t i) { y[i] = from_bf16(x[i]); });
}

void narrow_elements(void* stream, const float* x, std::uint16_t* y, std::int64_t count) {
  for_elements(
      "narrow", stream, count, GPT_BODY(std::int64_t i) { y[i] = to_bf16(x[i]); });
}

void narrow_add_elements(void* stream, const float* x, std::uint16_t* y, std::int64_t count) {
  for_elements(
      "narrow add", stream, count,
      GPT_BODY(std::int64_t i) { y[i] = to_bf16(from_bf16(y[i]) + x[i]); });
}

// y [rows, columns], packed, of x with rows `stride` apart.
void narrow_rows(void* stream, const float* x, std::int64_t stride, std::uint16_t* y,
                 std::int64_t rows, std::int64_t columns) {
  for_rows(
      "narrow rows", stream, rows, GPT_BODY(Lanes lanes, std::int64_t row) {
        lanes.each(columns,
                   [&](std::int64_t i) { y[row * columns + i] = to_bf16(x[row * stride + i]); });
      });
}

class GpuCompute final : public Compute {
 public:
  GpuCompute(std::unique_ptr<Queue> queue, bool bf16) : queue_(std::move(queue)), bf16_(bf16) {}
  ~GpuCompute() override {
    for (const auto& [memory, bytes] : sizes_) queue_->release(memory);
    if (pinned_ != nullptr) queue_->release_pinned(pinned_);
  }
  GpuCompute(const GpuCompute&) = delete;
  GpuCompute& operator=(const GpuCompute&) = delete;

  [[nodiscard]] std::string name() const override { return queue_->name(); }
  [[nodiscard]] void* stream() const override { return queue_->stream(); }

  float* allocate(std::int64_t count) override { return take<float>(count); }
  void release(float* memory) noexcept override {
    const auto found = sizes_.find(memory);
    if (found == sizes_.end()) return;
    queue_->release(memory);
    bytes_ -= found->second;
    sizes_.erase(found);
  }
  [[nodiscard]] std::int64_t bytes() const override { return bytes_ + queue_->own_bytes(); }
  [[nodiscard]] std::int64_t heads_at_once(const ModelShape& shape) const override {
    return shape.heads;
  }

  void reserve(const ModelShape& shape, std::int64_t max_rows) override {
    const std::int64_t C = shape.width;
    const std::int64_t T = shape.context;
    const std::int64_t tokens = max_rows * T;
    shape_ = shape;
    most_chunks_ = tokens / kChunkPlaces + kTokens;
    layout_.targets = aligned(tokens);
    layout_.places = layout_.targets + aligned(tokens);
    layout_.chunks = layout_.places + aligned(4 * tokens);
    layout_.first_chunk = layout_.chunks + aligned(8 * most_chunks_);
    layout_.bytes = layout_.first_chunk + aligned(4 * (kTokens + 1));
    batch_ = take<std::byte>(layout_.bytes);
    losses_ = take<double>(tokens);
    total_ = take<double>(1);
    partial_ = take<float>(std::max(divided_up(tokens, kChunkRows) * 4 * C, most_chunks_ * C));
    pinned_ = static_cast<std::byte*>(queue_->allocate_pinned(kSlots * layout_.bytes + 256));
    if (!bf16_) return;
    std::int64_t piece = 0;
    for (std::int64_t k = 0; k < shape.vocab_units; ++k) {
      piece = std::max(piece, vocab_piece(shape, k).count);
    }
    const std::int64_t scores = shape.heads * T * T;
    halves_[0] = take<std::uint16_t>(tokens * std::max(4 * C, piece));
    halves_[1] = take<std::uint16_t>(std::max({tokens * 4 * C, 4 * C * C, piece * C, scores}));
    halves_[2] = take<std::uint16_t>(std::max(T * C, scores));
  }

  // The lists let each token's places be added in one order, without atomics.
  void start(std::span<const std::uint8_t* const> rows) override {
    queue_->use();
    rows_ = static_cast<std::int64_t>(rows.size());
    tokens_ = rows_ * shape_.context;
    std::byte* block = pinned_ + slot_ * layout_.bytes;
    queue_->wait(slot_);  // the batch that lay here before may still be on its way
    auto* inputs = reinterpret_cast<std::uint8_t*>(block);
    auto* targets = reinterpret_cast<std::uint8_t*>(block + layout_.targets);
    auto* places = reinterpret_cast<std::int32_t*>(block + layout_.places);
    auto* chunks = reinterpret_cast<Chunk*>(block + layout_.chunks);
    auto* first_chunk = reinterpret_cast<std::int32_t*>(block + layout_.first_chunk);
    const auto context = static_cast<std::size_t>(shape_.context);
    std::int32_t counts[kTokens] = {};
    for (std::size_t row = 0; row < rows.size(); ++row) {
      std::memcpy(inputs + row * context, rows[row], context);
      std::memcpy(targets + row * context, rows[row] + 1, context);
    }
    for (std::int64_t place = 0; place < tokens_; ++place) ++counts[inputs[place]];
    std::int32_t next[kTokens] = {};
    std::int32_t at = 0;
    chunks_ = 0;
    for (int token = 0; token < kTokens; ++token) {
      next[token] = at;
      first_chunk[token] = static_cast<std::int32_t>(chunks_);
      const std::int32_t end = at + counts[token];
      while (at < end) {
        const auto last = static_cast<std::int32_t>(std::min<std::int64_t>(at + kChunkPlaces, end));
        chunks[chunks_++] = {at, last};
        at = last;
      }
    }
    first_chunk[kTokens] = static_cast<std::int32_t>(chunks_);
    for (std::int64_t place = 0; place < tokens_; ++place) {
      places[next[inputs[place]]++] = static_cast<std::int32_t>(place);
    }
    queue_->upload(batch_, block, layout_.bytes);
    queue_->mark(slot_);
    slot_ = (slot_ + 1) % kSlots;
  }

  void embedding_forward(const float* wte, const float* wpe, float* out, VocabPiece piece,
                         std::int64_t width) override {
    lookup(stream(), reinterpret_cast<const std::uint8_t*>(batch_), wte, wpe, out, piece, tokens_,
           shape_.context, width);
  }

  void embedding_backward(const float* d, float* dwte, float* dwpe, VocabPiece piece, float beta,
                          std::int64_t width) override {
    if (beta == 0.0f) zero(dwte, piece.count * width);
    token_chunks(stream(), d, reinterpret_cast<const std::int32_t*>(batch_ + layout_.places),
                 reinterpret_cast<const Chunk*>(batch_ + layout_.chunks), partial_, chunks_, width);
    add_token_chunks(stream(), partial_,
                     reinterpret_cast<const std::int32_t*>(batch_ + layout_.first_chunk), dwte,
                     piece, width);
    if (dwpe != nullptr) {
      position_sums(stream(), d, dwpe, beta, rows_, shape_.context, width);
    }
  }

  void cross_entropy(float* logits, float scale, std::int64_t vocab) override {
    cross_entropies(stream(), logits,
                    reinterpret_cast<const std::uint8_t*>(batch_ + layout_.targets), losses_, scale,
                    tokens_, vocab);
    add_losses(stream(), losses_, total_, tokens_);
  }
  void queue_loss() override {
    queue_->use();
    queue_->download(pinned_loss(), total_, sizeof(double));
    queue_->zero(total_, sizeof(double));
    queue_->mark(kLossMark);
  }
  double take_loss() override {
    queue_->wait(kLossMark);
    double loss = 0.0;
    std::memcpy(&loss, pinned_loss(), sizeof loss);
    return loss;
  }

  void linear_forward(const float* x, const float* w, const float* b, float* y, std::int64_t rows,
                      std::int64_t in, std::int64_t out) override {
    bias_rows(stream(), b, y, rows, out);
    multiply(operand(0, x, rows, in), operand(1, w, in, out), y, out, rows, out, in, 1.0f);
  }
  void linear_backward(const float* dy, const float* x, const float* w, float* dx, float* dw,
                       float* db, float beta, std::int64_t rows, std::int64_t in,
                       std::int64_t out) override {
    const Operand d = operand(0, dy, rows, out);
    multiply(d, transposed(operand(1, w, in, out)), dx, in, rows, in, out, 0.0f);
    multiply(transposed(operand(1, x, rows, in)), d, dw, out, in, out, rows, beta);
    column_chunks(stream(), dy, partial_, rows, out);
    add_chunks(stream(), partial_, out, db, beta, divided_up(rows, kChunkRows), out);
  }
  void layer_norm_forward(const float* x, const float* gain, const float* bias, float* y,
                          float* mean, float* inverse_std, std::int64_t rows,
                          std::int64_t width) override {
    norm_forward(stream(), x, gain, bias, y, mean, inverse_std, rows, width);
  }
  void layer_norm_backward(const float* dy, const float* x, const float* gain, const float* mean,
                           const float* inverse_std, float* dx, float* dgain, float* dbias,
                           float beta, std::int64_t rows, std::int64_t width) override {
    norm_input_backward(stream(), dy, x, gain, mean, inverse_std, dx, rows, width);
    norm_parameter_chunks(stream(), dy, x, mean, inverse_std, partial_, rows, width);
    const std::int64_t chunks = divided_up(rows, kChunkRows);
    add_chunks(stream(), partial_, 2 * width, dgain, beta, chunks, width);
    add_chunks(stream(), partial_ + width, 2 * width, dbias, beta, chunks, width);
  }
  void gelu_forward(const float* x, float* y, std::int64_t count) override {
    gelu(stream(), x, y, count);
  }
  void gelu_backward(const float* dy, const float* x, float* dx, std::int64_t count) override {
    gelu_gradient(stream(), dy, x, dx, count);
  }

  // The heads of a row are one batch of products.
  void attention_forward(const float* qkv, float* probabilities, float* out,
                         const AttentionShape& shape) override {
    const std::int64_t T = shape.context;
    const std::int64_t D = shape.head_width;
    const std::int64_t C = shape.heads * D;
    const std::int64_t scores = shape.heads * T * T;
    const Operand all = operand(0, qkv, shape.rows * T, 3 * C);
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const Operand q = head(all, row * T * 3 * C, D);
      const Operand k = head(all, row * T * 3 * C + C, D);
      multiply(q, transposed(k), probabilities + row * scores, T, T, T, D, 0.0f, shape.heads,
               T * T);
    }
    causal_softmax(stream(), probabilities, scale_of(D), shape.rows * shape.heads * T, T);
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const Operand p =
          batched(operand(1, probabilities + row * scores, shape.heads * T, T), T * T);
      const Operand v = head(all, row * T * 3 * C + 2 * C, D);
      multiply(p, v, out + row * T * C, C, T, D, T, 0.0f, shape.heads, D);
    }
  }
  void attention_backward(const float* dout, const float* qkv, const float* probabilities,
                          float* dqkv, float* scratch, const AttentionShape& shape) override {
    const std::int64_t T = shape.context;
    const std::int64_t D = shape.head_width;
    const std::int64_t H = shape.heads;
    const std::int64_t C = H * D;
    const Operand all = operand(0, qkv, shape.rows * T, 3 * C);
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      const std::int64_t offset = row * T * 3 * C;
      const Operand q = head(all, offset, D);
      const Operand k = head(all, offset + C, D);
      const Operand v = head(all, offset + 2 * C, D);
      const float* probability = probabilities + row * H * T * T;
      const Operand p = batched(operand(1, probability, H * T, T), T * T);
      const Operand dy = head(operand(2, dout + row * T * C, T, C), 0, D);
      multiply(transposed(p), dy, dqkv + offset + 2 * C, 3 * C, T, D, T, 0.0f, H, D);
      multiply(dy, transposed(v), scratch, T, T, T, D, 0.0f, H, T * T);
      causal_softmax_gradient(stream(), probability, scratch, scale_of(D), H * T, T);
      const Operand ds = batched(operand(2, scratch, H * T, T), T * T);
      multiply(ds, k, dqkv + offset, 3 * C, T, D, T, 0.0f, H, D);
      multiply(transposed(ds), q, dqkv + offset + C, 3 * C, T, D, T, 0.0f, H, D);
    }
  }

  void head_logits(const float* x, const float* wte, float* logits, std::int64_t stride,
                   std::int64_t rows, std::int64_t width, std::int64_t vocab) override {
    multiply(operand(0, x, rows, width), transposed(operand(1, wte, vocab, width)), logits, stride,
             rows, vocab, width, 0.0f);
  }
  void head_input_backward(const float* dlogits, std::int64_t stride, const float* wte, float* dx,
                           float beta, std::int64_t rows, std::int64_t width,
                           std::int64_t vocab) override {
    multiply(operand(0, dlogits, rows, vocab, stride), operand(1, wte, vocab, width), dx, width,
             rows, width, vocab, beta);
  }
  void head_weight_backward(const float* dlogits, std::int64_t stride, const float* x, float* dwte,
                            float beta, std::int64_t rows, std::int64_t width,
                            std::int64_t vocab) override {
    multiply(transposed(operand(0, dlogits, rows, vocab, stride)), operand(1, x, rows, width), dwte,
             width, vocab, width, rows, beta);
  }

  void add(const float* x, float* y, std::int64_t count) override {
    add_elements(stream(), x, y, count);
  }
  void zero(float* x, std::int64_t count) override {
    if (count > 0) queue_->zero(x, count * static_cast<std::int64_t>(sizeof(float)));
  }
  void widen(const std::uint16_t* x, float* y, std::int64_t count) override {
    widen_elements(stream(), x, y, count);
  }
  void narrow(const float* x, std::uint16_t* y, std::int64_t count) override {
    narrow_elements(stream(), x, y, count);
  }
  void narrow_add(const float* x, std::uint16_t* y, std::int64_t count) override {
    narrow_add_elements(stream(), x, y, count);
  }

 private:
  // Bytes from the start of a batch's block; inputs come first.
  struct BatchLayout {
    std::int64_t targets = 0;
    std::int64_t places = 0;
    std::int64_t chunks = 0;
    std::int64_t first_chunk = 0;
    std::int64_t bytes = 0;
  };

  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes =
        aligned(std::max<std::int64_t>(count, 1) * static_cast<std::int64_t>(sizeof(T)));
    void* memory = queue_->allocate(bytes);
    sizes_.emplace(memory, bytes);
    bytes_ += bytes;
    return static_cast<T*>(memory);
  }
  [[nodiscard]] std::byte* pinned_loss() const { return pinned_ + kSlots * layout_.bytes; }
  static float scale_of(std::int64_t head_width) {
    return 1.0f / std::sqrt(static_cast<float>(head_width));
  }

  // x as the products take it: itself, or rounded to bf16 into a buffer that the next use of the
  // same slot overwrites.
  Operand operand(int slot, const float* x, std::int64_t rows, std::int64_t columns,
                  std::int64_t stride = 0) {
    if (stride == 0) stride = columns;
    if (!bf16_) return {x, stride};
    std::uint16_t* halves = halves_[slot];
    if (stride == columns) {
      narrow_elements(stream(), x, halves, rows * columns);
    } else {
      narrow_rows(stream(), x, stride, halves, rows, columns);
    }
    return {halves, columns};
  }
  static Operand transposed(Operand x) {
    x.transposed = true;
    return x;
  }
  static Operand batched(Operand x, std::int64_t step) {
    x.step = step;
    return x;
  }
  // The part of x that starts `offset` elements behind it, heads `step` apart.
  Operand head(Operand x, std::int64_t offset, std::int64_t step) const {
    const std::int64_t bytes = offset * (bf16_ ? 2 : 4);
    return {static_cast<const std::byte*>(x.data) + bytes, x.stride, false, step};
  }
  void multiply(Operand a, Operand b, float* c, std::int64_t c_stride, std::int64_t rows,
                std::int64_t columns, std::int64_t inner, float beta, std::int64_t batch = 1,
                std::int64_t c_step = 0) {
    queue_->multiply({a, b, c, c_stride, c_step, rows, columns, inner, batch, beta, bf16_});
  }

  std::unique_ptr<Queue> queue_;
  bool bf16_;
  std::map<void*, std::int64_t> sizes_;
  std::int64_t bytes_ = 0;
  ModelShape shape_;
  std::int64_t most_chunks_ = 0;
  BatchLayout layout_;
  std::byte* batch_ = nullptr;
  double* losses_ = nullptr;  // [tokens]
  double* total_ = nullptr;
  float* partial_ = nullptr;
  std::uint16_t* halves_[3] = {};
  std::byte* pinned_ = nullptr;  // kSlots batches, and the loss
  int slot_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t tokens_ = 0;
  std::int64_t chunks_ = 0;
};

}  // namespace

std::unique_ptr<Compute> make_gpu_compute(std::unique_ptr<Queue> queue, bool bf16) {
  return std::make_unique<GpuCompute>(std::move(queue), bf16);
}

}  // namespace gpt::gpu
