// A tape autograd: forward records nodes that hold addresses of parameters, and backward runs on a
// thread of its own, as autograd engines do it. zshard moves the parameters in between; on_bind
// tells the tape where they are, and the engine's plain calls stand in the tape's hooks.
#include "tests/wrap/tape.hpp"

#include <gtest/gtest.h>

#include <future>

#include "tests/wrap/compare.hpp"

namespace zshard::wrap {
namespace {

constexpr int kRows = 4, kIn = 5, kHidden = 9, kOut = 3;

/// in -> shared -> middle -> shared -> out; the shared module is used twice in each direction.
struct Net {
  ModelSpec spec;
  UnitId in, shared, middle, out;
  ParameterId in_w, in_b, shared_w, shared_b, shared_s, middle_w, middle_b, out_w, out_b;

  Net() {
    const auto linear = [](UnitBuilder& unit, const std::string& name, int outputs, int inputs,
                           ParameterId& w, ParameterId& b) {
      w = unit.parameter(name + ".weight", {outputs, inputs});
      b = unit.parameter(name + ".bias", {outputs}, {.decay = false});
      return unit.id();
    };
    UnitBuilder a = spec.unit("in");
    in = linear(a, "in", kHidden, kIn, in_w, in_b);
    UnitBuilder b = spec.unit("shared");
    shared = linear(b, "shared", kHidden, kHidden, shared_w, shared_b);
    shared_s = b.parameter("shared.scale", {kHidden}, {.decay = false});
    UnitBuilder c = spec.unit("middle");
    middle = linear(c, "middle", kHidden, kHidden, middle_w, middle_b);
    UnitBuilder d = spec.unit("out");
    out = linear(d, "out", kOut, kHidden, out_w, out_b);
    std::vector<Position> program;
    for (const UnitId u : {in, shared, middle, shared, out}) program.push_back({u, Pass::forward});
    for (const UnitId u : {out, shared, middle, shared, in}) program.push_back({u, Pass::backward});
    spec.program(program);
  }

  /// Records the graph; enter and leave stand around each module.
  float forward(Tape& tape, const Tape::Hooks& hooks, int step, int micro, int rank) const {
    Tensor x(kRows * kIn);
    Tensor target(kRows * kOut);
    const auto seed = static_cast<std::uint64_t>((step * 8 + micro) * 8 + rank);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = noise(seed, i);
    for (std::size_t i = 0; i < target.size(); ++i) target[i] = x[i] * 0.5f + x[i + 2];
    const auto within = [&](UnitId unit, auto&& body) {
      hooks.enter(unit.value);
      tape.module(unit.value);
      const Tape::Id y = body();
      hooks.leave(unit.value);
      return y;
    };
    // The weight is used twice in one visit, so its second node adds whatever the mode is.
    const auto residual = [&](Tape::Id y) {
      const Tape::Id once = tape.tanh(tape.linear(y, shared_w, shared_b, kHidden));
      return tape.add(y, tape.scale(tape.linear(once, shared_w, shared_b, kHidden), shared_s));
    };
    Tape::Id y = tape.input(kRows, kIn, x);
    y = within(in, [&] { return tape.tanh(tape.linear(y, in_w, in_b, kHidden)); });
    y = within(shared, [&] { return residual(y); });
    y = within(middle, [&] { return tape.tanh(tape.linear(y, middle_w, middle_b, kHidden)); });
    y = within(shared, [&] { return residual(y); });
    y = within(out, [&] { return tape.linear(y, out_w, out_b, kOut); });
    return tape.loss(y, target);
  }
};

Outcome train_plain(const Setting& setting) {
  const Net net;
  PlainTrainer trainer(plain_tensors(net.spec), setting.world, setting.options.accumulation,
                       kAdamW);
  Outcome out(setting.world);
  Tape tape(net.spec.parameter_count());
  const Tape::Hooks none{[](int) {}, [](int) {}};
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      trainer.micro_step([&](int rank) {
        for (const UnitSpec& unit : net.spec.units()) {
          for (const ParameterSpec& p : unit.parameters)
            tape.bind({p.id, trainer.value(p.name), trainer.gradient(p.name)});
        }
        out.add_loss(rank, net.forward(tape, none, step, micro, rank));
        tape.backward(none);
        tape.clear();
      });
    }
    out.norms.push_back(trainer.step());
  }
  out.tensors = trainer.tensors();
  return out;
}

void train(const ProcessGroup& group, const Setting& setting, Outcome& out) {
  const Net net;
  Engine engine(net.spec, kAdamW, group, setting.options);
  initialize_all(engine);
  Tape tape(net.spec.parameter_count());
  engine.on_bind([&](const Binding& binding) { tape.bind(binding); });

  const Tape::Hooks forward{
      [&](int module) { engine.acquire(UnitId{module}, Pass::forward); },
      [&](int module) { engine.release(UnitId{module}, Pass::forward); },
  };
  const Tape::Hooks backward{
      [&](int module) { engine.acquire(UnitId{module}, Pass::backward); },
      [&](int module) {
        engine.commit(UnitId{module});
        engine.release(UnitId{module}, Pass::backward);
      },
  };
  for (int step = 0; step < kSteps; ++step) {
    engine.begin_micro_steps(setting.accumulation);
    for (int micro = 0; engine.next_micro_step(); ++micro) {
      out.add_loss(group.rank(), net.forward(tape, forward, step, micro, group.rank()));
      std::async(std::launch::async, [&] { tape.backward(backward); }).get();
      tape.clear();
    }
    out.norms.push_back(engine.step().norm);
  }
  finish(engine, out);
}

TEST(Tape, BackwardOnAnotherThreadGivesThePlainTapesBits) {
  expect_equal(Net().spec, train_plain, train);
}

}  // namespace
}  // namespace zshard::wrap
