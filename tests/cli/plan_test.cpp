// zshard plan: equal to what an engine takes, byte by byte; whether it fits; what to change.
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <optional>

#include "runtime/cli/shapes.hpp"
#include "runtime/cli/spec_file.hpp"
#include "tests/cli/program.hpp"
#include "zshard/zshard.hpp"

namespace zshard::lab {
namespace {

using Arguments = std::vector<std::string>;
using Bytes = std::map<std::string, std::int64_t>;  // "moments/host"

Arguments operator+(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr std::array kAllTiers = {Tier::device, Tier::host, Tier::nvme};

Bytes bytes_of(const MemoryPlan& plan) {
  Bytes all;
  for (int c = 0; c < kCategories; ++c) {
    const auto category = static_cast<Category>(c);
    for (const Tier tier : kAllTiers) {
      all[std::string(to_string(category)) + "/" + std::string(to_string(tier))] =
          plan.bytes(category, tier);
    }
  }
  return all;
}

Bytes bytes_of(const nlohmann::json& said) {
  Bytes all;
  for (const auto& [category, tiers] : said.at("rank").at("bytes").items()) {
    for (const auto& [tier, bytes] : tiers.items()) {
      all[category + "/" + tier] = bytes.get<std::int64_t>();
    }
  }
  return all;
}

/// What the tool says with these arguments, and what an engine of the same takes.
void expect_equal(const Arguments& model, const ModelSpec& spec, const Optimizer& optimizer,
                  const std::string& optimizer_name, int world, const Arguments& options) {
  const Arguments arguments =
      Arguments{"plan",        "--json",      "--memory", "1TiB", "--world", std::to_string(world),
                "--optimizer", optimizer_name} +
      model + options;
  std::string text;
  for (const std::string& argument : arguments) text += argument + " ";
  SCOPED_TRACE(text);
  const Ending end = run_tool(arguments);
  ASSERT_EQ(end.code(), 0) << end.text();
  EngineOptions engine_options;
  ASSERT_TRUE(apply_option_arguments(engine_options, options).empty());
  std::mutex mutex;
  std::vector<Bytes> ledgers;
  std::int64_t memory = 0;
  run_ranks(world, [&](ProcessGroup group) {
    const Engine engine(spec, optimizer, group, engine_options);
    const std::lock_guard lock(mutex);
    ledgers.push_back(bytes_of(engine.ledger()));
    memory = engine.ledger().memory_bytes();
  });
  ASSERT_EQ(ledgers.size(), static_cast<std::size_t>(world));
  for (const Bytes& ledger : ledgers) EXPECT_EQ(bytes_of(end.said()), ledger);
  EXPECT_EQ(end.said().at("rank").at("memory_bytes"), memory);
  EXPECT_EQ(end.said().at("machine").at("memory_needed"), memory * world);
  EXPECT_EQ(end.said().at("model").at("parameters"), cli::parameter_count(spec));
}

const Arguments kGpt = {"--layers", "2", "--width", "24", "--vocab", "61", "--context", "10"};
const Arguments kLlama = {"--family", "llama", "--layers", "2",  "--width",    "24", "--heads", "4",
                          "--ffn",    "56",    "--vocab",  "61", "--kv-heads", "2"};
const cli::Shape kGptShape{cli::Family::gpt, 2, 24, 1, 1, 96, 61, 10};
const cli::Shape kLlamaShape{cli::Family::llama, 2, 24, 4, 2, 56, 61, 0};

TEST(Plan, EqualsTheLedgerAtEveryStage) {
  const std::vector<std::pair<std::string, Optimizer>> optimizers = {
      {"adamw", AdamW{}}, {"adam", Adam{}}, {"sgd", SGD{}}, {"sgd-momentum", SGD{.momentum = 0.9}}};
  std::size_t turn = 0;
  for (const int stage : {0, 1, 2, 3}) {
    for (const int world : {1, 2, 3}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const auto& [name, optimizer] = optimizers[turn++ % optimizers.size()];
        const Arguments more = {"--dtype", std::string(to_string(dtype))};
        const Arguments options = {"--stage", std::to_string(stage)};
        expect_equal(kGpt + more, cli::make_spec(kGptShape, dtype), optimizer, name, world,
                     options);
        expect_equal(kLlama + more, cli::make_spec(kLlamaShape, dtype), optimizer, name, world,
                     options);
      }
    }
  }
}

TEST(Plan, EqualsTheLedgerWithOptions) {
  const std::vector<Arguments> all = {
      {"--offload-optimizer", "host"},
      {"--offload-optimizer", "host", "--offload-gradients", "host", "--stage", "1"},
      {"--offload-parameters", "host"},
      {"--accumulation", "local", "--stage", "2"},
      {"--accumulation", "local", "--stage", "0"},
      {"--wire", "bf16", "--look-ahead", "0", "--behind", "0"},
      {"--gather-budget", "64KiB"},
      {"--gather-budget", "64KiB", "--look-ahead", "3", "--offload-gradients", "host"},
  };
  for (const Arguments& options : all) {
    expect_equal(kGpt, cli::make_spec(kGptShape, DType::f32), AdamW{}, "adamw", 2, options);
  }
}

TEST(Plan, EqualsTheLedgerOfASpecFromAFile) {
  const Directory directory;
  const std::string file = directory.write("spec.json", kFullSpec);
  const ModelSpec spec = cli::parse_spec(kFullSpec, DType::f32);
  for (const int stage : {0, 1, 2, 3}) {
    for (const int world : {1, 3}) {
      expect_equal({"--spec", file}, spec, AdamW{}, "adamw", world,
                   {"--stage", std::to_string(stage)});
    }
  }
}

TEST(Plan, EqualsTheLedgerOfNvmeTiers) {
  const Directory directory;
  const Arguments where = {"--offload-nvme-dir", directory.path(), "--sub-group-bytes", "16KiB"};
  const std::vector<Arguments> all = {
      {"--offload-optimizer", "nvme"},
      {"--offload-optimizer", "nvme", "--stage", "0"},
      {"--offload-optimizer", "nvme", "--offload-gradients", "nvme", "--stage", "1"},
      {"--offload-optimizer", "nvme", "--offload-optimizer-nvme-bytes", "20000", "--stage", "2"},
      {"--offload-parameters", "nvme", "--offload-optimizer", "nvme", "--gather-budget", "64KiB"},
      {"--offload-parameters", "nvme", "--offload-optimizer", "nvme", "--offload-gradients", "nvme",
       "--io-buffers", "1", "--io-verify", "true"},
  };
  for (const Arguments& options : all) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect_equal(kGpt + Arguments{"--dtype", std::string(to_string(dtype))},
                   cli::make_spec(kGptShape, dtype), AdamW{}, "adamw", 2, options + where);
    }
  }
}

