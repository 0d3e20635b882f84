// Training through the engine: against torch's training of the same model, and that bits do not
// depend on the stage, the budget or the gradient mode.
#include "gpt/trainer.hpp"

#include <cblas.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "golden.hpp"
#include "gpt/report.hpp"
#include "tests/engine/pairwise.hpp"

namespace gpt_test {
namespace {

std::vector<std::uint8_t> pseudo_text(std::size_t count) {
  const std::string words = "to be or not to be, that is the question: whether tis nobler in mind ";
  const gpt::CounterRandom random(3, "text");
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Mostly words, so that there is something to learn.
    const std::uint64_t bits = random.bits(i);
    bytes[i] = bits % 8 == 0 ? static_cast<std::uint8_t>(bits >> 32U)
                             : static_cast<std::uint8_t>(words[i % words.size()]);
  }
  return bytes;
}

/// What a run leaves, for comparison.
struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::string digests;
  double validation = 0.0;

  bool operator==(const Outcome&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  out << outcome.digests << "losses";
  for (const double loss : outcome.losses) out << " " << loss;
  return out << ", validation " << outcome.validation;
}

/// Trains config.steps steps on `world` ranks. Fails the test if ranks disagree.
Outcome train(const gpt::Config& config, int world, const gpt::Dataset& data) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world));
  zshard::run_ranks(world, [&](const zshard::ProcessGroup& group) {
    gpt::Trainer trainer(config, data, group);
    trainer.initialize();
    Outcome& outcome = outcomes[static_cast<std::size_t>(group.rank())];
    for (std::int64_t step = 0; step < config.steps; ++step) {
      const gpt::StepResult result = trainer.train_step(step);
      outcome.losses.push_back(result.loss);
      outcome.norms.push_back(result.report.norm);
      EXPECT_FALSE(result.report.skipped);
    }
    outcome.validation = trainer.validation_loss();
    outcome.digests = gpt::digest_lines(trainer, config);
    EXPECT_EQ(trainer.engine().plan(), trainer.engine().ledger());
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome, outcomes[0]);
  return outcomes[0];
}

gpt::Config tiny() {
  gpt::Config config;
  config.shape = {.layers = 3, .heads = 2, .width = 12, .context = 7, .vocab = 259};
  config.batch = 5;
  config.steps = 3;
  config.warmup = 1;
  config.lr = 1e-2;
  config.min_lr = 1e-3;
  config.val_fraction = 0.2;
  config.engine.poison_slots = true;
  config.engine.threads = 1;
  return config;
}

const gpt::Dataset& text() {
  static const gpt::Dataset data(pseudo_text(4000), 0.2, 7);
  return data;
}

class TrainerTest : public testing::Test {
 protected:
  void SetUp() override { openblas_set_num_threads(1); }
};

// What may not change a bit, and what may. Five rows a micro-step: no world but 1 and 5 divides
// them, and some ranks of 7 and 8 have none.
struct Variant {
  // May change bits: runs are compared where these are equal.
  int world = 1;
  std::int64_t accumulation = 1;
  zshard::Accumulation mode = zshard::Accumulation::reduced;
  zshard::DType dtype = zshard::DType::f32;
  std::int64_t vocab_units = 1;
  // May not.
  int placement = 0;  // stages 0 to 2, then stage 3 with three budgets
  zshard::GradientMode gradient_mode = zshard::GradientMode::accumulate;
  int look_ahead = 1;
  zshard::Tier tier = zshard::Tier::device;  // on nvme: of all that the stage lets be there
};

constexpr int kWorlds[] = {1, 2, 3, 4, 5, 7, 8};
constexpr zshard::Tier kTiers[] = {zshard::Tier::device, zshard::Tier::host, zshard::Tier::nvme};
const std::vector<int> kLevels = {7, 2, 2, 2, 6, 2, 2, 3, 2};

