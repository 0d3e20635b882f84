// How each rank of a group ends, for tests of misuse and faults: type, text and state_step of what
// its function threw. And a small model with a loop that anything can be done wrong to.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "zshard/zshard.hpp"

namespace zshard::lab {

/// Seconds. Of groups and engines whose deadline is not to pass: long, since others may use the
/// machine.
inline constexpr double kDeadline = 20.0;

struct Outcome {
  std::string type = "nothing";  // "UsageError", ..., "other" for an exception that is not ours
  std::string text;
  std::optional<std::int64_t> state_step;
};

inline Outcome outcome_of(const std::exception_ptr& cause) {
  Outcome out;
  try {
    std::rethrow_exception(cause);
  } catch (const Error& error) {
    out = {"Error", error.what(), error.state_step()};
    if (typeid(error) == typeid(UsageError)) out.type = "UsageError";
    if (typeid(error) == typeid(CommError)) out.type = "CommError";
    if (typeid(error) == typeid(DeviceError)) out.type = "DeviceError";
    if (typeid(error) == typeid(OutOfMemory)) out.type = "OutOfMemory";
    if (typeid(error) == typeid(IoError)) out.type = "IoError";
  } catch (const std::exception& error) {
    out = {"other", error.what(), std::nullopt};
  } catch (...) {
    out = {"other", "no std::exception", std::nullopt};
  }
  return out;
}

/// What `body` throws.
template <class Body>
Outcome outcome(Body&& body) {
  try {
    body();
  } catch (...) {
    return outcome_of(std::current_exception());
  }
  return {};
}

/// How fn ends on each of `world` thread ranks, errors passed on to run_ranks; and what run_ranks
/// itself throws, last.
inline std::vector<Outcome> outcomes(int world, const std::function<void(const ProcessGroup&)>& fn,
                                     double deadline = kDeadline) {
  std::vector<Outcome> all(static_cast<std::size_t>(world));
  Outcome first = outcome([&] {
    run_ranks(world,
              [&](const ProcessGroup& group) {
                try {
                  fn(group);
                } catch (...) {
                  all[static_cast<std::size_t>(group.rank())] =
                      outcome_of(std::current_exception());
                  throw;
                }
              },
              {.deadline_seconds = deadline});
  });
  all.push_back(std::move(first));
  return all;
}

inline void expect(const Outcome& got, const std::string& type,
                   const std::vector<std::string>& parts, const std::string& what) {
  EXPECT_EQ(got.type, type) << what << ": " << got.text;
  for (const std::string& part : parts) {
    EXPECT_NE(got.text.find(part), std::string::npos)
        << what << ": no `" << part << "` in: " << got.text;
  }
}

/// Every rank, and run_ranks, ended with that type and a text that holds all parts.
inline void expect_all(const std::vector<Outcome>& got, const std::string& type,
                       const std::vector<std::string>& parts, const std::string& what = "") {
  for (std::size_t r = 0; r < got.size(); ++r) {
    expect(got[r], type, parts, what + " rank " + std::to_string(r));
  }
}

/// Ends within the deadline and what a loaded machine adds to it, or the test fails.
class Within {
 public:
  explicit Within(double seconds) : seconds_(seconds) {}
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
  ~Within() {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    EXPECT_LT(spent.count(), seconds_);
  }

 private:
  double seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Units u0, u1, ... of two parameters each, "u0.w" [7] and "u0.b" [5]; small, so that ranks own
/// padding only.
inline ModelSpec small_model(int units = 3, ParameterOptions options = {}) {
  ModelSpec spec;
  for (int u = 0; u < units; ++u) {
    UnitBuilder unit = spec.unit("u" + std::to_string(u));
    unit.parameter("u" + std::to_string(u) + ".w", {7}, options);
    unit.parameter("u" + std::to_string(u) + ".b", {5}, options);
  }
  return spec;
}

inline UnitId unit(int u) {
  return UnitId{u};
}

inline EngineOptions at_stage(int stage) {
  EngineOptions options;
  options.stage = static_cast<Stage>(stage);
  options.deadline_seconds = kDeadline;
  options.poison_slots = true;
  return options;
}

/// Writes `value` * (1 + element / 8) as gradient of every f32 parameter of the unit.
inline void write_gradients(Engine& engine, UnitId id, float value) {
  for (const ParameterSpec& p :
       engine.spec().units()[static_cast<std::size_t>(id.value)].parameters) {
    auto* gradient = static_cast<float*>(engine.gradient(p.id));
    if (gradient == nullptr) continue;
    for (std::int64_t i = 0; i < p.count(); ++i) {
      gradient[i] = value * (1.0f + static_cast<float>(i) / 8.0f);
    }
  }
}

inline void forward_backward(Engine& engine, float value) {
  const auto units = static_cast<int>(engine.spec().units().size());
  for (int u = 0; u < units; ++u) (void)engine.forward(unit(u));
  for (int u = units; u-- > 0;) {
    Guard guard = engine.backward(unit(u));
    write_gradients(engine, unit(u), value);
    guard.commit();
  }
}

/// One step of n micro-steps with gradients that differ by rank.
inline StepReport train_step(Engine& engine, int n = 1, const StepOptions& how = {}) {
  for (const MicroStep micro : engine.micro_steps(n)) {
    forward_backward(engine, static_cast<float>((engine.rank() + 1) * micro.loss_scale()));
  }
  return engine.step(how);
}

/// All parameters, "u0.w" first.
inline std::vector<float> contents(Engine& engine) {
  std::vector<float> all;
  for (const UnitSpec& u : engine.spec().units()) {
    for (const ParameterSpec& p : u.parameters) {
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      engine.read_parameter(p.name, values);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

}  // namespace zshard::lab
