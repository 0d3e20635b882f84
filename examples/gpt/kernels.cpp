#include "kernels.hpp"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>

// One loop serves every processor: the compiler makes a version for each vector width, and the
// program takes the widest at start. Sanitizers get the plain one: they cannot run the resolvers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GPT_VECTOR_VERSIONS \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GPT_VECTOR_VERSIONS
#endif
#define GPT_INLINE inline __attribute__((always_inline))

namespace gpt {
namespace {

// Sums run in 16 lanes, lane j over elements j, j + 16, ..., and then in a tree: a fixed order that
// vectorises.
constexpr std::int64_t kLanes = 16;

GPT_INLINE float fold(float* lane) {
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

// The sum over i of term(i).
template <class Term>
GPT_INLINE float lane_sum(std::int64_t count, Term term) {
  float lane[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lane[j] += term(i + j);
  }
  for (std::int64_t j = 0; i + j < count; ++j) lane[j] += term(i + j);
  return fold(lane);
}

GPT_INLINE float lane_max(const float* x, std::int64_t count) {
  float lane[kLanes];
  for (std::int64_t j = 0; j < kLanes; ++j) lane[j] = x[0];
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lane[j] = lane[j] < x[i + j] ? x[i + j] : lane[j];
  }
  for (std::int64_t j = 0; i + j < count; ++j) lane[j] = lane[j] < x[i + j] ? x[i + j] : lane[j];
  for (std::int64_t j = 1; j < kLanes; ++j) lane[0] = lane[0] < lane[j] ? lane[j] : lane[0];
  return lane[0];
}

// e^x within 2 units in the last place for x in [-87, 88]; smaller and larger x count as the ends,
// NaN stays NaN. x = n ln 2 + r with |r| <= ln(2) / 2, a polynomial of r (Cephes' coefficients),
// and n put into the exponent. std::exp would not vectorise.
GPT_INLINE float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const std::uint32_t exponent =
      std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kRound) + 127U;
  return p * std::bit_cast<float>(exponent << 23U);
}

// GELU in its logistic form: 0.5 (1 + tanh(u)) = 1 / (1 + e^(-2u)). The difference 1 + tanh(u)
// would lose all digits in the negative tail.
constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

// e^(-2u) of x.
GPT_INLINE float gelu_exponential(float x) {
  return exponential(-kTwoRootTwoOverPi * (x + kCubic * x * x * x));
}

// In place: x[0..count) = softmax(scale * x).
GPT_VECTOR_VERSIONS
void scaled_softmax(float* x, float scale, std::int64_t count) {
  const float largest = lane_max(x, count);
  for (std::int64_t i = 0; i < count; ++i) x[i] = exponential((x[i] - largest) * scale);
  const float inverse = 1.0f / lane_sum(count, [&](std::int64_t i) { return x[i]; });
  for (std::int64_t i = 0; i < count; ++i) x[i] *= inverse;
}

// In place on dp, the gradient of probabilities p: the gradient of the logits that were scaled.
GPT_VECTOR_VERSIONS
void scaled_softmax_backward(const float* p, float* dp, float scale, std::int64_t count) {
  const float mean = lane_sum(count, [&](std::int64_t i) { return dp[i] * p[i]; });
  for (std::int64_t i = 0; i < count; ++i) dp[i] = p[i] * (dp[i] - mean) * scale;
}

// y = beta y + column sums of x.
GPT_VECTOR_VERSIONS
void column_sums(const float* x,  // [rows, width]
                 float* y,        // [width]
                 float beta, std::int64_t rows, std::int64_t width) {
  if (beta == 0.0f) std::fill_n(y, width, 0.0f);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t j = 0; j < width; ++j) y[j] += x[row * width + j];
  }
}

struct Matrix {
  const float* data;
  std::int64_t stride;
  bool transposed = false;
};

// c[rows, columns] = a b + beta c. Sizes fit an int: the configuration refuses larger ones.
void multiply(Matrix a, Matrix b, float* c, std::int64_t c_stride, std::int64_t rows,
              std::int64_t columns, std::int64_t inner, float beta) {
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(rows),
              static_cast<int>(columns), static_cast<int>(inner), 1.0f, a.data,
              static_cast<int>(a.stride), b.data, static_cast<int>(b.stride), beta, c,
              static_cast<int>(c_stride));
}

}  // namespace

