// Runs a wrapped loop and its plain twin over stages, world sizes, budgets and modes, and compares
// bits.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/wrap/plain.hpp"
#include "zshard/zshard.hpp"

namespace zshard::wrap {

inline constexpr int kSteps = 3;
inline constexpr AdamW kAdamW{
    .lr = 0.02, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};

struct Setting {
  int world = 1;
  int accumulation = 1;
  EngineOptions options;

  [[nodiscard]] std::string text() const {
    std::ostringstream out;
    out << "world " << world << ", accumulation " << accumulation << " "
        << to_string(options.accumulation) << ", stage " << to_string(options.stage) << ", mode "
        << to_string(options.gradient_mode) << ", budget ";
    if (options.gather_budget) {
      out << *options.gather_budget;
    } else {
      out << "unset";
    }
    return out.str();
  }
};

/// What a run leaves. A rank's losses stand in losses[rank], in order.
struct Outcome {
  Tensors tensors;
  std::vector<std::vector<float>> losses;
  std::vector<double> norms;

  explicit Outcome(int world) : losses(static_cast<std::size_t>(world)) {}
  void add_loss(int rank, float loss) { losses[static_cast<std::size_t>(rank)].push_back(loss); }
};

/// A rank's training with zshard: fills its own Outcome.
using Loop = std::function<void(const ProcessGroup& group, const Setting& setting, Outcome& out)>;
using Plain = std::function<Outcome(const Setting& setting)>;

/// Fills every parameter of the spec with initial().
inline void initialize_all(Engine& engine) {
  for (std::size_t u = 0; u < engine.spec().units().size(); ++u) {
    engine.initialize(UnitId{static_cast<std::int32_t>(u)}, [](const ParameterRange& range,
                                                               std::span<float> values) {
      for (std::int64_t i = 0; i < range.count; ++i) {
        values[static_cast<std::size_t>(i)] = initial(std::string(range.name), range.first + i);
      }
    });
  }
}

/// Parameters and state by name, with an alias under both names.
inline void read_all(Engine& engine, Tensors& out) {
  for (const UnitSpec& unit : engine.spec().units()) {
    for (const ParameterSpec& p : unit.parameters) {
      const auto count = static_cast<std::size_t>(p.count());
      engine.read_parameter(p.name, out[p.name] = Tensor(count));
      if (p.options.frozen || !p.options.alias.empty()) continue;
      for (const char* slot : {"exp_avg", "exp_avg_sq"}) {
        engine.read_state(p.name, slot, out[p.name + "/" + slot] = Tensor(count));
      }
    }
  }
}

/// "" if equal, else the first difference of each tensor. Norms depend on the layout in their last
/// bits, so they are compared to 1e-12.
inline std::string difference(const Outcome& expected, const Outcome& got) {
  std::ostringstream out;
  out.precision(9);
  for (const auto& [name, values] : got.tensors) {
    if (expected.tensors.count(name) == 0) out << name << " is not expected; ";
  }
  for (const auto& [name, values] : expected.tensors) {
    const auto found = got.tensors.find(name);
    if (found == got.tensors.end() || found->second.size() != values.size()) {
      out << name << " is missing or has another size; ";
      continue;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::memcmp(&values[i], &found->second[i], sizeof(float)) == 0) continue;
      out << name << "[" << i << "] is " << found->second[i] << ", not " << values[i] << "; ";
      break;
    }
  }
  for (std::size_t r = 0; r < expected.losses.size(); ++r) {
    const auto& a = expected.losses[r];
    const auto& b = got.losses[r];
    if (a.size() != b.size() ||
        (!a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0)) {
      out << "rank " << r << " saw other losses; ";
    }
  }
  if (expected.norms.size() != got.norms.size()) out << "another number of steps; ";
  for (std::size_t i = 0; i < expected.norms.size() && i < got.norms.size(); ++i) {
    if (!(std::fabs(expected.norms[i] - got.norms[i]) <= 1e-12 * expected.norms[i])) {
      out << "norm of step " << i << " is " << got.norms[i] << ", not " << expected.norms[i];
    }
  }
  return out.str();
}

