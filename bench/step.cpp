// The training step of a 124M-parameter GPT at stage 3 on two ranks, against two programs side by
// side that train the same model on one row each and never talk ("pair"). Both live at once and
// take turns, so that what else runs on the machine hits both.
#include <cblas.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/common/child.hpp"
#include "bench/common/memory.hpp"
#include "bench/common/row.hpp"
#include "bench/common/team.hpp"
#include "examples/gpt/model.hpp"
#include "examples/gpt/random.hpp"
#include "examples/gpt/trainer.hpp"
#include "zshard/zshard.hpp"

namespace {

using bench::Ranks;

constexpr int kWorld = 2;
constexpr double kMiB = 1024.0 * 1024.0;

gpt::ModelShape shape(bool small) {
  if (small) return {.layers = 2, .heads = 4, .width = 128, .context = 64, .vocab = 4096};
  return {.layers = 12, .heads = 12, .width = 768, .context = 64, .vocab = 50304};
}

std::vector<std::uint8_t> text() {
  const gpt::CounterRandom random(7, "text");
  std::vector<std::uint8_t> bytes(1 << 16);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(random.bits(i));
  }
  return bytes;
}

// -- memory of a process --

/// A line of /proc/self/FILE, in bytes; 0 where there is none.
double memory_line(const char* file, std::string_view key) {
  std::ifstream lines(std::string("/proc/self/") + file);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, key.size(), key) == 0) return std::stod(line.substr(key.size())) * 1024.0;
  }
  return 0.0;
}

/// The most that this process has held so far. Shared memory counts by halves in each of the
/// processes that map it, so that the sum over ranks is what the machine has given; it is taken at
/// construction and kept, so now is its peak.
double peak_memory() {
  return memory_line("status", "VmHWM:") - memory_line("status", "RssShmem:") +
         memory_line("smaps_rollup", "Pss_Shmem:");
}

// -- one program of the pair --

/// The same model code with plain arrays and a plain AdamW.
class Plain {
 public:
  explicit Plain(const gpt::ModelShape& shape)
      : layers_(shape.layers),
        model_(shape, 1),
        count_(gpt::parameter_count(shape)),
        weights_(count_),
        gradients_(count_),
        m_(count_),
        v_(count_),
        text_(text()) {
    std::int64_t at = 0;
    std::fill_n(m_.data(), count_, 0.0f);
    std::fill_n(v_.data(), count_, 0.0f);
    for (const gpt::UnitInfo& unit : gpt::unit_list(shape)) {
      auto& w = unit_weights_.emplace_back();
      auto& g = unit_gradients_.emplace_back();
      for (const gpt::ParameterInfo& p : unit.parameters) {
        w.push_back(weights_.data() + at);
        g.push_back(gradients_.data() + at);
        std::int64_t size = 1;
        for (const std::int64_t extent : p.shape) size *= extent;
        const gpt::CounterRandom random(1, p.name);
        for (std::int64_t i = 0; i < size; ++i, ++at) {
          const double normal =
              p.deviation == 0.0f ? 0.0 : random.normal(static_cast<std::uint64_t>(i));
          weights_.data()[at] = static_cast<float>(p.mean + p.deviation * normal);
        }
      }
    }
  }

  /// Seconds of forward and backward, and of the update.
  std::pair<double, double> step() {
    const double model = bench::timed([&] { forward_backward(); });
    const double update = bench::timed([&] {
      bench::plain_adamw(weights_.data(), m_.data(), v_.data(), gradients_.data(), count_,
                         ++steps_);
    });
    return {model, update};
  }

