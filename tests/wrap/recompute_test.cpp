// Recomputation instead of stored activations: by segments, as positions of the program, and of
// single layers, nested inside the backward guard that holds the layer anyway.
#include <gtest/gtest.h>

#include "tests/wrap/compare.hpp"
#include "tests/wrap/kernels.hpp"

namespace zshard::wrap {
namespace {

constexpr int kLayers = 6, kSegment = 2, kRows = 4, kWidth = 9, kInner = 11;

/// One layer: x + w2 tanh(w1 x + b1). Pointers are the loop's own.
struct Weights {
  float* w1 = nullptr;  // [kInner, kWidth]
  float* b1 = nullptr;  // [kInner]
  float* w2 = nullptr;  // [kWidth, kInner]
};

void layer_forward(float* y, float* inner, const float* x, const Weights& w) {
  linear_forward(inner, x, w.w1, w.b1, kRows, kWidth, kInner);
  tanh_forward(inner, inner, kRows * kInner);
  linear_forward(y, inner, w.w2, nullptr, kRows, kInner, kWidth);
  for (int i = 0; i < kRows * kWidth; ++i) y[i] += x[i];
}

/// d[kRows, kWidth] becomes the gradient of x.
void layer_backward(float* d, const float* inner, const float* x, const Weights& w,
                    const Weights& g, GradientMode mode) {
  Tensor d_inner(kRows * kInner);
  Tensor d_x(kRows * kWidth);
  linear_backward(d_inner.data(), g.w2, nullptr, d, inner, w.w2, kRows, kInner, kWidth, mode);
  tanh_backward(d_inner.data(), d_inner.data(), inner, kRows * kInner);
  linear_backward(d_x.data(), g.w1, g.b1, d_inner.data(), x, w.w1, kRows, kWidth, kInner, mode);
  for (int i = 0; i < kRows * kWidth; ++i) d[i] += d_x[static_cast<std::size_t>(i)];
}

/// x[l] is the input of layer l. What a loop does not store is empty.
struct Activations {
  Tensor x[kLayers + 1];
  Tensor inner[kLayers];

  void forward(int l, const Weights& w) {
    x[l + 1].resize(kRows * kWidth);
    inner[l].resize(kRows * kInner);
    layer_forward(x[l + 1].data(), inner[l].data(), x[l].data(), w);
  }
  void drop(int l) {
    x[l].clear();
    drop_inner(l);
  }
  void drop_inner(int l) { inner[l].clear(); }
};

struct Batch {
  Tensor x = Tensor(kRows * kWidth);
  Tensor target = Tensor(kRows * kWidth);
};

Batch batch_of(int step, int micro, int rank) {
  Batch batch;
  const auto seed = static_cast<std::uint64_t>((step * 8 + micro) * 8 + rank);
  for (std::size_t i = 0; i < batch.x.size(); ++i) {
    batch.x[i] = noise(seed, i);
    batch.target[i] = noise(7, i) - batch.x[i];
  }
  return batch;
}

std::string name(int l, const char* what) {
  return "layer." + std::to_string(l) + "." + what;
}

struct Net {
  Weights w[kLayers];
  Weights g[kLayers];
  ModelSpec spec;
  std::vector<UnitId> layers;