TEST(Plan, ShortFormsAreTheOptionsOfTheTable) {
  const Directory a;
  const Directory b;
  const Ending end = run_tool(Arguments{"plan", "--json", "--stage", "3", "--optimizer-tier",
                                        "host", "--gradient-tier", "host", "--parameter-tier",
                                        "host", "--nvme-dir", a.path(), "--nvme-dir", b.path()} +
                              kGpt);
  ASSERT_EQ(end.code(), 0) << end.text();
  const nlohmann::json options = end.said().at("options");
  EXPECT_EQ(options.at("offload.optimizer"), "host");
  EXPECT_EQ(options.at("offload.gradients"), "host");
  EXPECT_EQ(options.at("offload.parameters"), "host");
  EXPECT_EQ(options.at("offload.nvme_dir"), a.path() + "," + b.path());
  EXPECT_EQ(options.size(), option_table().size());
  EXPECT_GT(end.said().at("machine").at("disk_available").get<std::int64_t>(), 0);
}

TEST(Plan, OptionsComeFromEnvironmentFilesAndArguments) {
  const Directory directory;
  const std::string file = directory.write("options", "stage = 1\nlook_ahead = 5\n");
  const std::string deepspeed =
      directory.write("ds.json", R"({"zero_optimization": {"stage": 2}, "train_batch_size": 4})");
  const auto stage = [&](const Arguments& arguments, const Variables& variables) {
    const Ending end = run_tool(Arguments{"plan", "--json"} + kGpt + arguments, variables);
    EXPECT_EQ(end.code(), 0) << end.text();
    return end.said().at("options").at("stage").get<std::string>();
  };
  EXPECT_EQ(stage({}, {}), "parameters");
  EXPECT_EQ(stage({}, {{"ZSHARD_STAGE", "0"}}), "replicated");
  EXPECT_EQ(stage({"--deepspeed", deepspeed}, {{"ZSHARD_STAGE", "0"}}), "gradients");
  EXPECT_EQ(stage({"--deepspeed", deepspeed, "--options", file}, {}), "optimizer");
  EXPECT_EQ(stage({"--options", file, "--stage", "3"}, {}), "parameters");
  const Ending ignored = run_tool(Arguments{"plan", "--deepspeed", deepspeed} + kGpt);
  EXPECT_NE(ignored.output.find("train_batch_size"), std::string::npos) << ignored.output;
  EXPECT_EQ(run_tool(Arguments{"plan"} + kGpt, {{"ZSHARD_STAGE", "7"}}).code(), 2);
  EXPECT_EQ(run_tool(Arguments{"plan", "--options", directory.file("none")} + kGpt).code(), 3);
  EXPECT_EQ(run_tool(Arguments{"plan", "--deepspeed", directory.file("none")} + kGpt).code(), 3);
  const std::string bad = directory.write("bad.json", R"({"zero_optimization": {"stage": 7}})");
  const Ending wrong = run_tool(Arguments{"plan", "--deepspeed", bad} + kGpt);
  EXPECT_EQ(wrong.code(), 2) << wrong.text();
  EXPECT_NE(wrong.output.find(bad + ": "), std::string::npos) << wrong.output;
}

