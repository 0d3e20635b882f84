#include "config.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "output.hpp"

namespace gpt {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw ConfigError(message);
}

void require_whole(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  require(least <= value && value <= most, std::string(name) + " is " + std::to_string(value) +
                                               ", must be " + std::to_string(least) + " to " +
                                               std::to_string(most));
}

// Checks that a text is one number of type T, all of it and in T's range: CLI11 itself would take
// "" for 0 and -1 or 1e30 for the nearest number that fits.
template <class T>
CLI::Validator strict(const std::string& kind) {
  return CLI::Validator(
      [kind](std::string& text) {
        T value{};
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        return error == std::errc() && stop == end ? "" : "'" + text + "' is not " + kind;
      },
      "");
}

void require_number(const char* name, double value, double least, double most) {
  require(least <= value && value <= most,  // false for NaN
          fmt::format("{} is {}, must be {} to {}", name, value, least, most));
}

/// An option of the engine that has a name of this program's too.
struct Own {
  const char* argument;
  const char* option;
  std::optional<std::string> text{};
};

/// The argument that sets the option under one of the engine's names; "" if none does.
std::string engines_name(const std::vector<std::string>& arguments, std::string_view option) {
  std::string name;
  for (const zshard::OptionInfo& info : zshard::option_table()) {
    if (info.name == option) name = info.argument.substr(2);
  }
  for (const std::string& argument : arguments) {
    if (argument == "--") break;
    const std::string given = argument.substr(0, argument.find('='));
    if (given == "--" + name || given == "--zshard-" + name) return given;
  }
  return "";
}

}  // namespace

