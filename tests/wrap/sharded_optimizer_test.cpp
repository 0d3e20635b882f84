// The smallest step in: a loop that keeps its own flat buffers, and replaces its optimizer by three
// lines.
#include <gtest/gtest.h>

#include "tests/wrap/compare.hpp"
#include "tests/wrap/kernels.hpp"

namespace zshard::wrap {
namespace {

constexpr int kRows = 4, kWidth = 7, kInner = 9, kOut = 3;
constexpr int kWeights = kInner * kWidth + kOut * kInner;
constexpr int kBiases = kInner + kOut;

/// The existing loop: flat buffers, and a function that adds the gradients of one micro-step.
struct Network {
  Tensor weights = Tensor(kWeights);  // w1[kInner, kWidth], w2[kOut, kInner]
  Tensor weight_gradients = Tensor(kWeights);
  Tensor biases = Tensor(kBiases);  // b1[kInner], b2[kOut]
  Tensor bias_gradients = Tensor(kBiases);

  explicit Network(float offset = 0.0f) {
    for (int i = 0; i < kWeights; ++i)
      weights[static_cast<std::size_t>(i)] = initial("weights", i) + offset;
    for (int i = 0; i < kBiases; ++i)
      biases[static_cast<std::size_t>(i)] = initial("biases", i) + offset;
  }

  void zero_gradients() {
    std::fill(weight_gradients.begin(), weight_gradients.end(), 0.0f);
    std::fill(bias_gradients.begin(), bias_gradients.end(), 0.0f);
  }

  static float micro_step(const float* w, const float* b, float* dw, float* db, int step, int micro,
                          int rank) {
    Tensor x(kRows * kWidth), target(kRows * kOut), h(kRows * kInner), y(kRows * kOut);
    Tensor dy(kRows * kOut), dh(kRows * kInner);
    const auto seed = static_cast<std::uint64_t>((step * 8 + micro) * 8 + rank);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = noise(seed, i);
    for (std::size_t i = 0; i < target.size(); ++i) target[i] = x[i] * x[i + 1];
    const int second = kInner * kWidth;
    linear_forward(h.data(), x.data(), w, b, kRows, kWidth, kInner);
    tanh_forward(h.data(), h.data(), kRows * kInner);
    linear_forward(y.data(), h.data(), w + second, b + kInner, kRows, kInner, kOut);
    const float loss = squared_error(dy.data(), y.data(), target.data(), kRows * kOut);
    const GradientMode add = GradientMode::accumulate;
    linear_backward(dh.data(), dw + second, db + kInner, dy.data(), h.data(), w + second, kRows,
                    kInner, kOut, add);
    tanh_backward(dh.data(), dh.data(), h.data(), kRows * kInner);
    linear_backward(nullptr, dw, db, dh.data(), x.data(), w, kRows, kWidth, kInner, add);
    return loss;
  }
};

// The loop adds its micro-steps up itself, in the buffers: `local` accumulation.
Outcome train_plain(const Setting& setting) {
  PlainTrainer trainer(
      {{"weights", kWeights, true, false, "weights"}, {"biases", kBiases, false, false, "biases"}},
      setting.world, Accumulation::local, kAdamW);
  Outcome out(setting.world);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      trainer.micro_step([&](int rank) {
        out.add_loss(rank, Network::micro_step(trainer.value("weights"), trainer.value("biases"),
                                               trainer.gradient("weights"),
                                               trainer.gradient("biases"), step, micro, rank));
      });
    }
    out.norms.push_back(trainer.step());
  }
  out.tensors = trainer.tensors();
  return out;
}

void train(const ProcessGroup& group, const Setting& setting, Outcome& out) {
  // Ranks start apart: rank 0's parameters win.
  Network net(static_cast<float>(group.rank()));
  ShardedOptimizer optimizer(
      {{"weights", net.weights.data(), net.weight_gradients.data(), kWeights},
       {"biases", net.biases.data(), net.bias_gradients.data(), kBiases, false},
       {"unused", nullptr, nullptr, 0}},
      kAdamW, group, setting.options);
  for (int step = 0; step < kSteps; ++step) {
    net.zero_gradients();
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      out.add_loss(
          group.rank(),
          Network::micro_step(net.weights.data(), net.biases.data(), net.weight_gradients.data(),
                              net.bias_gradients.data(), step, micro, group.rank()));
    }
    const StepReport report =
        optimizer.step({.gradient_scale = 1.0 / (group.size() * setting.accumulation)});
    out.norms.push_back(report.norm);
  }
  finish(optimizer.engine(), out);
  out.tensors.erase("unused");
  out.tensors.erase("unused/exp_avg");
  out.tensors.erase("unused/exp_avg_sq");
  if (out.tensors["weights"] != net.weights || out.tensors["biases"] != net.biases)
    throw std::runtime_error("the loop's buffers are not the optimizer's parameters");
}

/// A loop that adds its micro-steps up itself gives the addition of micro-steps its own order,
/// which is that of every mode with one micro-step.
TEST(ShardedOptimizerWrap, ThreeLinesGiveThePlainLoopsBits) {
  expect_equal(ModelSpec(), train_plain, train, Stage::optimizer);
}

TEST(ShardedOptimizerWrap, StateIsShardedAtStage1) {
  Network net;
  run_ranks(3, [](const ProcessGroup& group) {
    Network mine;
    const auto moments = [&](Stage stage) {
      ShardedOptimizer optimizer(
          {{"weights", mine.weights.data(), mine.weight_gradients.data(), kWeights}}, kAdamW, group,
          {.stage = stage});
      return optimizer.engine().ledger().bytes(Category::moments);
    };
    const std::int64_t whole = moments(Stage::replicated);
    const std::int64_t part = moments(Stage::optimizer);
    if (part * 3 != whole) throw std::runtime_error("a rank holds more than its third");
  });
}

TEST(ShardedOptimizerWrap, HigherStagesAreRefused) {
  Network net;
  for (const Stage stage : {Stage::gradients, Stage::parameters}) {
    EXPECT_THROW(
        ShardedOptimizer({{"weights", net.weights.data(), net.weight_gradients.data(), kWeights}},
                         kAdamW, ProcessGroup::single(), {.stage = stage}),
        UsageError);
  }
}

}  // namespace
}  // namespace zshard::wrap
