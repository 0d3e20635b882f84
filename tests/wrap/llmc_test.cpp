// A loop in the shape of llm.c. Its kernels index stacked tensors, `params.qkvw + l * 3 * C * C`,
// and its fused kernels read the next layer's LayerNorm while a layer runs. Both stay as they are:
// zshard only sets the pointers.
#include <gtest/gtest.h>

#include "tests/wrap/compare.hpp"
#include "tests/wrap/llmc_model.hpp"

namespace zshard::wrap::llmc {
namespace {

// The loop as it was: every tensor whole, all layers stacked.
Outcome train_plain(const Setting& setting) {
  std::vector<PlainTensor> tensors;
  for (const Field& f : fields()) {
    tensors.push_back({f.name, f.layers * f.size(), f.decay(), false, "model"});
  }
  PlainTrainer trainer(tensors, setting.world, setting.options.accumulation, kAdamW);
  Outcome out(setting.world);
  Gpt model;
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      trainer.micro_step([&](int rank) {
        for (const Field& f : fields()) {
          model.params.*f.member = trainer.value(f.name);
          model.grads.*f.member = trainer.gradient(f.name);
        }
        const Tokens tokens = tokens_of(step, micro, rank);
        const GradientMode mode = GradientMode::accumulate;
        model.embed_forward(tokens);
        model.first_norm_forward();
        for (int l = 0; l < kLayers; ++l) {
          model.block_forward(l);
          model.fused_norm_forward(l, model.params.fcprojb + l * kWidth);
        }
        out.add_loss(rank, model.head_forward(tokens));
        model.head_backward(mode);
        model.final_norm_backward(mode);
        for (int l = kLayers; l-- > 0;) {
          model.block_backward(l, mode);
          model.first_norm_backward(l, mode);
        }
        model.embed_backward(tokens);
      });
    }
    out.norms.push_back(trainer.step());
  }
  out.tensors = trainer.tensors();
  return out;
}

const Field& field(const std::string& name) {
  for (const Field& f : fields()) {
    if (name == f.name) return f;
  }
  throw std::runtime_error("no field " + name);
}

std::string name_of(const Field& f, int layer) {
  return f.layers == 1 ? f.name : "h." + std::to_string(layer) + "." + f.name;
}

/// A parameter of one layer, as a place in a stacked tensor.
struct Place {
  const Field* field = nullptr;
  int layer = 0;

  [[nodiscard]] std::int64_t offset() const { return layer * field->size(); }
};

/// Fills layer by layer what the plain loop fills stacked.
void initialize(Engine& engine, const std::vector<Place>& places) {
  for (std::size_t u = 0; u < engine.spec().units().size(); ++u) {
    engine.initialize(UnitId{static_cast<std::int32_t>(u)}, [&](const ParameterRange& range,
                                                                std::span<float> values) {
      const Place& place = places[static_cast<std::size_t>(range.parameter.value)];
      for (std::int64_t i = 0; i < range.count; ++i) {
        values[static_cast<std::size_t>(i)] =
            initial(place.field->name, place.offset() + range.first + i);
      }
    });
  }
}

/// Reads parameters and state back into stacked tensors.
void collect(Engine& engine, const std::vector<Place>& places, Tensors& out) {
  if (engine.ledger() != engine.plan()) throw std::runtime_error("the ledger is not the plan");
  for (const UnitSpec& unit : engine.spec().units()) {
    for (const ParameterSpec& p : unit.parameters) {
      const Place& place = places[static_cast<std::size_t>(p.id.value)];
      if (!p.options.alias.empty()) continue;
      for (const std::string slot : {"", "exp_avg", "exp_avg_sq"}) {
        Tensor& stacked = out[place.field->name + (slot.empty() ? "" : "/" + slot)];
        stacked.resize(static_cast<std::size_t>(place.field->layers * place.field->size()));
        const auto part = std::span<float>(stacked).subspan(
            static_cast<std::size_t>(place.offset()), static_cast<std::size_t>(p.count()));
        if (slot.empty()) {
          engine.read_parameter(p.name, part);
        } else {
          engine.read_state(p.name, slot, part);
        }
      }
    }
  }
}

