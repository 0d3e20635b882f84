// LoRA: a frozen base, small trained parts beside it. The base is gathered, or resident where it
// fits; gradients and optimizer state exist for the small parts only.
#include <gtest/gtest.h>

#include "tests/wrap/compare.hpp"
#include "tests/wrap/kernels.hpp"

namespace zshard::wrap {
namespace {

constexpr int kLayers = 3, kRows = 5, kWidth = 12, kRank = 2, kVocab = 11;
constexpr float kAlpha = 0.5f;

/// The loop's pointers. Layer: x + tanh(base x + alpha * b (a x)).
struct Net {
  float* embedding = nullptr;  // [kVocab, kWidth], frozen
  float* base[kLayers] = {};   // [kWidth, kWidth], frozen
  float* a[kLayers] = {};      // [kRank, kWidth]
  float* b[kLayers] = {};      // [kWidth, kRank]
  float* grad_a[kLayers] = {};
  float* grad_b[kLayers] = {};
  float* head = nullptr;  // [kVocab, kWidth], frozen

  void embed(const int* tokens) {
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kWidth; ++i)
        x_[0][static_cast<std::size_t>(r * kWidth + i)] = embedding[tokens[r] * kWidth + i];
    }
  }

  void forward(int l) {
    Tensor low_up(kRows * kWidth);
    linear_forward(y_[l].data(), x_[l].data(), base[l], nullptr, kRows, kWidth, kWidth);
    linear_forward(low_[l].data(), x_[l].data(), a[l], nullptr, kRows, kWidth, kRank);
    linear_forward(low_up.data(), low_[l].data(), b[l], nullptr, kRows, kRank, kWidth);
    for (std::size_t i = 0; i < low_up.size(); ++i) {
      y_[l][i] = std::tanh(y_[l][i] + kAlpha * low_up[i]);
      x_[l + 1][i] = x_[l][i] + y_[l][i];
    }
  }

  float loss(const int* targets) {
    linear_forward(logits_.data(), x_[kLayers].data(), head, nullptr, kRows, kWidth, kVocab);
    return cross_entropy(logits_.data(), targets, kRows, kVocab);
  }

  void head_backward() {
    linear_backward(d_.data(), nullptr, nullptr, logits_.data(), nullptr, head, kRows, kWidth,
                    kVocab, GradientMode::accumulate);
  }

  void backward(int l, GradientMode mode) {
    Tensor d(kRows * kWidth), d_up(kRows * kWidth), d_low(kRows * kRank);
    Tensor d_base(kRows * kWidth), d_a(kRows * kWidth);
    tanh_backward(d.data(), d_.data(), y_[l].data(), kRows * kWidth);
    for (std::size_t i = 0; i < d.size(); ++i) d_up[i] = kAlpha * d[i];
    linear_backward(d_low.data(), grad_b[l], nullptr, d_up.data(), low_[l].data(), b[l], kRows,
                    kRank, kWidth, mode);
    linear_backward(d_a.data(), grad_a[l], nullptr, d_low.data(), x_[l].data(), a[l], kRows, kWidth,
                    kRank, mode);
    linear_backward(d_base.data(), nullptr, nullptr, d.data(), nullptr, base[l], kRows, kWidth,
                    kWidth, mode);
    for (std::size_t i = 0; i < d.size(); ++i) d_[i] = d_[i] + (d_base[i] + d_a[i]);
  }

 private:
  Tensor x_[kLayers + 1] = {Tensor(kRows * kWidth), Tensor(kRows* kWidth), Tensor(kRows* kWidth),
                            Tensor(kRows* kWidth)};
  Tensor y_[kLayers] = {Tensor(kRows * kWidth), Tensor(kRows* kWidth), Tensor(kRows* kWidth)};
  Tensor low_[kLayers] = {Tensor(kRows * kRank), Tensor(kRows* kRank), Tensor(kRows* kRank)};
  Tensor logits_ = Tensor(kRows * kVocab);
  Tensor d_ = Tensor(kRows * kWidth);
};

