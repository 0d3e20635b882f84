// From the command line to a command, and from errors to exit codes.
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "runtime/base/build_config.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"
#include "runtime/cli/arguments.hpp"
#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 fine; 1 the answer is no (a plan that does not fit); 2 wrong usage; 3 an I/O or "
    "system error.";

/// The command that was named; it may be a subcommand of one.
CLI::App* chosen(CLI::App& app) {
  CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  return at;
}

std::string full_name(const CLI::App* app) {
  std::string name = app->get_name();
  for (const CLI::App* at = app->get_parent(); at != nullptr; at = at->get_parent()) {
    name = at->get_name() + " " + name;
  }
  return name;
}

[[noreturn]] void no_command(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  const std::vector<std::string> others = app.remaining();
  if (!others.empty() && others.front().rfind('-', 0) == 0) {
    refuse_others(others, names_of(app), full_name(&app));
  }
  const std::string begin = others.empty() ? full_name(&app) + " needs a command"
                                           : "there is no command " + base::quoted(others.front());
  throw UsageError(begin + "." +
                   (others.empty() ? std::string() : base::did_you_mean(others.front(), names)) +
                   " Commands: " + list + "; '" + full_name(&app) + " --help' describes them.");
}

/// Commands of their own and, for `bench`, commands below one.
void describe(CLI::App& app) {
  app.name("zshard");
  app.set_version_flag("--version", std::string("zshard ") + ZSHARD_VERSION);
  app.set_help_flag("-h,--help", "print this help and exit");
  app.require_subcommand(0, 1);
  app.allow_extras();
  app.get_formatter()->column_width(34);
  app.footer(kExitCodes);
}

ExitCode dispatch(std::vector<std::string> arguments) {
  CLI::App app("Plans, measures and inspects what zshard needs.");
  describe(app);
  std::vector<std::pair<CLI::App*, std::unique_ptr<Command>>> commands;
  const auto add = [&](std::unique_ptr<Command> command) {
    CLI::App* described = command->describe(app);
    described->allow_extras();
    commands.emplace_back(described, std::move(command));
  };
  add(make_options_command());
  add(make_info_command());
  add(make_plan_command());
  add(make_bench_io_command());

  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes arguments from the end
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    print(app.help());
    return ExitCode::fine;
  } catch (const CLI::CallForVersion& version) {
    print(std::string(version.what()) + "\n");
    return ExitCode::fine;
  } catch (const CLI::ParseError& error) {
    throw UsageError(std::string(error.what()) + "; see '" + full_name(chosen(app)) + " --help'");
  }
  const CLI::App* command = chosen(app);
  for (const CLI::App* at = command->get_parent(); at != nullptr; at = at->get_parent()) {
    refuse_others(at->remaining(), names_of(*at), full_name(at));
  }
  for (const auto& [described, run] : commands) {
    if (described == command) return run->run(command->remaining());
  }
  no_command(*command);
}

}  // namespace

std::vector<std::string> names_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

CLI::Option* add_text(CLI::App& command, const std::string& name, const std::string& meta,
                      const std::string& help, std::function<void(const std::string&)> take) {
  return command
      .add_option(
          name,
          [take = std::move(take)](const CLI::results_t& texts) {
            for (const std::string& text : texts) take(text);
            return true;
          },
          help)
      ->type_name(meta)
      ->expected(1);
}

ExitCode run_tool(std::vector<std::string> arguments) {
  try {
    return dispatch(std::move(arguments));
  } catch (const OutputClosed&) {
    return ExitCode::fine;
  } catch (const UsageError& error) {
    complain(error.what());
    return ExitCode::usage;
  } catch (const std::bad_alloc&) {
    complain("out of memory");
    return ExitCode::system;
  } catch (const std::exception& error) {
    complain(error.what());
    return ExitCode::system;
  }
}

}  // namespace zshard::cli