/// The reference's own backward, against its forward: along the gradient g the loss changes by
/// |g|^2.
TEST(LlmC, TheBackwardPassIsTheDerivativeOfTheForwardPass) {
  Tensors values, gradients;
  Gpt model;
  for (const Field& f : fields()) {
    Tensor& value = values[f.name];
    for (std::int64_t i = 0; i < f.layers * f.size(); ++i) value.push_back(initial(f.name, i));
    gradients[f.name].resize(value.size());
    model.grads.*f.member = gradients[f.name].data();
  }
  const Tokens tokens = tokens_of(0, 0, 0);
  const auto loss_at = [&](float distance) {
    Tensors moved = values;
    for (const Field& f : fields()) {
      for (std::size_t i = 0; i < moved[f.name].size(); ++i)
        moved[f.name][i] += distance * gradients[f.name][i];
      model.params.*f.member = moved[f.name].data();
    }
    model.embed_forward(tokens);
    model.first_norm_forward();
    for (int l = 0; l < kLayers; ++l) {
      model.block_forward(l);
      model.fused_norm_forward(l, model.params.fcprojb + l * kWidth);
    }
    return static_cast<double>(model.head_forward(tokens));
  };
  loss_at(0.0f);
  for (const Field& f : fields()) model.params.*f.member = values[f.name].data();
  model.head_backward(GradientMode::accumulate);
  model.final_norm_backward(GradientMode::accumulate);
  for (int l = kLayers; l-- > 0;) {
    model.block_backward(l, GradientMode::accumulate);
    model.first_norm_backward(l, GradientMode::accumulate);
  }
  model.embed_backward(tokens);
  for (const Field& f : fields()) {  // one tensor at a time: a wrong small one must show
    const Tensors all = gradients;
    double square = 0.0;
    for (const float g : all.at(f.name)) square += static_cast<double>(g) * g;
    for (auto& [name, g] : gradients) {
      if (name != f.name) std::fill(g.begin(), g.end(), 0.0f);
    }
    const auto h = static_cast<float>(0.02 / std::sqrt(square));
    const double slope = (loss_at(h) - loss_at(-h)) / (2.0 * static_cast<double>(h));
    EXPECT_NEAR(slope / square, 1.0, 0.02) << f.name;
    gradients = all;
  }
}

// -- hold 2: layer l and the LayerNorm of layer l + 1 are gathered at once --

struct HeldPair {
  Gpt model;
  ModelSpec spec;
  UnitId embedding, final_norm;
  std::vector<UnitId> blocks;
  std::vector<Place> places;   // by parameter
  std::vector<Place> current;  // by field: the layer that the stacked pointer serves now

  HeldPair() {
    const auto add = [&](UnitBuilder& unit, const char* name, int layer) {
      const Field& f = field(name);
      places.push_back({&f, layer});
      // What is one tensor has a bound pointer; what is stacked is set in rebase().
      float** data = f.layers == 1 ? &(model.params.*f.member) : nullptr;
      float** gradient = f.layers == 1 ? &(model.grads.*f.member) : nullptr;
      unit.parameter(name_of(f, layer), f.shape, data, gradient, {.decay = f.decay()});
    };
    UnitBuilder embed = spec.unit("embedding");
    add(embed, "wte", 0);
    add(embed, "wpe", 0);
    embedding = embed.id();
    for (int l = 0; l < kLayers; ++l) {
      UnitBuilder block = spec.unit("h." + std::to_string(l));
      for (const Field& f : fields()) {
        if (f.layers > 1) add(block, f.name, l);
      }
      blocks.push_back(block.id());
    }
    UnitBuilder norm = spec.unit("final");
    add(norm, "lnfw", 0);
    add(norm, "lnfb", 0);
    final_norm = norm.id();
    norm.parameter("lm_head.weight", {kVocab, kWidth}, {.alias = "wte"});
    places.push_back({&field("wte"), 0});

    // The tied head is the embedding's unit used again, after the final norm and before its
    // backward.
    std::vector<Position> program = {{embedding, Pass::forward}};
    for (const UnitId block : blocks) program.push_back({block, Pass::forward});
    program.push_back({final_norm, Pass::forward});
    program.push_back({embedding, Pass::forward});
    const std::vector<Position> forward = program;
    for (auto p = forward.rbegin(); p != forward.rend(); ++p)
      program.push_back({p->unit, Pass::backward});
    spec.program(program).hold(2);
  }

  /// on_bind: a stacked pointer is moved so that `pointer + layer * size` is the gathered layer.
  /// The layer bound last has it; a layer that goes takes only its own pointer away.
  void rebase(const Binding& b) {
    const Place& place = places[static_cast<std::size_t>(b.parameter.value)];
    if (place.field->layers == 1) return;
    const auto f = static_cast<std::size_t>(place.field - fields().data());
    if (b.data == nullptr && current[f].layer != place.layer) return;
    current[f] = place;
    const auto base = [&](void* layer) {
      return layer == nullptr ? nullptr : static_cast<float*>(layer) - place.offset();
    };
    model.params.*(place.field->member) = base(b.data);
    model.grads.*(place.field->member) = base(b.gradient);
  }

