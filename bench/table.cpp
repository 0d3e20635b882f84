// Prints one table from the JSON files of the benchmark programs.
//
//   bench_table FILE...
//
// The exit code is 0 even where a target is missed: a shared machine's speed is no test.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

using Json = nlohmann::ordered_json;

struct Line {
  std::string name;
  std::vector<double> ratios;  // of each repetition
  double ours = 0.0;
  double limit = 0.0;
  double ratio = 0.0;
  bool compared = false;
  Json label;
};

/// "ok" or "missed" for "ratio >= 0.90", "ratio <= 1.25", "ours - limit <= 0.2"; "" without a
/// target.
std::string verdict(const Line& line, const std::string& target) {
  if (target.empty()) return "";
  const std::size_t at = target.find_first_of("<>");
  const double bound = std::stod(target.substr(at + 2));
  const double value = target.rfind("ratio", 0) == 0 ? line.ratio : line.ours - line.limit;
  return (target[at] == '>' ? value >= bound : value <= bound) ? "ok" : "missed";
}

std::vector<Line> read(const std::string& path) {
  std::ifstream file(path);
  const Json json = Json::parse(file);
  std::vector<Line> lines;
  std::map<std::string, std::vector<double>> ratios;
  for (const Json& run : json.at("benchmarks")) {
    const auto name = run.at("run_name").get<std::string>();
    const bool aggregate = run.at("run_type") == "aggregate";
    if (!aggregate && run.contains("ratio")) ratios[name].push_back(run["ratio"]);
    if (!aggregate || run.at("aggregate_name") != "median") continue;
    Line line;
    // Google Benchmark adds how it ran a row behind the name.
    line.name = name.substr(0, name.find("/iterations:"));
    line.ours = run.at("ours");
    line.compared = run.contains("ratio");
    if (line.compared) {
      line.limit = run.at("limit");
      line.ratio = run.at("ratio");
      line.ratios = ratios[name];
      std::sort(line.ratios.begin(), line.ratios.end());
    }
    line.label = Json::parse(run.at("label").get<std::string>());
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<Line> lines;
    for (int i = 1; i < argc; ++i) {
      const std::vector<Line> more = read(argv[i]);
      lines.insert(lines.end(), more.begin(), more.end());
    }
    fmt::print("{:<54} {:>9} {:>9} {:<8} {:>7} {:<13} {:<21} {}\n", "row", "ours", "limit", "unit",
               "ratio", "(quartiles)", "target", "");
    for (const Line& line : lines) {
      const auto target = line.label.at("target").get<std::string>();
      std::string limit = "-";
      std::string ratio = "-";
      std::string quartiles;
      if (line.compared) {
        limit = fmt::format("{:.4g}", line.limit);
        ratio = fmt::format("{:.3f}", line.ratio);
        const std::size_t last = line.ratios.size() - 1;
        quartiles =
            fmt::format("({:.2f}-{:.2f})", line.ratios[last / 4], line.ratios[last - last / 4]);
      }
      fmt::print("{:<54} {:>9.4g} {:>9} {:<8} {:>7} {:<13} {:<21} {}\n", line.name, line.ours,
                 limit, line.label.at("unit").get<std::string>(), ratio, quartiles, target,
                 verdict(line, target));
    }
    fmt::print("\nlimits and peers\n");
    std::vector<std::string> said;
    for (const Line& line : lines) {
      std::string text = line.label.at("limit").get<std::string>();
      const auto peers = line.label.at("peers").get<std::string>();
      if (!text.empty()) text = "limit: " + text;
      if (!peers.empty()) text += (text.empty() ? "peers: " : "; peers: ") + peers;
      if (text.empty()) continue;
      // Rows of one family say the same.
      const std::string family = line.name.substr(0, line.name.find('/'));
      if (std::find(said.begin(), said.end(), family + text) != said.end()) continue;
      said.push_back(family + text);
      fmt::print("  {}: {}\n", line.name, text);
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_table: {}\n", error.what());
    return 1;
  }
}
