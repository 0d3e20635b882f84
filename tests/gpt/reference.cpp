#include "reference.hpp"

#include <cmath>
#include <cstddef>
#include <random>

namespace gpt_test {
namespace {

using Vector = std::vector<double>;

Vector layer_norm(const Vector& x, const Vector& gain, const Vector& bias) {
  double mean = 0.0;
  for (const double value : x) mean += value / static_cast<double>(x.size());
  double variance = 0.0;
  for (const double value : x) {
    variance += (value - mean) * (value - mean) / static_cast<double>(x.size());
  }
  Vector y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    y[i] = (x[i] - mean) / std::sqrt(variance + 1e-5) * gain[i] + bias[i];
  }
  return y;
}

Vector linear(const Vector& x, const Vector& w, const Vector& b) {
  Vector y = b;
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < y.size(); ++j) y[j] += x[i] * w[i * y.size() + j];
  }
  return y;
}

void add(const Vector& x, Vector& y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] += x[i];
}

double gelu(double x) {
  return 0.5 * x *
         (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

// Causal attention of all positions of a row: qkv[t] is q | k | v.
std::vector<Vector> attention(const std::vector<Vector>& qkv, std::size_t heads) {
  const std::size_t width = qkv[0].size() / 3;
  const std::size_t head_width = width / heads;
  std::vector<Vector> out(qkv.size(), Vector(width, 0.0));
  for (std::size_t t = 0; t < qkv.size(); ++t) {
    for (std::size_t h = 0; h < heads; ++h) {
      Vector weight(t + 1);
      double sum = 0.0;
      for (std::size_t s = 0; s <= t; ++s) {
        double score = 0.0;
        for (std::size_t i = h * head_width; i < (h + 1) * head_width; ++i) {
          score += qkv[t][i] * qkv[s][width + i];
        }
        weight[s] = std::exp(score / std::sqrt(static_cast<double>(head_width)));
        sum += weight[s];
      }
      for (std::size_t s = 0; s <= t; ++s) {
        for (std::size_t i = h * head_width; i < (h + 1) * head_width; ++i) {
          out[t][i] += weight[s] / sum * qkv[s][2 * width + i];
        }
      }
    }
  }
  return out;
}

double row_loss(const gpt::ModelShape& shape, const Parameters& parameters,
                const std::vector<std::uint8_t>& row) {
  const auto width = static_cast<std::size_t>(shape.width);
  const Vector& wte = parameters[0][0];
  const Vector& wpe = parameters[0][1];
  std::vector<Vector> x(static_cast<std::size_t>(shape.context), Vector(width));
  for (std::size_t t = 0; t < x.size(); ++t) {
    for (std::size_t i = 0; i < width; ++i) x[t][i] = wte[row[t] * width + i] + wpe[t * width + i];
  }
  for (std::size_t layer = 0; layer < static_cast<std::size_t>(shape.layers); ++layer) {
    const std::vector<Vector>& p = parameters[layer + 1];
    std::vector<Vector> qkv;
    for (const Vector& token : x) qkv.push_back(linear(layer_norm(token, p[0], p[1]), p[2], p[3]));
    const std::vector<Vector> mixed = attention(qkv, static_cast<std::size_t>(shape.heads));
    for (std::size_t t = 0; t < x.size(); ++t) {
      add(linear(mixed[t], p[4], p[5]), x[t]);
      Vector hidden = linear(layer_norm(x[t], p[6], p[7]), p[8], p[9]);
      for (double& value : hidden) value = gelu(value);
      add(linear(hidden, p[10], p[11]), x[t]);
    }
  }
  double loss = 0.0;
  for (std::size_t t = 0; t < x.size(); ++t) {
    const Vector y = layer_norm(x[t], parameters.back()[0], parameters.back()[1]);
    double sum = 0.0;
    double of_target = 0.0;
    for (std::size_t v = 0; v < static_cast<std::size_t>(shape.vocab); ++v) {
      double logit = 0.0;
      for (std::size_t i = 0; i < width; ++i) logit += y[i] * wte[v * width + i];
      sum += std::exp(logit);
      if (v == row[t + 1]) of_target = logit;
    }
    loss += std::log(sum) - of_target;
  }
  return loss;
}

}  // namespace

Parameters random_parameters(const gpt::ModelShape& shape, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  Parameters parameters;
  for (const gpt::UnitInfo& unit : gpt::unit_list(shape)) {
    std::vector<Vector>& tensors = parameters.emplace_back();
    for (const gpt::ParameterInfo& info : unit.parameters) {
      std::int64_t count = 1;
      for (const std::int64_t extent : info.shape) count *= extent;
      Vector& values = tensors.emplace_back(static_cast<std::size_t>(count));
      // Rounded to fp32, so that both precisions start from the same numbers.
      for (double& value : values) {
        value = static_cast<float>(static_cast<double>(info.mean) + 0.3 * normal(random));
      }
    }
  }
  return parameters;
}

double reference_loss(const gpt::ModelShape& shape, const Parameters& parameters,
                      const std::vector<std::vector<std::uint8_t>>& rows) {
  double loss = 0.0;
  for (const auto& row : rows) loss += row_loss(shape, parameters, row);
  return loss;
}

}  // namespace gpt_test