void linear_forward(const float* x, const float* w, const float* b, float* y, std::int64_t rows,
                    std::int64_t in, std::int64_t out) {
  for (std::int64_t row = 0; row < rows; ++row) std::copy_n(b, out, y + row * out);
  multiply({x, in}, {w, out}, y, out, rows, out, in, 1.0f);
}

void linear_backward(const float* dy, const float* x, const float* w, float* dx, float* dw,
                     float* db, float beta, std::int64_t rows, std::int64_t in, std::int64_t out) {
  multiply({dy, out}, {w, out, true}, dx, in, rows, in, out, 0.0f);
  multiply({x, in, true}, {dy, out}, dw, out, in, out, rows, beta);
  column_sums(dy, db, beta, rows, out);
}

GPT_VECTOR_VERSIONS
void layer_norm_forward(const float* x, const float* gain, const float* bias, float* y, float* mean,
                        float* inverse_std, std::int64_t rows, std::int64_t width) {
  const float inverse_width = 1.0f / static_cast<float>(width);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * width;
    float* out = y + row * width;
    const float m = lane_sum(width, [&](std::int64_t i) { return in[i]; }) * inverse_width;
    const float variance =
        lane_sum(width, [&](std::int64_t i) { return (in[i] - m) * (in[i] - m); }) * inverse_width;
    const float s = 1.0f / std::sqrt(variance + 1e-5f);
    for (std::int64_t i = 0; i < width; ++i) out[i] = (in[i] - m) * s * gain[i] + bias[i];
    mean[row] = m;
    inverse_std[row] = s;
  }
}

GPT_VECTOR_VERSIONS
void layer_norm_backward(const float* dy, const float* x, const float* gain, const float* mean,
                         const float* inverse_std, float* dx, float* dgain, float* dbias,
                         float beta, std::int64_t rows, std::int64_t width) {
  if (beta == 0.0f) {
    std::fill_n(dgain, width, 0.0f);
    std::fill_n(dbias, width, 0.0f);
  }
  const float inverse_width = 1.0f / static_cast<float>(width);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* d = dy + row * width;
    const float* in = x + row * width;
    float* out = dx + row * width;
    const float m = mean[row];
    const float s = inverse_std[row];
    // With the normalised n = (x - m) s and its gradient e = d gain:
    // dx = s (e - average(e) - n average(e n)).
    const float e_mean =
        lane_sum(width, [&](std::int64_t i) { return d[i] * gain[i]; }) * inverse_width;
    const float en_mean =
        lane_sum(width, [&](std::int64_t i) { return d[i] * gain[i] * ((in[i] - m) * s); }) *
        inverse_width;
    for (std::int64_t i = 0; i < width; ++i) {
      const float n = (in[i] - m) * s;
      out[i] += s * (d[i] * gain[i] - e_mean - n * en_mean);
      dgain[i] += d[i] * n;
      dbias[i] += d[i];
    }
  }
}

GPT_VECTOR_VERSIONS
void gelu_forward(const float* x, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] / (1.0f + gelu_exponential(x[i]));
}

GPT_VECTOR_VERSIONS
void gelu_backward(const float* dy, const float* x, float* dx, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float e = gelu_exponential(x[i]);
    const float gate = 1.0f / (1.0f + e);
    const float rest = e * gate;  // 1 - gate, with all its digits
    const float slope = kTwoRootTwoOverPi * (1.0f + 3.0f * kCubic * x[i] * x[i]);
    dx[i] = dy[i] * (gate + x[i] * (gate * rest) * slope);
  }
}

void attention_forward(const float* qkv, float* probabilities, float* out,
                       const AttentionShape& shape) {
  const std::int64_t T = shape.context;
  const std::int64_t D = shape.head_width;
  const std::int64_t C = shape.heads * D;
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      const float* q = qkv + row * T * 3 * C + head * D;  // [T, D], stride 3C
      const float* k = q + C;
      const float* v = k + C;
      float* p = probabilities + (row * shape.heads + head) * T * T;  // [T, T]
      multiply({q, 3 * C}, {k, 3 * C, true}, p, T, T, T, D, 0.0f);
      for (std::int64_t t = 0; t < T; ++t) {
        scaled_softmax(p + t * T, scale, t + 1);
        std::fill_n(p + t * T + t + 1, T - t - 1, 0.0f);
      }
      multiply({p, T}, {v, 3 * C}, out + row * T * C + head * D, C, T, D, T, 0.0f);
    }
  }
}