  Net() {
    for (int l = 0; l < kLayers; ++l) {
      UnitBuilder unit = spec.unit("layer." + std::to_string(l));
      unit.parameter(name(l, "w1"), {kInner, kWidth}, &w[l].w1, &g[l].w1);
      unit.parameter(name(l, "b1"), {kInner}, &w[l].b1, &g[l].b1, {.decay = false});
      unit.parameter(name(l, "w2"), {kWidth, kInner}, &w[l].w2, &g[l].w2);
      layers.push_back(unit.id());
    }
  }
  [[nodiscard]] UnitId unit(int l) const { return layers[static_cast<std::size_t>(l)]; }
};

// The loop without zshard stores every activation.
Outcome train_plain(const Setting& setting) {
  const ModelSpec spec = Net().spec;
  PlainTrainer trainer(plain_tensors(spec), setting.world, setting.options.accumulation, kAdamW);
  Outcome out(setting.world);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      trainer.micro_step([&](int rank) {
        const auto pointers = [&](int l, auto&& of) {
          return Weights{of(name(l, "w1")), of(name(l, "b1")), of(name(l, "w2"))};
        };
        const Batch batch = batch_of(step, micro, rank);
        Activations a;
        a.x[0] = batch.x;
        const auto value = [&](const std::string& n) { return trainer.value(n); };
        const auto gradient = [&](const std::string& n) { return trainer.gradient(n); };
        for (int l = 0; l < kLayers; ++l) a.forward(l, pointers(l, value));
        Tensor d(kRows * kWidth);
        out.add_loss(rank, squared_error(d.data(), a.x[kLayers].data(), batch.target.data(),
                                         kRows * kWidth));
        for (int l = kLayers; l-- > 0;) {
          layer_backward(d.data(), a.inner[l].data(), a.x[l].data(), pointers(l, value),
                         pointers(l, gradient), GradientMode::accumulate);
        }
      });
    }
    out.norms.push_back(trainer.step());
  }
  out.tensors = trainer.tensors();
  return out;
}

// -- segments --

/// Forward of all layers; then from the last segment to the first: its forward again, its backward.
ModelSpec segments(Net& net) {
  std::vector<Position> program;
  for (int l = 0; l < kLayers; ++l) program.push_back({net.unit(l), Pass::forward});
  for (int end = kLayers; end > 0; end -= kSegment) {
    for (int l = end - kSegment; l < end; ++l) program.push_back({net.unit(l), Pass::recompute});
    for (int l = end; l-- > end - kSegment;) program.push_back({net.unit(l), Pass::backward});
  }
  return net.spec.program(program);
}

void train_segments(const ProcessGroup& group, const Setting& setting, Outcome& out) {
  Net net;
  Engine engine(segments(net), kAdamW, group, setting.options);
  initialize_all(engine);
  for (int step = 0; step < kSteps; ++step) {
    for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
      const Batch batch = batch_of(step, micro.index(), group.rank());
      Activations a;
      a.x[0] = batch.x;
      for (int l = 0; l < kLayers; ++l) {
        const Guard guard = engine.forward(net.unit(l));
        a.forward(l, net.w[l]);
        a.drop_inner(l);
        if (l % kSegment != 0) a.drop(l);  // only the first input of each segment is stored
      }
      Tensor d(kRows * kWidth);
      out.add_loss(group.rank(), squared_error(d.data(), a.x[kLayers].data(), batch.target.data(),
                                               kRows * kWidth));
      for (int end = kLayers; end > 0; end -= kSegment) {
        for (int l = end - kSegment; l < end; ++l) {
          const Guard guard = engine.recompute(net.unit(l));
          a.forward(l, net.w[l]);
        }
        for (int l = end; l-- > end - kSegment;) {
          Guard guard = engine.backward(net.unit(l));
          layer_backward(d.data(), a.inner[l].data(), a.x[l].data(), net.w[l], net.g[l],
                         guard.gradient_mode());
          guard.commit();
          a.drop(l);
        }
      }
    }
    out.norms.push_back(engine.step().norm);
  }
  finish(engine, out);
}

TEST(Recompute, SegmentsGiveTheBitsOfStoredActivations) {
  Net net;
  expect_equal(segments(net), train_plain, train_segments);
}

// -- nested in the backward guard --

