// zshard options: the option table.
#include "runtime/base/option_table.hpp"
#include "runtime/cli/arguments.hpp"
#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"
#include "runtime/cli/json_line.hpp"
#include "zshard/options.hpp"

namespace zshard::cli {
namespace {

Json json_of(const OptionInfo& option) {
  return {{"name", option.name},
          {"type", option.type},
          {"unit", or_null(option.unit)},
          {"default", or_null(option.default_value)},
          {"range", option.range},
          {"help", option.help},
          {"environment", option.environment},
          {"argument", option.argument}};
}

std::string text_of(const OptionInfo& option) {
  return option.name + ": " + option.help + "\n  type         " + option.type +
         (option.unit.empty() ? "" : ", in " + option.unit) + "\n  allowed      " + option.range +
         "\n  default      " + (option.default_value.empty() ? "unset" : option.default_value) +
         "\n  environment  " + option.environment + "\n  argument     " + option.argument + "\n";
}

class OptionsCommand : public Command {
 public:
  CLI::App* describe(CLI::App& tool) override {
    CLI::App* command =
        tool.add_subcommand("options", "Print the table of all options of an engine");
    command->add_option("names", names_, "only these options, as in the table")->type_name("NAME");
    command->add_flag("--json", json_, "one JSON array instead of the page docs/options.md");
    command->footer(
        "Examples:\n"
        "  zshard options\n"
        "  zshard options gather_budget offload.optimizer\n"
        "  zshard options --json");
    return command;
  }

  ExitCode run(const std::vector<std::string>& others) override {
    refuse_others(others, {"--json", "--help"}, "zshard options");
    std::vector<OptionInfo> chosen;
    for (const std::string& name : names_) chosen.push_back(base::option_row(name).info);
    if (json_) {
      Json all = Json::array();
      for (const OptionInfo& option : names_.empty() ? option_table() : chosen) {
        all.push_back(json_of(option));
      }
      print(json_line(all));
      return ExitCode::fine;
    }
    if (names_.empty()) {
      print(options_markdown());
      return ExitCode::fine;
    }
    std::string text;
    for (const OptionInfo& option : chosen) text += text_of(option);
    print(text);
    return ExitCode::fine;
  }

 private:
  std::vector<std::string> names_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_options_command() {
  return std::make_unique<OptionsCommand>();
}

}  // namespace zshard::cli
