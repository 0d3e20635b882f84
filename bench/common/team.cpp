#include "bench/common/team.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "bench/common/child.hpp"

namespace bench {
namespace {

std::map<std::string, Job>& jobs() {
  static std::map<std::string, Job> all;
  return all;
}

std::vector<std::vector<double>> run_threads(int world, const Job& job,
                                             const Arguments& arguments) {
  std::vector<std::vector<double>> lines;
  zshard::run_ranks(world,
                    [&](const zshard::ProcessGroup& group) {
                      job(group, arguments, [&](const std::vector<double>& line) {
                        if (group.rank() == 0) lines.push_back(line);
                      });
                    },
                    {.deadline_seconds = 120});
  return lines;
}

std::vector<std::vector<double>> run_processes(int world, const std::string& job,
                                               const Arguments& arguments) {
  Arguments all = {"--worker", job};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const int number = next_job();
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < world; ++rank) {
    children.push_back(std::make_unique<Child>(all, launcher_variables(rank, world, number)));
  }
  std::vector<std::vector<double>> lines;
  while (const auto line = children[0]->receive()) lines.push_back(parse_numbers(*line));
  for (auto& child : children) child->finish();
  return lines;
}

}  // namespace

std::string to_string(Ranks ranks) {
  return ranks == Ranks::threads ? "threads" : "processes";
}

void add_job(const std::string& name, Job job) {
  jobs()[name] = std::move(job);
}

bool worker(int argc, char** argv, int* code) {
  if (argc < 3 || std::string_view(argv[1]) != "--worker") return false;
  *code = 1;
  try {
    const auto group = zshard::ProcessGroup::from_environment();
    jobs().at(argv[2])(group, Arguments(argv + 3, argv + argc),
                       [&](const std::vector<double>& line) {
                         if (group.rank() != 0) return;
                         for (const double number : line) fmt::print("{:.17g} ", number);
                         fmt::print("\n");
                         std::fflush(stdout);
                       });
    *code = 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench: {}: {}\n", argv[2], error.what());
  }
  return true;
}

std::vector<std::vector<double>> run_team(Ranks ranks, int world, const std::string& job,
                                          const Arguments& arguments) {
  return ranks == Ranks::threads ? run_threads(world, jobs().at(job), arguments)
                                 : run_processes(world, job, arguments);
}

const std::vector<double>& Measured::line(std::size_t index) {
  if (!done_) {
    done_ = true;
    try {
      lines_ = source_();
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
  }
  if (!failure_.empty()) throw std::runtime_error(failure_);
  if (index >= lines_.size()) throw std::runtime_error("the job gave too few repetitions");
  return lines_[index];
}

}  // namespace bench
