// Kernels of the small models: plain loops, shapes beside every pointer. Gradients of parameters
// are written as the mode says; null pointers of outputs are left out.
#pragma once

#include <algorithm>
#include <cmath>

#include "zshard/types.hpp"

namespace zshard::wrap {

inline void put(float& g, float value, GradientMode mode) {
  g = mode == GradientMode::overwrite ? value : g + value;
}

/// For kernels that only add, and for parts of a unit that a later position writes: an overwrite
/// buffer starts undefined.
inline void start(float* g, int count, GradientMode mode) {
  if (mode == GradientMode::overwrite) std::fill(g, g + count, 0.0f);
}

/// y[rows, out] = x[rows, in] w[out, in]^T + b[out]
inline void linear_forward(float* y, const float* x, const float* w, const float* b, int rows,
                           int in, int out) {
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < out; ++o) {
      float sum = b == nullptr ? 0.0f : b[o];
      for (int i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  }
}

/// dx[rows, in] = dy[rows, out] w[out, in]; dw[out, in], db[out] by mode
inline void linear_backward(float* dx, float* dw, float* db, const float* dy, const float* x,
                            const float* w, int rows, int in, int out, GradientMode mode) {
  for (int r = 0; r < rows && dx != nullptr; ++r) {
    for (int i = 0; i < in; ++i) {
      float sum = 0.0f;
      for (int o = 0; o < out; ++o) sum += dy[r * out + o] * w[o * in + i];
      dx[r * in + i] = sum;
    }
  }
  for (int o = 0; o < out; ++o) {
    for (int i = 0; i < in && dw != nullptr; ++i) {
      float sum = 0.0f;
      for (int r = 0; r < rows; ++r) sum += dy[r * out + o] * x[r * in + i];
      put(dw[o * in + i], sum, mode);
    }
    if (db == nullptr) continue;
    float sum = 0.0f;
    for (int r = 0; r < rows; ++r) sum += dy[r * out + o];
    put(db[o], sum, mode);
  }
}

/// y[rows, width], mean[rows], rstd[rows]
inline void layernorm_forward(float* y, float* mean, float* rstd, const float* x, const float* w,
                              const float* b, int rows, int width) {
  for (int r = 0; r < rows; ++r) {
    const float* row = x + r * width;
    float m = 0.0f;
    for (int i = 0; i < width; ++i) m += row[i];
    m /= static_cast<float>(width);
    float v = 0.0f;
    for (int i = 0; i < width; ++i) v += (row[i] - m) * (row[i] - m);
    const float s = 1.0f / std::sqrt(v / static_cast<float>(width) + 1e-5f);
    for (int i = 0; i < width; ++i) y[r * width + i] = (row[i] - m) * s * w[i] + b[i];
    mean[r] = m;
    rstd[r] = s;
  }
}

/// dx[rows, width] is added to; dw[width], db[width] by mode
inline void layernorm_backward(float* dx, float* dw, float* db, const float* dy, const float* x,
                               const float* w, const float* mean, const float* rstd, int rows,
                               int width, GradientMode mode) {
  for (int i = 0; i < width; ++i) {
    float sum_w = 0.0f;
    float sum_b = 0.0f;
    for (int r = 0; r < rows; ++r) {
      sum_w += dy[r * width + i] * (x[r * width + i] - mean[r]) * rstd[r];
      sum_b += dy[r * width + i];
    }
    put(dw[i], sum_w, mode);
    put(db[i], sum_b, mode);
  }
  for (int r = 0; r < rows; ++r) {
    float mean_d = 0.0f;
    float mean_dn = 0.0f;
    for (int i = 0; i < width; ++i) {
      const float d = dy[r * width + i] * w[i];
      mean_d += d;
      mean_dn += d * (x[r * width + i] - mean[r]) * rstd[r];
    }
    mean_d /= static_cast<float>(width);
    mean_dn /= static_cast<float>(width);
    for (int i = 0; i < width; ++i) {
      const float n = (x[r * width + i] - mean[r]) * rstd[r];
      dx[r * width + i] += (dy[r * width + i] * w[i] - mean_d - n * mean_dn) * rstd[r];
    }
  }
}

/// y[count] = gelu(x[count]), the tanh form
inline void gelu_forward(float* y, const float* x, int count) {
  for (int i = 0; i < count; ++i) {
    const float u = 0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
    y[i] = 0.5f * x[i] * (1.0f + std::tanh(u));
  }
}

/// d[count] becomes the gradient of x
inline void gelu_backward(float* d, const float* x, int count) {
  for (int i = 0; i < count; ++i) {
    const float t = std::tanh(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
    const float du = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x[i] * x[i]);
    d[i] *= 0.5f * (1.0f + t) + 0.5f * x[i] * (1.0f - t * t) * du;
  }
}

/// y[count] = tanh(x[count]); in place allowed
inline void tanh_forward(float* y, const float* x, int count) {
  for (int i = 0; i < count; ++i) y[i] = std::tanh(x[i]);
}

/// dx[count] = dy[count] * (1 - y[count]^2); in place allowed
inline void tanh_backward(float* dx, const float* dy, const float* y, int count) {
  for (int i = 0; i < count; ++i) dx[i] = dy[i] * (1.0f - y[i] * y[i]);
}

/// y[batch * time, width], probabilities[batch, heads, time, time] from qkv[batch * time, 3 *
/// width]
inline void attention_forward(float* y, float* probabilities, const float* qkv, int batch, int time,
                              int width, int heads) {
  const int size = width / heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < time; ++t) {
        const float* q = qkv + (b * time + t) * 3 * width + h * size;
        float* p = probabilities + ((b * heads + h) * time + t) * time;
        float largest = -1e30f;
        for (int s = 0; s <= t; ++s) {
          const float* k = qkv + (b * time + s) * 3 * width + width + h * size;
          float dot = 0.0f;
          for (int i = 0; i < size; ++i) dot += q[i] * k[i];
          p[s] = dot * scale;
          largest = std::max(largest, p[s]);
        }
        float sum = 0.0f;
        for (int s = 0; s <= t; ++s) sum += p[s] = std::exp(p[s] - largest);
        for (int s = 0; s <= t; ++s) p[s] /= sum;
        float* out = y + (b * time + t) * width + h * size;
        for (int i = 0; i < size; ++i) {
          out[i] = 0.0f;
          for (int s = 0; s <= t; ++s)
            out[i] += p[s] * qkv[(b * time + s) * 3 * width + 2 * width + h * size + i];
        }
      }
    }
  }
}