TEST(Plan, FitsExactlyWhatItTakes) {
  const Arguments job = Arguments{"plan", "--json", "--world", "4", "--ranks-here", "2"} + kGpt;
  const Ending end = run_tool(job);
  ASSERT_EQ(end.code(), 0) << end.text();
  const auto needed = end.said().at("machine").at("memory_needed").get<std::int64_t>();
  EXPECT_EQ(needed, 2 * end.said().at("rank").at("memory_bytes").get<std::int64_t>());
  EXPECT_EQ(run_tool(job + Arguments{"--memory", std::to_string(needed)}).code(), 0);
  const Ending less = run_tool(job + Arguments{"--memory", std::to_string(needed - 1)});
  EXPECT_EQ(less.code(), 1) << less.text();
  EXPECT_FALSE(less.said().at("fits").get<bool>());
  EXPECT_EQ(less.said().at("lacks").size(), 1U);
  const Ending budget = run_tool(job + Arguments{"--device-budget", "1MiB"});
  EXPECT_EQ(budget.code(), 1) << budget.text();
  EXPECT_NE(budget.said().at("lacks")[0].get<std::string>().find("device_budget"),
            std::string::npos);
}

TEST(Plan, DiskCounts) {
  const Arguments job =
      Arguments{"plan", "--json", "--world", "2", "--optimizer-tier", "nvme"} + kGpt;
  const Ending end = run_tool(job);
  ASSERT_EQ(end.code(), 0) << end.text();
  EXPECT_TRUE(end.said().at("machine").at("disk_available").is_null());
  const auto needed = end.said().at("machine").at("disk_needed").get<std::int64_t>();
  EXPECT_GT(needed, 0);
  EXPECT_EQ(run_tool(job + Arguments{"--disk", std::to_string(needed)}).code(), 0);
  EXPECT_EQ(run_tool(job + Arguments{"--disk", std::to_string(needed - 1)}).code(), 1);
  EXPECT_EQ(run_tool(job + Arguments{"--nvme-dir", "/nowhere/at/all"}).code(), 2);
}

TEST(Plan, LockedMemoryIsToldAndRefusesNothing) {
  const Arguments job = Arguments{"plan", "--json", "--world", "4", "--ranks-here", "2"} + kGpt;
  const auto needed = [&](const Arguments& more) {
    const Ending end = run_tool(job + more);
    EXPECT_EQ(end.code(), 0) << end.text();
    return end.said().at("machine").at("locked_needed").get<std::int64_t>();
  };
  EXPECT_EQ(needed({}), 0);
  EXPECT_EQ(needed({"--optimizer-tier", "host"}), 0);
  EXPECT_EQ(needed({"--optimizer-tier", "nvme", "--io-backend", "posix"}), 0);
  const std::int64_t all = needed({"--optimizer-tier", "nvme", "--disk", "1TiB"});
  const std::int64_t plain = needed({"--optimizer-tier", "nvme", "--io-verify", "false"});
  EXPECT_EQ(all, plain);
  EXPECT_GT(all, std::int64_t{4} << 20);
  EXPECT_EQ(all, needed({"--optimizer-tier", "nvme", "--io-verify", "true"}))
      << "checksums are not the disk's";
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  std::string words;
  for (const std::string& word : Arguments{"--world", "4", "--optimizer-tier", "nvme"} + kGpt) {
    words += " " + word;
  }
  const std::string user =
      "ulimit -l 64; exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$1\" plan" + words;
  const Ending text = run_script(user);
  EXPECT_EQ(text.code(), 0) << text.text();
  EXPECT_NE(text.output.find("of 64.00 KiB if io_uring registers its buffers, which it then does "
                             "not (ulimit -l)"),
            std::string::npos)
      << text.text();
  const Ending json = run_script(user + " --json");
  ASSERT_EQ(json.code(), 0) << json.text();
  EXPECT_EQ(json.said().at("machine").at("locked_available"), 65536);
}