  void train(const ProcessGroup& group, const Setting& setting, Outcome& out) {
    Engine engine(spec, kAdamW, group, setting.options);
    current.resize(fields().size());
    engine.on_bind([this](const Binding& binding) { rebase(binding); });
    initialize(engine, places);
    for (int step = 0; step < kSteps; ++step) {
      for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
        const Tokens tokens = tokens_of(step, micro.index(), group.rank());

        Guard held = engine.forward(embedding);
        model.embed_forward(tokens);
        held = engine.forward(blocks[0]);  // the assignment releases what was held before
        model.first_norm_forward();
        for (std::size_t l = 0; l < kLayers; ++l) {
          model.block_forward(static_cast<int>(l));
          // The next layer takes the stacked pointers; this layer's bias stays where it is.
          const float* bias = model.params.fcprojb + l * kWidth;
          Guard next = engine.forward(l + 1 < kLayers ? blocks[l + 1] : final_norm);
          model.fused_norm_forward(static_cast<int>(l), bias);
          held = std::move(next);
        }
        held = engine.forward(embedding);
        out.add_loss(group.rank(), model.head_forward(tokens));
        held.release();

        {
          Guard guard = engine.backward(embedding);
          model.head_backward(guard.gradient_mode());
          // The unit is handed over after its second use: what that only adds to starts here.
          start(model.grads.wpe, kTime * kWidth, guard.gradient_mode());
          guard.commit();
        }
        {
          Guard guard = engine.backward(final_norm);
          model.final_norm_backward(guard.gradient_mode());
          guard.commit();
        }
        for (int l = kLayers; l-- > 0;) {
          Guard guard = engine.backward(blocks[static_cast<std::size_t>(l)]);
          model.block_backward(l, guard.gradient_mode());
          model.first_norm_backward(l, guard.gradient_mode());
          guard.commit();
        }
        Guard guard = engine.backward(embedding);
        if (guard.gradient_mode() != GradientMode::accumulate)
          throw std::runtime_error("the second use of a unit adds");
        model.embed_backward(tokens);
        guard.commit();
      }
      out.norms.push_back(engine.step().norm);
      if (model.params.wte != nullptr || model.params.qkvw != nullptr ||
          model.grads.fcw != nullptr || model.grads.wte != nullptr)
        throw std::runtime_error("a pointer outlives its guard");
    }
    collect(engine, places, out.tensors);
    Tensor head(kVocab * kWidth);
    engine.read_parameter("lm_head.weight", head);
    if (head != out.tensors["wte"]) throw std::runtime_error("the tied head is another tensor");
  }
};

TEST(LlmC, HoldingTheNextLayerGivesTheStackedLoopsBits) {
  const ModelSpec spec = HeldPair().spec;
  expect_equal(spec, train_plain,
               [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
                 HeldPair().train(group, setting, out);
               });
}

// -- hold 1: all LayerNorms that are fused are one small resident unit --

struct ResidentNorms {
  Gpt model;
  ModelSpec spec;
  UnitId embedding, norms;
  std::vector<UnitId> blocks;
  std::vector<std::vector<ParameterId>> parameters;  // of each block
  std::vector<Place> places;