Variant variant(const std::vector<int>& row) {
  return {.world = kWorlds[row[0]],
          .accumulation = row[1] == 0 ? 1 : 3,
          .mode = row[2] == 0 ? zshard::Accumulation::reduced : zshard::Accumulation::local,
          .dtype = row[3] == 0 ? zshard::DType::f32 : zshard::DType::bf16,
          .vocab_units = row[8] == 0 ? 1 : 3,
          .placement = row[4],
          .gradient_mode =
              row[5] == 0 ? zshard::GradientMode::accumulate : zshard::GradientMode::overwrite,
          .look_ahead = row[6] == 0 ? 1 : 3,
          .tier = kTiers[row[7]]};
}

std::string text_of(const Variant& v) {
  std::ostringstream out;
  out << "world " << v.world << ", accumulation " << v.accumulation << " " << to_string(v.mode)
      << ", " << to_string(v.dtype) << ", vocabulary units " << v.vocab_units << ", placement "
      << v.placement << ", " << to_string(v.gradient_mode) << ", look-ahead " << v.look_ahead
      << ", state on " << to_string(v.tier);
  return out.str();
}

// A directory for the nvme tier that ends with the program.
std::string nvme_directory() {
  struct Directory {
    Directory() {
      path = testing::TempDir() + "gpt_trainer_XXXXXX";
      if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make " + path);
    }
    ~Directory() { std::filesystem::remove_all(path); }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;
    std::string path;
  };
  static const Directory directory;
  return directory.path;
}

gpt::Config config_of(const Variant& v) {
  gpt::Config config = tiny();
  config.accumulation = v.accumulation;
  config.dtype = v.dtype;
  config.shape.vocab_units = v.vocab_units;
  config.engine.accumulation = v.mode;
  config.engine.gradient_mode = v.gradient_mode;
  config.engine.look_ahead = v.look_ahead;
  config.engine.offload.optimizer = v.tier;
  config.engine.stage = static_cast<zshard::Stage>(std::min(v.placement, 3));
  if (v.placement >= 3) {
    const zshard::ModelSpec spec = gpt::make_spec(config).model;
    const std::int64_t least = minimum_gather_budget(spec, v.world);
    const std::int64_t all = maximum_gather_budget(spec, v.world);
    // With one vocabulary unit that is the largest; the rest are three blocks and the small norm.
    const std::int64_t budgets[] = {least, least + (all - least) * 2 / 3, all};
    config.engine.gather_budget = budgets[v.placement - 3];
  }
  if (v.tier == zshard::Tier::nvme) {
    config.engine.offload.nvme_dir = nvme_directory();
    config.engine.sub_group_bytes = 4096;
    if (v.mode == zshard::Accumulation::reduced) config.engine.offload.gradients = v.tier;
    if (v.placement >= 3) config.engine.offload.parameters = v.tier;
  }
  return config;
}

// Compares with stage 0 at otherwise default placements, which is trained once for each group.
class EqualityTest : public TrainerTest {
 protected:
  void check(const Variant& v) {
    const auto key = std::tuple(v.world, v.accumulation, v.mode, v.dtype, v.vocab_units);
    auto expected = expected_.find(key);
    if (expected == expected_.end()) {
      Variant plain = v;
      plain.placement = 0;
      plain.gradient_mode = zshard::GradientMode::accumulate;
      plain.look_ahead = 1;
      plain.tier = zshard::Tier::device;
      expected = expected_.emplace(key, train(config_of(plain), v.world, text())).first;
      EXPECT_LT(expected->second.losses.back(), expected->second.losses.front()) << text_of(v);
    }
    EXPECT_EQ(train(config_of(v), v.world, text()), expected->second) << text_of(v);
  }

 private:
  std::map<std::tuple<int, std::int64_t, zshard::Accumulation, zshard::DType, std::int64_t>,
           Outcome>
      expected_;
};

TEST_F(EqualityTest, EveryPairOfFactors) {
  for (const std::vector<int>& row : zshard::lab::pairwise(kLevels, 1)) check(variant(row));
}

