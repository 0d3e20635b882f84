// zshard plan: how many bytes of what an engine would take, where, whether that fits, and what to
// change if not. Nothing is allocated.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "offload/io/extent_file.hpp"
#include "offload/io/lock_limit.hpp"
#include "runtime/base/bytes.hpp"
#include "runtime/cli/arguments.hpp"
#include "runtime/cli/capacity.hpp"
#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"
#include "runtime/cli/json_line.hpp"
#include "runtime/cli/machine.hpp"
#include "runtime/cli/plan_model.hpp"
#include "runtime/cli/spec_file.hpp"
#include "runtime/engine/blueprint.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

using engine::Blueprint;

constexpr std::int64_t kMostWorld = 16384;
constexpr std::int64_t kMostBytes = std::numeric_limits<std::int64_t>::max();
constexpr Tier kTierList[] = {Tier::device, Tier::host, Tier::nvme};

constexpr const char* kExamples =
    "All options of the engine are arguments too (zshard options): --stage 2, --gather-budget "
    "64MiB,\n--accumulation local, ... They are read from the environment first, then from "
    "--deepspeed,\nthen from --options, then from here.\n\n"
    "Examples:\n"
    "  zshard plan --preset gpt2-xl --world 4 --stage 3 --dtype bf16\n"
    "  zshard plan --preset llama-7b --world 8 --ranks-here 2 --memory 64GiB\n"
    "  zshard plan --layers 24 --width 2048 --world 2 --optimizer-tier nvme --disk 1TiB\n"
    "  zshard plan --preset gpt3-175b --world 64 --largest --memory 512GiB --ranks-here 8 --json\n"
    "  zshard plan --spec model.json --optimizer sgd-momentum\n\n"
    "Exit codes: 0 it fits, 1 it does not, 2 wrong usage, 3 an I/O or system error.";

struct Rule {
  const char* name;
  Optimizer optimizer;
};

const std::vector<Rule>& rules() {
  static const std::vector<Rule> all{
      {"adamw", AdamW{}}, {"adam", Adam{}}, {"sgd", SGD{}}, {"sgd-momentum", SGD{.momentum = 0.9}}};
  return all;
}

/// Layers of the largest model that fits.
struct Largest {
  std::int64_t layers = 0;  // 0: not even one fits
  bool capped = false;      // there may be room for more
  std::int64_t parameters = 0;
  std::optional<std::int64_t> gather_budget{};
};

/// The answer, from which both outputs are made.
struct Answer {
  Blueprint blueprint;
  Capacity capacity;
  std::vector<std::string> lacks;
  std::string change;  // "" if nothing needs to change
  bool disk_matters = false;
  std::optional<Largest> largest;
  /// The same with the least gather_budget, where gathered parameters had none.
  std::optional<Largest> largest_with_budget;
  /// With device = cuda: a GPU of this machine, if it has one.
  std::optional<Gpu> gpu;
  offload::LockLimit lock = offload::lock_limit();
};

std::string layers_text(std::int64_t layers) {
  return count_text(layers, "layer");
}

/// Returns the names without a counterpart; errors name the file.
std::vector<std::string> apply_deepspeed_file(EngineOptions& options, const std::string& path) {
  const std::string content = read_text(path);
  try {
    return apply_deepspeed_config(options, content);
  } catch (const UsageError& error) {
    throw UsageError(path + ": " + error.what());
  }
}

/// The smallest GPU of this machine, as the driver lists them.
std::optional<Gpu> smallest_gpu() {
  const Gpus gpus = probe_gpus();
  std::optional<Gpu> smallest;
  for (const Gpu& gpu : gpus.list) {
    if (gpu.memory > 0 && (!smallest || gpu.memory < smallest->memory)) smallest = gpu;
  }
  return smallest;
}

std::string text_of(const Largest& largest) {
  if (largest.layers == 0) return "not even one layer fits";
  std::string text = fmt::format("{}{} fit: {} parameters", largest.capped ? "at least " : "",
                                 layers_text(largest.layers), grouped(largest.parameters));
  if (largest.gather_budget)
    text += fmt::format(" with --gather-budget {}", *largest.gather_budget);
  return text;
}

