#include "report.hpp"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "output.hpp"
#include "zshard/error.hpp"

namespace gpt {
namespace {

using zshard::Category;
using zshard::MemoryPlan;
using zshard::Tier;

constexpr double kMiB = 1024.0 * 1024.0;

/// ": No space left on device", or nothing if the system has given no reason.
std::string reason(int error) {
  return error == 0 ? "" : ": " + std::generic_category().message(error);
}

// One line for each category and tier that any of the plans uses, one column a plan, and the sums.
std::string plan_table(const std::string& title, const std::vector<std::string>& heads,
                       const std::vector<std::optional<MemoryPlan>>& plans) {
  std::string text = fmt::format("{:<32}", title);
  for (const std::string& head : heads) text += fmt::format("{:>16}", head);
  text += '\n';
  const auto line = [&](const std::string& name, auto bytes_of) {
    std::string cells;
    bool used = false;
    for (const auto& plan : plans) {
      const std::int64_t bytes = plan ? bytes_of(*plan) : 0;
      used = used || bytes != 0;
      cells += plan ? fmt::format("{:>16}", bytes) : fmt::format("{:>16}", "-");
    }
    if (used) text += fmt::format("{:<32}{}\n", name, cells);
  };
  for (int category = 0; category < zshard::kCategories; ++category) {
    for (int tier = 0; tier < zshard::kTiers; ++tier) {
      const auto c = static_cast<Category>(category);
      const auto t = static_cast<Tier>(tier);
      line(fmt::format("{} ({})", to_string(c), to_string(t)),
           [&](const MemoryPlan& plan) { return plan.bytes(c, t); });
    }
  }
  for (int tier = 0; tier < zshard::kTiers; ++tier) {
    const auto t = static_cast<Tier>(tier);
    line(fmt::format("arenas ({})", to_string(t)),
         [&](const MemoryPlan& plan) { return plan.arena_bytes(t); });
  }
  line("memory", [](const MemoryPlan& plan) { return plan.memory_bytes(); });
  return text;
}

}  // namespace

std::string memory_table(const zshard::Engine& engine, const zshard::ProcessGroup& group) {
  // A ledger travels as its numbers.
  constexpr std::size_t kCells = zshard::kCategories * zshard::kTiers;
  const MemoryPlan mine = engine.ledger();
  std::vector<std::int64_t> cells(kCells);
  for (std::size_t i = 0; i < kCells; ++i) {
    cells[i] = mine.bytes(static_cast<Category>(i / zshard::kTiers),
                          static_cast<Tier>(i % zshard::kTiers));
  }
  std::vector<std::int64_t> all(kCells * static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(cells)), std::as_writable_bytes(std::span(all)));

  std::string text = "memory of a rank, bytes\n" + engine.plan().to_string();
  bool as_planned = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    MemoryPlan ledger;
    for (std::size_t i = 0; i < kCells; ++i) {
      ledger.add(static_cast<Category>(i / zshard::kTiers), static_cast<Tier>(i % zshard::kTiers),
                 all[static_cast<std::size_t>(rank) * kCells + i]);
    }
    if (ledger == engine.plan()) continue;
    as_planned = false;
    text += fmt::format("rank {} has allocated otherwise:\n{}", rank, ledger.to_string());
  }
  if (as_planned) text += fmt::format("allocated on {} ranks: equal to the plan\n", group.size());
  return text;
}

std::string stage_table(const Config& config, int world) {
  const GptSpec spec = make_spec(config);
  std::vector<std::string> heads;
  std::vector<std::optional<MemoryPlan>> plans;
  for (int stage = 0; stage <= 3; ++stage) {
    zshard::EngineOptions options = config.engine;
    options.stage = static_cast<zshard::Stage>(stage);
    if (stage < 3) options.offload.parameters = Tier::device;  // the only tier they have there
    heads.push_back(
        fmt::format("stage {}{}", stage, options.stage == config.engine.stage ? "*" : ""));
    try {
      plans.emplace_back(plan_memory(spec.model, make_optimizer(config), world, options));
    } catch (const zshard::UsageError&) {
      plans.emplace_back();  // a tier that this stage does not serve
    }
  }
  return plan_table(fmt::format("bytes of one rank of {}", world), heads, plans);
}

std::string digest_lines(Trainer& trainer, const Config& config) {
  zshard::Engine& engine = trainer.engine();
  std::map<std::string, std::int64_t> counts;  // in order of names
  for (const zshard::UnitSpec& unit : engine.spec().units()) {
    for (const zshard::ParameterSpec& parameter : unit.parameters) {
      counts[parameter.name] = parameter.count();
    }
  }
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              &XXH3_freeState);
  std::vector<float> chunk(1 << 16);
  std::string text;
  const auto digest = [&](const std::string& what, auto read) {
    XXH3_64bits_reset(state.get());
    for (const auto& [name, count] : counts) {
      for (std::int64_t first = 0; first < count;) {
        const auto length =
            std::min<std::int64_t>(count - first, static_cast<std::int64_t>(chunk.size()));
        const auto piece = std::span(chunk).first(static_cast<std::size_t>(length));
        read(name, piece, first);
        XXH3_64bits_update(state.get(), piece.data(), piece.size_bytes());
        first += length;
      }
    }
    text += fmt::format("digest {} {:016x}\n", what, XXH3_64bits_digest(state.get()));
  };
  digest("parameters", [&](const std::string& name, std::span<float> out, std::int64_t first) {
    engine.read_parameter(name, out, first);
  });
  std::vector<std::string> slots = zshard::Optimizer(make_optimizer(config)).slots();
  if (config.dtype != zshard::DType::f32) slots.emplace_back("master");
  for (const std::string& slot : slots) {
    digest(slot, [&](const std::string& name, std::span<float> out, std::int64_t first) {
      engine.read_state(name, slot, out, first);
    });
  }
  return text;
}

