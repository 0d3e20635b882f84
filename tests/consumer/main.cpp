// A user's program: two ranks fit y = a * b * x elementwise, at stage 0 and at stage 3. It fails
// unless the loss falls, the ranks agree, and both stages end with the same bits.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "zshard/zshard.hpp"

namespace {

constexpr int kRanks = 2;
constexpr int kWidth = 37;
constexpr int kSteps = 40;

struct Outcome {
  double first_loss = 0.0;
  double last_loss = 0.0;
  std::vector<float> weights;
};

Outcome train(const zshard::ProcessGroup& group, zshard::Stage stage) {
  float* weight[2] = {};
  float* gradient[2] = {};
  zshard::ModelSpec spec;
  std::vector<zshard::UnitId> units;
  for (int l = 0; l < 2; ++l) {
    auto unit = spec.unit("layer." + std::to_string(l));
    unit.parameter("layer." + std::to_string(l) + ".weight", {kWidth}, &weight[l], &gradient[l]);
    units.push_back(unit.id());
  }
  zshard::Engine engine(spec, zshard::AdamW{.lr = 0.05}, group,
                        {.stage = stage, .deadline_seconds = 60.0});
  for (const zshard::UnitId unit : units) {
    engine.initialize(unit, [](const zshard::ParameterRange& range, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = 1.0f + 0.01f * static_cast<float>((range.first + static_cast<int>(i)) % 7);
      }
    });
  }

  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    double loss = 0.0;
    for (const zshard::MicroStep micro : engine.micro_steps(1)) {
      (void)micro;
      float x[3][kWidth];
      float d[kWidth];
      for (int i = 0; i < kWidth; ++i) x[0][i] = group.rank() == 0 ? 1.0f : 0.5f;
      for (int l = 0; l < 2; ++l) {
        const auto held = engine.forward(units[static_cast<std::size_t>(l)]);
        for (int i = 0; i < kWidth; ++i) x[l + 1][i] = weight[l][i] * x[l][i];
      }
      for (int i = 0; i < kWidth; ++i) {
        d[i] = x[2][i] - 3.0f * x[0][i];
        loss += 0.5 * d[i] * d[i];
      }
      for (int l = 1; l >= 0; --l) {
        auto held = engine.backward(units[static_cast<std::size_t>(l)]);
        for (int i = 0; i < kWidth; ++i) {
          gradient[l][i] += d[i] * x[l][i];
          d[i] *= weight[l][i];
        }
        held.commit();
      }
    }
    const zshard::StepReport report = engine.step({.clip_norm = 10.0});
    if (report.skipped || report.step != step) throw zshard::Error("step skipped or miscounted");
    std::vector<double> losses(kRanks);
    group.all_gather(std::as_bytes(std::span(&loss, 1)), std::as_writable_bytes(std::span(losses)));
    (step == 0 ? outcome.first_loss : outcome.last_loss) = losses[0] + losses[1];
  }
  for (int l = 0; l < 2; ++l) {
    std::vector<float> part(kWidth);
    engine.read_parameter("layer." + std::to_string(l) + ".weight", part);
    outcome.weights.insert(outcome.weights.end(), part.begin(), part.end());
  }
  if (engine.ledger() != engine.plan()) throw zshard::Error("the ledger differs from the plan");
  return outcome;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  std::vector<Outcome> outcomes;
  try {
    std::mutex mutex;
    for (const zshard::Stage stage : {zshard::Stage::replicated, zshard::Stage::parameters}) {
      zshard::run_ranks(kRanks, [&](const zshard::ProcessGroup& group) {
        Outcome outcome = train(group, stage);
        const std::lock_guard lock(mutex);
        outcomes.push_back(std::move(outcome));
      });
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "consumer: %s\n", error.what());
    return 1;
  }
  const Outcome& reference = outcomes.front();
  std::printf("consumer: loss %.6f -> %.6f\n", reference.first_loss, reference.last_loss);
  if (!(reference.last_loss < 0.05 * reference.first_loss)) {
    std::fprintf(stderr, "consumer: the loss did not fall\n");
    return 1;
  }
  for (const Outcome& outcome : outcomes) {
    if (outcomes.size() != 4 || !same_bits(outcome.weights, reference.weights) ||
        outcome.last_loss != reference.last_loss) {
      std::fprintf(stderr, "consumer: ranks or stages differ\n");
      return 1;
    }
  }
  return 0;
}