void check(const Config& config) {
  const ModelShape& shape = config.shape;
  require_whole("--layers", shape.layers, 1, 1024);
  require_whole("--heads", shape.heads, 1, 1024);
  require_whole("--width", shape.width, 1, 1 << 16);
  require_whole("--context", shape.context, 1, 1 << 16);
  require_whole("--vocab", shape.vocab, 256, 1 << 24);
  require_whole("--vocab-units", shape.vocab_units, 1, std::min<std::int64_t>(shape.vocab, 4096));
  require(shape.width % shape.heads == 0, "--width is " + std::to_string(shape.width) +
                                              ", must be a multiple of --heads, " +
                                              std::to_string(shape.heads));
  require_whole("--batch", config.batch, 1, 1 << 20);
  require_whole("--accumulation", config.accumulation, 1, 1 << 20);
  require_whole("--steps", config.steps, 0, 1'000'000'000);
  std::int64_t tokens = 0;
  require(!__builtin_mul_overflow(config.tokens_per_step(), config.steps, &tokens),
          "--steps * --batch * --accumulation * --context must be less than 2^63 tokens");
  require_number("--lr", config.lr, 0.0, 1e6);
  require_number("--min-lr", config.min_lr, 0.0, config.lr);
  require_whole("--warmup", config.warmup, 0, 1'000'000'000);
  require_number("--beta1", config.beta1, 0.0, 0.999999);
  require_number("--beta2", config.beta2, 0.0, 0.99999999);
  require_number("--weight-decay", config.weight_decay, 0.0, 1e6);
  require_number("--clip", config.clip, 0.0, 1e30);
  require_whole("--eval-interval", config.eval_interval, 0, 1'000'000'000);
  require_number("--val-fraction", config.val_fraction, 0.0, 0.999999);
  if (config.ranks) {
    require_whole("--ranks", *config.ranks, 1, 1024);
    // Each process of a launcher would train a model of its own, and none would say so.
    for (const char* world :
         {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
      const char* text = std::getenv(world);
      require(text == nullptr || std::atoll(text) <= 1,
              "--ranks makes ranks of this process' threads, but a launcher has started several "
              "processes (" +
                  std::string(world) + "=" + (text == nullptr ? "" : text) +
                  "); leave --ranks away, or start one process");
    }
  }
  zshard::validate(config.engine);
}

std::optional<Config> parse_arguments(std::vector<std::string> arguments) {
  Config config;
  zshard::apply_option_environment(config.engine);
  std::optional<double> min_lr;
  std::string dtype = "f32";
  std::string order = "random";
  Own device{"--device", "device"};
  Own stage{"--stage", "stage"};
  Own optimizer_tier{"--optimizer-tier", "offload.optimizer"};
  Own gradient_tier{"--gradient-tier", "offload.gradients"};
  Own parameter_tier{"--parameter-tier", "offload.parameters"};
  Own nvme_dir{"--nvme-dir", "offload.nvme_dir"};
  Own gather_budget{"--gather-budget", "gather_budget"};
  std::vector<std::string> nvme_dirs;

  CLI::App app("Trains a GPT-2 shaped byte-level language model with zshard.\n", "gpt");
  app.footer(
      "Options of the engine, see docs/options.md, are taken as --name or --zshard-name; the "
      "engine's own --accumulation as --zshard-accumulation only.\n\n"
      "Exit codes: 0 trained, 2 what was asked for cannot be served: an argument, a text that "
      "cannot be\nread, too little memory, no GPU; 1 everything else.");
  app.allow_extras();
  app.option_defaults()->always_capture_default();
  const CLI::Validator whole = strict<std::int64_t>("a whole number");
  const CLI::Validator number = strict<double>("a number");
  ModelShape& shape = config.shape;
  app.add_option("--data", config.data, "files of text, read one after another")->required();
  app.add_option("--layers", shape.layers, "transformer blocks")->check(whole);
  app.add_option("--heads", shape.heads, "attention heads of a block")->check(whole);
  app.add_option("--width", shape.width, "width of the residual stream; a multiple of --heads")
      ->check(whole);
  app.add_option("--context", shape.context, "tokens of a row")->check(whole);
  app.add_option("--vocab", shape.vocab,
                 "rows of the token table, at least 256: a token is a byte, more only enlarge it")
      ->check(whole);
  app.add_option("--vocab-units", shape.vocab_units,
                 "units that the token table is cut into: more take less memory at stage 3")
      ->check(whole);
  app.add_option("--batch", config.batch, "rows of a micro-step over all ranks")->check(whole);
  app.add_option("--accumulation", config.accumulation, "micro-steps of a step")->check(whole);
  app.add_option("--steps", config.steps, "optimizer steps")->check(whole);
  app.add_option("--lr", config.lr, "largest learning rate")->check(number);
  app.add_option("--min-lr", min_lr, "learning rate at the end; default lr / 10")->check(number);
  app.add_option("--warmup", config.warmup, "steps of linear warm-up")->check(whole);
  app.add_option("--beta1", config.beta1, "AdamW's decay of the first moment")->check(number);
  app.add_option("--beta2", config.beta2, "AdamW's decay of the second moment")->check(number);
  app.add_option("--weight-decay", config.weight_decay, "of parameters of two or more dimensions")
      ->check(number);
  app.add_option("--clip", config.clip, "largest global gradient norm; 0: no clipping")
      ->check(number);
  app.add_option("--dtype", dtype,
                 "of parameters and their gradients; arithmetic is f32, but matrix products on a "
                 "GPU round their operands to bf16 if this is bf16")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--seed", config.seed, "of the initial weights and the order of rows")
      ->check(strict<std::uint64_t>("a whole number from 0 to 2^64 - 1"));
  app.add_option("--eval-interval", config.eval_interval, "steps between validations; 0: never")
      ->check(whole);
  app.add_option("--val-fraction", config.val_fraction,
                 "part of the text, at its end, for validation; 0: none")
      ->check(number);
  app.add_option("--ranks", config.ranks, "threads of this process that train together")
      ->check(strict<int>("a whole number"));
  app.add_option("--device", device.text,
                 "where parameters lie and the model runs: host or cuda; default host");
  app.add_option("--stage", stage.text, "ZeRO stage 0 to 3; default 3");
  app.add_option("--optimizer-tier", optimizer_tier.text,
                 "where optimizer state lives: device, host or nvme; default device");
  app.add_option("--gradient-tier", gradient_tier.text,
                 "where summed gradients live: device, host or nvme; default device");
  app.add_option("--parameter-tier", parameter_tier.text,
                 "where parameters live at stage 3: device, host or nvme; default device");
  app.add_option("--nvme-dir", nvme_dirs,
                 "directory for the nvme tier; given again: one more, and they share the work")
      ->allow_extra_args(false);
  app.add_option("--gather-budget", gather_budget.text,
                 "bytes a rank for gathered parameters at stage 3; default all units");
  app.add_option("--order", order, "of rows")->check(CLI::IsMember({"random", "sequential"}));
  app.add_option("--log", config.log, "file that gets one JSON object a step");
  app.add_flag("--digest", config.digest, "print XXH3 of parameters and of each optimizer state");

  // CLI11 takes no empty text behind '='.
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] != "--gather-budget=") continue;
    arguments[i].pop_back();
    arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1, "");
  }
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes arguments from the end
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    say(app.help());
    flush_output();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw ConfigError(error.what());
  }
  const std::vector<std::string> rest = app.remaining();
  const std::vector<std::string> others = zshard::apply_option_arguments(config.engine, rest);
  require(others.empty(), "unknown argument " + (others.empty() ? "" : others.front()) +
                              "; --help lists what there is");
  for (const std::string& directory : nvme_dirs) {
    // The engine's option is a list separated by commas.
    require(directory.find(',') == std::string::npos,
            "--nvme-dir takes one directory each time, without a comma; got '" + directory + "'");
    nvme_dir.text = nvme_dir.text ? *nvme_dir.text + "," + directory : directory;
  }
  for (const Own* own : {&device, &stage, &optimizer_tier, &gradient_tier, &parameter_tier,
                         &nvme_dir, &gather_budget}) {
    if (!own->text) continue;
    const std::string other = engines_name(rest, own->option);
    require(other.empty(), fmt::format("{} and {} both set the option {}; give one of them",
                                       own->argument, other, own->option));
    zshard::set_option(config.engine, own->option, *own->text);
  }
  // A variable of the environment may stand for all jobs of a machine; an argument is for this one.
  const std::string directories =
      nvme_dir.text ? nvme_dir.argument : engines_name(rest, nvme_dir.option);
  const zshard::OffloadOptions& tiers = config.engine.offload;
  require(directories.empty() || tiers.nvme_dir.empty() || tiers.optimizer == zshard::Tier::nvme ||
              tiers.gradients == zshard::Tier::nvme || tiers.parameters == zshard::Tier::nvme,
          directories +
              " is given, but nothing is on nvme; add --optimizer-tier nvme, "
              "--gradient-tier nvme or --parameter-tier nvme, or leave it away");
  config.dtype = dtype == "bf16" ? zshard::DType::bf16 : zshard::DType::f32;
  config.order = order == "sequential" ? Order::sequential : Order::random;
  config.min_lr = min_lr.value_or(config.lr / 10.0);
  check(config);
  return config;
}

}  // namespace gpt
