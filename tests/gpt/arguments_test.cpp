// What the command line takes and what it refuses, and the program's exit codes.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gpt/config.hpp"

namespace gpt_test {
namespace {

using Arguments = std::vector<std::string>;

gpt::Config parse(Arguments arguments) {
  arguments.insert(arguments.begin(), {"--data", "text"});
  return gpt::parse_arguments(arguments).value();
}

// The message of one of the two errors that main() turns into exit code 2; "" without an error.
std::string refusal(const Arguments& arguments) {
  try {
    parse(arguments);
    return "";
  } catch (const gpt::ConfigError& error) {
    return error.what();
  } catch (const zshard::UsageError& error) {
    return error.what();
  }
}

bool refused(const Arguments& arguments) {
  return refusal(arguments).size() > 10;
}

TEST(Arguments, AllAreRead) {
  const gpt::Config config = gpt::parse_arguments({"--data",
                                                   "a",
                                                   "b",
                                                   "--layers",
                                                   "3",
                                                   "--heads",
                                                   "5",
                                                   "--width",
                                                   "35",
                                                   "--context",
                                                   "17",
                                                   "--vocab",
                                                   "300",
                                                   "--vocab-units",
                                                   "9",
                                                   "--batch",
                                                   "7",
                                                   "--accumulation",
                                                   "2",
                                                   "--steps",
                                                   "11",
                                                   "--lr",
                                                   "0.5",
                                                   "--min-lr",
                                                   "0.25",
                                                   "--warmup",
                                                   "4",
                                                   "--beta1",
                                                   "0.8",
                                                   "--beta2",
                                                   "0.7",
                                                   "--weight-decay",
                                                   "0.3",
                                                   "--clip",
                                                   "2.5",
                                                   "--dtype",
                                                   "bf16",
                                                   "--seed",
                                                   "18446744073709551615",
                                                   "--eval-interval",
                                                   "6",
                                                   "--val-fraction",
                                                   "0.2",
                                                   "--ranks",
                                                   "3",
                                                   "--stage",
                                                   "1",
                                                   "--optimizer-tier",
                                                   "host",
                                                   "--gradient-tier",
                                                   "nvme",
                                                   "--nvme-dir",
                                                   "/a",
                                                   "--nvme-dir",
                                                   "/b",
                                                   "--gather-budget",
                                                   "3MiB",
                                                   "--order",
                                                   "sequential",
                                                   "--log",
                                                   "l.jsonl",
                                                   "--digest",
                                                   "--zshard-accumulation",
                                                   "local",
                                                   "--reduction-group",
                                                   "2"})
                                 .value();
  EXPECT_EQ(config.data, (Arguments{"a", "b"}));
  EXPECT_EQ(config.shape.layers, 3);
  EXPECT_EQ(config.shape.heads, 5);
  EXPECT_EQ(config.shape.width, 35);
  EXPECT_EQ(config.shape.context, 17);
  EXPECT_EQ(config.shape.vocab, 300);
  EXPECT_EQ(config.shape.vocab_units, 9);
  EXPECT_EQ(config.batch, 7);
  EXPECT_EQ(config.accumulation, 2);
  EXPECT_EQ(config.steps, 11);
  EXPECT_EQ(config.lr, 0.5);
  EXPECT_EQ(config.min_lr, 0.25);
  EXPECT_EQ(config.warmup, 4);
  EXPECT_EQ(config.beta1, 0.8);
  EXPECT_EQ(config.beta2, 0.7);
  EXPECT_EQ(config.weight_decay, 0.3);
  EXPECT_EQ(config.clip, 2.5);
  EXPECT_EQ(config.dtype, zshard::DType::bf16);
  EXPECT_EQ(config.seed, 18446744073709551615U);
  EXPECT_EQ(config.eval_interval, 6);
  EXPECT_EQ(config.val_fraction, 0.2);
  EXPECT_EQ(config.ranks, 3);
  EXPECT_EQ(config.engine.stage, zshard::Stage::optimizer);
  EXPECT_EQ(config.engine.offload.optimizer, zshard::Tier::host);
  EXPECT_EQ(config.engine.offload.gradients, zshard::Tier::nvme);
  EXPECT_EQ(config.engine.offload.nvme_dir, "/a,/b");
  EXPECT_EQ(config.engine.gather_budget, 3 << 20);
  EXPECT_EQ(config.order, gpt::Order::sequential);
  EXPECT_EQ(config.log, "l.jsonl");
  EXPECT_TRUE(config.digest);
  EXPECT_EQ(config.engine.accumulation, zshard::Accumulation::local);
  EXPECT_EQ(config.engine.reduction_group, 2);
}

TEST(Arguments, EachClassOfTensorsHasItsTier) {
  const auto tiers = [](const Arguments& arguments) {
    const zshard::OffloadOptions offload = parse(arguments).engine.offload;
    return std::vector{offload.optimizer, offload.gradients, offload.parameters};
  };
  using zshard::Tier;
  EXPECT_EQ(tiers({}), (std::vector{Tier::device, Tier::device, Tier::device}));
  EXPECT_EQ(tiers({"--optimizer-tier", "host", "--gradient-tier", "device", "--parameter-tier",
                   "nvme", "--nvme-dir", "/a"}),
            (std::vector{Tier::host, Tier::device, Tier::nvme}));
  EXPECT_TRUE(refused({"--parameter-tier", "host", "--stage", "2"}));
}

TEST(Arguments, DeviceIsTheEngines) {
  EXPECT_EQ(parse({}).engine.device, zshard::DeviceKind::host);
  EXPECT_EQ(parse({"--device", "host"}).engine.device, zshard::DeviceKind::host);
  const gpt::Config config = parse({"--device", "cuda", "--device-index", "3"});
  EXPECT_EQ(config.engine.device, zshard::DeviceKind::cuda);
  EXPECT_EQ(config.engine.device_index, 3);
  for (const char* wrong : {"", "gpu", "CUDA", "cuda:0", "0"}) {
    EXPECT_TRUE(refused({"--device", wrong})) << wrong;
  }
  EXPECT_TRUE(refused({"--device"}));
  EXPECT_TRUE(refused({"--device-index", "-2"}));
}

TEST(Arguments, LowestLearningRateFollowsTheHighest) {
  EXPECT_DOUBLE_EQ(parse({"--lr", "1e-5"}).min_lr, 1e-6);
  EXPECT_TRUE(refused({"--lr", "1e-5", "--min-lr", "1e-4"}));
}

TEST(Arguments, CommandLineWinsOverEnvironment) {
  setenv("ZSHARD_STAGE", "1", 1);
  EXPECT_EQ(parse({}).engine.stage, zshard::Stage::optimizer);
  EXPECT_EQ(parse({"--stage", "2"}).engine.stage, zshard::Stage::gradients);
  unsetenv("ZSHARD_STAGE");
  EXPECT_EQ(parse({}).engine.stage, zshard::Stage::parameters);
}

TEST(Arguments, EachNumberAtZeroOneNegativeAndHuge) {
  struct Case {
    const char* name;
    bool zero, one, negative, huge;  // legal?
  };
  const std::vector<Case> cases = {
      {"--layers", false, true, false, false},       {"--heads", false, true, false, false},
      {"--width", false, false, false, false},  // one is no multiple of four heads
      {"--context", false, true, false, false},      {"--vocab", false, false, false, false},
      {"--vocab-units", false, true, false, false},  {"--batch", false, true, false, false},
      {"--accumulation", false, true, false, false}, {"--steps", true, true, false, false},
      {"--lr", false, true, false, false},  // zero is less than the least rate given below
      {"--min-lr", true, false, false, false},       {"--warmup", true, true, false, false},
      {"--beta1", true, false, false, false},        {"--beta2", true, false, false, false},
      {"--weight-decay", true, true, false, false},  {"--clip", true, true, false, false},
      {"--seed", true, true, false, false},          {"--eval-interval", true, true, false, false},
      {"--val-fraction", true, false, false, false}, {"--ranks", false, true, false, false},
      {"--stage", true, true, false, false},         {"--gather-budget", true, true, false, false},
  };
  for (const Case& c : cases) {
    const Arguments other =
        c.name == std::string("--lr") ? Arguments{"--min-lr", "1e-6"} : Arguments{"--lr", "1e-3"};
    const auto with = [&](const std::string& value) {
      Arguments arguments = other;
      arguments.insert(arguments.end(), {c.name, value});
      return arguments;
    };
    EXPECT_EQ(refused(with("0")), !c.zero) << c.name;
    EXPECT_EQ(refused(with("1")), !c.one) << c.name;
    EXPECT_EQ(refused(with("-1")), !c.negative) << c.name;
    for (const char* huge : {"99999999999999999999999999999999999999999", "1e99"}) {
      EXPECT_EQ(refused(with(huge)), !c.huge) << c.name << " " << huge;
    }
    for (const char* nonsense : {"", "x", "1x", "nan"}) {
      // The engine's own options take an empty text for "unset".
      if (c.name == std::string("--gather-budget") && *nonsense == '\0') continue;
      EXPECT_TRUE(refused(with(nonsense))) << c.name << " " << nonsense;
    }
  }
}

TEST(Arguments, WhatCannotBeServedIsRefused) {
  EXPECT_TRUE(refused({"--dtype", "f16"}));
  EXPECT_TRUE(refused({"--order", "backwards"}));
  EXPECT_TRUE(refused({"--vocab-units", "257"}));  // of 256 rows
  EXPECT_TRUE(refused({"--optimizer-tier", "cloud"}));
  EXPECT_TRUE(refused({"--gradient-tier", "cloud"}));
  EXPECT_TRUE(refused({"--parameter-tier", "cloud"}));
  EXPECT_TRUE(refused({"--nvme-dir", "/a,/b"}));
  EXPECT_TRUE(refused({"--nvme-dir", "/a", "/b"}));
  EXPECT_TRUE(refused({"--heads", "3"}));  // 128 is no multiple
  EXPECT_TRUE(refused({"--vocab", "255"}));
  EXPECT_TRUE(refused({"--lr", "inf"}));
  EXPECT_TRUE(refused({"--unknown", "1"}));
  EXPECT_TRUE(refused({"--layers", "1", "stray"}));
  EXPECT_TRUE(refused({"--zshard-stagee", "1"}));
  EXPECT_TRUE(refused({"--reduction-group"}));
  EXPECT_TRUE(refused({"--look-ahead", "-1"}));
  EXPECT_TRUE(
      refused({"--steps", "1000000000", "--batch", "1048576", "--accumulation", "1048576"}));
  EXPECT_THROW(gpt::parse_arguments({}), gpt::ConfigError);  // no --data
}

TEST(Arguments, OneOptionByTwoNamesIsRefusedWithBoth) {
  const std::vector<Arguments> cases = {
      {"--stage", "3", "--zshard-stage", "2"},
      {"--zshard-stage=2", "--stage", "2"},
      {"--device", "host", "--zshard-device", "host"},
      {"--optimizer-tier", "host", "--offload-optimizer", "host"},
      {"--gradient-tier", "host", "--offload-gradients=device"},
      {"--parameter-tier", "host", "--zshard-offload-parameters", "device"},
      {"--nvme-dir", "/a", "--offload-nvme-dir", "/b", "--optimizer-tier", "nvme"},
      {"--gather-budget", "1GiB", "--zshard-gather-budget", "2GiB"},
      {"--look-ahead", "1", "--zshard-look-ahead", "2"},
  };
  for (const Arguments& arguments : cases) {
    const std::string message = refusal(arguments);
    for (const std::string& argument : arguments) {
      const std::string name = argument.substr(0, argument.find('='));
      if (name.rfind("--", 0) != 0) continue;
      if (name == "--optimizer-tier" && arguments[0] == "--nvme-dir") continue;
      EXPECT_NE(message.find(name + " "), std::string::npos) << name << ": " << message;
    }
  }
  EXPECT_TRUE(refused({"--look-ahead", "1", "--look-ahead", "1"}));
  EXPECT_TRUE(refused({"--stage", "1", "--stage", "1"}));
}

TEST(Arguments, ADirectoryThatNoTierUsesIsRefused) {
  for (const char* name : {"--nvme-dir", "--offload-nvme-dir", "--zshard-offload-nvme-dir"}) {
    const std::string message = refusal({name, "/a", "--optimizer-tier", "host"});
    EXPECT_NE(message.find(std::string(name) + " is given"), std::string::npos) << message;
    EXPECT_NE(message.find("--optimizer-tier nvme"), std::string::npos) << message;
    for (const char* tier : {"--optimizer-tier", "--gradient-tier", "--parameter-tier"}) {
      EXPECT_EQ(refusal({name, "/a", tier, "nvme"}), "");
    }
  }
  EXPECT_EQ(refusal({"--offload-nvme-dir="}), "");
  // Of the environment: it may stand for all jobs of a machine.
  setenv("ZSHARD_OFFLOAD_NVME_DIR", "/a", 1);
  EXPECT_EQ(refusal({}), "");
  unsetenv("ZSHARD_OFFLOAD_NVME_DIR");
}

TEST(Arguments, BoundsAreSaidInFull) {
  EXPECT_EQ(refusal({"--beta2", "1"}), "--beta2 is 1, must be 0 to 0.99999999");
  EXPECT_EQ(refusal({"--beta1", "0.9999999"}), "--beta1 is 0.9999999, must be 0 to 0.999999");
}

TEST(Arguments, AnEmptyGatherBudgetIsUnset) {
  setenv("ZSHARD_GATHER_BUDGET", "1GiB", 1);
  EXPECT_EQ(parse({}).engine.gather_budget, 1 << 30);
  EXPECT_FALSE(parse({"--gather-budget=", "--layers", "2"}).engine.gather_budget);
  unsetenv("ZSHARD_GATHER_BUDGET");
}

// -- the program itself --

class Program : public testing::Test {
 protected:
  void SetUp() override {
    program_ = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gpt";
    if (!std::filesystem::exists(program_)) GTEST_SKIP() << program_ << " is not built";
    std::string pattern = (std::filesystem::temp_directory_path() / "gpt_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    std::ofstream text(file("text"));
    for (int i = 0; i < 200; ++i) text << "the quick brown fox jumps over lazy dog " << i << "\n";
  }
  void TearDown() override {
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  [[nodiscard]] std::string file(const std::string& name) const { return directory_ / name; }

  // Exit code; standard output and errors go to output_. -1 if the program died of a signal.
  int run(const std::string& arguments) { return run_as_is(arguments + " 2>&1 </dev/null"); }

  // The same; the arguments end in redirections of the caller's.
  int run_as_is(const std::string& arguments, const std::string& before = "") {
    const std::string command = before + "timeout 120 " + program_.string() + " " + arguments;
    std::FILE* pipe = popen(command.c_str(), "r");
    output_.clear();
    char buffer[4096];
    while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, pipe)) {
      output_.append(buffer, count);
    }
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  [[nodiscard]] std::string small() const {
    return "--data " + file("text") +
           " --layers 1 --heads 2 --width 16 --context 8 --batch 3 --warmup 2";
  }

  [[nodiscard]] std::string digests() const {
    std::string lines;
    std::istringstream output(output_);
    for (std::string line; std::getline(output, line);) {
      if (line.rfind("digest ", 0) == 0) lines += line + "\n";
    }
    return lines;
  }

  std::filesystem::path program_;
  std::filesystem::path directory_;
  std::string output_;
};

TEST_F(Program, TrainsLogsAndPrintsDigests) {
  ASSERT_EQ(
      run(small() + " --ranks 2 --steps 5 --digest --eval-interval 2 --log " + file("log.jsonl")),
      0)
      << output_;
  EXPECT_NE(output_.find("digest parameters "), std::string::npos) << output_;
  EXPECT_NE(output_.find("digest exp_avg "), std::string::npos) << output_;
  EXPECT_NE(output_.find("digest exp_avg_sq "), std::string::npos) << output_;
  EXPECT_NE(output_.find("validation loss "), std::string::npos) << output_;
  EXPECT_NE(output_.find("stage 3*"), std::string::npos) << output_;
  std::ifstream log(file("log.jsonl"));
  std::int64_t step = 0;
  for (std::string line; std::getline(log, line); ++step) {
    const nlohmann::json entry = nlohmann::json::parse(line);
    EXPECT_EQ(entry.at("step"), step);
    EXPECT_GT(entry.at("loss").get<double>(), 0.0);
    EXPECT_GT(entry.at("norm").get<double>(), 0.0);
    EXPECT_GT(entry.at("lr").get<double>(), 0.0);
    EXPECT_FALSE(entry.at("skipped").get<bool>());
    EXPECT_GT(entry.at("tokens_per_s").get<double>(), 0.0);
    EXPECT_GT(entry.at("peak_bytes").get<std::int64_t>(), 0);
  }
  EXPECT_EQ(step, 5);

  const std::string first = digests();
  ASSERT_EQ(run(small() + " --ranks 2 --steps 5 --digest --stage 0 --optimizer-tier host"), 0)
      << output_;
  EXPECT_EQ(digests(), first);
  ASSERT_EQ(run(small() + " --ranks 2 --steps 6 --digest"), 0) << output_;
  EXPECT_NE(digests(), first);
}

TEST_F(Program, StateOnDiskLeavesTheDigests) {
  const std::string run_of = small() + " --ranks 2 --steps 5 --digest --vocab-units 2 ";
  ASSERT_EQ(run(run_of), 0) << output_;
  const std::string in_memory = digests();
  EXPECT_EQ(output_.find("disk a step"), std::string::npos) << output_;
  for (const char* name : {"a", "b"}) std::filesystem::create_directory(file(name));
  ASSERT_EQ(
      run(run_of + "--optimizer-tier nvme --gradient-tier nvme --parameter-tier nvme " +
          "--nvme-dir " + file("a") + " --nvme-dir " + file("b") + " --log " + file("log.jsonl")),
      0)
      << output_;
  EXPECT_EQ(digests(), in_memory);
  EXPECT_NE(output_.find("disk a step"), std::string::npos) << output_;
  std::ifstream log(file("log.jsonl"));
  int steps = 0;
  for (std::string line; std::getline(log, line); ++steps) {
    const nlohmann::json entry = nlohmann::json::parse(line);
    EXPECT_GT(entry.at("disk_read_bytes").get<std::int64_t>(), 0);
    EXPECT_GT(entry.at("disk_written_bytes").get<std::int64_t>(), 0);
    EXPECT_GT(entry.at("read_seconds").get<double>(), 0.0);
    EXPECT_GT(entry.at("write_seconds").get<double>(), 0.0);
    EXPECT_GE(entry.at("wait_seconds").get<double>(), 0.0);
    EXPECT_GT(entry.at("raw_share").get<double>(), 0.0);
  }
  EXPECT_EQ(steps, 5);
  for (const char* name : {"a", "b"}) EXPECT_TRUE(std::filesystem::is_empty(file(name))) << name;
}

TEST_F(Program, ThePeakIsThePlan) {
  ASSERT_EQ(run(small() + " --ranks 2 --steps 1"), 0) << output_;
  const std::string key = "peak of the engine's arenas on this rank: ";
  const std::size_t at = output_.find(key);
  ASSERT_NE(at, std::string::npos) << output_;
  long long peak = 0;
  long long planned = 0;
  ASSERT_EQ(
      std::sscanf(output_.c_str() + at + key.size(), "%lld bytes, planned %lld", &peak, &planned),
      2);
  EXPECT_GT(peak, 0);
  EXPECT_LE(peak, planned);
  EXPECT_NE(output_.find("allocated on 2 ranks: equal to the plan"), std::string::npos) << output_;
}

TEST_F(Program, NoStepsLeaveTheInitialWeights) {
  ASSERT_EQ(run(small() + " --steps 0 --digest --ranks 1"), 0) << output_;
  const std::string one = digests();
  ASSERT_EQ(run(small() + " --steps 0 --digest --ranks 3 --stage 2"), 0) << output_;
  EXPECT_EQ(digests(), one);
  ASSERT_EQ(run(small() + " --steps 0 --digest --ranks 1 --seed 2"), 0) << output_;
  EXPECT_NE(digests(), one);
}

TEST_F(Program, MisuseEndsWithCodeTwoAndAMessage) {
  std::ofstream(file("empty")).close();
  std::ofstream(file("short")) << "12345678";
  const std::vector<std::string> cases = {
      "",
      "--data " + file("missing"),
      "--data " + file("empty"),
      "--data " + directory_.string(),
      "--data " + file("short") + " --context 8 --val-fraction 0",
      small() + " --ranks 0",
      small() + " --ranks 100000",
      small() + " --stage 4",
      small() + " --stage -1",
      small() + " --heads 3",
      small() + " --vocab 100",
      small() + " --gather-budget 1",
      small() + " --gather-budget 99999999999999999999",
      small() + " --device-budget 1",
      small() + " --log /nowhere/log --ranks 2",
      small() + " --optimizer-tier nvme",  // no --nvme-dir
      small() + " --optimizer-tier nvme --nvme-dir " + file("missing"),
      small() + " --stage 2 --parameter-tier nvme --nvme-dir " + directory_.string(),
      // Legal numbers, but no machine has the memory: refused instead of killed.
      "--data " + file("text") + " --layers 1024 --width 65536 --heads 1",
      small() + " --batch 1048576 --accumulation 1 --vocab 16777216",
  };
  for (const std::string& arguments : cases) {
    EXPECT_EQ(run(arguments), 2) << arguments << "\n" << output_;
    EXPECT_NE(output_.find("gpt: "), std::string::npos) << arguments << "\n" << output_;
  }
}

// The message says what is missing: the library, the driver or the GPU.
TEST_F(Program, CudaWithoutAGpuEndsWithCodeTwoAndTheReason) {
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine has a GPU driver";
  for (const char* ranks : {" --ranks 1", " --ranks 2", ""}) {
    EXPECT_EQ(run(small() + " --device cuda" + ranks), 2) << output_;
    EXPECT_NE(output_.find("gpt: --device cuda: "), std::string::npos) << output_;
    EXPECT_NE(output_.find("--device host"), std::string::npos) << output_;
    EXPECT_EQ(output_.find("cudaErrorInsufficientDriver"), std::string::npos) << output_;
    EXPECT_EQ(output_.find("step "), std::string::npos) << output_;
  }
}

TEST_F(Program, OutputThatIsLostIsAnError) {
  const std::string trains = small() + " --ranks 1 --steps 1 --digest";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {trains + " 2>&1 >/dev/full", "No space left on device"},
      {trains + " 2>&1 >&-", "Bad file descriptor"},
      {trains + " --log " + file("log.jsonl") + " 2>&1 >&- <&-", "Bad file descriptor"},
      {"--help 2>&1 >/dev/full", "No space left on device"},
  };
  for (const auto& [arguments, reason] : cases) {
    EXPECT_EQ(run_as_is(arguments), 1) << arguments << "\n" << output_;
    EXPECT_EQ(output_, "gpt: cannot write to standard output: " + reason + "\n") << arguments;
  }
  EXPECT_EQ(run(trains + " --log /dev/full"), 1) << output_;
  EXPECT_NE(output_.find("--log: cannot write /dev/full: No space left"), std::string::npos)
      << output_;
  EXPECT_EQ(run(trains + " --log /nowhere/log"), 2) << output_;
  EXPECT_NE(output_.find("No such file or directory"), std::string::npos) << output_;
}

// Exit handlers of libraries wait for ever then.
TEST_F(Program, ShortOfAddressSpaceItEndsWithTheReason) {
#ifdef ZSHARD_SANITIZER
  GTEST_SKIP() << "a sanitizer takes more address space than the limit leaves";
#else
  // Enough for the program and the worker of OpenBLAS, not for the stack of one more thread.
  const std::string limits = "ulimit -s 8192; ulimit -v 60000; OPENBLAS_NUM_THREADS=2 ";
  EXPECT_EQ(run_as_is(small() + " --ranks 1 --steps 1 2>&1 </dev/null", limits), 2) << output_;
  EXPECT_NE(output_.find("ulimit -v"), std::string::npos) << output_;
#endif
}

TEST_F(Program, HelpListsTheArguments) {
  EXPECT_EQ(run("--help"), 0);
  for (const char* name :
       {"--data", "--device", "--gather-budget", "--optimizer-tier", "--digest", "Exit codes"}) {
    EXPECT_NE(output_.find(name), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace gpt_test