TEST(Plan, DirectoriesNamedTwiceAreRefusedAsByTheEngine) {
  const Directory a;
  const Directory b;
  const auto with = [&](const std::string& second) {
    return run_tool(Arguments{"plan", "--optimizer-tier", "nvme", "--nvme-dir", a.path(),
                              "--nvme-dir", second} +
                    kGpt);
  };
  EXPECT_EQ(with(b.path()).code(), 0);
  for (const std::string& again : {a.path(), a.path() + "/"}) {
    const Ending end = with(again);
    EXPECT_EQ(end.code(), 2) << end.text();
    EXPECT_NE(end.output.find("are the same directory"), std::string::npos) << end.text();
  }
}

/// "The cheapest change that fits: a = b, c = d (changes bits)." as arguments.
Arguments arguments_of(const std::string& change) {
  const std::string begin = "The cheapest change that fits: ";
  EXPECT_EQ(change.rfind(begin, 0), 0U) << change;
  std::string rest = change.substr(begin.size());
  rest = rest.substr(0, rest.find(". "));
  if (!rest.empty() && rest.back() == '.') rest.pop_back();
  Arguments arguments;
  while (!rest.empty()) {
    const std::size_t comma = std::min(rest.find(", "), rest.size());
    std::string item = rest.substr(0, comma);
    rest.erase(0, comma + 2);
    if (const std::size_t note = item.find(" (changes bits)"); note != std::string::npos) {
      item.resize(note);
    }
    const std::size_t equals = item.find(" = ");
    for (const OptionInfo& option : option_table()) {
      if (option.name == item.substr(0, equals)) {
        arguments.push_back(option.argument + "=" + item.substr(equals + 3));
      }
    }
  }
  return arguments;
}

TEST(Plan, AdviceFits) {
  const Arguments job = {"plan", "--json", "--preset", "gpt2", "--world", "4"};
  std::size_t different = 0;
  std::string last;
  for (const char* stage : {"0", "1", "2", "3"}) {
    for (const char* memory : {"9GiB", "8GiB", "6GiB", "5GiB", "4GiB", "3GiB"}) {
      const Arguments here = job + Arguments{"--stage", stage, "--memory", memory};
      const Ending end = run_tool(here);
      if (end.code() == 0) continue;
      ASSERT_EQ(end.code(), 1) << end.text();
      const auto change = end.said().at("change").get<std::string>();
      different += change != last ? 1 : 0;
      last = change;
      Arguments changed = job + Arguments{"--memory", memory} + arguments_of(change);
      if (change.find("stage = ") == std::string::npos)
        changed = changed + Arguments{"--stage", stage};
      const Ending again = run_tool(changed);
      EXPECT_EQ(again.code(), 0) << stage << " " << memory << " " << change << "\n" << again.text();
    }
  }
  EXPECT_GT(different, 4U);
}

