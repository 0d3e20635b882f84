// What all commands have in common: help, version, exit codes, standard output that is closed, full
// or not there, progress on a terminal only.
#include <gtest/gtest.h>

#include "tests/cli/program.hpp"
#include "zshard/options.hpp"

namespace zshard::lab {
namespace {

using Arguments = std::vector<std::string>;

TEST(Tool, EveryCommandHasHelpWithExamples) {
  for (const Arguments& command :
       {Arguments{"options"}, Arguments{"info"}, Arguments{"plan"}, Arguments{"bench", "io"}}) {
    for (const char* flag : {"--help", "-h"}) {
      Arguments arguments = command;
      arguments.emplace_back(flag);
      const Ending end = run_tool(arguments);
      EXPECT_EQ(end.code(), 0) << end.text();
      EXPECT_NE(end.output.find("Examples:\n  zshard " + command[0]), std::string::npos)
          << end.output;
      EXPECT_NE(end.output.find("--json"), std::string::npos) << end.output;
    }
  }
  for (const Arguments& command : {Arguments{"--help"}, Arguments{"bench", "--help"}}) {
    const Ending end = run_tool(command);
    EXPECT_EQ(end.code(), 0) << end.text();
    EXPECT_NE(end.output.find("Exit codes: 0"), std::string::npos) << end.output;
  }
}

TEST(Tool, SaysItsVersion) {
  const Ending end = run_tool({"--version"});
  EXPECT_EQ(end.code(), 0);
  EXPECT_EQ(end.output.rfind("zshard ", 0), 0U) << end.output;
  const Ending info = run_tool({"info", "--json"});
  EXPECT_EQ(end.output, "zshard " + info.said().at("version").get<std::string>() + "\n");
}

TEST(Tool, MisuseIsCodeTwoAndNamesTheNearest) {
  const std::vector<std::pair<Arguments, std::string>> cases = {
      {{}, "needs a command"},
      {{"pln"}, "Did you mean 'plan'"},
      {{"optoins"}, "Did you mean 'options'"},
      {{"--versoin"}, "Did you mean '--version'"},
      {{"--nothing-like-it"}, "unknown argument"},
      {{"bench"}, "needs a command"},
      {{"bench", "oi"}, "Did you mean 'io'"},
      {{"bench", "io"}, "--dir"},
      {{"info", "--jsn"}, "Did you mean '--json'"},
      {{"info", "info"}, "'info'"},
      {{"options", "io_dept"}, "Did you mean 'io_depth'"},
      {{"options", "--jso"}, "Did you mean '--json'"},
      {{""}, "no command"},
  };
  for (const auto& [arguments, part] : cases) {
    const Ending end = run_tool(arguments);
    EXPECT_EQ(end.code(), 2) << part << "\n" << end.text();
    EXPECT_NE(end.output.find(part), std::string::npos) << part << "\n" << end.text();
    EXPECT_EQ(end.output.rfind("zshard: ", 0), 0U) << end.text();
  }
}

TEST(Tool, OptionsAreTheTable) {
  EXPECT_EQ(run_tool({"options"}).output, options_markdown());
  const nlohmann::json all = nlohmann::json::parse(run_tool({"options", "--json"}).output);
  ASSERT_EQ(all.size(), option_table().size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const OptionInfo& option = option_table()[i];
    EXPECT_EQ(all[i].at("name"), option.name);
    EXPECT_EQ(all[i].at("argument"), option.argument);
    EXPECT_EQ(all[i].at("range"), option.range);
    EXPECT_EQ(all[i].at("default").is_null(), option.default_value.empty());
  }
  const Ending one = run_tool({"options", "gather_budget", "--json"});
  EXPECT_EQ(nlohmann::json::parse(one.output).size(), 1U);
  const Ending text = run_tool({"options", "gather_budget", "stage"});
  EXPECT_NE(text.output.find("ZSHARD_GATHER_BUDGET"), std::string::npos) << text.output;
  EXPECT_NE(text.output.find("--stage"), std::string::npos) << text.output;
}

// -- standard output --

TEST(Tool, ClosedPipeEndsQuietly) {
  for (const char* command : {"options", "options --json", "info", "plan --preset gpt2"}) {
    // The reader is gone before the tool writes.
    const Ending end = run_script(std::string("set -o pipefail; (sleep 0.3; \"$1\" ") + command +
                                  ") | true; echo code $?");
    EXPECT_EQ(end.output, "code 0\n") << command;
  }
  const Ending head = run_script("\"$1\" options | head -n 1; echo ${PIPESTATUS[0]}");
  EXPECT_EQ(head.output, "# Options of an engine\n0\n");
}

TEST(Tool, OutputThatCannotBeWrittenIsCodeThree) {
  const Ending full = run_script("\"$1\" options > /dev/full; echo code $?");
  EXPECT_NE(full.output.find("code 3\n"), std::string::npos) << full.output;
  EXPECT_NE(full.output.find("standard output"), std::string::npos) << full.output;
  const Ending closed = run_script("\"$1\" info >&-; echo code $?");
  EXPECT_NE(closed.output.find("code 3\n"), std::string::npos) << closed.output;
  const Ending no_errors = run_script("\"$1\" plan 2>&-; echo code $?");
  EXPECT_EQ(no_errors.output, "code 2\n");
}

TEST(Tool, ErrorsGoToStandardErrorAlone) {
  const Ending end = run_script("\"$1\" plan --preset nothing --json 2> /dev/null; echo code $?");
  EXPECT_EQ(end.output, "code 2\n");
  const Ending no = run_script("\"$1\" plan --preset gpt2 --memory 1MiB --json 2>&1 > /dev/null");
  EXPECT_EQ(no.code(), 1);
  EXPECT_EQ(no.output, "");
}

}  // namespace
}  // namespace zshard::lab