struct Tokens {
  int inputs[kRows];
  int targets[kRows];
};

Tokens tokens_of(int step, int micro, int rank) {
  Tokens t;
  const auto seed = static_cast<std::uint64_t>((step * 8 + micro) * 8 + rank);
  for (int i = 0; i < kRows; ++i) {
    t.inputs[i] = noise_below(kVocab, seed, static_cast<std::uint64_t>(i));
    t.targets[i] = (t.inputs[i] * 3 + 2) % kVocab;
  }
  return t;
}

std::string name(int l, const char* what) {
  return "layer." + std::to_string(l) + "." + what;
}

struct Registered {
  ModelSpec spec;
  UnitId embedding, head;
  std::vector<UnitId> layers;

  Registered(Net& net, bool resident) {
    const ParameterOptions frozen{.frozen = true, .resident = resident};
    UnitBuilder first = spec.unit("embedding");
    first.parameter("embedding", {kVocab, kWidth}, &net.embedding, {}, frozen);
    embedding = first.id();
    for (int l = 0; l < kLayers; ++l) {
      UnitBuilder unit = spec.unit("layer." + std::to_string(l));
      unit.parameter(name(l, "base"), {kWidth, kWidth}, &net.base[l], {}, frozen);
      unit.parameter(name(l, "lora_a"), {kRank, kWidth}, &net.a[l], &net.grad_a[l]);
      unit.parameter(name(l, "lora_b"), {kWidth, kRank}, &net.b[l], &net.grad_b[l]);
      layers.push_back(unit.id());
    }
    UnitBuilder last = spec.unit("head");
    last.parameter("head", {kVocab, kWidth}, &net.head, {}, frozen);
    head = last.id();
    // Backward goes through the frozen head, but ends before the frozen embedding.
    std::vector<Position> program = {{embedding, Pass::forward}};
    for (const UnitId layer : layers) program.push_back({layer, Pass::forward});
    program.push_back({head, Pass::forward});
    program.push_back({head, Pass::backward});
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer)
      program.push_back({*layer, Pass::backward});
    spec.program(program);
  }
};

Outcome train_plain(const Setting& setting) {
  Net net;
  const ModelSpec spec = Registered(net, false).spec;
  PlainTrainer trainer(plain_tensors(spec), setting.world, setting.options.accumulation, kAdamW);
  Outcome out(setting.world);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      trainer.micro_step([&](int rank) {
        net.embedding = trainer.value("embedding");
        net.head = trainer.value("head");
        for (int l = 0; l < kLayers; ++l) {
          net.base[l] = trainer.value(name(l, "base"));
          net.a[l] = trainer.value(name(l, "lora_a"));
          net.b[l] = trainer.value(name(l, "lora_b"));
          net.grad_a[l] = trainer.gradient(name(l, "lora_a"));
          net.grad_b[l] = trainer.gradient(name(l, "lora_b"));
        }
        const Tokens tokens = tokens_of(step, micro, rank);
        net.embed(tokens.inputs);
        for (int l = 0; l < kLayers; ++l) net.forward(l);
        out.add_loss(rank, net.loss(tokens.targets));
        net.head_backward();
        for (int l = kLayers; l-- > 0;) net.backward(l, GradientMode::accumulate);
      });
    }
    out.norms.push_back(trainer.step());
  }
  out.tensors = trainer.tensors();
  return out;
}

void train(const ProcessGroup& group, const Setting& setting, Outcome& out, bool resident) {
  Net net;
  const Registered model(net, resident);
  Engine engine(model.spec, kAdamW, group, setting.options);
  initialize_all(engine);
  for (int step = 0; step < kSteps; ++step) {
    for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
      const Tokens tokens = tokens_of(step, micro.index(), group.rank());
      {
        const Guard guard = engine.forward(model.embedding);
        net.embed(tokens.inputs);
      }
      for (int l = 0; l < kLayers; ++l) {
        const Guard guard = engine.forward(model.layers[static_cast<std::size_t>(l)]);
        net.forward(l);
      }
      {
        const Guard guard = engine.forward(model.head);
        out.add_loss(group.rank(), net.loss(tokens.targets));
      }
      {
        const Guard guard = engine.backward(model.head);  // frozen: nothing to commit
        net.head_backward();
      }
      for (int l = kLayers; l-- > 0;) {
        Guard guard = engine.backward(model.layers[static_cast<std::size_t>(l)]);
        net.backward(l, guard.gradient_mode());
        guard.commit();
      }
    }
    out.norms.push_back(engine.step().norm);
  }
  finish(engine, out);
}