StepLog::StepLog(const std::string& path) : path_(path) {
  if (path.empty()) return;
  errno = 0;
  file_.open(path, std::ios::trunc);
  if (!file_) throw ConfigError("--log: cannot open " + path + " for writing" + reason(errno));
}

void StepLog::write(std::int64_t step, const StepResult& result, double tokens_per_second) {
  if (!file_.is_open()) return;
  const zshard::StepReport& report = result.report;
  nlohmann::ordered_json line;
  line["step"] = step;
  line["loss"] = result.loss;
  line["norm"] = report.norm;
  line["lr"] = result.lr;
  line["skipped"] = report.skipped;
  line["tokens_per_s"] = tokens_per_second;
  line["peak_bytes"] = report.peak_bytes;
  line["gather_seconds"] = report.gather_seconds;
  line["reduce_seconds"] = report.reduce_seconds;
  line["update_seconds"] = report.update_seconds;
  line["read_seconds"] = report.read_seconds;
  line["write_seconds"] = report.write_seconds;
  line["wait_seconds"] = report.wait_seconds;
  line["disk_read_bytes"] = report.disk_read_bytes;
  line["disk_written_bytes"] = report.disk_written_bytes;
  line["raw_share"] = report.raw_share;
  errno = 0;
  file_ << line.dump() << '\n' << std::flush;
  if (!file_) throw zshard::IoError("--log: cannot write " + path_ + reason(errno));
}

void TimeSplit::add(double seconds, const zshard::StepReport& report) {
  ++steps_;
  seconds_ += seconds;
  sums_.gather_seconds += report.gather_seconds;
  sums_.reduce_seconds += report.reduce_seconds;
  sums_.update_seconds += report.update_seconds;
  sums_.read_seconds += report.read_seconds;
  sums_.write_seconds += report.write_seconds;
  sums_.wait_seconds += report.wait_seconds;
  sums_.disk_read_bytes += report.disk_read_bytes;
  sums_.disk_written_bytes += report.disk_written_bytes;
  sums_.raw_share += report.raw_share;
}

std::string TimeSplit::text() const {
  if (steps_ == 0) return "";
  const auto count = static_cast<double>(steps_);
  const auto ms = [&](double seconds) { return seconds / count * 1e3; };
  const auto mib = [&](std::int64_t bytes) { return static_cast<double>(bytes) / count / kMiB; };
  std::string text = fmt::format(
      "time of a step on this rank, mean of {}: {:.2f} ms; gathers {:.2f}, reductions {:.2f}, "
      "update {:.2f}",
      steps_, ms(seconds_), ms(sums_.gather_seconds), ms(sums_.reduce_seconds),
      ms(sums_.update_seconds));
  if (sums_.disk_read_bytes > 0 || sums_.disk_written_bytes > 0) {
    text += fmt::format(
        ", disk read {:.2f}, disk write {:.2f}, waiting for the disk {:.2f} (they overlap)\n"
        "disk a step: {:.1f} MiB read, {:.1f} MiB written, {:.0f}% of the raw device's speed",
        ms(sums_.read_seconds), ms(sums_.write_seconds), ms(sums_.wait_seconds),
        mib(sums_.disk_read_bytes), mib(sums_.disk_written_bytes), sums_.raw_share / count * 100.0);
  }
  return text + "\n";
}

std::string peak_lines(const zshard::Engine& engine, std::int64_t peak_bytes, double own,
                       int local_ranks) {
  const std::int64_t planned = engine.plan().memory_bytes();
  // What lies on a GPU is no memory of the process.
  const bool host = engine.options().device == zshard::DeviceKind::host;
  const std::int64_t of_process = planned - (host ? 0 : engine.plan().arena_bytes(Tier::device));
  std::string text = fmt::format("peak of the engine's arenas on this rank: {} bytes, planned {}\n",
                                 peak_bytes, planned);
  std::ifstream status("/proc/self/status");
  for (std::string key, rest; status >> key && std::getline(status, rest);) {
    if (key != "VmHWM:") continue;
    text += fmt::format(
        "peak of this process, code and libraries included: {:.1f} MiB, {:.1f} planned for arenas "
        "and activations of {} rank{}\n",
        std::stod(rest) / 1024.0, local_ranks * (static_cast<double>(of_process) + own) / kMiB,
        local_ranks, local_ranks == 1 ? "" : "s");
  }
  return text;
}

Progress::Progress(std::int64_t steps) : steps_(steps), terminal_(isatty(STDOUT_FILENO) == 1) {}

void Progress::clear() const {
  if (terminal_) say("\r\x1b[K");
}

void Progress::step(std::int64_t step, const StepResult& result, double tokens_per_second) {
  const std::int64_t interval = std::max<std::int64_t>(1, steps_ / 10);
  const bool last = step + 1 == steps_;
  if (!terminal_ && step % interval != 0 && !last && !result.report.skipped) return;
  clear();
  say(fmt::format("step {:>6}/{}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:.0f} tokens/s{}", step + 1,
                  steps_, result.loss, result.report.norm, result.lr, tokens_per_second,
                  result.report.skipped ? "  SKIPPED: a gradient was not finite" : ""));
  // A skipped step is news that must not be written over.
  if (!terminal_ || last || result.report.skipped) say("\n");
  flush_output();
}

void Progress::validation(std::int64_t step, double training_loss, double validation_loss) {
  clear();
  say(fmt::format("step {:>6}/{}  loss {:.4f}  validation loss {:.4f}\n", step + 1, steps_,
                  training_loss, validation_loss));
  flush_output();
}

}  // namespace gpt
