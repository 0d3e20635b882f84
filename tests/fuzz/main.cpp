// Random models, programs, skips and options against the plain oracle, for as long as asked.
//   fuzz [--processes | --cuda] [--seconds N] [--seed S] [--from K] [--runs N]
// Prints its seed; a failure prints the seed and run that reproduce it, and the exit status is 1.
// --processes: ranks are processes, in batches of runs of one world size. --cuda: ranks are on the
// simulated device, where no order may be left to chance.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "tests/engine/cases.hpp"
#include "tests/process/children.hpp"
#include "tests/process/rows.hpp"
#if defined(ZSHARD_TEST_SIMULATED)
#include "tests/device_engine/cuda_lab.hpp"
#endif

namespace {

using namespace zshard;

struct Arguments {
  double seconds = 180;
  std::uint64_t seed =
      static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  long long from = 0;
  long long runs = -1;
  bool processes = false;
  bool cuda = false;
  bool rank = false;  // this is one of the processes of a batch
};

constexpr long long kBatch = 25;

// Each run has a generator of its own, so that a failing one can be repeated alone.
std::mt19937_64 random_of(const Arguments& a, long long run) {
  return std::mt19937_64(a.seed * 1000003 + static_cast<std::uint64_t>(run));
}

std::vector<int> row_of(std::mt19937_64& random) {
  std::vector<int> row;
  for (const int levels : lab::kLevels) row.push_back(lab::pick(random, 0, levels - 1));
  return row;
}

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const auto value = [&](const char* name) -> const char* {
      if (std::strcmp(argv[i], name) != 0) return nullptr;
      if (i + 1 == argc) {
        std::fprintf(stderr, "fuzz: %s needs a value\n", name);
        std::exit(2);
      }
      return argv[++i];
    };
    if (const char* v = value("--seconds")) {
      a.seconds = std::atof(v);
    } else if (const char* v2 = value("--seed")) {
      a.seed = std::strtoull(v2, nullptr, 10);
    } else if (const char* v3 = value("--from")) {
      a.from = std::atoll(v3);
    } else if (const char* v4 = value("--runs")) {
      a.runs = std::atoll(v4);
    } else if (std::strcmp(argv[i], "--processes") == 0) {
      a.processes = true;
#if defined(ZSHARD_TEST_SIMULATED)
    } else if (std::strcmp(argv[i], "--cuda") == 0) {
      a.cuda = true;
#endif
    } else if (std::strcmp(argv[i], "--rank-of-batch") == 0) {
      a.rank = true;
    } else {
      std::fprintf(
          stderr,
          "fuzz: unknown argument %s; fuzz [--processes | --cuda] [--seconds N] [--seed S] "
          "[--from K] [--runs N]\n",
          argv[i]);
      std::exit(2);
    }
  }
  return a;
}

/// Trains on the simulated device. What went wrong, or "".
std::string check_cuda([[maybe_unused]] lab::Case& c, [[maybe_unused]] long long run,
                       [[maybe_unused]] std::mt19937_64& random) {
  std::string problem;
#if defined(ZSHARD_TEST_SIMULATED)
  // The host updates only state that is off the GPU.
  std::vector<UpdateOn> updates = {UpdateOn::automatic, UpdateOn::device};
  if (c.options.offload.optimizer != Tier::device) updates.push_back(UpdateOn::host);
  c.options.offload.update_on =
      updates[static_cast<std::size_t>(lab::pick(random, 0, static_cast<int>(updates.size()) - 1))];
  simulator::reset();
  simulator::set_device_memory(std::int64_t{128} << 20);
  simulator::set_delays(run % 2 == 0 ? 0 : 20, static_cast<std::uint64_t>(run));
  lab::on_cuda(c);
  lab::Tensors got = lab::train(c);
  got.forward_hash = 0;
  problem = lab::difference(lab::oracle(c), got);
  for (const simulator::Race& race : simulator::races()) problem += "\n" + race.text();
  for (const std::string& fault : simulator::faults()) problem += "\n" + fault;
  for (const std::string& leak : simulator::leaks()) problem += "\nleft behind: " + leak;
  if (!problem.empty()) {
    problem = "update_on = " + std::string(to_string(c.options.offload.update_on)) + ": " + problem;
  }
#endif
  return problem;
}