 private:
  void forward_backward() {
    const std::uint8_t* row = text_.data() + steps_ * 64 % 32768;
    model_.start(std::span(&row, 1));
    model_.embedding_forward(0, gpt::EmbeddingWeights(weights(0)));
    for (std::int64_t l = 0; l < layers_; ++l) {
      model_.block_forward(l, gpt::BlockWeights(weights(l + 1)));
    }
    model_.final_norm_forward(gpt::FinalNormWeights(weights(layers_ + 1)));
    model_.head_forward(0, gpt::EmbeddingWeights(weights(0)));
    model_.cross_entropy();
    model_.head_input_backward(0, gpt::EmbeddingWeights(weights(0)));
    model_.final_norm_backward(gpt::FinalNormWeights(weights(layers_ + 1)),
                               gpt::FinalNormGradients(gradients(layers_ + 1)), 0.0f);
    for (std::int64_t l = layers_; l-- > 0;) {
      model_.block_backward(l, gpt::BlockWeights(weights(l + 1)),
                            gpt::BlockGradients(gradients(l + 1)), 0.0f);
    }
    model_.head_weight_backward(0, gpt::EmbeddingGradients(gradients(0)), 0.0f);
    model_.embedding_backward(0, gpt::EmbeddingGradients(gradients(0)), 1.0f);
  }
  std::span<const float* const> weights(std::int64_t unit) {
    return unit_weights_[static_cast<std::size_t>(unit)];
  }
  std::span<float* const> gradients(std::int64_t unit) {
    return unit_gradients_[static_cast<std::size_t>(unit)];
  }

  std::int64_t layers_;
  gpt::Model model_;
  std::int64_t count_;
  bench::Floats weights_;
  bench::Floats gradients_;
  bench::Floats m_;
  bench::Floats v_;
  std::vector<std::vector<const float*>> unit_weights_;
  std::vector<std::vector<float*>> unit_gradients_;
  std::vector<std::uint8_t> text_;
  std::int64_t steps_ = 0;
};

/// Serves commands: "step" answers with the seconds of forward and backward, and of the update;
/// "memory" with the peak above the start, in bytes.
void pair_main(bool small) {
  openblas_set_num_threads(1);
  const double start = peak_memory();
  Plain plain(shape(small));
  for (std::string command; std::getline(std::cin, command);) {
    if (command == "step") {
      const auto [model, update] = plain.step();
      fmt::print("{:.9f} {:.9f}\n", model, update);
    } else if (command == "memory") {
      fmt::print("{}\n", peak_memory() - start);
    }
    std::fflush(stdout);
  }
}

/// Serves "copy" with the seconds a byte of memcpy (of the copied bytes), and of a reduction's loop
/// (of the bytes of its sources). A program of its own, so that its arrays are not in the pair's
/// peak.
void copier_main() {
  constexpr std::int64_t kCount = std::int64_t{32} << 20;
  bench::Floats from(kCount);
  bench::Floats to(kCount);
  const float* sources[] = {from.data(), from.data() + kCount / 2};
  for (std::string command; std::getline(std::cin, command);) {
    const double copied = bench::timed(
        [&] { std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.bytes())); });
    const double reduced =
        bench::timed([&] { bench::add_sources(sources, 2, to.data(), kCount / 2); });
    const auto bytes = static_cast<double>(from.bytes());
    fmt::print("{:.6e} {:.6e}\n", copied / bytes, reduced / bytes);
    std::fflush(stdout);
  }
}

// -- a rank of the engine --

/// The same commands. "step": seconds of the step, bytes gathered and reduced, seconds of gathers,
/// reductions and updates.
void rank_main(const zshard::ProcessGroup& group, const gpt::ModelShape& shape, std::int64_t budget,
               double start) {
  const gpt::Dataset data(text(), 0.0, 64);
  gpt::Config config;
  config.shape = shape;
  config.batch = group.size();
  config.steps = 1'000'000;
  config.lr = 1e-4;
  config.min_lr = 1e-4;
  config.warmup = 0;
  config.clip = 0.0;
  config.eval_interval = 0;
  config.val_fraction = 0.0;
  config.engine.gradient_mode = zshard::GradientMode::overwrite;
  if (budget > 0) config.engine.gather_budget = budget;
  gpt::Trainer trainer(config, data, group);
  trainer.initialize();
  std::int64_t step = 0;
  while (true) {
    char command = 'q';
    if (group.rank() == 0) {
      std::string line;
      if (std::getline(std::cin, line)) command = line[0];
    }
    group.broadcast(std::as_writable_bytes(std::span(&command, 1)), 0);
    if (command == 'q') return;
    std::vector<double> answer;
    if (command == 's') {
      gpt::StepResult result;
      const double seconds = bench::timed([&] { result = trainer.train_step(step++); });
      const zshard::StepReport& r = result.report;
      answer = {seconds,
                static_cast<double>(r.gathered_bytes),
                static_cast<double>(r.reduced_bytes),
                r.gather_seconds,
                r.reduce_seconds,
                r.update_seconds};
    } else {
      const double mine = peak_memory() - start;
      std::vector<double> all(static_cast<std::size_t>(group.size()));
      group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
      answer = {*std::max_element(all.begin(), all.end())};
    }
    if (group.rank() != 0) continue;
    for (const double number : answer) fmt::print("{:.9g} ", number);
    fmt::print("\n");
    std::fflush(stdout);
  }
}