TEST_F(EqualityTest, TheWholeProduct) {
  const char* wanted = std::getenv("ZSHARD_EXHAUSTIVE");
  if (wanted == nullptr || std::string(wanted) != "1") {
    GTEST_SKIP() << "runs for minutes: set ZSHARD_EXHAUSTIVE=1 (tests/run.sh --exhaustive)";
  }
  std::vector<int> row(kLevels.size(), 0);
  for (std::size_t digit = 0; digit < row.size();) {
    const Variant v = variant(row);
    // In large worlds disks and vocabulary units meet the others in pairs only: minutes less.
    if (v.world <= 3 || (v.vocab_units == 1 && v.tier != zshard::Tier::nvme)) check(v);
    for (digit = 0; digit < row.size() && ++row[digit] == kLevels[digit]; ++digit) row[digit] = 0;
  }
}

// Every placement of models with the token table in one and in three units.
TEST_F(EqualityTest, VocabularyUnitsAtEveryPlacement) {
  for (const std::int64_t units : {1, 3}) {
    for (int world = 1; world <= 3; ++world) {
      for (int placement = 0; placement < 6; ++placement) {
        check({.world = world,
               .accumulation = 2,
               .vocab_units = units,
               .placement = placement,
               .gradient_mode = zshard::GradientMode::overwrite});
      }
    }
  }
}

// Where there is nothing to sum in another order, the mode changes no bit.
TEST_F(EqualityTest, AccumulationModesAreEqualForOneMicroStepOrOneRank) {
  for (const auto& [world, accumulation] : {std::pair{3, 1}, {1, 3}}) {
    Variant v{.world = world, .accumulation = accumulation};
    const Outcome reduced = train(config_of(v), world, text());
    v.mode = zshard::Accumulation::local;
    EXPECT_EQ(train(config_of(v), world, text()), reduced) << text_of(v);
  }
}

// A row more or fewer on a rank changes rounding only: every world size trains on the same rows.
TEST_F(TrainerTest, WorldSizesAgreeUpToRounding) {
  gpt::Config config = tiny();
  config.accumulation = 2;
  const Outcome one = train(config, 1, text());
  for (const int world : {2, 3, 7, 8}) {
    const Outcome many = train(config, world, text());
    for (std::size_t step = 0; step < one.losses.size(); ++step) {
      EXPECT_NEAR(many.losses[step], one.losses[step], 1e-4) << "world " << world;
      EXPECT_NEAR(many.norms[step], one.norms[step], 1e-3 * one.norms[step]) << "world " << world;
    }
    EXPECT_NEAR(many.validation, one.validation, 1e-3) << "world " << world;
  }
}

// The same initial weights, the same rows: a token table in pieces changes rounding only.
TEST_F(TrainerTest, VocabularyUnitsAgreeUpToRounding) {
  gpt::Config config = tiny();
  const Outcome one = train(config, 2, text());
  for (const std::int64_t units : {2, 3, 16}) {
    config.shape.vocab_units = units;
    const Outcome many = train(config, 2, text());
    for (std::size_t step = 0; step < one.losses.size(); ++step) {
      EXPECT_NEAR(many.losses[step], one.losses[step], 1e-4) << units << " units";
      EXPECT_NEAR(many.norms[step], one.norms[step], 1e-3 * one.norms[step]) << units << " units";
    }
    EXPECT_NEAR(many.validation, one.validation, 1e-3) << units << " units";
  }
}

// What the pieces are for: at stage 3 neither the gathered table nor its gradient is in memory as a
// whole.
TEST_F(TrainerTest, VocabularyUnitsTakeLessMemory) {
  gpt::Config config = tiny();
  config.shape.vocab = 4096;  // a table of 4096 * 12 elements beside blocks of 1884
  const auto slots = [&](std::int64_t units) {
    config.shape.vocab_units = units;
    const gpt::GptSpec spec = gpt::make_spec(config);
    zshard::EngineOptions options = config.engine;
    options.gather_budget = minimum_gather_budget(spec.model, 2);
    const zshard::MemoryPlan plan =
        plan_memory(spec.model, gpt::make_optimizer(config), 2, options);
    return std::pair(plan.bytes(zshard::Category::gather_slots),
                     plan.bytes(zshard::Category::gradient_slots));
  };
  const auto [gathered, gradient] = slots(1);
  const auto [gathered_of_8, gradient_of_8] = slots(8);
  EXPECT_GE(gathered, 4096 * 12 * 4);
  EXPECT_LT(gathered_of_8, gathered / 7);
  EXPECT_LT(gradient_of_8, gradient / 3);  // two pieces: one is reduced while the next is computed
}