/// The device tier of a rank on a GPU, and what it was compared with.
std::string device_text(const Answer& a) {
  const EngineOptions& options = a.blueprint.options;
  const std::string needed =
      base::human_bytes(a.blueprint.plan.arena_bytes(Tier::device)) + " a rank ";
  if (options.device_budget) {
    return needed + "of " + base::human_bytes(*options.device_budget) + " (device_budget)";
  }
  return needed + "(not checked: give --device-budget" +
         (a.gpu ? "; " + a.gpu->name + " here has " + base::human_bytes(a.gpu->memory) : "") + ")";
}

class PlanCommand : public Command {
 public:
  CLI::App* describe(CLI::App& tool) override;
  ExitCode run(const std::vector<std::string>& others) override;

 private:
  void describe_job(CLI::App& command);
  void describe_tiers(CLI::App& command);
  void describe_machine(CLI::App& command);
  [[nodiscard]] EngineOptions engine_options(const std::vector<std::string>& others) const;
  [[nodiscard]] Capacity capacity(const EngineOptions& options) const;
  [[nodiscard]] Answer answer(const EngineOptions& options) const;
  [[nodiscard]] Largest largest(const EngineOptions& options, const Capacity& capacity,
                                bool least_budget) const;
  [[nodiscard]] Blueprint blueprint(const EngineOptions& options,
                                    std::optional<std::int64_t> layers) const {
    return Blueprint::make(model_.spec(layers), rules()[rule_].optimizer, world_, options);
  }
  [[nodiscard]] Json json_of(const Answer& a) const;
  [[nodiscard]] std::string text_of(const Answer& a) const;

  PlanModel model_;
  std::size_t rule_ = 0;
  int world_ = 1;
  std::optional<int> ranks_here_;
  std::optional<std::int64_t> memory_;
  std::optional<std::int64_t> disk_;
  struct ShortForm {
    std::string argument;
    std::string option;
    std::string value;
  };
  std::vector<ShortForm> short_forms_;
  std::vector<std::string> directories_;
  std::string deepspeed_;
  std::string options_file_;
  std::vector<std::string> known_;
  bool largest_ = false;
  bool json_ = false;
};

CLI::App* PlanCommand::describe(CLI::App& tool) {
  CLI::App* command = tool.add_subcommand(
      "plan", "Compute the memory that training a model takes, and whether it fits");
  model_.describe(*command);
  describe_job(*command);
  describe_tiers(*command);
  describe_machine(*command);
  command->add_flag("--largest", largest_,
                    "the largest model of this shape that fits: as many layers of the same width");
  command->add_flag("--json", json_, "one JSON object");
  command->footer(kExamples);
  known_ = names_of(*command);
  for (const OptionInfo& option : option_table()) known_.push_back(option.argument);
  return command;
}

void PlanCommand::describe_job(CLI::App& command) {
  const std::string group = "Job";
  add_text(command, "--world", "N", "ranks of the job; default 1", [this](const std::string& text) {
    world_ = static_cast<int>(whole("--world", text, 1, kMostWorld));
  })->group(group);
  add_text(command, "--optimizer", "NAME", "adamw (default), adam, sgd, sgd-momentum",
           [this](const std::string& text) {
             std::vector<std::string> names;
             for (const Rule& rule : rules()) names.emplace_back(rule.name);
             rule_ = one_of("--optimizer", text, names);
           })
      ->group(group);
  add_text(command, "--options", "FILE", "options of the engine, name = value a line",
           [this](const std::string& text) { options_file_ = text; })
      ->group(group);
  add_text(command, "--deepspeed", "FILE.json", "options of the engine, as DeepSpeed names them",
           [this](const std::string& text) { deepspeed_ = text; })
      ->group(group);
}

void PlanCommand::describe_tiers(CLI::App& command) {
  const std::string group = "Tiers (short for the engine's --offload-...)";
  const auto add = [&](const std::string& name, const std::string& meta, const std::string& option,
                       const std::string& help) {
    add_text(command, name, meta, help, [this, name, option](const std::string& text) {
      short_forms_.push_back({name, option, text});
    })->group(group);
  };
  add("--optimizer-tier", "TIER", "offload.optimizer", "device (default), host, nvme");
  add("--gradient-tier", "TIER", "offload.gradients", "device (default), host, nvme");
  add("--parameter-tier", "TIER", "offload.parameters", "device (default), host, nvme; stage 3");
  add("--optimizer-nvme-bytes", "BYTES", "offload.optimizer_nvme_bytes",
      "least optimizer state on nvme");
  add_text(command, "--nvme-dir", "DIR", "directory of the nvme tier; may be repeated",
           [this](const std::string& text) { directories_.push_back(text); })
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->group(group);
}

