// The element loops and matrix products of the model, forward and backward, on row-major fp32.
// Every loop sums in an order that depends on sizes only, so results do not depend on where a
// buffer lies. Kernels that write gradients of parameters take `beta`: 0 overwrites the buffer,
// whatever it holds, and 1 adds to it.
#pragma once

#include <cstdint>

#include "shape.hpp"

namespace gpt {

/// y = x w + b.
void linear_forward(const float* x,  // [rows, in]
                    const float* w,  // [in, out]
                    const float* b,  // [out]
                    float* y,        // [rows, out]
                    std::int64_t rows, std::int64_t in, std::int64_t out);

/// dx = dy w^T, dw = beta dw + x^T dy, db = beta db + column sums of dy.
void linear_backward(const float* dy,  // [rows, out]
                     const float* x,   // [rows, in]
                     const float* w,   // [in, out]
                     float* dx,        // [rows, in]
                     float* dw,        // [in, out]
                     float* db,        // [out]
                     float beta, std::int64_t rows, std::int64_t in, std::int64_t out);

/// y = (x - mean) / sqrt(variance + 1e-5) * gain + bias over each row; the variance is the biased
/// one.
void layer_norm_forward(const float* x,      // [rows, width]
                        const float* gain,   // [width]
                        const float* bias,   // [width]
                        float* y,            // [rows, width]
                        float* mean,         // [rows], for the backward pass
                        float* inverse_std,  // [rows], for the backward pass
                        std::int64_t rows, std::int64_t width);

/// Adds the gradient of x to dx, which carries the residual stream's gradient.
void layer_norm_backward(const float* dy,           // [rows, width]
                         const float* x,            // [rows, width]
                         const float* gain,         // [width]
                         const float* mean,         // [rows]
                         const float* inverse_std,  // [rows]
                         float* dx,                 // [rows, width], added to
                         float* dgain,              // [width]
                         float* dbias,              // [width]
                         float beta, std::int64_t rows, std::int64_t width);

/// y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU.
void gelu_forward(const float* x, float* y, std::int64_t count);

/// dx = dy * gelu'(x); dx and dy may be the same buffer.
void gelu_backward(const float* dy, const float* x, float* dx, std::int64_t count);

/// out = softmax(q k^T / sqrt(head_width)) v for each row and head; position t sees 0..t.
void attention_forward(const float* qkv,      // [rows, context, 3, heads, head_width]
                       float* probabilities,  // [rows, heads, context, context], for the backward
                       float* out,            // [rows, context, heads, head_width]
                       const AttentionShape& shape);

void attention_backward(const float* dout,           // [rows, context, heads, head_width]
                        const float* qkv,            // [rows, context, 3, heads, head_width]
                        const float* probabilities,  // [rows, heads, context, context]
                        float* dqkv,                 // [rows, context, 3, heads, head_width]
                        float* scratch,              // [context, context]
                        const AttentionShape& shape);

/// logits = x wte^T, the head that is tied to the embedding. Rows of logits are `stride` apart, so
/// that wte and logits may be those of a piece of the vocabulary; likewise below.
void head_logits(const float* x,    // [rows, width]
                 const float* wte,  // [vocab, width]
                 float* logits,     // [rows, vocab], stride
                 std::int64_t stride, std::int64_t rows, std::int64_t width, std::int64_t vocab);

/// dx = beta dx + dlogits wte.
void head_input_backward(const float* dlogits,  // [rows, vocab], stride
                         std::int64_t stride,
                         const float* wte,  // [vocab, width]
                         float* dx,         // [rows, width]
                         float beta, std::int64_t rows, std::int64_t width, std::int64_t vocab);

/// dwte = beta dwte + dlogits^T x.
void head_weight_backward(const float* dlogits,  // [rows, vocab], stride
                          std::int64_t stride,
                          const float* x,  // [rows, width]
                          float* dwte,     // [vocab, width]
                          float beta, std::int64_t rows, std::int64_t width, std::int64_t vocab);

/// Cross entropy (natural logarithm) of one position. Overwrites the logits with their gradient
/// times `scale`: (softmax - one_hot(target)) * scale.
double cross_entropy(float* logits,  // [vocab]
                     std::int64_t target, float scale, std::int64_t vocab);

/// y += x.
void add(const float* x, float* y, std::int64_t count);

/// bf16 <-> fp32; to bf16 rounds to nearest even, a NaN stays one.
void widen(const std::uint16_t* x, float* y, std::int64_t count);
void narrow(const float* x, std::uint16_t* y, std::int64_t count);
/// y = bf16(fp32(y) + x).
void narrow_add(const float* x, std::uint16_t* y, std::int64_t count);

}  // namespace gpt