// A constant factor on the loss that is a power of two changes no bit of the update.
TEST_F(TrainerTest, LossScaleIsTakenOutAgain) {
  gpt::Config config = tiny();
  const Outcome plain = train(config, 2, text());
  config.engine.loss_scale = 256.0;
  EXPECT_EQ(train(config, 2, text()), plain);
}

TEST_F(TrainerTest, ValidationDoesNotDisturbTraining) {
  const gpt::Config config = tiny();
  const Outcome expected = train(config, 2, text());
  std::string digests;
  zshard::run_ranks(2, [&](const zshard::ProcessGroup& group) {
    gpt::Trainer trainer(config, text(), group);
    trainer.initialize();
    for (std::int64_t step = 0; step < config.steps; ++step) {
      const double before = trainer.validation_loss();
      EXPECT_EQ(trainer.validation_loss(), before);
      trainer.train_step(step);
    }
    const std::string mine = gpt::digest_lines(trainer, config);
    if (group.rank() == 0) digests = mine;
  });
  EXPECT_EQ(digests, expected.digests);
}

// -- torch's training of gpt2_tiny --

class GoldenTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    const std::string fixture = std::string(ZSHARD_FIXTURES_DIR) + "/gpt2_tiny";
    const std::string text_file = std::string(ZSHARD_DATA_DIR) + "/tinyshakespeare.txt";
    for (const std::string& path :
         {fixture + "/golden.json", fixture + "/model.safetensors", text_file}) {
      if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
    }
    golden_ = read_json(fixture + "/golden.json");
    weights_ = read_safetensors(fixture + "/model.safetensors");
    text_ = gpt::Dataset::read({text_file});
    config_.shape = {.layers = 3, .heads = 4, .width = 64, .context = 64, .vocab = 256};
    config_.lr = golden_.at("optimizer").at("lr");
    config_.min_lr = config_.lr;
    config_.warmup = 0;
    config_.beta1 = golden_.at("optimizer").at("betas").at(0);
    config_.beta2 = golden_.at("optimizer").at("betas").at(1);
    config_.weight_decay = golden_.at("optimizer").at("weight_decay");
    config_.clip = golden_.at("optimizer").at("clip_grad_norm");
    config_.val_fraction = 0.0;
    config_.order = gpt::Order::sequential;
    config_.batch = 4;
    config_.engine.poison_slots = true;
  }

  void load(gpt::Trainer& trainer) const {
    for (const auto& [name, values] : weights_) {
      trainer.engine().write_parameter(name.substr(std::string("transformer.").size()), values);
    }
  }

  // The fp32 tolerances of the fixture's README.
  static constexpr double kLoss = 5e-6;
  static constexpr double kNorm = 5e-6;
  static constexpr double kElement = 5e-5;
  static constexpr double kSum = 1e-4;
  static constexpr double kSquares = 5e-6;

  static void expect_sums(std::span<const float> values, double sum, double squares,
                          const std::string& what) {
    double actual_sum = 0.0;
    double actual_squares = 0.0;
    for (const float value : values) {
      actual_sum += static_cast<double>(value);
      actual_squares += static_cast<double>(value) * static_cast<double>(value);
    }
    EXPECT_NEAR(actual_sum, sum, kSum) << what;
    EXPECT_NEAR(actual_squares, squares, kSquares * squares) << what;
  }

  void train_and_compare(const gpt::Config& config, int world) {
    const gpt::Dataset data(text_, 0.0, config.shape.context);
    zshard::run_ranks(world, [&](const zshard::ProcessGroup& group) {
      gpt::Trainer trainer(config, data, group);
      load(trainer);
      for (const nlohmann::json& step : golden_.at("steps")) {
        const gpt::StepResult result = trainer.train_step(step.at("step"));
        const double norm = step.at("grad_norm64");
        EXPECT_NEAR(result.loss, step.at("loss64").get<double>(), kLoss) << step.at("step");
        EXPECT_NEAR(result.report.norm, norm, kNorm * norm) << step.at("step");
      }
      for (const auto& [full_name, expected] : golden_.at("parameters_after_training").items()) {
        compare_parameter(trainer.engine(), full_name, expected);
      }
      const double after = golden_.at("after_training").at("loss_on_step_0_rows64");
      EXPECT_NEAR(trainer.train_step(0).loss, after, kLoss);
    });
  }

  void compare_parameter(zshard::Engine& engine, const std::string& full_name,
                         const nlohmann::json& expected) const {
    const std::string name = full_name.substr(std::string("transformer.").size());
    std::vector<float> values(weights_.at(full_name).size());
    engine.read_parameter(name, values);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(values[i], expected.at("first64").at(i).get<double>(), kElement) << name;
    }
    if (expected.contains("q_sum64")) {
      // The key's part has no gradient but rounding noise, see the fixture's README.
      const std::size_t width = values.size() / 3;
      expect_sums(std::span(values).first(width), expected.at("q_sum64"), expected.at("q_sumsq64"),
                  name + " q");
      expect_sums(std::span(values).last(width), expected.at("v_sum64"), expected.at("v_sumsq64"),
                  name + " v");
    } else {
      expect_sums(values, expected.at("sum64"), expected.at("sumsq64"), name);
    }
    // Moments: relative to the size of what is summed, with the norm's tolerance once a step.
    for (const std::string slot : {"exp_avg", "exp_avg_sq"}) {
      engine.read_state(name, slot, values);
      double sum = 0.0;
      double squares = 0.0;
      for (const float value : values) {
        sum += static_cast<double>(value);
        squares += static_cast<double>(value) * static_cast<double>(value);
      }
      const double expected_squares = expected.at(slot + "_sumsq64");
      const double size = std::sqrt(expected_squares * static_cast<double>(values.size()));
      EXPECT_NEAR(sum, expected.at(slot + "_sum64").get<double>(), 10 * kNorm * size)
          << name << " " << slot;
      EXPECT_NEAR(squares, expected_squares, 20 * kNorm * expected_squares) << name << " " << slot;
    }
  }

  gpt::Config config_;
  nlohmann::json golden_;
  std::map<std::string, std::vector<float>> weights_;
  std::vector<std::uint8_t> text_;
};

