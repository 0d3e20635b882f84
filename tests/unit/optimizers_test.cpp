// The rules: known answers, traps, cuts, edges of the hyper-parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "optimizers/rule.hpp"
#include "runtime/kernels/copy.hpp"
#include "runtime/kernels/kernels.hpp"
#include "zshard/error.hpp"
#include "zshard/optimizer.hpp"

namespace zshard::optimizers {
namespace {

constexpr double kEpsilon = std::numeric_limits<float>::epsilon();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

std::uint32_t bits(float x) {
  return std::bit_cast<std::uint32_t>(x);
}

/// Rounds to fp32 whatever the compiler would like to do with the expression around it.
float rounded(float x) {
  volatile float y = x;
  return y;
}

/// Parameters and state as an engine would hold them.
struct State {
  std::vector<float> parameter;
  std::vector<std::vector<float>> slots;

  State(const Rule& rule, std::vector<float> start)
      : parameter(std::move(start)),
        slots(rule.slots().size(), std::vector<float>(parameter.size(), 0.0f)) {}

  /// Every pass of a step over elements [begin, end).
  void step(const Rule& rule, const Constants& constants, const std::vector<float>& gradient,
            std::int64_t step, float factor, std::int64_t begin, std::int64_t end) {
    Elements elements{.parameter = parameter.data() + begin,
                      .gradient = gradient.data() + begin,
                      .factor = factor,
                      .count = end - begin};
    for (std::size_t s = 0; s < slots.size(); ++s) elements.slots[s] = slots[s].data() + begin;
    for (const Pass pass : rule.passes()) pass(elements, constants, step);
  }

  void step(const Rule& rule, const std::vector<float>& gradient, std::int64_t count,
            float factor = 1.0f) {
    step(rule, rule.constants(rule.defaults(), count), gradient, count, factor, 0,
         static_cast<std::int64_t>(parameter.size()));
  }

