// Random models, programs, skips and options against the plain oracle, for as long as asked.
//   fuzz [--seconds N] [--seed S] [--runs N]
// Prints its seed; a failure prints the seed and run that reproduce it, and the exit status is 1.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "tests/engine/cases.hpp"

namespace {

using namespace zshard;

struct Arguments {
  double seconds = 180;
  std::uint64_t seed =
      static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  long long from = 0;
  long long runs = -1;
};

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
    } else {
      std::fprintf(
          stderr,
          "fuzz: unknown argument %s; fuzz [--seconds N] [--seed S] [--from K] [--runs N]\n",
          argv[i]);
      std::exit(2);
    }
  }
  return a;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments a = parse(argc, argv);
  std::printf("fuzz: seed %llu\n", static_cast<unsigned long long>(a.seed));
  std::fflush(stdout);
  const auto start = std::chrono::steady_clock::now();
  long long run = a.from;
  for (; a.runs < 0 || run < a.from + a.runs; ++run) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (spent.count() > a.seconds) break;
    // Each run has a generator of its own, so that a failing one can be repeated alone.
    std::mt19937_64 random(a.seed * 1000003 + static_cast<std::uint64_t>(run));
    std::vector<int> row;
    for (const int levels : lab::kLevels) row.push_back(lab::pick(random, 0, levels - 1));
    std::string problem;
    try {
      const lab::Case c = lab::make_case(row, random());
      alarm(120);  // a hang is a failure too
      lab::Tensors got = lab::train(c);
      alarm(0);
      got.forward_hash = 0;
      problem = lab::difference(lab::oracle(c), got);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (!problem.empty()) {
      std::printf("fuzz: FAILED: --seed %llu --from %lld --runs 1 (row %s): %s\n",
                  static_cast<unsigned long long>(a.seed), run, lab::text(row).c_str(),
                  problem.c_str());
      return 1;
    }
  }
  std::printf("fuzz: %lld runs, all equal to the oracle\n", run - a.from);
  return run > a.from ? 0 : 1;
}