void PlanCommand::describe_machine(CLI::App& command) {
  const std::string group = "Machine";
  add_text(command, "--ranks-here", "N", "ranks of the job on this machine; default all",
           [this](const std::string& text) {
             ranks_here_ = static_cast<int>(whole("--ranks-here", text, 1, kMostWorld));
           })
      ->group(group);
  add_text(command, "--memory", "BYTES", "memory for all ranks here; default what is available",
           [this](const std::string& text) { memory_ = bytes("--memory", text, 1, kMostBytes); })
      ->group(group);
  add_text(command, "--disk", "BYTES",
           "disk for all ranks here; default what is free in the --nvme-dir",
           [this](const std::string& text) { disk_ = bytes("--disk", text, 0, kMostBytes); })
      ->group(group);
}

EngineOptions PlanCommand::engine_options(const std::vector<std::string>& others) const {
  EngineOptions options;
  apply_option_environment(options);
  if (!deepspeed_.empty()) {
    const std::vector<std::string> ignored = apply_deepspeed_file(options, deepspeed_);
    std::string names;
    for (const std::string& name : ignored) names += (names.empty() ? "" : ", ") + name;
    if (!names.empty()) complain("no counterpart, ignored: " + names);
  }
  if (!options_file_.empty()) apply_option_file(options, options_file_);
  refuse_others(apply_option_arguments(options, others), known_, "zshard plan");
  for (const auto& [argument, option, value] : short_forms_) {
    refuse_second_name(argument, option, others);
    set_option(options, option, value);
  }
  if (!directories_.empty()) {
    refuse_second_name("--nvme-dir", "offload.nvme_dir", others);
    std::string list;
    for (const std::string& directory : directories_) {
      if (directory.empty()) throw UsageError("argument --nvme-dir: the path is empty");
      list += (list.empty() ? "" : ",") + directory;
    }
    set_option(options, "offload.nvme_dir", list);
  }
  return options;
}

Capacity PlanCommand::capacity(const EngineOptions& options) const {
  Capacity result;
  result.ranks = ranks_here_.value_or(world_);
  if (result.ranks > world_) {
    throw UsageError("--ranks-here is " + std::to_string(result.ranks) + ", must be at most " +
                     "--world, " + std::to_string(world_));
  }
  result.memory = memory_ ? *memory_ : memory::available_memory();
  if (disk_) {
    result.disk = *disk_;
  } else if (!options.offload.nvme_dir.empty()) {
    const auto directories = offload::split_directories(options.offload.nvme_dir);
    offload::check_directories(directories);
    result.disk = free_disk(directories);
  }
  return result;
}

Largest PlanCommand::largest(const EngineOptions& options, const Capacity& capacity,
                             bool least_budget) const {
  Progress progress;
  EngineOptions tried = options;
  const auto fits = [&](std::int64_t layers) {
    progress.show("trying " + layers_text(layers));
    try {
      if (least_budget) tried.gather_budget = minimum_gather_budget(model_.spec(layers), world_);
      return capacity.lacks(blueprint(tried, layers).plan, tried).empty();
    } catch (const UsageError&) {
      if (layers == 1) throw;
      return false;  // a sum passes 2^63
    }
  };
  std::int64_t works = 0;
  std::int64_t fails = 1;
  while (fails <= PlanModel::kMostLayers && fits(fails)) {
    works = fails;
    fails *= 2;
  }
  const bool capped = fails > PlanModel::kMostLayers;
  while (!capped && fails - works > 1) {
    const std::int64_t middle = works + (fails - works) / 2;
    (fits(middle) ? works : fails) = middle;
  }
  Largest found{works, capped, works == 0 ? 0 : parameter_count(model_.spec(works)), {}};
  if (least_budget && works != 0) {
    found.gather_budget = minimum_gather_budget(model_.spec(works), world_);
  }
  return found;
}