  [[nodiscard]] bool same_bits(const State& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    bool equal = same(parameter, other.parameter) && slots.size() == other.slots.size();
    for (std::size_t s = 0; equal && s < slots.size(); ++s) equal = same(slots[s], other.slots[s]);
    return equal;
  }
};

struct KnownAnswer {
  std::string name;
  Optimizer optimizer;
  std::array<double, 3> after_three;
};

std::vector<KnownAnswer> known_answers() {
  return {
      {"SGD", SGD{.lr = 0.1}, {0.965, -2.03, 0.30001}},
      {"SGD momentum, decay",
       SGD{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
       {0.915362789, -1.993655578, 0.2972163895}},
      {"SGD nesterov",
       SGD{.lr = 0.1, .momentum = 0.9, .nesterov = true},
       {0.89381, -2.03432, 0.1200271}},
      {"Adam", Adam{.lr = 0.01}, {0.974813056997865, -1.99190994799913, 0.501052467814543}},
      {"Adam L2",
       Adam{.lr = 0.01, .weight_decay = 0.1},
       {0.972241494173677, -1.97876354282091, 0.473358549601538}},
      {"AdamW",
       AdamW{.lr = 0.01, .weight_decay = 0.1},
       {0.971845223806646, -1.98593859936836, 0.499546526998264}},
  };
}

const std::vector<float> kStart = {1.0f, -2.0f, 0.5f};
const std::vector<std::vector<float>> kGradients = {
    {0.1f, -0.2f, 0.0f}, {0.3f, 0.1f, -1e-4f}, {-0.05f, 0.4f, 2.0f}};

TEST(KnownAnswers, ThreeStepsOfEveryRule) {
  for (const KnownAnswer& known : known_answers()) {
    const Rule& rule = known.optimizer.rule();
    State state(rule, kStart);
    for (std::size_t t = 0; t < 3; ++t) {
      state.step(rule, kGradients[t], static_cast<std::int64_t>(t) + 1);
    }
    for (std::size_t i = 0; i < 3; ++i) {
      // Three updates of about ten roundings, each of at most half an epsilon of the parameter.
      const double tolerance = 3 * 10 * 0.5 * kEpsilon * std::abs(known.after_three[i]);
      EXPECT_NEAR(state.parameter[i], known.after_three[i], tolerance) << known.name << " " << i;
    }
  }
}

TEST(KnownAnswers, TheFactorScalesTheGradientFirst) {
  for (const KnownAnswer& known : known_answers()) {
    const Rule& rule = known.optimizer.rule();
    State plain(rule, kStart), scaled(rule, kStart);
    for (std::size_t t = 0; t < 3; ++t) {
      std::vector<float> doubled = kGradients[t];
      for (float& g : doubled) g *= 8.0f;
      plain.step(rule, kGradients[t], static_cast<std::int64_t>(t) + 1);
      scaled.step(rule, doubled, static_cast<std::int64_t>(t) + 1, 0.125f);
    }
    EXPECT_TRUE(plain.same_bits(scaled)) << known.name;
  }
}

TEST(KnownAnswers, AResetStepCounterOrNoBiasCorrectionWouldShow) {
  const Optimizer optimizer = Adam{.lr = 0.01};
  const Rule& rule = optimizer.rule();
  State reset(rule, kStart), uncorrected(rule, kStart);
  for (std::size_t t = 0; t < 3; ++t) {
    reset.step(rule, kGradients[t], t == 2 ? 1 : static_cast<std::int64_t>(t) + 1);
    const std::int64_t late = std::int64_t{1} << 40;  // every correction is 1
    uncorrected.step(rule, kGradients[t], late);
  }
  EXPECT_NEAR(reset.parameter[0], 0.971415481651, 20 * kEpsilon);
  EXPECT_NEAR(uncorrected.parameter[0], 0.899628816357, 20 * kEpsilon);
}

TEST(KnownAnswers, EpsStandsOutsideTheRoot) {
  for (const Optimizer& optimizer :
       {Optimizer(Adam{.lr = 0.1}), Optimizer(AdamW{.lr = 0.1, .weight_decay = 0.0})}) {
    State state(optimizer.rule(), {1.0f});
    state.step(optimizer.rule(), {1e-8f}, 1);
    EXPECT_NEAR(state.parameter[0], 0.95, 4 * kEpsilon) << optimizer.name();
  }
}

TEST(KnownAnswers, DecayWithoutAGradient) {
  const Optimizer adam = Adam{.lr = 0.1, .weight_decay = 0.1};
  State l2(adam.rule(), {1.0f});
  l2.step(adam.rule(), {0.0f}, 1);
  EXPECT_NEAR(l2.parameter[0], 0.90000001, 2 * kEpsilon);
  const Optimizer adamw = AdamW{.lr = 0.1, .weight_decay = 0.1};
  State decoupled(adamw.rule(), {1.0f});
  decoupled.step(adamw.rule(), {0.0f}, 1);
  EXPECT_EQ(decoupled.parameter[0], 0.99f);
}

TEST(KnownAnswers, WithoutDecayAdamAndAdamWAreTheSame) {
  const Optimizer adam = Adam{.lr = 0.01};
  const Optimizer adamw = AdamW{.lr = 0.01, .weight_decay = 0.0};
  State a(adam.rule(), kStart), b(adamw.rule(), kStart);
  for (std::size_t t = 0; t < 3; ++t) {
    a.step(adam.rule(), kGradients[t], static_cast<std::int64_t>(t) + 1);
    b.step(adamw.rule(), kGradients[t], static_cast<std::int64_t>(t) + 1);
  }
  EXPECT_TRUE(a.same_bits(b));
}

/// Thirteen parameters: 2-3-1, sigmoid on both layers, loss = sum of the outputs over three inputs.
template <class Real>
struct Mlp {
  static constexpr std::array<double, 13> kStart = {
      -0.21089885683388707, -0.4975560466422629, -0.1412921620247176,
      -0.3420288967865903,  -0.2523635082803723, 0.6975570255493778,    // W1 [3, 2]
      -0.10853121966252376, -0.297948499687533,  0.6892015099955718,    // b1
      -0.05080313011597654, -0.3941351875105899, -0.28433759745928844,  // W2 [1, 3]
      -0.07113812430174121};                                            // b2

  static Real sigmoid(Real x) { return Real(1) / (Real(1) + std::exp(-x)); }

  /// The loss; gradient gets its derivatives.
  static Real loss(const std::vector<Real>& p, std::vector<Real>& gradient) {
    const Real inputs[3][2] = {
        {Real(0.1), Real(0.2)}, {Real(0.3), Real(0.4)}, {Real(0.5), Real(0.6)}};
    gradient.assign(13, Real(0));
    Real total = 0;
    for (const auto& x : inputs) {
      Real hidden[3];
      Real out = p[12];
      for (std::size_t j = 0; j < 3; ++j) {
        hidden[j] = sigmoid(p[2 * j] * x[0] + p[2 * j + 1] * x[1] + p[6 + j]);
        out += p[9 + j] * hidden[j];
      }
      const Real y = sigmoid(out);
      total += y;
      const Real of_out = y * (Real(1) - y);
      gradient[12] += of_out;
      for (std::size_t j = 0; j < 3; ++j) {
        gradient[9 + j] += of_out * hidden[j];
        const Real of_hidden = of_out * p[9 + j] * hidden[j] * (Real(1) - hidden[j]);
        gradient[2 * j] += of_hidden * x[0];
        gradient[2 * j + 1] += of_hidden * x[1];
        gradient[6 + j] += of_hidden;
      }
    }
    return total;
  }
};

TEST(KnownAnswers, AThousandStepsOfTheBaselineModel) {
  using Truth = Mlp<double>;
  std::vector<double> truth(Truth::kStart.begin(), Truth::kStart.end()), m(13), v(13), g(13);
  std::vector<float> start(Truth::kStart.begin(), Truth::kStart.end()), gradient(13);
  const Optimizer optimizer = Adam{.lr = 1.0};
  const Rule& rule = optimizer.rule();
  State state(rule, start);
  double moved = 0.0;  // how far W1[0][0] went in all, the measure of its updates' roundings
  for (std::int64_t t = 1; t <= 1001; ++t) {
    const double loss = Truth::loss(truth, g);
    if (t == 1) {
      EXPECT_NEAR(loss, 1.1719825709171574, 1e-15);
    }
    const double before = truth[0];
    for (std::size_t i = 0; i < 13; ++i) {
      m[i] = m[i] * 0.9 + g[i] * (1 - 0.9);
      v[i] = v[i] * 0.999 + g[i] * g[i] * (1 - 0.999);
      const double mean = m[i] / (1 - std::pow(0.9, static_cast<double>(t)));
      const double square = v[i] / (1 - std::pow(0.999, static_cast<double>(t)));
      truth[i] -= mean / (std::sqrt(square) + 1e-8);
    }
    moved += std::abs(truth[0] - before);
    Mlp<float>::loss(state.parameter, gradient);
    state.step(rule, gradient, t);
    const double expected = t == 1      ? 0.7890972864438476
                            : t == 101  ? 8.233039313231831
                            : t == 1001 ? 8.23342461073333
                                        : kNan;
    if (std::isnan(expected)) continue;
    EXPECT_NEAR(truth[0], expected, 1e-11) << "the fp64 reference, step " << t;
    // Half an epsilon of the parameter a step for adding, and ten epsilons of the way moved for
    // what is added (the gradient of a sigmoid and the roundings of the update).
    const double tolerance =
        kEpsilon * (0.5 * std::abs(expected) * static_cast<double>(t) + 10 * moved);
    EXPECT_NEAR(state.parameter[0], expected, tolerance) << "step " << t;
  }
}

/// One element of a rule, each operation rounded on its own, in the order that the rule states.
using Reference = std::function<void(float& p, std::array<float, 2>& s, float g)>;

float reference_update(const Constants& adam, float p, float g, std::array<float, 2>& s) {
  // The constants' places are the rule's own business: they are computed anew by the caller.
  const float* k = adam.value;
  s[0] = rounded(rounded(s[0] * k[0]) + rounded(g * k[1]));
  s[1] = rounded(rounded(s[1] * k[2]) + rounded(rounded(g * g) * k[3]));
  const float root = rounded(std::sqrt(s[1]));
  const float below = rounded(rounded(root * k[6]) + k[4]);
  return rounded(p - rounded(k[5] * rounded(s[0] / below)));
}

Constants reference_adam_constants(double lr, double beta1, double beta2, double eps, int step) {
  return {{float(beta1), float(1 - beta1), float(beta2), float(1 - beta2), float(eps),
           float(lr / (1 - std::pow(beta1, step))),
           float(1 / std::sqrt(1 - std::pow(beta2, step)))}};
}

struct Case {
  std::string name;
  Optimizer optimizer;
  Reference reference;
};

/// Rules at step 7, with a factor of 0.3.
std::vector<Case> cases() {
  const Constants adam = reference_adam_constants(0.01, 0.9, 0.999, 1e-8, 7);
  const auto scaled = [](float g) { return rounded(g * 0.3f); };
  const auto l2 = [](float p, float g) { return rounded(g + rounded(p * 0.1f)); };
  return {
      {"AdamW", AdamW{.lr = 0.01, .weight_decay = 0.1},
       [=](float& p, std::array<float, 2>& s, float g) {
         p = rounded(p * float(1.0 - 0.01 * 0.1));
         p = reference_update(adam, p, scaled(g), s);
       }},
      {"Adam", Adam{.lr = 0.01},
       [=](float& p, std::array<float, 2>& s, float g) {
         p = reference_update(adam, p, scaled(g), s);
       }},
      {"Adam L2", Adam{.lr = 0.01, .weight_decay = 0.1},
       [=](float& p, std::array<float, 2>& s, float g) {
         p = reference_update(adam, p, l2(p, scaled(g)), s);
       }},
      {"SGD", SGD{.lr = 0.01},
       [=](float& p, std::array<float, 2>&, float g) {
         p = rounded(p - rounded(scaled(g) * 0.01f));
       }},
      {"SGD L2", SGD{.lr = 0.01, .weight_decay = 0.1},
       [=](float& p, std::array<float, 2>&, float g) {
         p = rounded(p - rounded(l2(p, scaled(g)) * 0.01f));
       }},
      {"SGD momentum", SGD{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1},
       [=](float& p, std::array<float, 2>& s, float g) {
         s[0] = rounded(rounded(s[0] * 0.9f) + l2(p, scaled(g)));
         p = rounded(p - rounded(s[0] * 0.01f));
       }},
      {"SGD nesterov", SGD{.lr = 0.01, .momentum = 0.9, .nesterov = true},
       [=](float& p, std::array<float, 2>& s, float g) {
         s[0] = rounded(rounded(s[0] * 0.9f) + scaled(g));
         p = rounded(p - rounded(rounded(scaled(g) + rounded(s[0] * 0.9f)) * 0.01f));
       }},
  };
}

/// Ordinary values with zeros of both signs, subnormals and huge ones among them.
std::vector<float> some_values(std::size_t count, std::uint32_t seed, bool positive) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    float x = normal(random);
    if (i % 11 == 3) x = std::copysign(0.0f, x);
    if (i % 11 == 5) x *= 1e-41f;
    if (i % 11 == 7) x *= 1e18f;
    values.push_back(positive ? std::abs(x) : x);
  }
  return values;
}

TEST(Passes, EqualOneElementAtATimeAtEveryLengthAndCut) {
  constexpr std::size_t kCount = 1003;
  for (const Case& c : cases()) {
    const Rule& rule = c.optimizer.rule();
    const Constants constants = rule.constants(rule.defaults(), 7);
    State start(rule, some_values(kCount, 1, false));
    for (std::size_t s = 0; s < start.slots.size(); ++s) {
      start.slots[s] = some_values(kCount, 2 + static_cast<std::uint32_t>(s), s == 1);
    }
    const std::vector<float> gradient = some_values(kCount, 9, false);

    State expected = start;
    for (std::size_t i = 0; i < kCount; ++i) {
      std::array<float, 2> s = {};
      for (std::size_t j = 0; j < start.slots.size(); ++j) s[j] = start.slots[j][i];
      c.reference(expected.parameter[i], s, gradient[i]);
      for (std::size_t j = 0; j < start.slots.size(); ++j) expected.slots[j][i] = s[j];
    }

    State whole = start;
    whole.step(rule, constants, gradient, 7, 0.3f, 0, kCount);
    EXPECT_TRUE(whole.same_bits(expected)) << c.name;

    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      State cut = start;
      std::mt19937 random(seed);
      std::vector<std::int64_t> edges = {0, kCount};
      for (int i = 0; i < 40; ++i) edges.push_back(static_cast<std::int64_t>(random() % kCount));
      std::sort(edges.begin(), edges.end());
      for (std::size_t e = 0; e + 1 < edges.size(); ++e) {
        cut.step(rule, constants, gradient, 7, 0.3f, edges[e], edges[e + 1]);
      }
      EXPECT_TRUE(cut.same_bits(expected)) << c.name << " seed " << seed;
    }
  }
}