/// dqkv[batch * time, 3 * width] is written
inline void attention_backward(float* dqkv, const float* dy, const float* probabilities,
                               const float* qkv, int batch, int time, int width, int heads) {
  const int size = width / heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  std::fill(dqkv, dqkv + batch * time * 3 * width, 0.0f);
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < time; ++t) {
        const float* d = dy + (b * time + t) * width + h * size;
        const float* p = probabilities + ((b * heads + h) * time + t) * time;
        const int at = (b * time + t) * 3 * width + h * size;
        float mean = 0.0f;
        for (int s = 0; s <= t; ++s) {
          const int v = (b * time + s) * 3 * width + 2 * width + h * size;
          for (int i = 0; i < size; ++i) mean += p[s] * d[i] * qkv[v + i];
        }
        for (int s = 0; s <= t; ++s) {
          const int k = (b * time + s) * 3 * width + width + h * size;
          const int v = k + width;
          float dp = 0.0f;
          for (int i = 0; i < size; ++i) {
            dp += d[i] * qkv[v + i];
            dqkv[v + i] += p[s] * d[i];
          }
          const float ds = p[s] * (dp - mean) * scale;
          for (int i = 0; i < size; ++i) {
            dqkv[at + i] += ds * qkv[k + i];
            dqkv[k + i] += ds * qkv[at + i];
          }
        }
      }
    }
  }
}

/// Sum over rows of -log softmax(logits[rows, classes])[target]; logits become its gradient.
inline float cross_entropy(float* logits, const int* targets, int rows, int classes) {
  float loss = 0.0f;
  for (int r = 0; r < rows; ++r) {
    float* row = logits + r * classes;
    const float largest = *std::max_element(row, row + classes);
    float sum = 0.0f;
    for (int c = 0; c < classes; ++c) sum += row[c] = std::exp(row[c] - largest);
    for (int c = 0; c < classes; ++c) row[c] /= sum;
    loss -= std::log(row[targets[r]]);
    row[targets[r]] -= 1.0f;
  }
  return loss;
}

/// Half the squared distance of y[count] from target[count]; d[count] = y - target
inline float squared_error(float* d, const float* y, const float* target, int count) {
  float loss = 0.0f;
  for (int i = 0; i < count; ++i) {
    d[i] = y[i] - target[i];
    loss += 0.5f * d[i] * d[i];
  }
  return loss;
}

}  // namespace zshard::wrap
