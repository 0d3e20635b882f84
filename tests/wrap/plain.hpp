// Data-parallel training without zshard, to compare with: whole arrays by name, the ranks one after
// the other, gradients summed in rank order, AdamW as numerics state it. Knows no layout, unit,
// stage or schedule.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "zshard/zshard.hpp"

namespace zshard::wrap {

using Tensor = std::vector<float>;
using Tensors = std::map<std::string, Tensor>;

/// A number in [-0.5, 0.5) that depends on all arguments alike (splitmix64).
inline float noise(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15ULL + index;
  for (int round = 0; round < 2; ++round) {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    x ^= x >> 31;
  }
  return static_cast<float>(x >> 40) * 0x1p-24f - 0.5f;
}

/// A whole number in [0, below).
inline int noise_below(int below, std::uint64_t seed, std::uint64_t index) {
  return static_cast<int>((noise(seed, index) + 0.5f) * static_cast<float>(below)) % below;
}

/// Element i of the tensor of that name before training.
inline float initial(const std::string& name, std::int64_t i) {
  std::uint64_t seed = 0xCBF29CE484222325ULL;
  for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  return noise(seed, static_cast<std::uint64_t>(i));
}

/// One tensor of a plain loop. Tensors of a group are touched together: weight decay applies in a
/// step only if some rank had a gradient for the group.
struct PlainTensor {
  std::string name;
  std::int64_t count = 0;
  bool decay = true;
  bool frozen = false;
  std::string group{};
};

/// The tensors of a spec, a group for each unit.
inline std::vector<PlainTensor> plain_tensors(const ModelSpec& spec) {
  std::vector<PlainTensor> tensors;
  for (const UnitSpec& unit : spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      if (p.options.alias.empty())
        tensors.push_back({p.name, p.count(), p.options.decay, p.options.frozen, unit.name});
    }
  }
  return tensors;
}

class PlainTrainer {
 public:
  PlainTrainer(std::vector<PlainTensor> tensors, int world, Accumulation accumulation, AdamW hyper)
      : world_(world), local_(accumulation == Accumulation::local), hyper_(hyper) {
    for (const PlainTensor& tensor : tensors) {
      Entry& entry = entries_[tensor.name];
      entry.what = tensor;
      const auto count = static_cast<std::size_t>(tensor.count);
      for (std::int64_t i = 0; i < tensor.count; ++i) {
        entry.value.push_back(initial(tensor.name, i));
      }
      entry.gradient.resize(count);
      entry.sum.resize(count);
      entry.total.resize(count);
      entry.m.resize(count);
      entry.v.resize(count);
      entry.buffers.assign(static_cast<std::size_t>(world), Tensor(count));
    }
  }

  [[nodiscard]] float* value(const std::string& name) { return entries_.at(name).value.data(); }

  /// Gradient of the rank whose turn it is, zero before its turn. Asking for it touches the group.
  [[nodiscard]] float* gradient(const std::string& name) {
    Entry& entry = entries_.at(name);
    touched_[entry.what.group] = true;
    return entry.gradient.data();
  }

  /// body(rank) adds the rank's gradients of one micro-step.
  template <class Body>
  void micro_step(Body&& body) {
    for (int rank = 0; rank < world_; ++rank) {
      for (auto& [name, entry] : entries_) entry.gradient.assign(entry.gradient.size(), 0.0f);
      body(rank);
      for (auto& [name, entry] : entries_) {
        Tensor& buffer = entry.buffers[static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < entry.gradient.size(); ++i) {
          const float g = entry.gradient[i];
          buffer[i] = buffer[i] + g;
          entry.sum[i] = rank == 0 ? g : entry.sum[i] + g;  // ((g0 + g1) + g2) ...
        }
      }
    }
    for (auto& [name, entry] : entries_) {
      for (std::size_t i = 0; i < entry.sum.size(); ++i)
        entry.total[i] = entry.total[i] + entry.sum[i];
    }
    ++micro_steps_;
  }

  /// One update; the mean over ranks and micro-steps. Returns the norm of the mean.
  double step() {
    const double scale = 1.0 / (static_cast<double>(world_) * micro_steps_);
    const auto factor = static_cast<float>(scale);
    double squares = 0.0;
    ++count_;
    for (auto& [name, entry] : entries_) {
      if (local_) sum_buffers(entry);
      if (!entry.what.frozen) {
        for (const float g : entry.total) squares += static_cast<double>(g) * g;
        if (touched_[entry.what.group]) update(entry, factor);
      }
      entry.total.assign(entry.total.size(), 0.0f);
      for (Tensor& buffer : entry.buffers) buffer.assign(buffer.size(), 0.0f);
    }
    touched_.clear();
    micro_steps_ = 0;
    return std::sqrt(squares) * scale;
  }

  /// "name", and for trained ones "name/exp_avg" and "name/exp_avg_sq".
  [[nodiscard]] Tensors tensors() const {
    Tensors out;
    for (const auto& [name, entry] : entries_) {
      out[name] = entry.value;
      if (entry.what.frozen) continue;
      out[name + "/exp_avg"] = entry.m;
      out[name + "/exp_avg_sq"] = entry.v;
    }
    return out;
  }

 private:
  struct Entry {
    PlainTensor what;
    Tensor value, gradient, sum, total, m, v;
    std::vector<Tensor> buffers;  // [rank]: sum over the micro-steps, for `local`
  };

  static void sum_buffers(Entry& entry) {
    for (std::size_t i = 0; i < entry.total.size(); ++i) {
      float sum = entry.buffers[0][i];
      for (std::size_t r = 1; r < entry.buffers.size(); ++r) sum = sum + entry.buffers[r][i];
      entry.total[i] = 0.0f + sum;
    }
  }

  void update(Entry& entry, float factor) const {
    const AdamW& h = hyper_;
    const auto b1 = static_cast<float>(h.beta1);
    const auto c1 = static_cast<float>(1 - h.beta1);
    const auto b2 = static_cast<float>(h.beta2);
    const auto c2 = static_cast<float>(1 - h.beta2);
    const auto eps = static_cast<float>(h.eps);
    const auto keep = static_cast<float>(1 - h.lr * (entry.what.decay ? h.weight_decay : 0.0));
    const auto rate = static_cast<float>(h.lr / (1 - std::pow(h.beta1, count_)));
    const auto root = static_cast<float>(1 / std::sqrt(1 - std::pow(h.beta2, count_)));
    for (std::size_t i = 0; i < entry.value.size(); ++i) {
      const float g = entry.total[i] * factor;
      float& m = entry.m[i];
      float& v = entry.v[i];
      float& p = entry.value[i];
      m = m * b1 + g * c1;
      v = v * b2 + (g * g) * c2;
      p = p * keep;
      p = p - rate * (m / (std::sqrt(v) * root + eps));
    }
  }

  int world_;
  bool local_;
  AdamW hyper_;
  int micro_steps_ = 0;
  int count_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, bool> touched_;
};

}  // namespace zshard::wrap