TEST(Passes, TheRoundedCopyIsThatOfNarrowAtEveryLengthAndPlace) {
  constexpr std::int64_t kMost = 1100;
  constexpr std::uint16_t kUntouched = 0x5a5a;
  for (const Case& c : cases()) {
    const Rule& rule = c.optimizer.rule();
    const Constants constants = rule.constants(rule.defaults(), 7);
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool streams : {false, true}) {
        for (const std::int64_t count :
             {0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 256, 300, 1024, 1100}) {
          for (const std::int64_t shift : {0, 1, 3, 8, 31, 32, 33}) {
            State state(rule, some_values(kMost, 1, false));
            for (std::size_t k = 0; k < state.slots.size(); ++k) {
              state.slots[k] = some_values(kMost, 2 + static_cast<std::uint32_t>(k), k == 1);
            }
            const std::vector<float> gradient = some_values(kMost, 9, false);
            State expected = state;
            expected.step(rule, constants, gradient, 7, 0.3f, 0, count);
            std::vector<std::uint16_t> narrowed(kMost);
            kernels::narrow(expected.parameter.data(), dtype, narrowed.data(), count);

            alignas(64) std::array<std::uint16_t, kMost + 64> published;
            published.fill(kUntouched);
            Elements elements{.parameter = state.parameter.data(),
                              .gradient = gradient.data(),
                              .factor = 0.3f,
                              .count = count,
                              .published = published.data() + shift,
                              .dtype = dtype,
                              .streams = streams};
            for (std::size_t k = 0; k < state.slots.size(); ++k) {
              elements.slots[k] = state.slots[k].data();
            }
            for (const Pass pass : rule.passes()) pass(elements, constants, 7);
            kernels::finish_streaming();
            const std::string what = c.name + ", " + to_string(dtype).data() + ", " +
                                     std::to_string(count) + " at " + std::to_string(shift) +
                                     (streams ? " streamed" : "");
            EXPECT_TRUE(state.same_bits(expected)) << what;
            for (std::int64_t i = 0; i < std::ssize(published); ++i) {
              const std::int64_t k = i - shift;
              ASSERT_EQ(published[static_cast<std::size_t>(i)],
                        k >= 0 && k < count ? narrowed[static_cast<std::size_t>(k)] : kUntouched)
                  << what << ", element " << k;
            }
          }
        }
      }
    }
  }
}