// State on a GPU is updated there: advice to put it there takes back the host's cores.
TEST(Plan, AdviceToMoveTheStateUpToTheGpuMovesTheUpdateToo) {
  for (const char* update : {"auto", "host", "device"}) {
    for (const char* budget : {"4MiB", "6MiB"}) {
      const Arguments job = {"plan",   "--json",   "--preset",      "gpt2",     "--world",
                             "4",      "--device", "cuda",          "--memory", "1TiB",
                             "--disk", "1TiB",     "--host-budget", budget};
      const Arguments disk = {"--offload-optimizer", "nvme", "--update-on", update};
      const Ending end = run_tool(job + disk);
      ASSERT_EQ(end.code(), 1) << end.text();
      const auto change = end.said().at("change").get<std::string>();
      const bool moves = change.find("offload.optimizer = device") != std::string::npos;
      EXPECT_EQ(moves, std::string(update) != "device" || std::string(budget) == "4MiB") << change;
      EXPECT_EQ(change.find("update_on = auto") != std::string::npos,
                moves && std::string(update) == "host")
          << change;
      Arguments changed = job + arguments_of(change);
      for (std::size_t i = 0; i < disk.size(); i += 2) {
        bool replaced = false;
        for (const std::string& argument : changed) {
          replaced = replaced || argument.rfind(disk[i] + "=", 0) == 0;
        }
        if (!replaced) changed = changed + Arguments{disk[i], disk[i + 1]};
      }
      const Ending again = run_tool(changed);
      EXPECT_EQ(again.code(), 0) << change << "\n" << again.text();
    }
  }
}

TEST(Plan, LargestIsTheLastThatFits) {
  for (const char* stage : {"0", "2", "3"}) {
    const Arguments job = {"plan",    "--json", "--width",  "256",    "--world", "2",
                           "--vocab", "1000",   "--memory", "300MiB", "--stage", stage};
    const Ending end = run_tool(job + Arguments{"--largest", "--layers", "1"});
    ASSERT_EQ(end.code(), 0) << end.text();
    const nlohmann::json said = end.said();
    const auto layers = said.at("largest").at("layers").get<std::int64_t>();
    EXPECT_FALSE(said.at("largest").at("at_least").get<bool>());
    EXPECT_GT(layers, 1);
    EXPECT_EQ(said.at("model").at("layers"), layers);
    EXPECT_EQ(said.at("largest").at("parameters"), said.at("model").at("parameters"));
    EXPECT_EQ(run_tool(job + Arguments{"--layers", std::to_string(layers)}).code(), 0);
    EXPECT_EQ(run_tool(job + Arguments{"--layers", std::to_string(layers + 1)}).code(), 1);
    EXPECT_EQ(said.contains("largest_with_least_gather_budget"), std::string(stage) == "3");
    if (std::string(stage) != "3") continue;
    const nlohmann::json more = said.at("largest_with_least_gather_budget");
    const auto many = more.at("layers").get<std::int64_t>();
    EXPECT_GT(many, layers);
    const Arguments with =
        job +
        Arguments{"--gather-budget", std::to_string(more.at("gather_budget").get<std::int64_t>())};
    EXPECT_EQ(run_tool(with + Arguments{"--layers", std::to_string(many)}).code(), 0);
    EXPECT_EQ(run_tool(with + Arguments{"--layers", std::to_string(many + 1)}).code(), 1);
  }
  const Ending none = run_tool(
      {"plan", "--preset", "gpt3-175b", "--world", "2", "--memory", "1GiB", "--largest", "--json"});
  EXPECT_EQ(none.code(), 1) << none.text();
  EXPECT_EQ(none.said().at("largest").at("layers"), 0);
  const Ending text =
      run_tool({"plan", "--preset", "gpt3-175b", "--world", "2", "--memory", "1GiB", "--largest"});
  const std::string said = "not even one layer fits";
  EXPECT_NE(text.output.find(said), std::string::npos) << text.output;
  EXPECT_EQ(text.output.find(said), text.output.rfind(said)) << text.output;
  EXPECT_EQ(run_tool({"plan", "--spec", "x.json", "--largest"}).code(), 2);
}

TEST(Plan, TextHasTheTable) {
  const Ending end = run_tool({"plan", "--preset", "gpt2"});
  ASSERT_EQ(end.code(), 0) << end.text();
  for (const char* part : {"124,439,808 parameters", "moments", "in arenas of 2 MiB pages",
                           "fits      yes", "Activations"}) {
    EXPECT_NE(end.output.find(part), std::string::npos) << part << "\n" << end.output;
  }
}