/// The world of a batch: all its runs, whatever their row says, have it.
int world_level(const Arguments& a, long long batch) {
  std::mt19937_64 random(a.seed * 7919 + static_cast<std::uint64_t>(batch));
  return lab::pick(random, 1, lab::kLevels[lab::kWorld] - 1);
}

/// One process of a batch.
int run_rank(const Arguments& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  for (long long run = a.from; run < a.from + a.runs; ++run) {
    std::mt19937_64 random = random_of(a, run);
    std::vector<int> row = row_of(random);
    row[lab::kWorld] = world_level(a, run / kBatch);
    std::string problem;
    try {
      problem = lab::run_row(group, row, random());
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (problem.empty()) continue;
    std::printf("rank %d, run %lld (row %s): %s\n", group.rank(), run, lab::text(row).c_str(),
                problem.c_str());
    return 1;
  }
  return 0;
}

/// Runs [from, from + runs) of one batch with ranks as processes. "" or what the processes said.
std::string run_batch(const Arguments& a, long long from, long long runs) {
  std::vector<int> row(lab::kFactors, 0);
  row[lab::kWorld] = world_level(a, from / kBatch);
  const int world = lab::world_of(row);
  lab::Children children(300.0);
  const std::string job = lab::new_job();
  for (int r = 0; r < world; ++r) {
    children.start({"/proc/self/exe", "--rank-of-batch", "--seed", std::to_string(a.seed), "--from",
                    std::to_string(from), "--runs", std::to_string(runs)},
                   lab::torchrun(job, r, world));
  }
  std::string problem;
  for (const lab::Ending& end : children.wait()) {
    if (end.code() != 0) problem += end.text() + "\n";
  }
  return problem;
}

int run_processes(const Arguments& a) {
  const auto start = std::chrono::steady_clock::now();
  const long long last = a.runs < 0 ? std::numeric_limits<long long>::max() : a.from + a.runs;
  long long run = a.from;
  while (run < last) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (spent.count() > a.seconds) break;
    const long long runs = std::min((run / kBatch + 1) * kBatch, last) - run;
    const std::string problem = run_batch(a, run, runs);
    if (!problem.empty()) {
      std::printf("fuzz: FAILED: --processes --seed %llu --from %lld --runs %lld:\n%s",
                  static_cast<unsigned long long>(a.seed), run, runs, problem.c_str());
      return 1;
    }
    run += runs;
  }
  std::printf("fuzz: %lld runs with ranks as processes, all equal to the oracle\n", run - a.from);
  return run > a.from ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments a = parse(argc, argv);
  if (a.rank) return run_rank(a);
  std::printf("fuzz: seed %llu\n", static_cast<unsigned long long>(a.seed));
  std::fflush(stdout);
  if (a.processes) return run_processes(a);
  const auto start = std::chrono::steady_clock::now();
  long long run = a.from;
  for (; a.runs < 0 || run < a.from + a.runs; ++run) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (spent.count() > a.seconds) break;
    std::mt19937_64 random = random_of(a, run);
    const std::vector<int> row = row_of(random);
    std::string problem;
    try {
      lab::Case c = lab::make_case(row, random());
      alarm(120);  // a hang is a failure too
      if (a.cuda) {
        problem = check_cuda(c, run, random);
      } else {
        lab::Tensors got = lab::train(c);
        got.forward_hash = 0;
        problem = lab::difference(lab::oracle(c), got);
      }
      alarm(0);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (!problem.empty()) {
      std::printf("fuzz: FAILED: %s--seed %llu --from %lld --runs 1 (row %s): %s\n",
                  a.cuda ? "--cuda " : "", static_cast<unsigned long long>(a.seed), run,
                  lab::text(row).c_str(), problem.c_str());
      return 1;
    }
  }
  std::printf("fuzz: %lld runs, all equal to the oracle\n", run - a.from);
  return run > a.from ? 0 : 1;
}
