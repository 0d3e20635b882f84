// Where the model's arithmetic runs: on the host, or on a GPU. One object serves one rank's model;
// the schedule of its calls is model.cpp's, the same for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "shape.hpp"

namespace gpt {

/// The functions of kernels.hpp, where their text is, over memory that the object gave out or that
/// the engine holds there. Calls queue work in order and return; take_loss() alone waits for
/// results. A call throws zshard::DeviceError, with call, file and line, if the device refuses it,
/// and zshard::OutOfMemory where memory is short. From one thread at a time.
class Compute {
 public:
  virtual ~Compute() = default;
  /// "host", "NVIDIA H200".
  [[nodiscard]] virtual std::string name() const = 0;
  /// The queue that the work is on, for the engine's guards: a cudaStream_t, or null on the host.
  [[nodiscard]] virtual void* stream() const = 0;

  /// Memory for so many floats, zeros.
  virtual float* allocate(std::int64_t count) = 0;
  virtual void release(float* memory) noexcept = 0;
  /// Takes what the calls need for batches of at most `max_rows` rows of this shape. Before
  /// start().
  virtual void reserve(const ModelShape& shape, std::int64_t max_rows) = 0;
  /// Bytes that the object holds now, its own work memory included.
  [[nodiscard]] virtual std::int64_t bytes() const = 0;
  /// Heads whose scores attention_backward() keeps in its scratch at once.
  [[nodiscard]] virtual std::int64_t heads_at_once(const ModelShape& shape) const = 0;

  /// Sets the batch, see Model::start.
  virtual void start(std::span<const std::uint8_t* const> rows) = 0;
  /// out = wte[token] (+ wpe), for tokens of the piece; others keep what is in `out`. wpe: null
  /// leaves positions out, else `out` counts as zero before.
  virtual void embedding_forward(const float* wte,  // [piece.count, width]
                                 const float* wpe,  // [context, width], or null
                                 float* out,        // [rows, context, width]
                                 VocabPiece piece, std::int64_t width) = 0;
  /// Adds d to the gradient of each token of the piece, and of each position.
  virtual void embedding_backward(const float* d,  // [rows, context, width]
                                  float* dwte,     // [piece.count, width]
                                  float* dwpe,     // [context, width], or null
                                  VocabPiece piece, float beta, std::int64_t width) = 0;
  /// cross_entropy() of kernels.hpp for each position of the batch, whose sum is added to the loss.
  virtual void cross_entropy(float* logits,  // [rows, context, vocab]
                             float scale, std::int64_t vocab) = 0;
  /// From here on take_loss() gives what cross_entropy() has added so far; a new sum starts at 0.
  virtual void queue_loss() = 0;
  /// The sum at the last queue_loss(). Waits for it.
  virtual double take_loss() = 0;

  virtual void linear_forward(const float* x, const float* w, const float* b, float* y,
                              std::int64_t rows, std::int64_t in, std::int64_t out) = 0;
  virtual void linear_backward(const float* dy, const float* x, const float* w, float* dx,
                               float* dw, float* db, float beta, std::int64_t rows, std::int64_t in,
                               std::int64_t out) = 0;
  virtual void layer_norm_forward(const float* x, const float* gain, const float* bias, float* y,
                                  float* mean, float* inverse_std, std::int64_t rows,
                                  std::int64_t width) = 0;
  virtual void layer_norm_backward(const float* dy, const float* x, const float* gain,
                                   const float* mean, const float* inverse_std, float* dx,
                                   float* dgain, float* dbias, float beta, std::int64_t rows,
                                   std::int64_t width) = 0;
  virtual void gelu_forward(const float* x, float* y, std::int64_t count) = 0;
  virtual void gelu_backward(const float* dy, const float* x, float* dx, std::int64_t count) = 0;
  virtual void attention_forward(const float* qkv, float* probabilities, float* out,
                                 const AttentionShape& shape) = 0;
  /// scratch: [heads_at_once, context, context].
  virtual void attention_backward(const float* dout, const float* qkv, const float* probabilities,
                                  float* dqkv, float* scratch, const AttentionShape& shape) = 0;
  virtual void head_logits(const float* x, const float* wte, float* logits, std::int64_t stride,
                           std::int64_t rows, std::int64_t width, std::int64_t vocab) = 0;
  virtual void head_input_backward(const float* dlogits, std::int64_t stride, const float* wte,
                                   float* dx, float beta, std::int64_t rows, std::int64_t width,
                                   std::int64_t vocab) = 0;
  virtual void head_weight_backward(const float* dlogits, std::int64_t stride, const float* x,
                                    float* dwte, float beta, std::int64_t rows, std::int64_t width,
                                    std::int64_t vocab) = 0;
  virtual void add(const float* x, float* y, std::int64_t count) = 0;
  virtual void zero(float* x, std::int64_t count) = 0;
  virtual void widen(const std::uint16_t* x, float* y, std::int64_t count) = 0;
  virtual void narrow(const float* x, std::uint16_t* y, std::int64_t count) = 0;
  virtual void narrow_add(const float* x, std::uint16_t* y, std::int64_t count) = 0;
};

/// Floats of a Compute, freed with the object.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<Compute> compute, std::int64_t count)
      : compute_(std::move(compute)), data_(compute_->allocate(count)) {}
  Buffer(Buffer&& other) noexcept
      : compute_(std::move(other.compute_)), data_(std::exchange(other.data_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(compute_, other.compute_);
    std::swap(data_, other.data_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) compute_->release(data_);
  }
  [[nodiscard]] float* data() const { return data_; }

 private:
  std::shared_ptr<Compute> compute_;
  float* data_ = nullptr;
};

}  // namespace gpt