TEST(Lora, AShardedBaseGivesThePlainLoopsBits) {
  Net net;
  expect_equal(Registered(net, false).spec, train_plain,
               [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
                 train(group, setting, out, false);
               });
}

TEST(Lora, AResidentBaseGivesThePlainLoopsBits) {
  Net net;
  expect_equal(Registered(net, true).spec, train_plain,
               [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
                 train(group, setting, out, true);
               });
}

/// The small parts of the same model, and nothing else.
ModelSpec small_parts_only() {
  ModelSpec spec;
  for (int l = 0; l < kLayers; ++l) {
    UnitBuilder unit = spec.unit("layer." + std::to_string(l));
    unit.parameter(name(l, "lora_a"), {kRank, kWidth});
    unit.parameter(name(l, "lora_b"), {kWidth, kRank});
  }
  return spec;
}

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

TEST(Lora, GradientsAndStateArePlannedForTheSmallPartsOnly) {
  const ModelSpec small = small_parts_only();
  for (const bool resident : {false, true}) {
    Net net;
    const ModelSpec spec = Registered(net, resident).spec;
    for (int world = 1; world <= 4; ++world) {
      for (int stage = 0; stage < 4; ++stage) {
        for (const Accumulation how : {Accumulation::reduced, Accumulation::local}) {
          const EngineOptions options =
              options_of(static_cast<Stage>(stage), GradientMode::accumulate, how);
          const MemoryPlan whole = plan_memory(spec, kAdamW, world, options);
          const MemoryPlan part = plan_memory(small, kAdamW, world, options);
          for (const Category c :
               {Category::gradients, Category::gradient_slots, Category::moments, Category::master,
                Category::communication_staging, Category::square_sum_blocks}) {
            EXPECT_EQ(whole.bytes(c), part.bytes(c))
                << to_string(c) << " world " << world << " stage " << stage;
          }
          // Both parts of a layer start on 256 bytes; the layer is padded to a shard a rank.
          const std::int64_t a = round_up(std::int64_t{kRank} * kWidth * 4, 256);
          const std::int64_t padded = round_up(a + kRank * kWidth * 4, std::int64_t{256} * world);
          const std::int64_t owned = kLayers * (stage == 0 ? padded : padded / world);
          EXPECT_EQ(whole.bytes(Category::moments), 2 * owned);
          if (stage >= 2 && how == Accumulation::reduced) {
            EXPECT_EQ(whole.bytes(Category::gradients), kLayers * padded / world);
          }
        }
      }
    }
  }
}

TEST(Lora, AResidentBaseIsNotGathered) {
  Net net;
  const ModelSpec gathered = Registered(net, false).spec;
  const ModelSpec resident = Registered(net, true).spec;
  const std::int64_t base =
      kLayers * round_up(kWidth * kWidth * 4, 2 * 256) + 2 * round_up(kVocab * kWidth * 4, 2 * 256);
  const MemoryPlan plan = plan_memory(resident, kAdamW, 2);
  EXPECT_EQ(plan.bytes(Category::resident), base);
  EXPECT_EQ(plan.bytes(Category::gather_slots), maximum_gather_budget(small_parts_only(), 2));
  EXPECT_EQ(plan_memory(gathered, kAdamW, 2).bytes(Category::gather_slots),
            base + maximum_gather_budget(small_parts_only(), 2));
}

}  // namespace
}  // namespace zshard::wrap
