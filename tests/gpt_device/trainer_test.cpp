// gpt trains through the engine on the simulated device: its own kernels, stream and copies beside
// the engine's, under random delays.
#include "gpt/trainer.hpp"

#include <cblas.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gpt/cuda/plugin.hpp"
#include "gpt/report.hpp"
#include "tests/device_engine/cuda_lab.hpp"

namespace gpt_test {
namespace {

using zshard::DType;
using zshard::Stage;
using zshard::Tier;
namespace lab = zshard::lab;

std::vector<std::uint8_t> pseudo_text() {
  const std::string words = "to be or not to be, that is the question: whether tis nobler ";
  std::vector<std::uint8_t> bytes(4000);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(i % 7 == 3 ? i * i : words[i % words.size()]);
  }
  return bytes;
}

const gpt::Dataset& text() {
  static const gpt::Dataset data(pseudo_text(), 0.2, 7);
  return data;
}

gpt::Config tiny(DType dtype) {
  gpt::Config config;
  config.shape = {.layers = 2, .heads = 2, .width = 12, .context = 7, .vocab = 259};
  config.shape.vocab_units = 3;
  config.batch = 5;
  config.accumulation = 2;
  config.steps = 3;
  config.warmup = 1;
  config.lr = 1e-2;
  config.min_lr = 1e-3;
  config.val_fraction = 0.2;
  config.dtype = dtype;
  config.engine.poison_slots = true;
  config.engine.threads = 1;
  config.engine.deadline_seconds = 60.0;
  return config;
}

struct Outcome {
  std::vector<double> values;  // loss and norm of each step, and the validation loss
  std::string digests;

  bool operator==(const Outcome&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  out << outcome.digests;
  for (const double value : outcome.values) out << " " << value;
  return out;
}

/// Trains on `world` ranks, each with a device of its own if config.engine says cuda.
Outcome train(const gpt::Config& config, int world) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world));
  const bool gpu = config.engine.device == zshard::DeviceKind::cuda;
  zshard::run_ranks(world, [&](const zshard::ProcessGroup& group) {
    std::shared_ptr<gpt::Compute> compute;
    if (gpu) {
      compute.reset(gpt_cuda_compute(config.engine.device_index, group.local_rank(),
                                     config.dtype == DType::bf16));
      simulator::name_stream(static_cast<cudaStream_t>(compute->stream()), "gpt");
    }
    gpt::Trainer trainer(config, text(), group, compute);
    trainer.initialize();
    Outcome& outcome = outcomes[static_cast<std::size_t>(group.rank())];
    for (std::int64_t step = 0; step < config.steps; ++step) {
      const gpt::StepResult result = trainer.train_step(step);
      EXPECT_FALSE(result.report.skipped);
      outcome.values.push_back(result.loss);
      outcome.values.push_back(result.report.norm);
    }
    outcome.values.push_back(trainer.validation_loss());
    outcome.digests = gpt::digest_lines(trainer, config);
    EXPECT_EQ(trainer.engine().plan(), trainer.engine().ledger());
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome, outcomes[0]);
  return outcomes[0];
}

class GptOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    openblas_set_num_threads(1);
    lab::open_plugin();
    fresh(0, 0);
  }
  void TearDown() override { simulator::reset(); }

  static void fresh(double mean_microseconds, std::uint64_t seed) {
    simulator::reset();
    simulator::set_open_memory(true);
    simulator::set_device_memory(std::int64_t{256} << 20);
    simulator::set_delays(mean_microseconds, seed);
  }

  static void expect_clean(const std::string& what) {
    for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << what << race.text();
    for (const std::string& fault : simulator::faults()) ADD_FAILURE() << what << fault;
    for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << what << leak;
  }

  static gpt::Config on_device(DType dtype, Stage stage) {
    gpt::Config config = tiny(dtype);
    config.engine.device = zshard::DeviceKind::cuda;
    config.engine.stage = stage;
    return config;
  }
};