void attention_backward(const float* dout, const float* qkv, const float* probabilities,
                        float* dqkv, float* scratch, const AttentionShape& shape) {
  const std::int64_t T = shape.context;
  const std::int64_t D = shape.head_width;
  const std::int64_t C = shape.heads * D;
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      const std::int64_t offset = row * T * 3 * C + head * D;
      const float* q = qkv + offset;  // [T, D], stride 3C, and so are k and v
      const float* k = q + C;
      const float* v = k + C;
      float* dq = dqkv + offset;
      float* dk = dq + C;
      float* dv = dk + C;
      const float* p = probabilities + (row * shape.heads + head) * T * T;  // [T, T]
      const float* dy = dout + row * T * C + head * D;                      // [T, D], stride C
      multiply({p, T, true}, {dy, C}, dv, 3 * C, T, D, T, 0.0f);
      float* ds = scratch;  // [T, T]: first the gradient of p, then of q k^T
      multiply({dy, C}, {v, 3 * C, true}, ds, T, T, T, D, 0.0f);
      for (std::int64_t t = 0; t < T; ++t) {
        scaled_softmax_backward(p + t * T, ds + t * T, scale, t + 1);
        std::fill_n(ds + t * T + t + 1, T - t - 1, 0.0f);
      }
      multiply({ds, T}, {k, 3 * C}, dq, 3 * C, T, D, T, 0.0f);
      multiply({ds, T, true}, {q, 3 * C}, dk, 3 * C, T, D, T, 0.0f);
    }
  }
}

void head_logits(const float* x, const float* wte, float* logits, std::int64_t stride,
                 std::int64_t rows, std::int64_t width, std::int64_t vocab) {
  multiply({x, width}, {wte, width, true}, logits, stride, rows, vocab, width, 0.0f);
}

void head_input_backward(const float* dlogits, std::int64_t stride, const float* wte, float* dx,
                         float beta, std::int64_t rows, std::int64_t width, std::int64_t vocab) {
  multiply({dlogits, stride}, {wte, width}, dx, width, rows, width, vocab, beta);
}

void head_weight_backward(const float* dlogits, std::int64_t stride, const float* x, float* dwte,
                          float beta, std::int64_t rows, std::int64_t width, std::int64_t vocab) {
  multiply({dlogits, stride, true}, {x, width}, dwte, width, vocab, width, rows, beta);
}

GPT_VECTOR_VERSIONS
double cross_entropy(float* logits, std::int64_t target, float scale, std::int64_t vocab) {
  const float largest = lane_max(logits, vocab);
  // The loss is taken before the logits are overwritten; in fp64, so that a small loss keeps its
  // digits.
  const double distance = static_cast<double>(largest) - static_cast<double>(logits[target]);
  for (std::int64_t i = 0; i < vocab; ++i) logits[i] = exponential(logits[i] - largest);
  const float sum = lane_sum(vocab, [&](std::int64_t i) { return logits[i]; });
  const float factor = scale / sum;
  for (std::int64_t i = 0; i < vocab; ++i) logits[i] *= factor;
  logits[target] -= scale;
  return std::log(static_cast<double>(sum)) + distance;
}

GPT_VECTOR_VERSIONS
void add(const float* x, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += x[i];
}

namespace {

GPT_INLINE float from_bf16(std::uint16_t x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16U);
}

GPT_INLINE std::uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = bits + 0x7FFFU + ((bits >> 16U) & 1U);
  const std::uint32_t quiet = bits | 0x400000U;
  return static_cast<std::uint16_t>((x == x ? rounded : quiet) >> 16U);
}

}  // namespace

GPT_VECTOR_VERSIONS
void widen(const std::uint16_t* x, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = from_bf16(x[i]);
}

GPT_VECTOR_VERSIONS
void narrow(const float* x, std::uint16_t* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = to_bf16(x[i]);
}

GPT_VECTOR_VERSIONS
void narrow_add(const float* x, std::uint16_t* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = to_bf16(from_bf16(y[i]) + x[i]);
}

}  // namespace gpt