  ResidentNorms() {
    const auto stacked = [&](UnitBuilder& unit, const char* name, bool resident) {
      const Field& f = field(name);
      Shape shape = f.shape;
      if (f.layers > 1) shape.insert(shape.begin(), f.layers);
      places.push_back({&f, 0});
      unit.parameter(name, shape, &(model.params.*f.member), &(model.grads.*f.member),
                     {.decay = f.decay(), .resident = resident});
    };
    UnitBuilder embed = spec.unit("embedding");
    stacked(embed, "wte", false);
    stacked(embed, "wpe", false);
    embedding = embed.id();
    UnitBuilder small = spec.unit("norms");
    for (const char* name : {"ln1w", "ln1b", "lnfw", "lnfb"}) stacked(small, name, true);
    norms = small.id();
    for (int l = 0; l < kLayers; ++l) {
      UnitBuilder block = spec.unit("h." + std::to_string(l));
      parameters.emplace_back();
      for (const Field& f : fields()) {
        if (f.layers == 1 || f.name == std::string("ln1w") || f.name == std::string("ln1b"))
          continue;
        places.push_back({&f, l});
        parameters.back().push_back(block.parameter(name_of(f, l), f.shape, {.decay = f.decay()}));
      }
      blocks.push_back(block.id());
    }
    std::vector<Position> program = {{embedding, Pass::forward}, {norms, Pass::forward}};
    for (const UnitId block : blocks) program.push_back({block, Pass::forward});
    program.push_back({embedding, Pass::forward});
    program.push_back({embedding, Pass::backward});
    program.push_back({norms, Pass::backward});
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
      program.push_back({*block, Pass::backward});
      program.push_back({norms, Pass::backward});
    }
    program.push_back({embedding, Pass::backward});
    spec.program(program);
  }

  /// The third way to set the pointers: ask the guard.
  void point_at(const Guard& guard, std::size_t l) {
    for (const ParameterId id : parameters[l]) {
      const Place& place = places[static_cast<std::size_t>(id.value)];
      model.params.*(place.field->member) = guard.pointer<float>(id) - place.offset();
      float* gradient = guard.gradient<float>(id);
      model.grads.*(place.field->member) =
          gradient == nullptr ? nullptr : gradient - place.offset();
    }
  }

  void train(const ProcessGroup& group, const Setting& setting, Outcome& out) {
    Engine engine(spec, kAdamW, group, setting.options);
    initialize(engine, places);
    for (int step = 0; step < kSteps; ++step) {
      for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
        const Tokens tokens = tokens_of(step, micro.index(), group.rank());
        {
          const Guard guard = engine.forward(embedding);
          model.embed_forward(tokens);
        }
        {
          const Guard guard = engine.forward(norms);
          model.first_norm_forward();
        }
        for (std::size_t l = 0; l < kLayers; ++l) {
          const Guard block = engine.forward(blocks[l]);
          point_at(block, l);
          model.block_forward(static_cast<int>(l));
          // Resident: served while the block is held, wherever the program stands.
          const Guard guard = engine.forward(norms);
          model.fused_norm_forward(static_cast<int>(l), model.params.fcprojb + l * kWidth);
        }
        {
          const Guard guard = engine.forward(embedding);
          out.add_loss(group.rank(), model.head_forward(tokens));
        }
        {
          Guard guard = engine.backward(embedding);
          model.head_backward(guard.gradient_mode());
          start(model.grads.wpe, kTime * kWidth, guard.gradient_mode());
          guard.commit();
        }
        {
          Guard guard = engine.backward(norms);
          model.final_norm_backward(guard.gradient_mode());
          // Later positions add one layer each.
          start(model.grads.ln1w, kLayers * kWidth, guard.gradient_mode());
          start(model.grads.ln1b, kLayers * kWidth, guard.gradient_mode());
          guard.commit();
        }
        for (std::size_t l = kLayers; l-- > 0;) {
          {
            Guard guard = engine.backward(blocks[l]);
            point_at(guard, l);
            model.block_backward(static_cast<int>(l), guard.gradient_mode());
            guard.commit();
          }
          Guard guard = engine.backward(norms);
          model.first_norm_backward(static_cast<int>(l), guard.gradient_mode());
          guard.commit();
        }
        Guard guard = engine.backward(embedding);
        model.embed_backward(tokens);
        guard.commit();
      }
      const StepReport report = engine.step();
      out.norms.push_back(report.norm);
      if (report.served_behind != kLayers * setting.accumulation)
        throw std::runtime_error("each fused norm is one use out of program order");
    }
    collect(engine, places, out.tensors);
  }
};

TEST(LlmC, ResidentNormsGiveTheStackedLoopsBits) {
  const ModelSpec spec = ResidentNorms().spec;
  expect_equal(spec, train_plain,
               [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
                 ResidentNorms().train(group, setting, out);
               });
}

TEST(LlmC, ResidentNormsNeedNoSecondLayerInTheGatherBudget) {
  const ModelSpec pair = HeldPair().spec;
  const ModelSpec resident = ResidentNorms().spec;
  EXPECT_LT(minimum_gather_budget(resident, 2), minimum_gather_budget(pair, 2));
  EngineOptions options;
  options.gather_budget = minimum_gather_budget(resident, 2);
  EXPECT_EQ(plan_memory(resident, kAdamW, 2, options).bytes(Category::gather_slots),
            minimum_gather_budget(resident, 2));
}

// Without hold(2) the second layer is refused while the first is held, instead of being gathered
// over it.
TEST(LlmC, HoldingTwoLayersMustBeStated) {
  HeldPair pair;
  pair.spec.hold(1);
  Engine engine(pair.spec, kAdamW, ProcessGroup::single());
  for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
    const Guard embedding = engine.forward(pair.embedding);
    EXPECT_THROW((void)engine.forward(pair.blocks[0]), UsageError);
    break;
  }
}

}  // namespace
}  // namespace zshard::wrap::llmc