TEST_F(GoldenTest, EveryStageAndWorldTrainsLikeTorch) {
  for (const int world : {1, 2, 4}) {
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE("world " + std::to_string(world) + ", stage " + std::to_string(stage));
      config_.engine.stage = static_cast<zshard::Stage>(stage);
      train_and_compare(config_, world);
    }
  }
}

TEST_F(GoldenTest, MicroStepsTrainLikeTorch) {
  for (const std::int64_t accumulation : {2, 4}) {
    for (const int world : {1, 2, 3}) {
      SCOPED_TRACE("world " + std::to_string(world) + ", accumulation " +
                   std::to_string(accumulation));
      config_.accumulation = accumulation;
      config_.batch = 4 / accumulation;
      train_and_compare(config_, world);
    }
  }
}

// The weights rounded to bf16, and arithmetic in fp32.
TEST_F(GoldenTest, Bf16WeightsGiveTheLossOfTheRoundedModel) {
  config_.dtype = zshard::DType::bf16;
  const gpt::Dataset data(text_, 0.0, config_.shape.context);
  for (const int stage : {0, 3}) {
    config_.engine.stage = static_cast<zshard::Stage>(stage);
    zshard::run_ranks(2, [&](const zshard::ProcessGroup& group) {
      gpt::Trainer trainer(config_, data, group);
      load(trainer);
      const double expected = golden_.at("bf16_weights").at("loss64");
      EXPECT_NEAR(trainer.train_step(0).loss, expected, kLoss);
    });
  }
}

}  // namespace
}  // namespace gpt_test