TEST_F(GptOnDevice, TrainsTheHostsModelWithTheSameBitsAtEveryStageAndTier) {
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int world : {1, dtype == DType::f32 ? 3 : 2}) {
      const Outcome expected = train(on_device(dtype, Stage::replicated), world);
      const Outcome host = train(tiny(dtype), world);
      // bf16: the products' operands are rounded too, by 2^-9 each.
      const double close = dtype == DType::f32 ? 1e-4 : 3e-2;
      ASSERT_EQ(expected.values.size(), host.values.size());
      for (std::size_t i = 0; i < host.values.size(); ++i) {
        EXPECT_NEAR(expected.values[i], host.values[i], close * host.values[i])
            << "value " << i << ", " << to_string(dtype) << ", world " << world;
      }
      for (const Stage stage : {Stage::optimizer, Stage::gradients, Stage::parameters}) {
        for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
          gpt::Config config = on_device(dtype, stage);
          config.engine.gradient_mode =
              seed % 2 == 0 ? zshard::GradientMode::accumulate : zshard::GradientMode::overwrite;
          const bool all = stage == Stage::parameters;
          lab::place(config.engine, {.optimizer = tier,
                                     .gradients = tier,
                                     .parameters = all ? tier : Tier::device,
                                     .update_on = zshard::UpdateOn::automatic});
          if (all) {
            const zshard::ModelSpec spec = gpt::make_spec(config).model;
            config.engine.gather_budget = minimum_gather_budget(spec, world);
          }
          fresh(seed % 2 == 0 ? 5 : 20, seed);
          ++seed;
          const std::string what = "stage " + std::to_string(static_cast<int>(stage)) +
                                   ", state on " + std::string(to_string(tier)) + ", " +
                                   std::string(to_string(dtype)) + ", world " +
                                   std::to_string(world) + ": ";
          EXPECT_EQ(train(config, world), expected) << what;
          expect_clean(what);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The loop's stream waits for what the engine gathers, and the engine for the loop's gradients.
TEST_F(GptOnDevice, AMissingWaitOfEitherSideIsFound) {
  for (const bool loop : {true, false}) {
    fresh(5, 1);
    simulator::ignore_waits(loop ? "gpt" : nullptr, loop ? nullptr : "gpt");
    gpt::Config config = on_device(DType::f32, Stage::parameters);
    (void)train(config, 2);
    EXPECT_GT(simulator::ignored_waits(), 0) << loop;
    bool products = false;
    for (const simulator::Race& race : simulator::races()) {
      products |= race.first.operation == "gemm" || race.second.operation == "gemm";
    }
    EXPECT_TRUE(products) << (loop ? "the loop" : "the engine") << " does not wait, "
                          << simulator::races().size() << " races";
  }
}

TEST_F(GptOnDevice, AKernelOfTheLoopThatFailsEndsEveryRankWithTheDevicesError) {
  for (const char* kernel : {"cross entropy", "gemm", "embedding"}) {
    fresh(5, 2);
    simulator::fail({.call = kernel,
                     .after = 3,
                     .code = cudaErrorIllegalAddress,
                     .how = simulator::How::fault,
                     .device = 1});
    gpt::Config config = on_device(DType::f32, Stage::parameters);
    config.engine.deadline_seconds = 5.0;
    try {
      (void)train(config, 3);
      ADD_FAILURE() << kernel << ": trained on";
    } catch (const zshard::Error& error) {
      // The first call that the device refuses tells of it, the engine's or the loop's.
      const std::string said = error.what();
      EXPECT_TRUE(said.find("cudaErrorIllegalAddress") != std::string::npos ||
                  said.find("CUBLAS_STATUS_EXECUTION_FAILED") != std::string::npos)
          << kernel << ": " << said;
    }
  }
}

TEST_F(GptOnDevice, ARefusedCallOfTheLoopNamesGpuRankAndPlace) {
  // The engine does not call it.
  simulator::fail({.call = "cudaEventSynchronize", .code = cudaErrorInvalidValue, .device = 1});
  gpt::Config config = on_device(DType::f32, Stage::gradients);
  config.engine.deadline_seconds = 5.0;
  try {
    (void)train(config, 2);
    ADD_FAILURE() << "trained on";
  } catch (const zshard::Error& error) {
    const std::string said = error.what();
    for (const char* part :
         {"cudaEventSynchronize",
          "cudaErrorInvalidValue; GPU 1, rank 1, examples/gpt/cuda/cuda_queue.cpp:"}) {
      EXPECT_NE(said.find(part), std::string::npos) << part << ": " << said;
    }
  }
  EXPECT_EQ(simulator::leaks(), std::vector<std::string>{});
}

TEST_F(GptOnDevice, DeviceMemoryThatIsShortIsToldWithWhatToMakeSmaller) {
  simulator::fail(
      {.call = "cudaMalloc", .after = 4, .code = cudaErrorMemoryAllocation, .times = -1});
  try {
    (void)train(on_device(DType::f32, Stage::parameters), 1);
    ADD_FAILURE() << "trained on";
  } catch (const zshard::OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("--batch"), std::string::npos) << error.what();
  }
  EXPECT_EQ(simulator::leaks(), std::vector<std::string>{});
}

}  // namespace
}  // namespace gpt_test