// -- both, taking turns --

/// Memory of a rank's gathered units: everything, or two blocks, with the token table in units that
/// are no larger.
enum class Budget { all, lean };

std::vector<std::vector<double>> take_turns(Ranks ranks, Budget budget) {
  const std::string small = bench::quick() ? "small" : "full";
  std::int64_t bytes = 0;
  std::int64_t vocab_units = 1;
  if (budget == Budget::lean) {
    const gpt::ModelShape s = shape(bench::quick());
    const std::int64_t block = 12 * s.width * s.width + 13 * s.width;
    vocab_units = ((s.vocab + s.context) * s.width + block - 1) / block;
    bytes = 4 * 2 * block + (1 << 20);  // and what alignment takes
  }
  std::vector<std::unique_ptr<bench::Child>> pair;
  std::vector<std::unique_ptr<bench::Child>> copiers;
  std::vector<std::unique_ptr<bench::Child>> engines;
  for (int i = 0; i < kWorld; ++i) {
    pair.push_back(std::make_unique<bench::Child>(std::vector<std::string>{"--pair", small},
                                                  std::vector<std::string>{}));
    copiers.push_back(std::make_unique<bench::Child>(std::vector<std::string>{"--copier"},
                                                     std::vector<std::string>{}));
  }
  const int job = bench::next_job();
  const bool threads = ranks == Ranks::threads;
  for (int rank = 0; rank < (threads ? 1 : kWorld); ++rank) {
    engines.push_back(std::make_unique<bench::Child>(
        std::vector<std::string>{"--engine", small, to_string(ranks), std::to_string(bytes),
                                 std::to_string(vocab_units)},
        threads ? std::vector<std::string>{} : bench::launcher_variables(rank, kWorld, job)));
  }
  const auto ask = [](auto& children, const char* command) {
    std::vector<std::vector<double>> answers;
    for (auto& child : children) child->send(command);
    for (auto& child : children) answers.push_back(child->numbers());
    return answers;
  };
  const auto mean = [](const std::vector<std::vector<double>>& answers, std::size_t column) {
    double sum = 0.0;
    for (const auto& answer : answers) sum += answer[column];
    return sum / static_cast<double>(answers.size());
  };
  const auto step = [&] {
    engines[0]->send("step");
    return engines[0]->numbers();
  };
  for (int warm = 0; warm < 2; ++warm) {
    ask(pair, "step");
    ask(copiers, "copy");
    step();
  }
  std::vector<std::vector<double>> lines;
  const int turns = bench::quick() ? 3 : 9;
  for (int turn = 0; turn < turns; ++turn) {
    const auto alone = ask(pair, "step");
    const std::vector<double> ours = step();
    const auto copies = ask(copiers, "copy");
    const double model = mean(alone, 0);
    const double update = mean(alone, 1);
    const double gathers = ours[1] * mean(copies, 0);
    const double reductions = ours[2] * mean(copies, 1);
    lines.push_back({ours[0], model + update, model + update / kWorld + gathers + reductions});
    if (turn + 1 == turns) {
      fmt::print(
          "  of the limit: model {:.0f} ms, update {:.0f}, gathers {:.0f} ({:.0f} MB), "
          "reductions {:.0f} ({:.0f} MB); the engine's own clocks: gathers {:.0f}, "
          "reductions {:.0f}, update {:.0f}\n",
          model * 1e3, update / kWorld * 1e3, gathers * 1e3, ours[1] * 1e-6, reductions * 1e3,
          ours[2] * 1e-6, ours[3] * 1e3, ours[4] * 1e3, ours[5] * 1e3);
    }
  }
  engines[0]->send("memory");
  const double memory = engines[0]->numbers()[0] / (threads ? kWorld : 1) / kMiB;
  const double pair_memory = mean(ask(pair, "memory"), 0) / kMiB;
  for (auto& line : lines) line.insert(line.end(), {memory, pair_memory});
  for (auto* children : {&engines, &copiers, &pair}) {
    for (auto& child : *children) child->finish();
  }
  return lines;
}