TEST(Plan, PresetsTakeChanges) {
  const Ending end =
      run_tool({"plan", "--preset", "llama-70b", "--layers", "2", "--world", "64", "--json"});
  ASSERT_LE(end.code(), 1) << end.text();
  EXPECT_EQ(end.said().at("model").at("kv_heads"), 8);
  EXPECT_EQ(end.said().at("model").at("ffn"), 28672);
  EXPECT_EQ(end.said().at("model").at("layers"), 2);
  const Ending wide =
      run_tool({"plan", "--preset", "gpt2", "--width", "128", "--world", "2", "--json"});
  ASSERT_EQ(wide.code(), 0) << wide.text();
  EXPECT_EQ(wide.said().at("model").at("ffn"), 512);
  EXPECT_EQ(wide.said().at("model").at("heads"), 2);
}

TEST(Plan, AGpusMemoryIsItsOwn) {
  const auto with = [&](const Arguments& more) {
    return run_tool(Arguments{"plan", "--json", "--preset", "gpt2-xl", "--memory", "1GiB"} + more);
  };
  EXPECT_EQ(with({}).code(), 1);
  const Ending gpu = with({"--device", "cuda"});
  ASSERT_EQ(gpu.code(), 0) << gpu.text();
  EXPECT_LT(gpu.said().at("machine").at("memory_needed").get<std::int64_t>(), 100 << 20);
  // Its state in main memory: twelve bytes a parameter and more.
  EXPECT_EQ(with({"--device", "cuda", "--offload-optimizer", "host"}).code(), 1);
  EXPECT_EQ(with({"--device", "cuda", "--device-budget", "8GiB"}).code(), 1);
}

// Without a limit nothing compares the device column, and that is said.
TEST(Plan, AGpusMemoryThatIsNotCheckedIsSaid) {
  const Arguments job = {"plan", "--preset", "llama-70b", "--memory", "1TiB"};
  const Arguments gpu = job + Arguments{"--device", "cuda"};
  const Ending text = run_tool(gpu);
  EXPECT_EQ(text.code(), 0) << text.text();
  EXPECT_NE(text.output.find("a rank (not checked: give --device-budget"), std::string::npos)
      << text.output;
  const nlohmann::json machine = run_tool(gpu + Arguments{"--json"}).said().at("machine");
  EXPECT_GT(machine.at("device_needed").get<std::int64_t>(), std::int64_t{1} << 40);
  EXPECT_TRUE(machine.at("device_available").is_null());
  const nlohmann::json gpus = run_tool({"info", "--json"}).said().at("gpus");
  EXPECT_EQ(machine.at("gpu_memory").is_null(), gpus.empty());
  const Ending budget = run_tool(gpu + Arguments{"--device-budget", "2TiB"});
  EXPECT_EQ(budget.code(), 0) << budget.text();
  EXPECT_NE(budget.output.find("of 2.00 TiB (device_budget)"), std::string::npos) << budget.output;
  const Ending host = run_tool(job);
  EXPECT_EQ(host.output.find("\ndevice "), std::string::npos) << host.output;
  const nlohmann::json here = run_tool({"plan", "--preset", "gpt2", "--json"}).said().at("machine");
  EXPECT_TRUE(here.at("device_needed").is_null());
  EXPECT_TRUE(here.at("gpu_memory").is_null());
}

// -- misuse --

TEST(Plan, NumbersOutOfRangeAreRefused) {
  const Arguments base = {"plan", "--layers", "2", "--width", "8", "--family", "llama"};
  const std::vector<std::string> numbers = {"--heads", "--kv-heads",   "--ffn",   "--vocab",
                                            "--world", "--ranks-here", "--memory"};
  for (const std::string& name : numbers) {
    for (const char* value :
         {"0", "-1", "99999999999999999999", "abc", "", "1.5e", "nan", "0x10"}) {
      const Ending end = run_tool(base + Arguments{name, value});
      EXPECT_EQ(end.code(), 2) << name << " " << value << "\n" << end.text();
      EXPECT_NE(end.output.find("argument " + name), std::string::npos) << end.text();
    }
  }
  for (const char* name : {"--layers", "--width"}) {
    for (const char* value : {"0", "-1", "99999999999999999999", "abc", ""}) {
      const Ending end = run_tool({"plan", name, value});
      EXPECT_EQ(end.code(), 2) << end.text();
      EXPECT_NE(end.output.find(std::string("argument ") + name), std::string::npos) << end.text();
    }
  }
  for (const char* value : {"0", "-1", "abc", "99999999999999999999"}) {
    EXPECT_EQ(
        run_tool(Arguments{"plan", "--context", value} + Arguments{"--preset", "gpt2"}).code(), 2);
  }
  // The largest that is allowed of everything at once: an answer or a refusal.
  const Ending huge = run_tool({"plan", "--layers", "4096", "--width", "1048576", "--ffn",
                                "2147483648", "--vocab", "2147483648", "--context", "2147483648"});
  EXPECT_EQ(huge.code(), 2) << huge.text();
}

