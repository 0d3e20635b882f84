// Options from files, environment and command line, and their document.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "runtime/base/bytes.hpp"
#include "runtime/base/environment.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/option_table.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"
#include "zshard/options.hpp"

namespace zshard {

namespace {

constexpr std::string_view kVariablePrefix = "ZSHARD_";
constexpr std::string_view kArgumentPrefix = "--zshard-";
// Far above any real file; keeps a wrong path from filling the memory.
constexpr std::size_t kMostFileBytes = 16 << 20;

// -- files --

[[noreturn]] void throw_io(const std::string& what, const std::string& path, std::size_t offset,
                           int error) {
  throw IoError(what + " option file " + path + " at offset " + std::to_string(offset) + ": " +
                std::generic_category().message(error));
}

class File {
 public:
  explicit File(const std::string& path) {
    do {
      descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    } while (descriptor_ < 0 && errno == EINTR);
    if (descriptor_ < 0) throw_io("cannot open", path, 0, errno);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(descriptor_); }
  [[nodiscard]] int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
};

std::string read_file(const std::string& path) {
  if (path.find('\0') != std::string::npos) {
    throw UsageError("the path of the option file holds a zero byte: " + base::quoted(path));
  }
  const File file(path);
  std::string content;
  char buffer[65536];
  while (true) {
    const ssize_t got = ::read(file.descriptor(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_io("cannot read", path, content.size(), errno);
    if (got == 0) return content;
    content.append(buffer, static_cast<std::size_t>(got));
    if (content.size() > kMostFileBytes) {
      throw UsageError(path + " is no option file: it holds more than " +
                       base::human_bytes(kMostFileBytes));
    }
  }
}

bool blank(char c) {
  return c == ' ' || c == '\t' || c == '\r';
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

// The value's text without comment and quotes.
std::string_view value_of(std::string_view text) {
  text = trimmed(text);
  if (text.empty() || text.front() != '"') return trimmed(text.substr(0, text.find('#')));
  const std::size_t end = text.find('"', 1);
  if (end == std::string_view::npos) {
    throw UsageError("the quote is not closed in " + base::quoted(text));
  }
  const std::string_view rest = trimmed(text.substr(end + 1));
  if (!rest.empty() && rest.front() != '#') {
    throw UsageError("text behind the closing quote: " + base::quoted(rest));
  }
  return text.substr(1, end - 1);
}

void apply_line(EngineOptions& options, std::string_view line) {
  line = trimmed(line);
  if (line.empty() || line.front() == '#') return;
  const std::size_t equals = line.find('=');
  const std::string_view key = trimmed(line.substr(0, equals));
  if (equals == std::string_view::npos || key.empty() || key.find('#') != std::string_view::npos) {
    throw UsageError("expected 'name = value', found " + base::quoted(line));
  }
  set_option(options, key, value_of(line.substr(equals + 1)));
}

// -- command line --

const base::OptionRow* row_of_argument(std::string_view argument) {
  for (const base::OptionRow& row : base::option_rows()) {
    if (argument == row.info.argument) return &row;
    if (argument.substr(0, kArgumentPrefix.size()) == kArgumentPrefix &&
        argument.substr(kArgumentPrefix.size()) == std::string_view(row.info.argument).substr(2)) {
      return &row;
    }
  }
  return nullptr;
}

// -- document --

std::string code(const std::string& text) {
  return "`" + text + "`";
}

std::string default_text(const OptionInfo& info) {
  if (info.default_value.empty()) return "unset";
  std::string text = code(info.default_value);
  if (info.type == "bytes") {
    text += " (" + base::human_bytes(base::parse_bytes(info.default_value).value_or(0)) + ")";
  }
  return text;
}

}  // namespace

void apply_option_file(EngineOptions& options, const std::string& path) {
  const std::string content = read_file(path);
  std::string_view rest = content;
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (rest.substr(0, kByteOrderMark.size()) == kByteOrderMark) {
    rest.remove_prefix(kByteOrderMark.size());
  }
  EngineOptions changed = options;
  for (int number = 1; !rest.empty(); ++number) {
    const std::size_t end = rest.find('\n');
    try {
      apply_line(changed, rest.substr(0, end));
    } catch (const UsageError& error) {
      throw UsageError(path + ":" + std::to_string(number) + ": " + error.what());
    }
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  options = std::move(changed);
}

void apply_option_environment(EngineOptions& options) {
  EngineOptions changed = options;
  for (const auto& [name, value] : base::environment_variables(kVariablePrefix)) {
    const base::OptionRow* found = nullptr;
    for (const base::OptionRow& row : base::option_rows()) {
      if (row.info.environment == name) found = &row;
    }
    if (found == nullptr) {
      if (base::registered_variable(name)) continue;
      std::vector<std::string> known;
      for (const base::OptionRow& row : base::option_rows()) known.push_back(row.info.environment);
      for (const auto& variable : base::environment_registry()) known.push_back(variable.name);
      // Without the prefix, which all of them share and which would make all of them near.
      for (std::string& candidate : known) candidate.erase(0, kVariablePrefix.size());
      const std::string near =
          base::nearest(std::string_view(name).substr(kVariablePrefix.size()), known);
      throw UsageError("environment variable " + base::quoted(name) + " names no option." +
                       (near.empty()
                            ? " docs/options.md lists all variables."
                            : " Did you mean '" + std::string(kVariablePrefix) + near + "'?"));
    }
    try {
      found->set(changed, value);
    } catch (const UsageError& error) {
      throw UsageError("environment variable " + name + ": " + error.what());
    }
  }
  options = std::move(changed);
}

std::vector<std::string> apply_option_arguments(EngineOptions& options,
                                                std::span<const std::string> arguments) {
  EngineOptions changed = options;
  std::vector<std::string> others;
  std::map<const base::OptionRow*, std::string> seen;  // and by which name
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      others.insert(others.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i),
                    arguments.end());
      break;
    }
    const std::size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const base::OptionRow* row = row_of_argument(name);
    if (row == nullptr) {
      if (name.substr(0, kArgumentPrefix.size()) == kArgumentPrefix) {
        std::vector<std::string> known;
        for (const OptionInfo& info : option_table()) known.push_back(info.argument.substr(2));
        const std::string near =
            base::nearest(std::string_view(name).substr(kArgumentPrefix.size()), known);
        throw UsageError("argument " + base::quoted(name) + " names no option." +
                         (near.empty()
                              ? " docs/options.md lists all arguments."
                              : " Did you mean '" + std::string(kArgumentPrefix) + near + "'?"));
      }
      others.push_back(argument);
      continue;
    }
    if (const auto [at, first] = seen.emplace(row, name); !first) {
      throw UsageError((at->second == name ? "argument " + name + " is given twice"
                                           : "arguments " + at->second + " and " + name +
                                                 " both set the option " + row->info.name) +
                       ". Leave one of them out.");
    }
    std::string_view value;
    if (equals != std::string::npos) {
      value = std::string_view(argument).substr(equals + 1);
    } else {
      if (i + 1 == arguments.size() || arguments[i + 1].substr(0, 2) == "--") {
        throw UsageError("argument " + name + " has no value. Allowed: " + row->info.range +
                         ". Write " + name + "=VALUE.");
      }
      value = arguments[++i];
    }
    try {
      row->set(changed, value);
    } catch (const UsageError& error) {
      throw UsageError("argument " + name + ": " + error.what());
    }
  }
  options = std::move(changed);
  return others;
}

std::string options_markdown() {
  std::string text =
      "# Options of an engine\n"
      "\n"
      "One table describes every option to code, files, environment, command line and this page; "
      "`options_markdown()`\n"
      "writes the page. What is applied last wins; a program usually applies code, file, "
      "environment, command line,\n"
      "in this order. Each call changes either everything it was given or, with an error, nothing. "
      "An unknown name is\n"
      "a `UsageError` with the nearest one; a value out of range is a `UsageError` with the "
      "range. Nothing is read\n"
      "that the program does not ask for: `apply_option_file`, `apply_option_environment`, "
      "`apply_option_arguments`.\n"
      "The last hands arguments that name no option back: a program refuses what it does not know "
      "either.\n"
      "\n"
      "Options must be the same on every rank, except the budgets of tiers, `device_index`, "
      "`update_on`, `gradient_mode`, `threads`, `deadline_seconds`,\n"
      "`inline_queues`, `test_delay_microseconds`, `poison_slots`, `log_dir`, "
      "`offload.nvme_dir`, `io_backend`,\n"
      "`io_block_bytes` and `io_depth`. Host ranks may differ in device and host; what one has on "
      "nvme all have there, and then\n"
      "`sub_group_bytes`, `io_buffers`, `io_verify` and the split between memory and nvme are the "
      "same too.\n"
      "\n"
      "| option | type | unit | default | allowed | meaning |\n"
      "|---|---|---|---|---|---|\n";
  for (const OptionInfo& info : option_table()) {
    text += "| " + code(info.name) + " | " + info.type + " | " + info.unit + " | " +
            default_text(info) + " | " + info.range + " | " + info.help + " |\n";
  }
  text +=
      "\n"
      "No option changes a bit of the result unless its line says so. An option that may be unset "
      "takes `unset` or the\n"
      "empty text. Sizes are bytes: a whole number, or a decimal number with B, KiB, MiB, GiB, TiB "
      "(1024) or KB, MB, GB,\n"
      "TB (1000).\n"
      "\n"
      "What the table allows and this version of the engine does not serve is a `UsageError` when "
      "an "
      "engine is made:\n"
      "`reduction = native` with `device = host`, `master` and `moments` other than f32.\n"
      "\n"
      "## Where options come from\n"
      "\n"
      "| option | environment | argument | DeepSpeed name |\n"
      "|---|---|---|---|\n";
  for (const base::OptionRow& row : base::option_rows()) {
    std::string names;
    for (const base::DeepspeedName& name : row.deepspeed) {
      names += (names.empty() ? "" : ", ") + code(name.path);
    }
    text += "| " + code(row.info.name) + " | " + code(row.info.environment) + " | " +
            code(row.info.argument) + " | " + names + " |\n";
  }
  text +=
      "\n"
      "- Files (`apply_option_file`): one `name = value` a line, at most 16 MiB. `#` starts a "
      "comment. A value in double\n"
      "  quotes is taken as it stands, so that it may hold `#` and outer blanks. Errors name file "
      "and line.\n"
      "- Environment (`apply_option_environment`): a `ZSHARD_` variable that is neither in the "
      "table above nor in the one\n"
      "  below is a `UsageError`.\n"
      "- Command line (`apply_option_arguments`): `--name value` or `--name=value`; every name "
      "also as `--zshard-name`, for\n"
      "  programs that have an argument of the short name. A value that starts with `--` needs "
      "`=`. An option twice in one\n"
      "  command line is a `UsageError`. Everything else, and everything from `--` on, is handed "
      "back in order.\n"
      "- DeepSpeed JSON (`apply_deepspeed_config`): `none`, `cpu` and `nvme` are device, host and "
      "nvme; `sub_group_size` is in\n"
      "  fp32 elements of 4 bytes; `nvme_path` counts where its device is `nvme`; `loss_scale` "
      "counts where `fp16.enabled`\n"
      "  is true, and dynamic scaling (0 or none given) is a `UsageError`. Only names that are "
      "there "
      "change anything, so\n"
      "  a configuration without `zero_optimization.stage` leaves the stage as it is. Names "
      "without "
      "a counterpart are\n"
      "  returned: batch sizes belong to the loop, `gradient_clipping` is "
      "`StepOptions::clip_norm`, "
      "a dtype is a\n"
      "  parameter's.\n"
      "\n"
      "## Other environment variables\n"
      "\n"
      "| variable | meaning |\n"
      "|---|---|\n";
  for (const base::EnvironmentVariable& variable : base::environment_registry()) {
    text +=
        "| " + code(variable.name + (variable.prefix ? "*" : "")) + " | " + variable.help + " |\n";
  }
  text +=
      "\n"
      "Log levels are trace, debug, info, warning, error and off; topics are the layers: base, "
      "device, memory, kernels,\n"
      "comm, shard, optimizers, offload, engine, checkpoint, cli. The default is warning.\n";
  return text;
}

}  // namespace zshard