TEST(Passes, RulesAreSharedBetweenThreads) {
  const Optimizer optimizer = AdamW{};
  const Optimizer copy = optimizer;
  EXPECT_EQ(&optimizer.rule(), &copy.rule());
  constexpr std::size_t kCount = 4096;
  const std::vector<float> gradient = some_values(kCount, 3, false);
  State alone(optimizer.rule(), some_values(kCount, 4, false)), together = alone;
  alone.step(optimizer.rule(), gradient, 1);
  const Constants constants = copy.rule().constants(copy.rule().defaults(), 1);
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      together.step(copy.rule(), constants, gradient, 1, 1.0f, i * 1024, (i + 1) * 1024);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(alone.same_bits(together));
}

TEST(Sgd, TheFirstBufferIsTheGradient) {
  const Optimizer optimizer = SGD{.lr = 0.5, .momentum = 0.9};
  State state(optimizer.rule(), {1.0f, 1.0f});
  state.step(optimizer.rule(), {0.25f, -3e-42f}, 1000);  // first touched at step 1000
  EXPECT_EQ(bits(state.slots[0][0]), bits(0.25f));
  EXPECT_EQ(bits(state.slots[0][1]), bits(-3e-42f));
}

TEST(Constants, CountFromOneAndTakeHugeSteps) {
  for (const KnownAnswer& known : known_answers()) {
    const Rule& rule = known.optimizer.rule();
    EXPECT_THROW((void)rule.constants(rule.defaults(), 0), UsageError);
    EXPECT_THROW((void)rule.constants(rule.defaults(), -1), UsageError);
    for (const std::int64_t step :
         {std::int64_t{1}, std::int64_t{1} << 33, std::numeric_limits<std::int64_t>::max()}) {
      for (const float value : rule.constants(rule.defaults(), step).value) {
        EXPECT_TRUE(std::isfinite(value)) << known.name << " " << step;
      }
    }
  }
}