void add_rows(Ranks ranks, Budget budget) {
  const auto measured =
      std::make_shared<bench::Measured>([=] { return take_turns(ranks, budget); });
  const std::string name = fmt::format("step/{} {}/gathered: {}", kWorld, to_string(ranks),
                                       budget == Budget::all ? "all" : "2 blocks");
  const auto add = [&](bench::Row row, auto sample) {
    const auto turn = std::make_shared<std::size_t>(0);
    row.name = name + row.name;
    if (bench::quick()) row.target.clear();  // the model is too small to say anything
    row.measure = [=] { return sample(measured->line((*turn)++)); };
    bench::add(row);
  };
  add({.name = "/x pair",
       .unit = "ms",
       .limit = "two such programs without an engine",
       .target = "ratio <= 1.25",
       .peers = "x pair (perf.md): DDP 1.51, ZeRO-1 of torch 1.58, FSDP2 2.37-3.05, DeepSpeed "
                "2.79-3.57"},
      [](const auto& line) {
        return bench::Sample{line[0] * 1e3, line[1] * 1e3, line[0]};
      });
  add({.name = "/of the possible",
       .unit = "steps/s",
       .limit = "the pair's model, half its update, and the copies at memory speed",
       .target = "ratio >= 0.95",
       .peers = ""},
      [](const auto& line) {
        return bench::Sample{1.0 / line[0], 1.0 / line[2], line[0]};
      });
  add({.name = "/peak memory",
       .unit = "MiB",
       .limit = "one program of the pair",
       // Who gathers everything has chosen speed over memory.
       .target = budget == Budget::lean ? "ratio <= 0.60" : "",
       .peers = "perf.md: pair of torch 2588, DDP 2894, FSDP2 2890-2931, DeepSpeed stage 3 3828"},
      [](const auto& line) {
        return bench::Sample{line[3], line[4], line[0]};
      });
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (arguments.size() == 2 && arguments[0] == "--pair") {
      pair_main(arguments[1] == "small");
      return 0;
    }
    if (arguments.size() == 1 && arguments[0] == "--copier") {
      copier_main();
      return 0;
    }
    if (arguments.size() == 5 && arguments[0] == "--engine") {
      openblas_set_num_threads(1);
      gpt::ModelShape model = shape(arguments[1] == "small");
      model.vocab_units = std::stoll(arguments[4]);
      const std::int64_t budget = std::stoll(arguments[3]);
      if (arguments[2] == "threads") {
        const double start = peak_memory();
        zshard::run_ranks(kWorld,
                          [&](const auto& group) { rank_main(group, model, budget, start); },
                          {.deadline_seconds = 300});
      } else {
        const auto group = zshard::ProcessGroup::from_environment();
        rank_main(group, model, budget, peak_memory());
      }
      return 0;
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_step: {}\n", error.what());
    return 1;
  }
  bench::initialize(argc, argv);
  for (const Ranks ranks : {Ranks::processes, Ranks::threads}) {
    for (const Budget budget : {Budget::all, Budget::lean}) add_rows(ranks, budget);
  }
  return bench::run();
}