/// "" if the run learned with finite numbers.
inline std::string not_finite(const Outcome& outcome) {
  const auto finite = [](const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
  };
  for (const auto& [name, values] : outcome.tensors) {
    if (!finite(values)) return name;
  }
  for (const auto& losses : outcome.losses) {
    if (!finite(losses)) return "a loss";
  }
  for (const double norm : outcome.norms) {
    if (!(norm > 0.0) || !std::isfinite(norm)) return "a norm";
  }
  return outcome.norms.empty() ? "no step" : "";
}

/// All ranks of one setting. Throws if the ranks ended with other bits.
inline Outcome run(const Setting& setting, const Loop& loop) {
  std::vector<Outcome> ranks(static_cast<std::size_t>(setting.world), Outcome(setting.world));
  run_ranks(setting.world,
            [&](const ProcessGroup& group) {
              loop(group, setting, ranks[static_cast<std::size_t>(group.rank())]);
            },
            {.deadline_seconds = setting.options.deadline_seconds});
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    ranks[0].losses[r] = ranks[r].losses[r];
    ranks[r].losses = ranks[0].losses;
    const std::string d = difference(ranks[0], ranks[r]);
    if (!d.empty()) throw std::runtime_error("rank " + std::to_string(r) + " and rank 0: " + d);
  }
  return ranks[0];
}

inline EngineOptions options_of(Stage stage, GradientMode mode, Accumulation accumulation) {
  EngineOptions options;
  options.stage = stage;
  options.gradient_mode = mode;
  options.accumulation = accumulation;
  options.deadline_seconds = 60.0;
  options.threads = 1;
  options.poison_slots = true;  // a read of what is not held shows as NaN
  return options;
}

inline bool exhaustive() {
  const char* wanted = std::getenv("ZSHARD_EXHAUSTIVE");
  return wanted != nullptr && std::string(wanted) == "1";
}

/// The setting that stands for each reference: what changes bits.
inline std::vector<Setting> references() {
  std::vector<Setting> settings;
  const std::vector<int> worlds =
      exhaustive() ? std::vector<int>{1, 2, 3, 4, 5, 7, 8} : std::vector<int>{1, 2, 3};
  const int many = exhaustive() ? 3 : 2;
  for (const int world : worlds) {
    for (const auto& [n, how] : {std::pair{1, Accumulation::reduced},
                                 {many, Accumulation::reduced},
                                 {many, Accumulation::local}})
      settings.push_back({world, n, options_of(Stage::replicated, GradientMode::accumulate, how)});
  }
  return settings;
}

/// Every stage, budget and gradient mode of one reference: what must not change bits.
inline std::vector<Setting> variants(const Setting& reference, const ModelSpec& spec,
                                     Stage last = Stage::parameters) {
  std::vector<Setting> settings;
  for (int stage = 0; stage <= static_cast<int>(last); ++stage) {
    for (const GradientMode mode : {GradientMode::overwrite, GradientMode::accumulate}) {
      Setting setting{reference.world, reference.accumulation,
                      options_of(static_cast<Stage>(stage), mode, reference.options.accumulation)};
      settings.push_back(setting);  // all units at once
      if (setting.options.stage != Stage::parameters) continue;
      const std::int64_t least = minimum_gather_budget(spec, setting.world);
      setting.options.gather_budget = least;
      settings.push_back(setting);
      if (!exhaustive()) continue;
      setting.options.gather_budget =
          least + (maximum_gather_budget(spec, setting.world) - least) / 2;
      settings.push_back(setting);
    }
  }
  return settings;
}

inline void expect_equal(const ModelSpec& spec, const Plain& plain, const Loop& loop,
                         Stage last = Stage::parameters) {
  for (const Setting& reference : references()) {
    const Outcome expected = plain(reference);
    ASSERT_EQ(not_finite(expected), "");  // or equal bits would say little
    for (const Setting& setting : variants(reference, spec, last)) {
      SCOPED_TRACE(setting.text());
      const Outcome got = run(setting, loop);
      ASSERT_EQ(difference(expected, got), "");
    }
  }
}

/// Called by a rank at the end of its loop.
inline void finish(Engine& engine, Outcome& out) {
  if (engine.ledger() != engine.plan()) throw std::runtime_error("the ledger is not the plan");
  read_all(engine, out.tensors);
}

}  // namespace zshard::wrap