/// `nested` acquires the layer again for its recomputation, as code that does not know its caller's
/// guard would; without it the loop recomputes under the backward guard alone. Returns the bytes
/// that were gathered.
std::int64_t train_layers(const ProcessGroup& group, const Setting& setting, Outcome& out,
                          bool nested) {
  Net net;  // the default program: it states no recompute position
  Engine engine(net.spec, kAdamW, group, setting.options);
  initialize_all(engine);
  std::int64_t gathered = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
      const Batch batch = batch_of(step, micro.index(), group.rank());
      Activations a;
      a.x[0] = batch.x;
      for (int l = 0; l < kLayers; ++l) {
        const Guard guard = engine.forward(net.unit(l));
        a.forward(l, net.w[l]);
        a.drop_inner(l);
      }
      Tensor d(kRows * kWidth);
      out.add_loss(group.rank(), squared_error(d.data(), a.x[kLayers].data(), batch.target.data(),
                                               kRows * kWidth));
      for (int l = kLayers; l-- > 0;) {
        Guard guard = engine.backward(net.unit(l));
        {
          Guard again;
          if (nested) again = engine.recompute(net.unit(l));
          const float* before = net.w[l].w1;
          a.forward(l, net.w[l]);
          if (nested) again.release();
          // The outer guard still holds the unit, where it was.
          if (net.w[l].w1 != before || net.g[l].w1 == nullptr)
            throw std::runtime_error("an inner release took the outer guard's pointers");
        }
        layer_backward(d.data(), a.inner[l].data(), a.x[l].data(), net.w[l], net.g[l],
                       guard.gradient_mode());
        guard.commit();
      }
    }
    const StepReport report = engine.step();
    out.norms.push_back(report.norm);
    gathered += report.gathered_bytes;
    if (report.served_behind != 0) throw std::runtime_error("a held unit is served where it is");
  }
  finish(engine, out);
  return gathered;
}

TEST(Recompute, NestedInTheBackwardGuardGivesTheSameBits) {
  expect_equal(Net().spec, train_plain,
               [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
                 train_layers(group, setting, out, true);
               });
}

TEST(Recompute, NestedInTheBackwardGuardMovesNoMoreBytes) {
  Setting setting{2, 2,
                  options_of(Stage::parameters, GradientMode::overwrite, Accumulation::reduced)};
  setting.options.gather_budget = minimum_gather_budget(Net().spec, 2);
  std::int64_t bytes[2] = {};
  for (const bool nested : {false, true}) {
    run(setting, [&](const ProcessGroup& group, const Setting& s, Outcome& out) {
      const std::int64_t gathered = train_layers(group, s, out, nested);
      if (group.rank() == 0) bytes[nested ? 1 : 0] = gathered;
    });
  }
  EXPECT_GT(bytes[0], 0);
  EXPECT_EQ(bytes[0], bytes[1]);
}

/// Each nested backward guard commits, and only the last one hands over: here the layer's two
/// weights are written under guards of their own.
TEST(Recompute, NestedBackwardGuardsHandOverOnce) {
  const auto loop = [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
    Net net;
    Engine engine(net.spec, kAdamW, group, setting.options);
    initialize_all(engine);
    for (int step = 0; step < kSteps; ++step) {
      for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
        const Batch batch = batch_of(step, micro.index(), group.rank());
        Activations a;
        a.x[0] = batch.x;
        for (int l = 0; l < kLayers; ++l) {
          const Guard guard = engine.forward(net.unit(l));
          a.forward(l, net.w[l]);
        }
        Tensor d(kRows * kWidth);
        out.add_loss(group.rank(), squared_error(d.data(), a.x[kLayers].data(), batch.target.data(),
                                                 kRows * kWidth));
        for (int l = kLayers; l-- > 0;) {
          Guard outer = engine.backward(net.unit(l));
          start(net.g[l].w1, kInner * kWidth, outer.gradient_mode());
          start(net.g[l].b1, kInner, outer.gradient_mode());
          start(net.g[l].w2, kWidth * kInner, outer.gradient_mode());
          {
            Guard inner = engine.backward(net.unit(l));
            if (inner.gradient_mode() != GradientMode::accumulate)
              throw std::runtime_error("a nested use adds to what the outer one started");
            layer_backward(d.data(), a.inner[l].data(), a.x[l].data(), net.w[l], net.g[l],
                           inner.gradient_mode());
            inner.commit();
          }
          outer.commit();
        }
      }
      out.norms.push_back(engine.step().norm);
    }
    finish(engine, out);
  };
  expect_equal(Net().spec, train_plain, loop);
}

}  // namespace
}  // namespace zshard::wrap
