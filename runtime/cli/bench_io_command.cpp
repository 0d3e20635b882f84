// zshard bench io: what a directory's disk gives, and the setting that gets it.
#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "offload/io/extent_file.hpp"
#include "offload/io/tuner.hpp"
#include "offload/io/uring_driver.hpp"
#include "runtime/base/bytes.hpp"
#include "runtime/base/quote.hpp"
#include "runtime/cli/arguments.hpp"
#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"
#include "runtime/cli/json_line.hpp"
#include "runtime/cli/machine.hpp"
#include "zshard/error.hpp"
#include "zshard/options.hpp"

namespace zshard::cli {
namespace {

using offload::Measurement;

constexpr std::int64_t kMostBytes = std::int64_t{1} << 50;
constexpr std::int64_t kMostBlock = std::int64_t{1} << 30;
constexpr std::int64_t kMostDepth = 4096;
constexpr std::int64_t kMostThreads = 256;
constexpr std::int64_t kMostRepeats = 1000;
constexpr std::int64_t kStateBytes = 12;  // AdamW behind a 16-bit parameter: master, two moments

constexpr const char* kExamples =
    "Without --block, --depth and --backend, a table of settings is measured and one is "
    "recommended: the one "
    "with\nthe least bytes in flight within 5% of the best. With one of them, one setting alone "
    "is measured.\nThe file that is measured has no name and is gone afterwards. GB are 1e9 "
    "bytes.\n\n"
    "Examples:\n"
    "  zshard bench io --dir /mnt/nvme\n"
    "  zshard bench io --dir /mnt/nvme --threads 4 --size 8GiB\n"
    "  zshard bench io --dir /mnt/nvme --block 1MiB --depth 32 --backend posix --json\n\n"
    "Exit codes: 0 measured, 2 wrong usage (also: direct I/O is refused there, so that the page "
    "cache\nwould be measured), 3 an I/O or system error.";

std::string gigabytes(double bytes) {
  return fmt::format("{:.2f}", bytes / 1e9);
}

std::string row_of(const Measurement& m) {
  return fmt::format("{:<10}{:>12}{:>7}{:>9}{:>9}{:>9}\n", to_string(m.backend),
                     base::human_bytes(m.block_bytes), m.depth, gigabytes(m.read),
                     gigabytes(m.write), gigabytes(m.mixed));
}

Json json_of(const Measurement& m) {
  return {{"backend", to_string(m.backend)},
          {"driver", m.driver},
          {"block_bytes", m.block_bytes},
          {"depth", m.depth},
          {"threads", m.threads},
          {"read", m.read},
          {"write", m.write},
          {"mixed", m.mixed}};
}

/// A file of options takes a value with blanks at its ends or a '#' in quotes.
std::string file_value(const std::string& text) {
  const bool plain = text.find('#') == std::string::npos && text.front() != '"' &&
                     text.back() != ' ' && text.front() != ' ';
  return plain ? text : "\"" + text + "\"";
}

/// As a shell takes it.
std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,=:@%+";
  if (text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

using Settings = std::vector<std::pair<std::string, std::string>>;

std::string arguments_of(const Settings& settings) {
  std::string text;
  for (const auto& [name, value] : settings) {
    for (const OptionInfo& option : option_table()) {
      if (option.name == name) {
        text += (text.empty() ? "" : " ") + shell_word(option.argument + "=" + value);
      }
    }
  }
  return text;
}

class BenchIoCommand : public Command {
 public:
  CLI::App* describe(CLI::App& tool) override;
  ExitCode run(const std::vector<std::string>& others) override;

 private:
  void check_directory();
  [[nodiscard]] Measurement measure_one() const;
  [[nodiscard]] Measurement tune(std::vector<Measurement>& table, std::string& refusal) const;
  /// Names and values of options that make an engine use the setting.
  [[nodiscard]] Settings configuration(const Measurement& m) const;
  [[nodiscard]] std::string text_of(const std::vector<Measurement>& table, const Measurement& best,
                                    std::int64_t free) const;

  std::string directory_;
  std::int64_t size_ = std::int64_t{1} << 30;
  std::optional<std::int64_t> block_;
  std::optional<int> depth_;
  int threads_ = 1;
  int repeats_ = 2;
  IoBackendKind backend_ = IoBackendKind::automatic;
  std::vector<std::string> known_;
  bool json_ = false;
};

CLI::App* BenchIoCommand::describe(CLI::App& tool) {
  CLI::App* bench = tool.add_subcommand("bench", "Measure what this machine gives");
  bench->require_subcommand(0, 1);
  bench->allow_extras();
  CLI::App* command = bench->add_subcommand(
      "io", "Measure a disk around the page cache, and recommend block size and depth");
  add_text(*command, "--dir", "DIR", "directory on the disk; a file is made there, and goes again",
           [this](const std::string& text) { directory_ = text; })
      ->required();
  add_text(*command, "--size", "BYTES",
           "of the file, moved in each pass, in whole blocks; default 1GiB",
           [this](const std::string& text) { size_ = bytes("--size", text, 4096, kMostBytes); });
  add_text(*command, "--block", "BYTES", "of one request",
           [this](const std::string& text) { block_ = bytes("--block", text, 4096, kMostBlock); });
  const auto number = [](const std::string& name, std::int64_t most, auto& value) {
    return [&value, name, most](const std::string& text) {
      value = static_cast<int>(whole(name, text, 1, most));
    };
  };
  add_text(*command, "--depth", "N", "requests in flight", number("--depth", kMostDepth, depth_));
  add_text(*command, "--threads", "N", "streams at a time, as ranks are; default 1",
           number("--threads", kMostThreads, threads_));
  add_text(*command, "--repeats", "N", "passes of each kind, of which the best counts; default 2",
           number("--repeats", kMostRepeats, repeats_));
  add_text(*command, "--backend", "NAME", "auto (default), io_uring, posix",
           [this](const std::string& text) {
             constexpr IoBackendKind kKinds[] = {IoBackendKind::automatic, IoBackendKind::io_uring,
                                                 IoBackendKind::posix};
             backend_ = kKinds[one_of("--backend", text, {"auto", "io_uring", "posix"})];
           });
  command->add_flag("--json", json_, "one JSON object; rates in bytes a second");
  command->footer(kExamples);
  known_ = names_of(*command);
  return command;
}

void BenchIoCommand::check_directory() {
  if (directory_.empty()) throw UsageError("argument --dir: the path is empty");
  if (directory_.find(',') != std::string::npos) {
    throw UsageError("argument --dir: " + base::quoted(directory_) +
                     " has a comma, which separates directories in offload.nvme_dir");
  }
  // Also refuses what the option does not take.
  EngineOptions options;
  set_option(options, "offload.nvme_dir", directory_);
  offload::check_directories({directory_});
  std::error_code error;
  const auto absolute = std::filesystem::absolute(directory_, error);
  if (!error) directory_ = absolute.lexically_normal().string();
  if (directory_.size() > 1 && directory_.back() == '/') directory_.pop_back();
}

Measurement BenchIoCommand::measure_one() const {
  // What each reaches the speed of a disk with: io_uring with many requests, threads with large
  // ones.
  const bool posix = backend_ == IoBackendKind::posix;
  offload::MeasureOptions options;
  options.directory = directory_;
  options.bytes = size_;
  options.block_bytes = block_.value_or(posix ? std::int64_t{4} << 20 : std::int64_t{1} << 20);
  options.depth = depth_.value_or(posix ? 2 : 8);
  options.backend = backend_;
  options.threads = threads_;
  options.repeats = repeats_;
  return offload::measure(options);
}

Measurement BenchIoCommand::tune(std::vector<Measurement>& table, std::string& refusal) const {
  Progress progress;
  offload::TuneOptions options;
  options.directory = directory_;
  options.bytes = size_;
  options.threads = threads_;
  options.repeats = repeats_;
  options.progress = [&](int done, int all, const Measurement& last) {
    progress.show(fmt::format("{} of {} settings; {} {} x {}: read {} write {} mixed {} GB/s", done,
                              all, to_string(last.backend), base::human_bytes(last.block_bytes),
                              last.depth, gigabytes(last.read), gigabytes(last.write),
                              gigabytes(last.mixed)));
  };
  offload::Tuning tuning = offload::tune(options);
  table = std::move(tuning.table);
  refusal = tuning.io_uring_refusal;
  return tuning.recommended;
}

Settings BenchIoCommand::configuration(const Measurement& m) const {
  return {{"offload.nvme_dir", directory_},
          {"io_backend", std::string(to_string(m.backend))},
          {"io_block_bytes", std::to_string(m.block_bytes)},
          {"io_depth", std::to_string(m.depth)}};
}

std::string BenchIoCommand::text_of(const std::vector<Measurement>& table, const Measurement& best,
                                    std::int64_t free) const {
  std::string text = fmt::format(
      "{}: {} free, room for the optimizer state of {} 16-bit parameters ({} bytes each)\n\n",
      directory_, base::human_bytes(free), grouped(free / kStateBytes), kStateBytes);
  text += fmt::format("{:<10}{:>12}{:>7}{:>9}{:>9}{:>9}  GB/s, {} {}, {}\n", "backend", "block",
                      "depth", "read", "write", "mixed", threads_,
                      threads_ == 1 ? "stream" : "streams", base::human_bytes(best.bytes));
  for (const Measurement& m : table) text += row_of(m);
  text += fmt::format("\n{}: {} ({}), {} x {}\n", table.size() > 1 ? "recommended" : "measured",
                      to_string(best.backend), best.driver, base::human_bytes(best.block_bytes),
                      best.depth);
  text += "\nin a file of options:\n";
  for (const auto& [name, value] : configuration(best)) {
    text += name + " = " + file_value(value) + "\n";
  }
  text += "\nor as arguments:\n" + arguments_of(configuration(best)) + "\n";
  return text;
}

ExitCode BenchIoCommand::run(const std::vector<std::string>& others) {
  refuse_others(others, known_, "zshard bench io");
  check_directory();
  if (backend_ == IoBackendKind::io_uring && !offload::io_uring_refusal().empty()) {
    throw UsageError("io_uring cannot be had: " + offload::io_uring_refusal());
  }
  const std::int64_t free = free_disk({directory_});
  if (size_ > free) {
    throw IoError(base::quoted(directory_) + ": --size is " + base::human_bytes(size_) + ", and " +
                  base::human_bytes(free) +
                  " are free there. Give a smaller --size or another --dir, or free space.");
  }
  std::vector<Measurement> table;
  std::string refusal;
  Measurement best;
  if (block_ || depth_ || backend_ != IoBackendKind::automatic) {
    best = measure_one();
    table.push_back(best);
  } else {
    best = tune(table, refusal);
  }
  if (!json_) {
    std::string text = text_of(table, best, free);
    if (!refusal.empty()) text += "\nio_uring is left out: " + refusal + "\n";
    print(text);
    return ExitCode::fine;
  }
  Json rows = Json::array();
  for (const Measurement& m : table) rows.push_back(json_of(m));
  Json options = Json::object();
  for (const auto& [name, value] : configuration(best)) options[name] = value;
  print(json_line({{"directory", directory_},
                   {"free_bytes", free},
                   {"size_bytes", best.bytes},
                   {"settings", rows},
                   {table.size() > 1 ? "recommended" : "measured", json_of(best)},
                   {"options", options},
                   {"arguments", arguments_of(configuration(best))},
                   {"io_uring_refusal", or_null(refusal)}}));
  return ExitCode::fine;
}

}  // namespace

std::unique_ptr<Command> make_bench_io_command() {
  return std::make_unique<BenchIoCommand>();
}

}  // namespace zshard::cli
