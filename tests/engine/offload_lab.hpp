// A small model with every kind of tensor, a loop over it, and its bits, for the tests of engines
// on disk.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/cases.hpp"
#include "tests/engine/outcomes.hpp"
#include "tests/offload/fault_driver.hpp"

namespace zshard::lab::disk {

using offload::Operation;
using offload::testing::Fault;
using offload::testing::Faults;
using offload::testing::Injection;
using offload::testing::kLasting;
using Values = std::map<std::string, std::vector<float>>;

// A disk that others use stalls for seconds; no error here has to wait for a deadline.
#ifdef ZSHARD_SANITIZER
inline constexpr double kPatience = 60.0;
inline constexpr bool kSanitized = true;
#else
inline constexpr double kPatience = 20.0;
inline constexpr bool kSanitized = false;
#endif
/// Stages that a test of its own visits; sanitizers are ten times slower.
inline const std::vector<int> kStages =
    kSanitized ? std::vector<int>{0, 3} : std::vector<int>{0, 1, 2, 3};
inline const std::vector<int> kWorlds =
    kSanitized ? std::vector<int>{2} : std::vector<int>{1, 2, 3};
inline constexpr std::int64_t kSmallest = 4096;  // sub_group_bytes of the smallest sub-groups

inline std::vector<Outcome> outcomes(int world,
                                     const std::function<void(const ProcessGroup&)>& fn) {
  return lab::outcomes(world, fn, kPatience);
}

inline bool exhaustive() {
  const char* wanted = std::getenv("ZSHARD_EXHAUSTIVE");
  return wanted != nullptr && std::string(wanted) == "1";
}

// -- a loop --

inline const UnitSpec& spec_of(const Engine& engine, int u) {
  return engine.spec().units()[static_cast<std::size_t>(u)];
}

inline int units_of(const Engine& engine) {
  return static_cast<int>(engine.spec().units().size());
}

inline void fill(Engine& engine) {
  for (int u = 0; u < units_of(engine); ++u) {
    engine.initialize(unit(u), [](const ParameterRange& range, std::span<float> out) {
      const auto values = lab::uniform(1, 0, std::string(range.name), range.count, range.first);
      std::copy(values.begin(), values.end(), out.begin());
    });
  }
}

/// A micro-step whose gradients follow from the parameters; `unused`: a unit left out.
inline void pass(Engine& engine, int tick, int unused = -1, bool bad = false) {
  for (int u = 0; u < units_of(engine); ++u) {
    if (u != unused) (void)engine.forward(unit(u));
  }
  for (int u = units_of(engine); u-- > 0;) {
    if (u == unused) continue;
    Guard guard = engine.backward(unit(u));
    for (const ParameterSpec& p : spec_of(engine, u).parameters) {
      void* target = guard.gradient(p.id);
      if (target == nullptr || p.count() == 0) continue;
      const auto values = lab::load(guard.pointer(p.id), p.options.dtype, p.count());
      auto g = lab::backward(p, values, engine.rank(), tick * 64 + u, -1);
      if (bad && engine.rank() == 0) g.back() = std::numeric_limits<float>::infinity();
      kernels::narrow(g.data(), p.options.dtype, target, p.count());
    }
    guard.commit();
  }
}

inline StepReport train(Engine& engine, int tick, int micro_steps = 2, int unused = -1,
                        bool bad = false) {
  for (const MicroStep micro : engine.micro_steps(micro_steps)) {
    pass(engine, tick * 4 + micro.index(), unused, bad);
  }
  StepOptions how;
  how.clip_norm = 5.0;
  return engine.step(how);
}

/// All parameters and states.
inline Values everything(Engine& engine) {
  Values all;
  for (int u = 0; u < units_of(engine); ++u) {
    for (const ParameterSpec& p : spec_of(engine, u).parameters) {
      const auto count = static_cast<std::size_t>(p.count());
      engine.read_parameter(p.name, all[p.name] = std::vector<float>(count));
      if (p.options.frozen || !p.options.alias.empty()) continue;
      std::vector<std::string> slots = {"exp_avg", "exp_avg_sq"};
      if (p.options.dtype != DType::f32) slots.emplace_back("master");
      for (const std::string& slot : slots) {
        auto& state = all[p.name + "/" + slot];
        state.resize(count);
        engine.read_state(p.name, slot, state);
      }
    }
  }
  return all;
}

inline std::string difference(const Values& a, const Values& b) {
  lab::Tensors left;
  lab::Tensors right;
  left.values = a;
  right.values = b;
  return lab::difference(left, right);
}

/// Several groups a segment, 16-bit and fp32 parameters, one frozen, one resident, one of one
/// element.
inline ModelSpec model() {
  ModelSpec spec;
  auto a = spec.unit("a");
  a.parameter("a.w", {9000});
  a.parameter("a.b", {5});
  auto b = spec.unit("b");
  b.parameter("b.w", {7000}, {.dtype = DType::bf16});
  b.parameter("b.frozen", {300}, {.frozen = true});
  auto c = spec.unit("c");
  c.parameter("c.one", {1});
  c.parameter("c.w", {3, 1000}, {.decay = false});
  c.parameter("c.resident", {2500}, {.dtype = DType::bf16, .resident = true});
  return spec;
}

inline EngineOptions on_disk(int stage, lab::TierLevel tiers, int buffers = 3) {
  EngineOptions options = lab::at_stage(stage);
  options.deadline_seconds = kPatience;
  options.sub_group_bytes = kSmallest;
  options.offload.io_buffers = buffers;
  lab::set_tiers(options, tiers);
  return options;
}

/// What `body` gives on rank 0 of engines with these options.
template <class Body>
auto on_ranks(int world, const ModelSpec& spec, const EngineOptions& options, Body&& body) {
  std::optional<decltype(body(std::declval<Engine&>()))> result;
  run_ranks(world, [&](const ProcessGroup& group) {
    Engine engine(spec, AdamW{.lr = 0.01}, group, options);
    auto mine = body(engine);
    if (group.rank() == 0) result = std::move(mine);
  });
  return std::move(*result);
}

inline constexpr std::array<lab::TierLevel, 5> kTierLevels = {
    lab::kOptimizerNvme, lab::kHalfOptimizerNvme, lab::kOptimizerAndGradientsNvme, lab::kAllNvme,
    lab::kParametersNvme};

struct Setting {
  int stage = 3;
  int world = 2;
  lab::TierLevel tiers = lab::kAllNvme;
  int buffers = 3;
  IoBackendKind backend = IoBackendKind::automatic;
  bool verify = false;
  bool inline_queues = false;
  bool gradients_only = false;
  [[nodiscard]] std::string text() const {
    return "stage " + std::to_string(stage) + " world " + std::to_string(world) + " tiers " +
           std::to_string(tiers) + " buffers " + std::to_string(buffers) +
           (inline_queues ? " inline" : "") + (gradients_only ? " gradients only" : "");
  }
  [[nodiscard]] EngineOptions options() const {
    EngineOptions o = on_disk(stage, tiers, buffers);
    o.offload.io_backend = backend;
    o.offload.io_verify = verify;
    o.inline_queues = inline_queues;
    if (gradients_only) o.offload.optimizer = Tier::host;
    return o;
  }
};

/// Bits after three steps in memory, and the norm of the second.
struct Undisturbed {
  Values values;
  double norm = 0.0;
};

inline const Undisturbed& undisturbed(int world) {
  static std::mutex mutex;  // ranks ask too
  const std::lock_guard<std::mutex> lock(mutex);
  static std::map<int, Undisturbed> known;
  auto [at, added] = known.try_emplace(world);
  if (!added) return at->second;
  at->second = on_ranks(world, model(), lab::at_stage(1), [](Engine& engine) {
    fill(engine);
    Undisturbed result;
    train(engine, 0);
    result.norm = train(engine, 1).norm;
    train(engine, 2);
    result.values = everything(engine);
    return result;
  });
  return at->second;
}

inline int files_in(const std::string& directory) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::recursive_directory_iterator(directory)) {
    ++count;
  }
  return count;
}

}  // namespace zshard::lab::disk
