#include "bench/common/row.hpp"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

namespace bench {
namespace {

bool is_quick = false;
bool failed = false;

/// One line a row: the medians.
class LineReporter final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& /*printed by bench/run.sh*/) override { return true; }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.error_occurred) {
        failed = true;
        fmt::print("{:<44} failed: {}\n", run.benchmark_name(), run.error_message);
        std::fflush(stdout);
        return;
      }
      if (run.aggregate_name == "median") print(run);
    }
  }

 private:
  static void print(const Run& run) {
    const auto label = nlohmann::json::parse(run.report_label);
    const auto unit = label.at("unit").get<std::string>();
    std::string line = fmt::format("{:<44} {:>10.4g} {:<9}", run.run_name.function_name,
                                   run.counters.at("ours").value, unit);
    if (const auto ratio = run.counters.find("ratio"); ratio != run.counters.end()) {
      line += fmt::format(" limit {:>10.4g}  ratio {:.3f}", run.counters.at("limit").value,
                          ratio->second.value);
    }
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }
};

}  // namespace

bool quick() {
  return is_quick;
}

int repetitions() {
  return is_quick ? 3 : 9;
}

void initialize(int argc, char** argv) {
  static std::vector<char*> others;
  for (int i = 0; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--quick") {
      is_quick = true;
    } else {
      others.push_back(argv[i]);
    }
  }
  auto count = static_cast<int>(others.size());
  others.push_back(nullptr);
  benchmark::Initialize(&count, others.data());
  if (benchmark::ReportUnrecognizedArguments(count, others.data())) std::exit(2);
}

void add(Row row) {
  const nlohmann::json label = {
      {"unit", row.unit}, {"limit", row.limit}, {"target", row.target}, {"peers", row.peers}};
  const int count = row.repetitions == 0 ? repetitions() : row.repetitions;
  const std::string name = row.name;
  const auto measure = [text = label.dump(),
                        shared = std::make_shared<Row>(std::move(row))](benchmark::State& state) {
    for ([[maybe_unused]] const auto iteration : state) {
      try {
        const Sample sample = shared->measure();
        state.SetIterationTime(sample.seconds);
        state.counters["ours"] = sample.ours;
        if (sample.limit) {
          state.counters["limit"] = *sample.limit;
          state.counters["ratio"] = sample.ours / *sample.limit;
        }
      } catch (const std::exception& error) {
        state.SkipWithError(error.what());
        break;
      }
    }
    state.SetLabel(text);
  };
  benchmark::RegisterBenchmark(name.c_str(), measure)
      ->Iterations(1)
      ->Repetitions(count)
      ->UseManualTime();
}

int run() {
  LineReporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();
  return failed ? 1 : 0;
}

}  // namespace bench