Answer PlanCommand::answer(const EngineOptions& options) const {
  const Capacity room = capacity(options);
  std::optional<Largest> found;
  std::optional<Largest> found_with_budget;
  if (largest_) {
    if (!model_.shape()) {
      throw UsageError(
          "--largest changes the number of layers: it needs --preset or --layers "
          "and --width, not --spec");
    }
    found = largest(options, room, false);
    if (options.stage == Stage::parameters && !options.gather_budget) {
      found_with_budget = largest(options, room, true);
    }
  }
  std::optional<std::int64_t> layers;
  if (found) layers = std::max<std::int64_t>(1, found->layers);
  Answer a{blueprint(options, layers), room, {}, "", false, found, found_with_budget, {}};
  if (options.device == DeviceKind::cuda) a.gpu = smallest_gpu();
  a.lacks = room.lacks(a.blueprint.plan, options);
  if (!a.lacks.empty()) {
    Progress progress;
    a.change = engine::cheapest_change(a.blueprint, world_,
                                       [&](const MemoryPlan& plan, const EngineOptions& changed) {
                                         progress.show("looking for a change that fits");
                                         return room.lacks(plan, changed).empty();
                                       });
  }
  const bool change_to_disk = a.change.find("= nvme") != std::string::npos;
  a.disk_matters = disk_bytes(a.blueprint.plan) > 0 || change_to_disk;
  return a;
}

Json PlanCommand::json_of(const Answer& a) const {
  const MemoryPlan& plan = a.blueprint.plan;
  Json model = {{"name", model_.name()},
                {"parameters", parameter_count(a.blueprint.spec)},
                {"trained_parameters", trained_count(a.blueprint.spec)},
                {"units", a.blueprint.spec.units().size()}};
  if (model_.shape()) {
    const Shape& s = *model_.shape();
    model["dtype"] = to_string(model_.dtype());
    model["family"] = to_string(s.family);
    model["layers"] = a.largest ? std::max<std::int64_t>(1, a.largest->layers) : s.layers;
    model["width"] = s.width;
    model["heads"] = s.heads;
    model["ffn"] = s.ffn;
    model["vocab"] = s.vocab;
    if (s.family == Family::llama) model["kv_heads"] = s.kv_heads;
    if (s.family == Family::gpt) model["context"] = s.context;
  }
  Json bytes = Json::object();
  Json total = Json::object();
  Json arenas = Json::object();
  for (int c = 0; c < kCategories; ++c) {
    const auto category = static_cast<Category>(c);
    Json& row = bytes[std::string(to_string(category))] = Json::object();
    for (const Tier tier : kTierList)
      row[std::string(to_string(tier))] = plan.bytes(category, tier);
  }
  for (const Tier tier : kTierList) {
    const std::string name(to_string(tier));
    std::int64_t sum = 0;
    for (int c = 0; c < kCategories; ++c) sum += plan.bytes(static_cast<Category>(c), tier);
    total[name] = sum;
    arenas[name] = plan.arena_bytes(tier);
  }
  Json options = Json::object();
  for (const OptionInfo& option : option_table()) {
    options[option.name] = or_null(get_option(a.blueprint.options, option.name));
  }
  const auto known = [](std::int64_t size) { return size < 0 ? Json(nullptr) : Json(size); };
  const std::int64_t locked =
      capped_product(locked_bytes(a.blueprint.tiers, a.blueprint.options), a.capacity.ranks);
  const bool gpu = a.blueprint.options.device == DeviceKind::cuda;
  const std::optional<std::int64_t>& budget = a.blueprint.options.device_budget;
  Json result = {{"model", model},
                 {"world", world_},
                 {"optimizer", rules()[rule_].name},
                 {"options", options},
                 {"rank",
                  {{"bytes", bytes},
                   {"total", total},
                   {"arenas", arenas},
                   {"memory_bytes", plan.memory_bytes()},
                   {"disk_bytes", disk_bytes(plan)}}},
                 {"machine",
                  {{"ranks", a.capacity.ranks},
                   {"memory_needed",
                    capped_product(main_memory_bytes(plan, a.blueprint.options), a.capacity.ranks)},
                   {"memory_available", known(a.capacity.memory)},
                   {"device_needed", gpu ? Json(plan.arena_bytes(Tier::device)) : Json(nullptr)},
                   {"device_available", gpu && budget ? Json(*budget) : Json(nullptr)},
                   {"gpu_memory", a.gpu ? Json(a.gpu->memory) : Json(nullptr)},
                   {"disk_needed", capped_product(disk_bytes(plan), a.capacity.ranks)},
                   {"disk_available", known(a.capacity.disk)},
                   {"locked_needed", locked},
                   {"locked_available",
                    a.lock.counts() ? Json(std::max<std::int64_t>(0, a.lock.bytes - a.lock.used))
                                    : Json(nullptr)}}},
                 {"fits", a.lacks.empty()},
                 {"lacks", a.lacks},
                 {"change", or_null(a.change)}};
  const auto add = [&](const char* name, const std::optional<Largest>& largest) {
    if (!largest) return;
    result[name] = {{"layers", largest->layers},
                    {"at_least", largest->capped},
                    {"parameters", largest->parameters}};
    if (largest->gather_budget) result[name]["gather_budget"] = *largest->gather_budget;
  };
  add("largest", a.largest);
  add("largest_with_least_gather_budget", a.largest_with_budget);
  return result;
}

