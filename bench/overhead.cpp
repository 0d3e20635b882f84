// What the engine itself costs: 10,000 parameters of 100 elements, whose work on the elements is
// done by plain loops beside it; and how long an engine takes to start.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/common/memory.hpp"
#include "bench/common/row.hpp"
#include "bench/common/team.hpp"
#include "runtime/kernels/kernels.hpp"
#include "zshard/zshard.hpp"

namespace {

using bench::Arguments;
using bench::Emit;
using bench::Ranks;
using zshard::Pass;
using zshard::ProcessGroup;

constexpr int kParameters = 10'000;
constexpr std::int64_t kElements = 100;

struct Model {
  explicit Model(int unit_count) {
    const int each = kParameters / unit_count;
    for (int u = 0; u < unit_count; ++u) {
      zshard::UnitBuilder unit = spec.unit(fmt::format("u.{}", u));
      for (int p = 0; p < each; ++p) {
        const auto i = static_cast<std::size_t>(u * each + p);
        unit.parameter(fmt::format("u.{}.p.{}", u, p), {kElements}, &weights[i], &gradients[i]);
      }
      units.push_back(unit.id());
    }
  }
  std::vector<float*> weights = std::vector<float*>(kParameters);
  std::vector<float*> gradients = std::vector<float*>(kParameters);
  zshard::ModelSpec spec;
  std::vector<zshard::UnitId> units;
};

/// What a step must do to the elements of one rank, as loops over whole arrays of the same padded
/// size.
class PlainWork {
 public:
  PlainWork(int stage, int world)
      : stage_(stage),
        world_(world),
        piece_(kPadded / world / 1024 * 1024),
        full_(kPadded),
        gathered_(kPadded),
        shard_(4 * kPadded),
        blocks_(static_cast<std::size_t>(kPadded / zshard::kernels::kSquareBlock + 1)) {}

  void step() {
    if (stage_ == 3) copy();
    float* sum = shard_.data();
    std::vector<const float*> sources;
    for (int r = 0; r < world_; ++r) sources.push_back(full_.data() + r * piece_);
    bench::add_sources(sources.data(), world_, sum, piece_);
    benchmark::DoNotOptimize(zshard::kernels::block_squares(sum, piece_, blocks_.data()));
    bench::plain_adamw(shard_.data() + kPadded, shard_.data() + 2 * kPadded,
                       shard_.data() + 3 * kPadded, sum, piece_, 1);
    if (stage_ < 3 && world_ > 1) copy();
  }

 private:
  static constexpr std::int64_t kPadded = kParameters * 128;  // starts are aligned to 256 bytes

  void copy() {
    std::memcpy(gathered_.data(), full_.data(), static_cast<std::size_t>(full_.bytes()));
    benchmark::ClobberMemory();
  }

  int stage_;
  int world_;
  std::int64_t piece_;
  bench::Floats full_;
  bench::Floats gathered_;
  bench::Floats shard_;  // sum, parameters, moments
  std::vector<double> blocks_;
};

/// arguments: stage, units, steps, repetitions. Lines: seconds of a step, of the plain work.
void step_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  const int stage = std::stoi(arguments[0]);
  const int steps = std::stoi(arguments[2]);
  Model model(std::stoi(arguments[1]));
  zshard::Engine engine(model.spec, zshard::AdamW{}, group,
                        {.stage = static_cast<zshard::Stage>(stage),
                         .gradient_mode = zshard::GradientMode::overwrite});
  PlainWork plain(stage, group.size());
  const auto run = [&] {
    for (int step = 0; step < steps; ++step) {
      engine.begin_micro_steps(1);
      engine.next_micro_step();
      for (const zshard::UnitId unit : model.units) {
        engine.acquire(unit, Pass::forward);
        engine.release(unit, Pass::forward);
      }
      for (std::size_t u = model.units.size(); u-- > 0;) {
        engine.acquire(model.units[u], Pass::backward);
        engine.commit(model.units[u]);
        engine.release(model.units[u], Pass::backward);
      }
      engine.step();
    }
  };
  // The gradients that `overwrite` leaves alone are zero from birth: no NaN, no denormal.
  run();
  for (int i = std::stoi(arguments[3]); i > 0; --i) {
    group.barrier();
    const double ours = bench::timed([&] {
      run();
      group.barrier();
    });
    const double work = bench::timed([&] {
      for (int step = 0; step < steps; ++step) plain.step();
      group.barrier();
    });
    emit({ours / steps, work / steps});
  }
}

/// arguments: units, repetitions. Lines: seconds for an engine to be made.
void start_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  Model model(std::stoi(arguments[0]));
  for (int i = std::stoi(arguments[1]); i > 0; --i) {
    group.barrier();
    const bench::Stopwatch watch;
    const zshard::Engine engine(model.spec, zshard::AdamW{}, group);
    emit({watch.seconds()});
  }
}

void add_steps(int stage, int world, Ranks ranks, int units) {
  const auto measured = std::make_shared<bench::Measured>([=] {
    return bench::run_team(ranks, world, "step",
                           {std::to_string(stage), std::to_string(units),
                            bench::quick() ? "2" : "10", std::to_string(bench::repetitions())});
  });
  const auto turn = std::make_shared<std::size_t>(0);
  const std::string who = world == 1 ? "1 rank" : fmt::format("{} {}", world, to_string(ranks));
  bench::add(
      {.name = fmt::format("overhead/stage {}/{}/{} units", stage, who, units),
       .unit = "us/param",
       .limit = "the elements' work, plain loops",
       // A unit for each parameter is no way to use zshard: its collectives are the cost.
       .target = units == kParameters ? "" : "ours - limit <= 0.2",
       .peers = "perf.md: torch fused AdamW alone 11.7, DDP 16, DeepSpeed stage 1 34, stage "
                "3 98, FSDP2 179 us",
       .measure = [=] {
         const std::vector<double>& line = measured->line((*turn)++);
         return bench::Sample{line[0] * 1e6 / kParameters, line[1] * 1e6 / kParameters, line[0]};
       }});
}

void add_start(int world, Ranks ranks, int units) {
  const auto measured = std::make_shared<bench::Measured>([=] {
    return bench::run_team(ranks, world, "start",
                           {std::to_string(units), std::to_string(bench::repetitions())});
  });
  const auto turn = std::make_shared<std::size_t>(0);
  const std::string who = world == 1 ? "1 rank" : fmt::format("{} {}", world, to_string(ranks));
  bench::add({.name = fmt::format("start/{}/10,000 parameters in {} units", who, units),
              .unit = "ms",
              .limit = "",
              .target = "",
              .peers = "perf.md: 12-26 s with DeepSpeed",
              .measure = [=] {
                const double seconds = measured->line((*turn)++)[0];
                return bench::Sample{seconds * 1e3, std::nullopt, seconds};
              }});
}

}  // namespace

int main(int argc, char** argv) {
  bench::add_job("step", step_job);
  bench::add_job("start", start_job);
  int code = 0;
  if (bench::worker(argc, argv, &code)) return code;
  bench::initialize(argc, argv);
  for (const int units : {100, kParameters}) {
    for (const int stage : {1, 2, 3}) {
      add_steps(stage, 1, Ranks::threads, units);
      add_steps(stage, 2, Ranks::threads, units);
      add_steps(stage, 2, Ranks::processes, units);
    }
  }
  for (const int units : {100, kParameters}) {
    add_start(1, Ranks::threads, units);
    add_start(2, Ranks::threads, units);
    add_start(2, Ranks::processes, units);
  }
  return bench::run();
}