TEST(Plan, EveryOptionOfTheTableIsCheckedHereToo) {
  for (const OptionInfo& option : option_table()) {
    if (option.type == "text" || option.type == "enum") continue;
    for (const char* value : {"-2", "garbage", "1e400"}) {
      const Ending end = run_tool(Arguments{"plan", option.argument + "=" + value} + kGpt);
      EXPECT_EQ(end.code(), 2) << option.name << " " << value << "\n" << end.text();
    }
    const Ending zero = run_tool(Arguments{"plan", option.argument + "=0"} + kGpt);
    EXPECT_TRUE(zero.code() >= 0 && zero.code() <= 2) << option.name << "\n" << zero.text();
  }
}

TEST(Plan, MisuseNamesWhatIsMeant) {
  const std::vector<std::pair<Arguments, std::string>> cases = {
      {{"plan"}, "--preset"},
      {{"plan", "--layers", "2"}, "--width"},
      {{"plan", "--preset", "gtp2"}, "Did you mean 'gpt2'"},
      {{"plan", "--presett", "gpt2"}, "Did you mean '--preset'"},
      {{"plan", "--preset", "gpt2", "--stag", "2"}, "Did you mean '--stage'"},
      {{"plan", "--preset", "gpt2", "--optimizer", "adamx"}, "adamw"},
      {{"plan", "--preset", "gpt2", "--dtype", "fp32"}, "f32"},
      {{"plan", "--preset", "gpt2", "--optimizer-tier", "disk"}, "nvme"},
      {{"plan", "--preset", "gpt2", "--stage", "4"}, "stage"},
      {{"plan", "--preset", "gpt2", "--stage"}, "--stage"},
      {{"plan", "--preset", "gpt2", "--zshard-stagee", "4"}, "--zshard-stage"},
      {{"plan", "--preset", "gpt2", "--preset", "gpt2"}, "--preset"},
      {{"plan", "--preset", "gpt2", "--spec", "x"}, "--spec"},
      {{"plan", "--spec", "x", "--layers", "2"}, "--spec"},
      {{"plan", "--preset", "gpt2", "--family", "llama"}, "family gpt"},
      {{"plan", "--preset", "gpt2", "--kv-heads", "2"}, "llama"},
      {{"plan", "--preset", "llama-7b", "--context", "2"}, "gpt"},
      {{"plan", "--preset", "gpt2", "--heads", "7"}, "multiple"},
      {{"plan", "--preset", "gpt2", "--ranks-here", "2"}, "--world"},
      {{"plan", "--preset", "gpt2", "--stage", "2", "--parameter-tier", "host"}, "stage"},
      {{"plan", "--preset", "gpt2", "--gather-budget", "1"}, "gather_budget"},
      {{"plan", "--preset", "gpt2", "--stage", "2", "--stage", "3"}, "--stage is given twice"},
      {{"plan", "--preset", "gpt2", "--stage", "2", "--zshard-stage=3"},
       "--stage and --zshard-stage both"},
      {{"plan", "--preset", "gpt2", "--optimizer-tier", "device", "--offload-optimizer", "nvme"},
       "--optimizer-tier and --offload-optimizer both set the option offload.optimizer"},
      {{"plan", "--preset", "gpt2", "--zshard-offload-nvme-dir=/tmp", "--nvme-dir", "/tmp"},
       "--nvme-dir and --zshard-offload-nvme-dir both"},
      {{"plan", "--preset", "gpt2", "extra"}, "extra"},
      {{"plan", "--preset", "gpt2", "--", "--json"}, "--"},
  };
  for (const auto& [arguments, part] : cases) {
    const Ending end = run_tool(arguments);
    EXPECT_EQ(end.code(), 2) << part << "\n" << end.text();
    EXPECT_NE(end.output.find(part), std::string::npos) << part << "\n" << end.text();
    EXPECT_EQ(end.output.rfind("zshard: ", 0), 0U) << end.text();
  }
}

}  // namespace
}  // namespace zshard::lab