std::string PlanCommand::text_of(const Answer& a) const {
  const Blueprint& b = a.blueprint;
  const MemoryPlan& plan = b.plan;
  std::string text;
  const auto line = [&](std::string_view name, std::string_view value) {
    text += fmt::format("{:<10}{}\n", name, value);
  };
  std::string shape;
  if (model_.shape()) {
    const std::int64_t layers =
        a.largest ? std::max<std::int64_t>(1, a.largest->layers) : model_.shape()->layers;
    shape = fmt::format(", {} of width {}, {}", layers_text(layers), model_.shape()->width,
                        to_string(model_.dtype()));
  }
  line(
      "model",
      fmt::format("{}: {} in {}{}", model_.name(), count_text(parameter_count(b.spec), "parameter"),
                  count_text(static_cast<std::int64_t>(b.spec.units().size()), "unit"), shape));
  line("job", fmt::format("{}, stage {} ({}), {}", count_text(world_, "rank"),
                          static_cast<int>(b.options.stage), to_string(b.options.stage),
                          rules()[rule_].name));
  text += "\nbytes of each rank\n" + plan.to_string() + "\n";
  const auto of = [](std::int64_t available, const char* unknown) {
    return available < 0 ? std::string(unknown) : "of " + base::human_bytes(available);
  };
  line("here", count_text(a.capacity.ranks, "rank"));
  if (b.options.device == DeviceKind::cuda) line("device", device_text(a));
  line("memory", fmt::format("{} {}",
                             base::human_bytes(capped_product(
                                 main_memory_bytes(plan, a.blueprint.options), a.capacity.ranks)),
                             of(a.capacity.memory, "(the system does not say what there is)")));
  if (a.disk_matters) {
    line("disk",
         fmt::format("{} {}", base::human_bytes(capped_product(disk_bytes(plan), a.capacity.ranks)),
                     of(a.capacity.disk, "(not checked: give --nvme-dir or --disk)")));
  }
  const std::int64_t locked = capped_product(locked_bytes(b.tiers, b.options), a.capacity.ranks);
  if (locked > 0 && a.lock.counts()) {
    line("locked",
         fmt::format(
             "{} of {} if io_uring registers its buffers{}", base::human_bytes(locked),
             base::human_bytes(a.lock.bytes),
             a.lock.allows(locked) ? "" : ", which it then does not (ulimit -l): a little slower"));
  }
  if (a.largest) line("largest", cli::text_of(*a.largest));
  const bool neither = a.largest && a.largest->layers == 0;
  if (a.largest_with_budget && (!neither || a.largest_with_budget->layers > 0)) {
    line("", cli::text_of(*a.largest_with_budget));
  }
  line("fits", a.lacks.empty() ? "yes" : "no");
  for (const std::string& lack : a.lacks) line("", lack);
  if (!a.change.empty()) {
    line("change", a.change);
    if (a.change.find(" ranks; ") != std::string::npos) {
      line("", fmt::format("(with {} of the ranks on each machine like this)", a.capacity.ranks));
    }
  }
  text += "\nActivations, other memory of the loop, and the program itself come on top.\n";
  return text;
}

ExitCode PlanCommand::run(const std::vector<std::string>& others) {
  const EngineOptions options = engine_options(others);
  model_.settle();
  const Answer a = answer(options);
  print(json_ ? json_line(json_of(a)) : text_of(a));
  return a.lacks.empty() ? ExitCode::fine : ExitCode::no;
}

}  // namespace

std::unique_ptr<Command> make_plan_command() {
  return std::make_unique<PlanCommand>();
}

}  // namespace zshard::cli