TEST(Constants, FollowTheLearningRateOfTheStep) {
  const Optimizer optimizer = AdamW{.lr = 0.1, .weight_decay = 0.1};
  const Rule& rule = optimizer.rule();
  State state(rule, {1.0f});
  const Resolved halved = merged(rule.defaults(), {.lr = 0.05});
  state.step(rule, rule.constants(halved, 1), {0.0f}, 1, 1.0f, 0, 1);
  EXPECT_EQ(state.parameter[0], 0.995f) << "decay takes the current learning rate";
  const Resolved still = merged(rule.defaults(), {.lr = 0.0});
  state.step(rule, rule.constants(still, 2), {1.0f}, 2, 1.0f, 0, 1);
  EXPECT_EQ(state.parameter[0], 0.995f) << "a learning rate of 0 keeps the bytes";
}

TEST(Merged, SetFieldsReplaceTheirOwn) {
  const Resolved base{.lr = 1, .weight_decay = 2, .beta1 = 3, .beta2 = 4, .eps = 5, .momentum = 6};
  const auto fields = [](const Resolved& r) {
    return std::vector<double>{r.lr, r.weight_decay, r.beta1, r.beta2, r.eps, r.momentum};
  };
  EXPECT_EQ(fields(merged(base, {})), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(fields(merged(base, {.lr = 0.0})), (std::vector<double>{0, 2, 3, 4, 5, 6}));
  EXPECT_EQ(fields(merged(base, {.weight_decay = 7})), (std::vector<double>{1, 7, 3, 4, 5, 6}));
  EXPECT_EQ(fields(merged(base, {.beta1 = 7})), (std::vector<double>{1, 2, 7, 4, 5, 6}));
  EXPECT_EQ(fields(merged(base, {.beta2 = 7})), (std::vector<double>{1, 2, 3, 7, 5, 6}));
  EXPECT_EQ(fields(merged(base, {.eps = 7})), (std::vector<double>{1, 2, 3, 4, 7, 6}));
  EXPECT_EQ(fields(merged(base, {.momentum = 7})), (std::vector<double>{1, 2, 3, 4, 5, 7}));
}

TEST(Optimizers, NamesAndSlots) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(Optimizer(AdamW{}).name(), "AdamW");
  EXPECT_EQ(Optimizer(Adam{}).name(), "Adam");
  EXPECT_EQ(Optimizer(SGD{}).name(), "SGD");
  EXPECT_EQ(Optimizer(AdamW{}).slots(), (Names{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(Optimizer(Adam{}).slots(), (Names{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(Optimizer(SGD{}).slots(), Names{});
  EXPECT_EQ(Optimizer(SGD{.momentum = 0.9}).slots(), Names{"momentum_buffer"});
}

/// The message of the UsageError that f throws; "" if it throws none.
std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

void expect_refused(const Rule& rule, const HyperParameters& over, const std::string& field) {
  const std::string message = refusal([&] { rule.validate(merged(rule.defaults(), over)); });
  EXPECT_NE(message.find(rule.name() + ": " + field + " = "), std::string::npos)
      << "message '" << message << "' for " << field;
}

TEST(Validate, EveryFieldAtItsEdges) {
  const std::vector<double> negative_or_not_finite = {-0.1,       -1e-300, kInfinity,
                                                      -kInfinity, kNan,    1e39};
  const std::vector<double> no_fraction = {-0.1, 1.0, 1.5, kInfinity, kNan};
  for (const Optimizer& optimizer :
       {Optimizer(AdamW{}), Optimizer(Adam{}), Optimizer(SGD{.momentum = 0.5})}) {
    const Rule& rule = optimizer.rule();
    rule.validate(rule.defaults());
    for (const double value : negative_or_not_finite) {
      expect_refused(rule, {.lr = value}, "lr");
      expect_refused(rule, {.weight_decay = value}, "weight_decay");
      if (optimizer.name() != "SGD") expect_refused(rule, {.eps = value}, "eps");
    }
    for (const double value : no_fraction) {
      if (optimizer.name() == "SGD") {
        expect_refused(rule, {.momentum = value}, "momentum");
      } else {
        expect_refused(rule, {.beta1 = value}, "beta1");
        expect_refused(rule, {.beta2 = value}, "beta2");
      }
    }
    const HyperParameters smallest{
        .lr = 0.0, .weight_decay = 0.0, .beta1 = 0.0, .beta2 = 0.0, .eps = 0.0, .momentum = 0.0};
    EXPECT_NO_THROW(rule.validate(merged(rule.defaults(), smallest)));
    const HyperParameters largest{.lr = 1e6,
                                  .weight_decay = 1e6,
                                  .beta1 = std::nextafter(1.0, 0),
                                  .beta2 = std::nextafter(1.0, 0),
                                  .eps = 1e30,
                                  .momentum = std::nextafter(1.0, 0)};
    EXPECT_NO_THROW(rule.validate(merged(rule.defaults(), largest)));
  }
}

TEST(Validate, FieldsThatARuleDoesNotKnowAreIgnored) {
  const Optimizer adamw = AdamW{};
  EXPECT_NO_THROW(adamw.rule().validate(merged(adamw.rule().defaults(), {.momentum = 5.0})));
  const Optimizer sgd = SGD{};
  EXPECT_NO_THROW(sgd.rule().validate(merged(sgd.rule().defaults(), {.beta1 = 5.0, .eps = -1.0})));
}

TEST(Validate, RatesThatOverflowFp32AreRefused) {
  const Optimizer adam = Adam{};
  expect_refused(adam.rule(), {.lr = 1e38}, "lr");  // 1e39 after bias correction
  const Optimizer adamw = AdamW{};
  expect_refused(adamw.rule(), {.lr = 1e30, .weight_decay = 1e20}, "lr");
  const Optimizer sgd = SGD{};
  EXPECT_NO_THROW(sgd.rule().validate(merged(sgd.rule().defaults(), {.lr = 1e38})));
}

TEST(Validate, ConfigurationsAreCheckedWhenTheOptimizerIsMade) {
  EXPECT_THROW(Optimizer(AdamW{.lr = -1.0}), UsageError);
  EXPECT_THROW(Optimizer(Adam{.beta2 = 1.0}), UsageError);
  EXPECT_THROW(Optimizer(SGD{.momentum = -0.1}), UsageError);
  EXPECT_THROW(Optimizer(SGD{.momentum = 1.0}), UsageError);
  EXPECT_NE(refusal([] { Optimizer bad(SGD{.nesterov = true}); }).find("nesterov"),
            std::string::npos);
}

TEST(Validate, MomentumNeedsTheBufferThatWasPlanned) {
  const Optimizer plain = SGD{};
  const std::string message =
      refusal([&] { plain.rule().validate(merged(plain.rule().defaults(), {.momentum = 0.9})); });
  EXPECT_NE(message.find("momentum_buffer"), std::string::npos) << message;
  const Optimizer with = SGD{.momentum = 0.9, .nesterov = true};
  EXPECT_NO_THROW(with.rule().validate(merged(with.rule().defaults(), {.momentum = 0.0})));
  State state(with.rule(), {1.0f});
  const Constants none =
      with.rule().constants(merged(with.rule().defaults(), {.lr = 0.5, .momentum = 0.0}), 1);
  state.step(with.rule(), none, {0.5f}, 1, 1.0f, 0, 1);
  EXPECT_EQ(state.parameter[0], 0.75f) << "a plain gradient step";
}

}  // namespace
}  // namespace zshard::optimizers
