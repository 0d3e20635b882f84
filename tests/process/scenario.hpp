// What a rank of a process test does: a function with a name, run in a process of its own. It tells
// the test what happened in JSON lines on its output.
#pragma once

#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/engine/outcomes.hpp"
#include "tests/process/children.hpp"

namespace zshard::lab {

using Json = nlohmann::json;

/// Prints a line that the test reads.
inline void say(const Json& what) {
  const std::string line = what.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  std::cout << line << std::flush;
}

inline Json to_json(const Outcome& end) {
  Json out{{"type", end.type}, {"text", end.text}};
  if (end.state_step) out["state_step"] = *end.state_step;
  return out;
}

/// The scenarios of this binary.
class Scenarios {
 public:
  using Function = std::function<void(const Json& arguments)>;
  static std::map<std::string, Function>& all() {
    static std::map<std::string, Function> scenarios;
    return scenarios;
  }
  /// Runs one and says how it ended. Returns the exit code.
  static int run(const std::string& name, const std::string& arguments) {
    const Outcome end = outcome([&] { all().at(name)(Json::parse(arguments)); });
    if (end.type == "nothing") return 0;
    say(to_json(end));
    return 1;
  }
};

/// Declares a scenario at namespace level.
class Scenario {
 public:
  Scenario(const char* name, Scenarios::Function function) {
    Scenarios::all()[name] = std::move(function);
  }
};

/// Seconds until a job of this file's ranks counts as hanging.
#ifdef ZSHARD_SANITIZER
inline constexpr double kJobSeconds = 120.0;
inline constexpr bool kSanitized = true;
#else
inline constexpr double kJobSeconds = 30.0;
inline constexpr bool kSanitized = false;
#endif

inline bool exhaustive() {
  const char* wanted = std::getenv("ZSHARD_EXHAUSTIVE");
  return wanted != nullptr && std::string(wanted) == "1";
}

/// The command of a scenario of this binary.
inline std::vector<std::string> command_of(const std::string& scenario, const Json& arguments) {
  return {"/proc/self/exe", "--scenario", scenario, arguments.dump()};
}

struct JobOptions {
  double seconds = kJobSeconds;
  double deadline = kDeadline;
  std::map<int, Variables> of_rank{};  // more variables, or others
};

/// Starts ranks 0 .. world - 1 of a scenario.
inline void start_job(Children& children, int world, const std::string& scenario,
                      const Json& arguments, const JobOptions& options = {}) {
  const std::string job = new_job();
  for (int r = 0; r < world; ++r) {
    Variables variables = torchrun(job, r, world);
    variables["ZSHARD_DEADLINE_SECONDS"] = std::to_string(options.deadline);
    if (const auto own = options.of_rank.find(r); own != options.of_rank.end()) {
      for (const auto& [name, value] : own->second) variables[name] = value;
    }
    children.start(command_of(scenario, arguments), variables);
  }
}

/// Runs them to their end.
inline std::vector<Ending> run_job(int world, const std::string& scenario, const Json& arguments,
                                   const JobOptions& options = {}) {
  Children children(options.seconds);
  start_job(children, world, scenario, arguments, options);
  return children.wait();
}

/// The rank ended by itself with an error of that type, whose text has all parts.
inline void expect_error(const Ending& end, const std::string& type,
                         const std::vector<std::string>& parts, const std::string& what) {
  EXPECT_FALSE(end.stopped) << what << ": " << end.text();
  const Json said = end.said();
  ASSERT_TRUE(said.is_object() && said.contains("type")) << what << ": " << end.text();
  expect({said["type"].get<std::string>(), said["text"].get<std::string>(), std::nullopt}, type,
         parts, what);
}

inline void expect_success(const std::vector<Ending>& ends, const std::string& what) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    EXPECT_EQ(ends[r].code(), 0) << what << ", rank " << r << ": " << ends[r].text();
  }
}

}  // namespace zshard::lab
