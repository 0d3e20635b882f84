// The device's updates against the host's passes, bit for bit, over several steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optimizers/rule.hpp"
#include "optimizers/rules.hpp"
#include "tests/device_kernels/lab.hpp"
#include "zshard/error.hpp"
#include "zshard/optimizer.hpp"

namespace zshard::optimizers {
namespace {

using testing::floats;
using testing::Lab;
using testing::SameBits;
using testing::SameNumber;
using testing::Twin;
using testing::Values;

struct Case {
  std::string name;
  std::shared_ptr<const Rule> rule;
};

std::vector<Case> cases() {
  return {
      {"AdamW", make_adamw({.lr = 3e-3, .weight_decay = 0.1})},
      {"AdamW without decay", make_adamw({.lr = 3e-3, .weight_decay = 0.0})},
      {"Adam", make_adam({.lr = 1e-2})},
      {"Adam with decay", make_adam({.lr = 1e-2, .weight_decay = 0.01})},
      {"SGD", make_sgd({.lr = 0.1})},
      {"SGD with decay", make_sgd({.lr = 0.1, .weight_decay = 0.01})},
      {"SGD, momentum", make_sgd({.lr = 0.1, .momentum = 0.9})},
      {"SGD, momentum, decay", make_sgd({.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01})},
      {"SGD, nesterov", make_sgd({.lr = 0.1, .momentum = 0.9, .nesterov = true})},
      {"SGD, nesterov, decay",
       make_sgd({.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01})},
  };
}

/// Element offsets of parameter, slots and gradient.
struct Starts {
  std::int64_t parameter;
  std::int64_t slots[2];
  std::int64_t gradient;
};

void check(const Rule& rule, std::int64_t count, const Starts& starts, Values values) {
  Lab& lab = Lab::get();
  Twin<float> parameter(floats(count, 1, Values::finite), starts.parameter);
  std::vector<std::unique_ptr<Twin<float>>> slots;
  for (std::size_t s = 0; s < rule.slots().size(); ++s) {
    slots.push_back(std::make_unique<Twin<float>>(
        std::vector<float>(static_cast<std::size_t>(count), 0.0f), starts.slots[s]));
  }
  Twin<float> gradient(count, starts.gradient);
  for (std::int64_t step = 1; step <= 4; ++step) {
    gradient.set(floats(count, static_cast<std::uint32_t>(10 + step), values));
    Elements here{.parameter = parameter.host(),
                  .gradient = gradient.host(),
                  .factor = 0.37f / static_cast<float>(step),
                  .count = count};
    Elements there = here;
    there.parameter = parameter.device();
    there.gradient = gradient.device();
    for (std::size_t s = 0; s < slots.size(); ++s) {
      here.slots[s] = slots[s]->host();
      there.slots[s] = slots[s]->device();
    }
    const Constants constants = rule.constants(rule.defaults(), step);
    for (const Pass pass : rule.passes()) pass(here, constants, step);
    lab.update().run(rule, there, constants, step, lab.stream());
    SCOPED_TRACE("step " + std::to_string(step));
    ASSERT_TRUE(parameter.agrees(SameNumber()));
    for (const auto& slot : slots) ASSERT_TRUE(slot->agrees(SameNumber()));
    ASSERT_TRUE(gradient.agrees(SameBits()));
  }
}

TEST(DeviceUpdate, GivesTheHostsBits) {
  constexpr std::int64_t kCounts[] = {0, 1, 2, 3, 15, 16, 17, 1023, 1024, 1025};
  constexpr Starts kStarts[] = {{0, {0, 0}, 0}, {1, {1, 1}, 1}, {3, {7, 3}, 11}, {1, {2, 3}, 0}};
  for (const Case& c : cases()) {
    for (const std::int64_t count : kCounts) {
      for (const Starts& starts : kStarts) {
        SCOPED_TRACE(c.name + ", " + std::to_string(count) + " elements, parameter from " +
                     std::to_string(starts.parameter));
        check(*c.rule, count, starts, Values::finite);
        if (HasFatalFailure()) return;
      }
    }
    SCOPED_TRACE(c.name + ", 100000 elements");
    check(*c.rule, 100000, kStarts[1], Values::finite);
    if (HasFatalFailure()) return;
  }
}

/// Infinities, NaN, subnormals, and squares that overflow: no branch of the device's division or
/// root differs.
TEST(DeviceUpdate, GivesTheHostsBitsForAnyGradient) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    check(*c.rule, 100000, {0, {0, 0}, 0}, Values::any);
    if (HasFatalFailure()) return;
  }
}

/// However a range is cut.
TEST(DeviceUpdate, PiecesAreTheWhole) {
  constexpr std::int64_t kCount = 1000;
  Lab& lab = Lab::get();
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    Twin<float> parameter(floats(kCount, 1, Values::finite));
    Twin<float> gradient(floats(kCount, 2, Values::finite));
    Twin<float> first(std::vector<float>(kCount, 0.25f));
    Twin<float> second(std::vector<float>(kCount, 0.5f));
    const Constants constants = c.rule->constants(c.rule->defaults(), 1);
    const auto elements = [&](bool device, std::int64_t begin, std::int64_t end) {
      const auto at = [&](Twin<float>& twin) {
        return (device ? twin.device() : twin.host()) + begin;
      };
      return Elements{.parameter = at(parameter),
                      .slots = {at(first), at(second)},
                      .gradient = at(gradient),
                      .factor = 0.5f,
                      .count = end - begin};
    };
    for (const Pass pass : c.rule->passes()) pass(elements(false, 0, kCount), constants, 1);
    std::int64_t begin = 0;
    for (const std::int64_t end : {1, 3, 10, 10, 267, 999, 1000}) {
      lab.update().run(*c.rule, elements(true, begin, end), constants, 1, lab.stream());
      begin = end;
    }
    EXPECT_TRUE(parameter.agrees(SameBits()));
    EXPECT_TRUE(first.agrees(SameBits()));
    EXPECT_TRUE(second.agrees(SameBits()));
  }
}

/// A rule that no kernel knows.
class HostRule final : public Rule {
 public:
  [[nodiscard]] std::string name() const override { return "HostRule"; }
  [[nodiscard]] std::span<const StateSlot> slots() const override { return {}; }
  [[nodiscard]] Resolved defaults() const override { return {}; }
  [[nodiscard]] Constants constants(const Resolved&, std::int64_t) const override { return {}; }
  [[nodiscard]] std::span<const Pass> passes() const override { return kPasses; }
  void validate(const Resolved&) const override {}

 private:
  static void pass(const Elements&, const Constants&, std::int64_t) {}
  static constexpr Pass kPasses[] = {pass};
};

TEST(DeviceUpdate, RefusesARuleWithoutADeviceForm) {
  Lab& lab = Lab::get();
  Twin<float> parameter(std::vector<float>(4, 1.0f));
  const Elements elements{
      .parameter = parameter.device(), .gradient = parameter.device(), .count = 4};
  try {
    lab.update().run(HostRule(), elements, {}, 1, lab.stream());
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("HostRule"), std::string::npos) << error.what();
  }
}

TEST(DeviceUpdate, EveryRuleHasADeviceForm) {
  for (const Case& c : cases()) {
    EXPECT_EQ(c.rule->device_passes().size(), c.rule->passes().size()) << c.name;
  }
}

}  // namespace
}  // namespace zshard::optimizers
