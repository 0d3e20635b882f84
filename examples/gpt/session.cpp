#include "session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "compute_loader.hpp"
#include "model.hpp"
#include "output.hpp"
#include "report.hpp"
#include "spec.hpp"
#include "trainer.hpp"

namespace gpt {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// Memory that this machine, or the container that the program runs in, can still give.
double available_bytes() {
  double bytes = std::numeric_limits<double>::infinity();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, rest; meminfo >> key && std::getline(meminfo, rest);) {
    if (key == "MemAvailable:") bytes = std::stod(rest) * 1024.0;
  }
  double limit = 0.0;
  double used = 0.0;
  // "max" where there is no limit: then nothing is read.
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    bytes = std::min(bytes, limit - used);
  }
  return bytes;
}

bool on_gpu(const Config& config) {
  return config.engine.device == zshard::DeviceKind::cuda;
}

// Bytes of the loop itself on a rank: activations, and the fp32 copies of a unit in another dtype.
double rank_bytes(const Config& config, std::int64_t rows) {
  const bool copies = config.dtype != zshard::DType::f32;
  const std::int64_t unit = largest_unit_bytes(unit_list(config.shape));
  return Model::bytes(config.shape, rows, on_gpu(config) ? config.shape.heads : 1) +
         (copies ? 2.0 * static_cast<double>(unit) : 0.0);
}

std::string advice(const Config& config) {
  return std::string("use a smaller model, --batch or --ranks") +
         (config.engine.stage == zshard::Stage::parameters ? ", or a --gather-budget"
                                                           : ", or a higher --stage");
}

// The ranks of this process whose GPU is the same as the first one's.
int ranks_of_a_gpu(const Config& config, int local_ranks, int gpus) {
  return config.engine.device_index >= 0 ? local_ranks : (local_ranks + gpus - 1) / gpus;
}

}  // namespace

void check_machine(const Config& config, const Dataset& data, int first_local_rank, int local_ranks,
                   int world) {
  constexpr double kGiB = 1024.0 * kMiB;
  const std::int64_t rows = Trainer::largest_batch(config, data, world);
  // BLAS counts rows of a matrix in an int.
  if (rows > std::numeric_limits<int>::max() / config.shape.context) {
    throw ConfigError(
        fmt::format("a rank gets {} rows of {} tokens at once, must be less than "
                    "2^31 tokens; use a smaller --batch or more --ranks",
                    rows, config.shape.context));
  }
  std::optional<GpuFacts> gpu;
  if (on_gpu(config)) gpu = gpu_facts(config, first_local_rank);
  const GptSpec spec = make_spec(config);
  const zshard::MemoryPlan plan =
      plan_memory(spec.model, make_optimizer(config), world, config.engine);
  const double model = rank_bytes(config, rows);
  const double on_device = static_cast<double>(plan.arena_bytes(zshard::Tier::device));
  if (gpu) {
    const int ranks = ranks_of_a_gpu(config, local_ranks, gpu->gpus);
    const double needed = ranks * (on_device + model);
    if (needed > static_cast<double>(gpu->free_bytes)) {
      throw ConfigError(fmt::format(
          "{} ranks on one GPU need {:.1f} GiB there, each {:.1f} for parameters, gradients and "
          "state and {:.1f} for activations, but {:.1f} of the {:.1f} GiB of {} are free; {}, or "
          "--optimizer-tier host\n{}",
          ranks, needed / kGiB, on_device / kGiB, model / kGiB,
          static_cast<double>(gpu->free_bytes) / kGiB, static_cast<double>(gpu->total_bytes) / kGiB,
          gpu->name, advice(config), plan.to_string()));
    }
  }
  const double engine = static_cast<double>(plan.memory_bytes()) - (gpu ? on_device : 0.0);
  const double activations = gpu ? 0.0 : model;
  const double needed = local_ranks * (engine + activations);
  const double available = available_bytes();
  if (needed <= available) return;
  throw ConfigError(fmt::format(
      "{} ranks need {:.1f} GiB, each {:.1f} for parameters, gradients and state and {:.1f} for "
      "activations, but {:.1f} GiB are available; {}, or "
      "--optimizer-tier nvme\n{}",
      local_ranks, needed / kGiB, engine / kGiB, activations / kGiB, available / kGiB,
      advice(config), plan.to_string()));
}

void run_session(const Config& config, const Dataset& data, const zshard::ProcessGroup& group) {
  using Clock = std::chrono::steady_clock;
  const bool speaks = group.rank() == 0;
  StepLog log(speaks ? config.log : "");
  Trainer trainer(config, data, group);
  const std::string memory = memory_table(trainer.engine(), group);
  const double own = on_gpu(config)
                         ? static_cast<double>(trainer.compute().bytes())
                         : rank_bytes(config, Trainer::largest_batch(config, data, group.size()));
  if (speaks) {
    const zshard::OffloadOptions& tiers = config.engine.offload;
    say(fmt::format(
        "{} parameters in {}, {} ranks, stage {}; parameters on {}, gradients on {}, optimizer "
        "state on {}\n",
        parameter_count(config.shape), to_string(config.dtype), group.size(),
        static_cast<int>(config.engine.stage), to_string(tiers.parameters),
        to_string(tiers.gradients), to_string(tiers.optimizer)));
    say(fmt::format("{} bytes to train on, {} for validation; {} rows of {} tokens a step\n\n",
                    data.training().size(), data.validation().size(), config.rows_per_step(),
                    config.shape.context));
    say(fmt::format("{}\n{}\n", memory, stage_table(config, group.size())));
    say(fmt::format(
        "the loop's own activations, outside zshard: {:.1f} MiB a rank{}\n\n", own / kMiB,
        on_gpu(config) ? " on " + trainer.compute().name() + ", work memory included" : ""));
    flush_output();
  }

  trainer.initialize();
  Progress progress(config.steps);
  TimeSplit times;
  std::int64_t peak_bytes = 0;
  for (std::int64_t step = 0; step < config.steps; ++step) {
    const Clock::time_point start = Clock::now();
    const StepResult result = trainer.train_step(step);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double speed = static_cast<double>(config.tokens_per_step()) / seconds;
    times.add(seconds, result.report);
    peak_bytes = result.report.peak_bytes;
    if (speaks) {
      log.write(step, result, speed);
      progress.step(step, result, speed);
    }
    const bool last = step + 1 == config.steps;
    if (config.eval_interval > 0 && (last || (step + 1) % config.eval_interval == 0)) {
      const double loss = trainer.validation_loss();
      if (speaks && !std::isnan(loss)) progress.validation(step, result.loss, loss);
    }
  }
  if (speaks && config.steps > 0) {
    say(times.text() + peak_lines(trainer.engine(), peak_bytes, on_gpu(config) ? 0.0 : own,
                                  config.ranks.value_or(1)));
    flush_output();
  }
  if (config.digest) {
    const std::string digests = digest_lines(trainer, config);
    if (speaks) {
      say(digests);
      flush_output();
    }
  }
}

}  // namespace gpt
