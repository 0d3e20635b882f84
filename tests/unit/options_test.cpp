// Options by name: text, files, environment, command line, DeepSpeed configurations, document.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/base/environment.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"
#include "zshard/options.hpp"

namespace zshard {
namespace {

#ifdef ZSHARD_SOURCE_DIR
const std::string kSource = ZSHARD_SOURCE_DIR;
#else
const std::string kSource = std::string(__FILE__) + "/../../..";
#endif

std::map<std::string, std::string> values_of(const EngineOptions& options) {
  std::map<std::string, std::string> values;
  for (const OptionInfo& info : option_table()) {
    values[info.name] = get_option(options, info.name);
  }
  return values;
}

// The message of the UsageError that `call` throws; options must be as before then.
std::string refused(EngineOptions& options, const std::function<void()>& call) {
  const auto before = values_of(options);
  try {
    call();
  } catch (const UsageError& error) {
    EXPECT_EQ(values_of(options), before) << "changed by a call that threw: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no UsageError";
  return "";
}

std::string refused_value(const std::string& key, const std::string& value) {
  EngineOptions options;
  return refused(options, [&] { set_option(options, key, value); });
}

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

EngineOptions unusual() {
  EngineOptions options;
  options.stage = Stage::parameters;
  options.device = DeviceKind::cuda;
  options.device_index = 3;
  options.offload = {.optimizer = Tier::nvme,
                     .gradients = Tier::host,
                     .parameters = Tier::nvme,
                     .update_on = UpdateOn::device,
                     .nvme_dir = "/mnt/a,/mnt/b c",
                     .optimizer_nvme_bytes = 0,
                     .io_backend = IoBackendKind::posix,
                     .io_buffers = 1,
                     .io_block_bytes = 4096,
                     .io_depth = 4096,
                     .io_verify = true};
  options.gather_budget = 12345;
  options.look_ahead = 0;
  options.behind = 7;
  options.gradient_mode = GradientMode::overwrite;
  options.accumulation = Accumulation::local;
  options.reduction = Reduction::native;
  options.wire = DType::f16;
  options.reduction_group = 8;
  options.master = MasterWeights::remainder;
  options.moments = Moments::q8;
  options.loss_scale = 65536.1;
  options.sub_group_bytes = 4096;
  options.device_budget = std::numeric_limits<std::int64_t>::max();
  options.host_budget = 1;
  options.deadline_seconds = 0.1;
  options.threads = 1024;
  options.inline_queues = true;
  options.test_delay_microseconds = 1000000;
  options.log_dir = "/var/log/a b";
  options.poison_slots = true;
  return options;
}

// -- the table --

// One name a field: this does not compile when a field comes or goes, and the number of names is
// compared with the table's.
std::size_t count_fields() {
  EngineOptions options;
  auto& [stage, device, device_index, offload, gather_budget, look_ahead, behind, gradient_mode,
         accumulation, reduction, wire, reduction_group, master, moments, loss_scale,
         sub_group_bytes, device_budget, host_budget, deadline_seconds, threads, inline_queues,
         test_delay_microseconds, poison_slots, log_dir] = options;
  auto& [optimizer, gradients, parameters, update_on, nvme_dir, optimizer_nvme_bytes, io_backend,
         io_buffers, io_block_bytes, io_depth, io_verify] = offload;
  const auto count = [](const auto&... fields) { return sizeof...(fields); };
  return count(stage, device, device_index, gather_budget, look_ahead, behind, gradient_mode,
               accumulation, reduction, wire, reduction_group, master, moments, loss_scale,
               sub_group_bytes, device_budget, host_budget, deadline_seconds, threads,
               inline_queues, test_delay_microseconds, poison_slots, log_dir) +
         count(optimizer, gradients, parameters, update_on, nvme_dir, optimizer_nvme_bytes,
               io_backend, io_buffers, io_block_bytes, io_depth, io_verify);
}

TEST(OptionTable, NamesEveryFieldOnceInAllSpellings) {
  std::set<std::string> names, variables, arguments;
  for (const OptionInfo& info : option_table()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_TRUE(variables.insert(info.environment).second) << info.environment;
    EXPECT_TRUE(arguments.insert(info.argument).second) << info.argument;
    for (const auto& variable : base::environment_registry()) {
      EXPECT_NE(info.environment, variable.name);
    }
    EXPECT_FALSE(info.help.empty()) << info.name;
    EXPECT_FALSE(info.range.empty()) << info.name;
    EXPECT_EQ((info.help + info.range).find('|'), std::string::npos) << "breaks the document";
  }
  EXPECT_EQ(names.size(), count_fields());
  EXPECT_TRUE(variables.count("ZSHARD_OFFLOAD_OPTIMIZER_NVME_BYTES"));
  EXPECT_TRUE(arguments.count("--offload-optimizer-nvme-bytes"));
}

TEST(OptionTable, GivesTheDefaultsOfTheStruct) {
  for (const OptionInfo& info : option_table()) {
    EXPECT_EQ(get_option(EngineOptions{}, info.name), info.default_value) << info.name;
  }
  EXPECT_EQ(get_option(EngineOptions{}, "stage"), "parameters");
  EXPECT_EQ(get_option(EngineOptions{}, "sub_group_bytes"), "16777216");
  EXPECT_EQ(get_option(EngineOptions{}, "gather_budget"), "");
  EXPECT_EQ(get_option(EngineOptions{}, "loss_scale"), "1");
  EXPECT_EQ(get_option(EngineOptions{}, "deadline_seconds"), "600");
}

TEST(OptionTable, ReadsAndWritesEveryField) {
  const EngineOptions from = unusual();
  EngineOptions to;
  for (const OptionInfo& info : option_table()) {
    // Parameter tiers need the default stage.
    if (info.name != "stage") {
      EXPECT_NE(get_option(from, info.name), info.default_value)
          << info.name << ": the test must use another value than the default";
    }
    set_option(to, info.name, get_option(from, info.name));
  }
  EXPECT_EQ(values_of(to), values_of(from));
  EXPECT_EQ(to.stage, from.stage);
  EXPECT_EQ(to.offload.optimizer, Tier::nvme);
  EXPECT_EQ(to.offload.gradients, Tier::host);
  EXPECT_EQ(to.offload.parameters, Tier::nvme);
  EXPECT_EQ(to.offload.nvme_dir, from.offload.nvme_dir);
  EXPECT_EQ(to.offload.optimizer_nvme_bytes, 0);
  EXPECT_EQ(to.gather_budget, 12345);
  EXPECT_EQ(to.look_ahead, 0);
  EXPECT_EQ(to.behind, 7);
  EXPECT_EQ(to.gradient_mode, GradientMode::overwrite);
  EXPECT_EQ(to.accumulation, Accumulation::local);
  EXPECT_EQ(to.reduction, Reduction::native);
  EXPECT_EQ(to.wire, DType::f16);
  EXPECT_EQ(to.reduction_group, 8);
  EXPECT_EQ(to.master, MasterWeights::remainder);
  EXPECT_EQ(to.moments, Moments::q8);
  EXPECT_EQ(to.loss_scale, 65536.1);
  EXPECT_EQ(to.sub_group_bytes, 4096);
  EXPECT_EQ(to.device_budget, std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(to.host_budget, 1);
  EXPECT_EQ(to.deadline_seconds, 0.1);
  EXPECT_EQ(to.threads, 1024);
  EXPECT_TRUE(to.inline_queues);
  EXPECT_EQ(to.test_delay_microseconds, 1000000);
  EXPECT_TRUE(to.poison_slots);
  EXPECT_EQ(to.log_dir, from.log_dir);
  validate(from);
}

TEST(OptionTable, AnUnknownNameIsRefusedWithTheNearest) {
  EngineOptions options;
  expect_in(refused(options, [&] { set_option(options, "look_ahed", "1"); }), "'look_ahead'?");
  expect_in(refused(options, [&] { set_option(options, "offload.optimiser", "host"); }),
            "'offload.optimizer'?");
  expect_in(refused(options, [&] { (void)get_option(options, "stag"); }), "'stage'?");
  expect_in(refused(options, [&] { set_option(options, "temperature", "1"); }), "docs/options.md");
  expect_in(refused(options, [&] { set_option(options, "", "1"); }), "unknown option ''");
  EXPECT_LT(refused(options, [&] { set_option(options, std::string(1 << 24, 'x'), "1"); }).size(),
            400U);
}

// -- values --

struct Case {
  std::string key;
  std::vector<std::string> allowed;
  std::vector<std::string> denied;
};

TEST(OptionValues, EveryNumberIsLegalOrRefusedWithItsRange) {
  const std::string huge = "1" + std::string(30, '0');
  const std::vector<std::string> texts = {"0",
                                          "1",
                                          "-1",
                                          "-9223372036854775808",
                                          huge,
                                          "-" + huge,
                                          "9223372036854775807",
                                          "9223372036854775808",
                                          "4294967296",
                                          "2147483648",
                                          "",
                                          "unset",
                                          "nan",
                                          "-nan",
                                          "inf",
                                          "1e400",
                                          "1e-400",
                                          "1x",
                                          "1 ",
                                          " 1",
                                          "+1",
                                          "0x1",
                                          "1.5",
                                          "1,5",
                                          "--1",
                                          std::string("1\0", 2),
                                          std::string(1 << 20, '9')};
  const std::string most = "9223372036854775807";
  const std::map<std::string, std::set<std::string>> allowed = {
      {"offload.optimizer_nvme_bytes", {"0", "1", most, "4294967296", "2147483648", "", "unset"}},
      {"gather_budget", {"0", "1", most, "4294967296", "2147483648", "", "unset"}},
      {"device_budget", {"0", "1", most, "4294967296", "2147483648", "", "unset"}},
      {"host_budget", {"0", "1", most, "4294967296", "2147483648", "", "unset"}},
      {"sub_group_bytes", {most, "4294967296", "2147483648"}},
      {"io_buffers", {"1"}},
      {"io_depth", {"1"}},
      {"io_block_bytes", {most, "4294967296", "2147483648"}},
      {"look_ahead", {"0", "1"}},
      {"behind", {"0", "1"}},
      {"reduction_group", {"0", "1"}},
      {"threads", {"0", "1"}},
      {"device_index", {"-1", "0", "1"}},
      {"test_delay_microseconds", {"0", "1"}},
      {"loss_scale", {"1", "1.5", huge, most, "9223372036854775808", "4294967296", "2147483648"}},
      {"deadline_seconds", {"1", "1.5"}},
  };
  std::size_t seen = 0;
  for (const OptionInfo& info : option_table()) {
    if (info.type != "integer" && info.type != "bytes" && info.type != "number") continue;
    ++seen;
    const auto& legal = allowed.at(info.name);
    for (const std::string& text : texts) {
      SCOPED_TRACE(info.name + " = " + base::quoted(text));
      EngineOptions options;
      if (legal.count(text)) {
        EXPECT_NO_THROW(set_option(options, info.name, text));
        EXPECT_NO_THROW(validate(options));
        const std::string back = get_option(options, info.name);
        EngineOptions again;
        set_option(again, info.name, back);
        EXPECT_EQ(get_option(again, info.name), back);
      } else {
        const std::string message = refused(options, [&] { set_option(options, info.name, text); });
        expect_in(message, "option " + info.name);
        expect_in(message, info.range);
        EXPECT_LT(message.size(), 400U);
      }
    }
  }
  EXPECT_EQ(seen, allowed.size());
}

TEST(OptionValues, TheEndsOfTheRangesAreExact) {
  const std::vector<Case> cases = {
      {"look_ahead", {"1048576"}, {"1048577"}},
      {"behind", {"1048576"}, {"1048577"}},
      {"reduction_group", {"1048576"}, {"1048577"}},
      {"threads", {"1024"}, {"1025"}},
      {"device_index", {"1023"}, {"-2", "1024"}},
      {"test_delay_microseconds", {"1000000"}, {"1000001"}},
      {"sub_group_bytes", {"4096", "4KiB"}, {"4095", "0", "4KB", "-4096"}},
      {"gather_budget", {"1.5GiB", "64 MiB", "0B"}, {"-1 GiB", "1.5", "8388608TiB", "1K"}},
      {"loss_scale", {"1e-30", "1e30", "0.5"}, {"0.9e-30", "1.1e30", "0", "-1"}},
      {"deadline_seconds", {"1e9", "0.001", "1e-300"}, {"1.0000001e9", "0", "-0", "-1"}},
  };
  for (const Case& c : cases) {
    for (const std::string& text : c.allowed) {
      EngineOptions options;
      EXPECT_NO_THROW(set_option(options, c.key, text)) << c.key << " = " << text;
    }
    for (const std::string& text : c.denied) {
      SCOPED_TRACE(text);
      expect_in(refused_value(c.key, text), "option " + c.key);
    }
  }
}

TEST(OptionValues, ChoicesGoByNameAndStagesAlsoByNumber) {
  EngineOptions options;
  for (int stage = 0; stage <= 3; ++stage) {
    set_option(options, "stage", std::to_string(stage));
    EXPECT_EQ(options.stage, static_cast<Stage>(stage));
    set_option(options, "stage", to_string(static_cast<Stage>(stage)));
    EXPECT_EQ(options.stage, static_cast<Stage>(stage));
  }
  for (const char* text : {"4", "-1", "00", "1 ", "", "unset", "Gradients", "3.0"}) {
    expect_in(refused_value("stage", text), "gradients (2)");
  }
  for (const char* text : {"", "unset", "cpu", "0", "Host", "host "}) {
    expect_in(refused_value("offload.optimizer", text), "device, host, nvme");
  }
  expect_in(refused_value("wire", "fp16"), "f32, bf16, f16; unset");
}

TEST(OptionValues, WhatMayBeUnsetTakesNothingOrTheWord) {
  for (const char* text : {"", "unset"}) {
    EngineOptions options = unusual();
    for (const char* key : {"gather_budget", "device_budget", "host_budget", "wire",
                            "offload.optimizer_nvme_bytes", "offload.nvme_dir"}) {
      set_option(options, key, text);
      EXPECT_EQ(get_option(options, key), "") << key;
    }
    EXPECT_FALSE(options.gather_budget || options.device_budget || options.host_budget ||
                 options.wire || options.offload.optimizer_nvme_bytes);
    EXPECT_EQ(options.offload.nvme_dir, "");
  }
}

TEST(OptionValues, BooleansHaveFourSpellings) {
  EngineOptions options;
  for (const char* text : {"true", "1", "yes", "on"}) {
    options.poison_slots = false;
    set_option(options, "poison_slots", text);
    EXPECT_TRUE(options.poison_slots) << text;
  }
  for (const char* text : {"false", "0", "no", "off"}) {
    options.poison_slots = true;
    set_option(options, "poison_slots", text);
    EXPECT_FALSE(options.poison_slots) << text;
  }
  for (const char* text : {"", "unset", "2", "-1", "TRUE", "true "}) {
    expect_in(refused_value("poison_slots", text), "true, false");
  }
}

TEST(OptionValues, DirectoriesAreAListWithoutHoles) {
  EngineOptions options;
  set_option(options, "offload.nvme_dir", "/mnt/a,/mnt/b c,\xC3\xA9");
  EXPECT_EQ(options.offload.nvme_dir, "/mnt/a,/mnt/b c,\xC3\xA9");
  for (const std::string& text :
       {std::string(","), std::string("/a,"), std::string(",/a"), std::string("/a,,/b"),
        std::string("/a\nb"), std::string("/a\0b", 4), std::string(65537, 'a')}) {
    expect_in(refused_value("offload.nvme_dir", text), "directories separated by commas");
  }
}

TEST(OptionValues, TheLogDirectoryIsOnePath) {
  EngineOptions options;
  set_option(options, "log_dir", "logs of, mine");
  EXPECT_EQ(options.log_dir, "logs of, mine");
  for (const char* text : {"", "unset"}) {
    options.log_dir = "a";
    set_option(options, "log_dir", text);
    EXPECT_EQ(options.log_dir, "");
  }
  for (const std::string& text :
       {std::string("/a\nb"), std::string("/a\0b", 4), std::string(4096, 'a')}) {
    expect_in(refused_value("log_dir", text), "a directory, at most 4095 bytes");
  }
}

// -- validate --

TEST(ValidateOptions, AcceptsDefaultsAndNamesWhatCodeSetOutOfRange) {
  EXPECT_NO_THROW(validate(EngineOptions{}));
  const std::vector<std::pair<std::string, std::function<void(EngineOptions&)>>> wrong = {
      {"stage", [](EngineOptions& o) { o.stage = static_cast<Stage>(4); }},
      {"offload.optimizer", [](EngineOptions& o) { o.offload.optimizer = static_cast<Tier>(9); }},
      {"offload.nvme_dir", [](EngineOptions& o) { o.offload.nvme_dir = "a,,b"; }},
      {"offload.optimizer_nvme_bytes",
       [](EngineOptions& o) { o.offload.optimizer_nvme_bytes = -1; }},
      {"gather_budget",
       [](EngineOptions& o) { o.gather_budget = std::numeric_limits<std::int64_t>::min(); }},
      {"look_ahead", [](EngineOptions& o) { o.look_ahead = -1; }},
      {"look_ahead", [](EngineOptions& o) { o.look_ahead = std::numeric_limits<int>::max(); }},
      {"behind", [](EngineOptions& o) { o.behind = std::numeric_limits<int>::min(); }},
      {"wire", [](EngineOptions& o) { o.wire = static_cast<DType>(3); }},
      {"reduction_group", [](EngineOptions& o) { o.reduction_group = -2; }},
      {"loss_scale", [](EngineOptions& o) { o.loss_scale = 0.0; }},
      {"loss_scale", [](EngineOptions& o) { o.loss_scale = -1.0; }},
      {"loss_scale",
       [](EngineOptions& o) { o.loss_scale = std::numeric_limits<double>::quiet_NaN(); }},
      {"loss_scale",
       [](EngineOptions& o) { o.loss_scale = std::numeric_limits<double>::infinity(); }},
      {"sub_group_bytes", [](EngineOptions& o) { o.sub_group_bytes = 0; }},
      {"device_budget", [](EngineOptions& o) { o.device_budget = -5; }},
      {"host_budget", [](EngineOptions& o) { o.host_budget = -5; }},
      {"deadline_seconds", [](EngineOptions& o) { o.deadline_seconds = 0; }},
      {"deadline_seconds",
       [](EngineOptions& o) { o.deadline_seconds = std::numeric_limits<double>::infinity(); }},
      {"threads", [](EngineOptions& o) { o.threads = -1; }},
      {"test_delay_microseconds", [](EngineOptions& o) { o.test_delay_microseconds = -1; }},
  };
  for (const auto& [name, change] : wrong) {
    SCOPED_TRACE(name);
    EngineOptions options;
    change(options);
    const std::string message = refused(options, [&] { validate(options); });
    expect_in(message, "option " + name + ":");
    for (const OptionInfo& info : option_table()) {
      if (info.name == name) expect_in(message, info.range);
    }
  }
}

TEST(ValidateOptions, ParameterTiersNeedStage3) {
  EngineOptions options;
  options.offload.parameters = Tier::host;
  EXPECT_NO_THROW(validate(options));
  options.stage = Stage::gradients;
  expect_in(refused(options, [&] { validate(options); }), "offload.parameters");
}

// -- files --

class OptionFile : public testing::Test {
 protected:
  OptionFile() {
    std::string pattern = testing::TempDir() + "/zshard_test_options_XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/options.conf";
  }
  ~OptionFile() override {
    ::chmod(path_.c_str(), 0600);
    ::unlink(path_.c_str());
    ::rmdir(directory_.c_str());
  }
  void write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }
  EngineOptions read(const std::string& text) {
    write(text);
    EngineOptions options;
    apply_option_file(options, path_);
    return options;
  }
  std::string refused_text(const std::string& text) {
    write(text);
    EngineOptions options;
    return refused(options, [&] { apply_option_file(options, path_); });
  }
  std::string directory_;
  std::string path_;
};

TEST_F(OptionFile, AppliesLinesAndSkipsComments) {
  const EngineOptions options = read(
      "# a comment\n"
      "\n"
      "  stage = 2   # gradients\n"
      "look_ahead=3\n"
      "\tgather_budget\t=\t1.5 GiB\t\n"
      "wire = unset\n"
      "device_budget =\n"
      "   # another\n"
      "offload.nvme_dir = \"/mnt/a #1 \" # quoted\n"
      "look_ahead = 4");
  EXPECT_EQ(options.stage, Stage::gradients);
  EXPECT_EQ(options.look_ahead, 4) << "the last line wins, also without a line end";
  EXPECT_EQ(options.gather_budget, 3LL << 29);
  EXPECT_EQ(options.offload.nvme_dir, "/mnt/a #1 ");
}

TEST_F(OptionFile, TakesForeignLineEndsAndByteOrderMarks) {
  const EngineOptions options = read("\xEF\xBB\xBFstage = 1\r\nlook_ahead = 2\r\n\r\n");
  EXPECT_EQ(options.stage, Stage::optimizer);
  EXPECT_EQ(options.look_ahead, 2);
}

TEST_F(OptionFile, AnEmptyFileChangesNothing) {
  for (const char* text : {"", "\n", "\n\n", "#", "\r\n", "   "}) {
    EXPECT_EQ(values_of(read(text)), values_of(EngineOptions{})) << base::quoted(text);
  }
}

TEST_F(OptionFile, ABadLineIsNamedAndNothingIsApplied) {
  expect_in(refused_text("stage = 1\n\nlook_ahed = 3\n"), path_ + ":3: unknown option 'look_ahed'");
  expect_in(refused_text("stage = 1\nlook_ahead = -1"), path_ + ":2: option look_ahead: '-1'");
  expect_in(refused_text("stage"), path_ + ":1: expected 'name = value'");
  expect_in(refused_text("= 3"), path_ + ":1: expected 'name = value'");
  expect_in(refused_text("stage # = 3"), path_ + ":1: expected 'name = value'");
  expect_in(refused_text("stage = \"2"), path_ + ":1: the quote is not closed");
  expect_in(refused_text("stage = \"2\" 3"), path_ + ":1: text behind the closing quote");
  expect_in(refused_text("stage = 2 3"), path_ + ":1: option stage: '2 3'");
  expect_in(refused_text(std::string("\0\0\0\n", 4)), path_ + ":1: expected 'name = value'");
  expect_in(refused_text("\x1f\x8b\x08\n"), path_ + ":1: expected");
}

TEST_F(OptionFile, AFileThatCannotBeReadIsAnIoErrorWithTheReason) {
  const auto io_error = [](const std::string& path) -> std::string {
    EngineOptions options = unusual();
    try {
      apply_option_file(options, path);
    } catch (const IoError& error) {
      EXPECT_EQ(values_of(options), values_of(unusual()));
      return error.what();
    }
    ADD_FAILURE() << "no IoError";
    return "";
  };
  const std::string missing = io_error(directory_ + "/missing");
  expect_in(missing, directory_ + "/missing");
  expect_in(missing, "No such file or directory");
  expect_in(io_error(""), "No such file or directory");
  expect_in(io_error(directory_), "Is a directory");
  expect_in(io_error(std::string(10000, 'a')), "File name too long");
  if (::geteuid() != 0) {
    write("stage = 1\n");
    ::chmod(path_.c_str(), 0);
    expect_in(io_error(path_), "Permission denied");
  }
  EngineOptions options;
  expect_in(refused(options, [&] { apply_option_file(options, std::string("a\0b", 3)); }),
            "zero byte");
}

TEST_F(OptionFile, AnEndlessOrHugeFileIsRefused) {
  EngineOptions options;
  expect_in(refused(options, [&] { apply_option_file(options, "/dev/zero"); }), "16.00 MiB");
  const std::string message = refused_text("look_ahead = " + std::string(100'000'000, '1'));
  expect_in(message, "16.00 MiB");
  expect_in(refused_text(std::string(16 << 20, 'x')), path_ + ":1: expected");
  expect_in(refused_text("look_ahead = " + std::string(1 << 20, '1')), "is not allowed");
}

// -- environment --

class Variable {
 public:
  Variable(const std::string& name, const std::string& value) : name_(name) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { ::unsetenv(name_.c_str()); }

 private:
  std::string name_;
};

TEST(OptionEnvironment, SetsEveryOptionByItsVariable) {
  const EngineOptions from = unusual();
  std::vector<std::unique_ptr<Variable>> variables;
  for (const OptionInfo& info : option_table()) {
    variables.push_back(std::make_unique<Variable>(info.environment, get_option(from, info.name)));
  }
  EngineOptions options;
  apply_option_environment(options);
  EXPECT_EQ(values_of(options), values_of(from));
}

TEST(OptionEnvironment, WithoutVariablesChangesNothing) {
  EngineOptions options = unusual();
  apply_option_environment(options);
  EXPECT_EQ(values_of(options), values_of(unusual()));
}

TEST(OptionEnvironment, NamesTheVariableThatIsWrong) {
  EngineOptions options;
  const Variable good("ZSHARD_BEHIND", "5");
  {
    const Variable bad("ZSHARD_LOOK_AHEAD", "-1");
    const std::string message = refused(options, [&] { apply_option_environment(options); });
    expect_in(message, "environment variable ZSHARD_LOOK_AHEAD");
    expect_in(message, "from 0 to 1048576");
  }
  {
    const Variable bad("ZSHARD_LOOK_AHED", "1");
    expect_in(refused(options, [&] { apply_option_environment(options); }),
              "Did you mean 'ZSHARD_LOOK_AHEAD'?");
  }
  {
    const Variable bad("ZSHARD_TEMPERATURE", "1");
    expect_in(refused(options, [&] { apply_option_environment(options); }), "names no option");
  }
  {
    const Variable bad("ZSHARD_", "1");
    expect_in(refused(options, [&] { apply_option_environment(options); }), "'ZSHARD_'");
  }
  apply_option_environment(options);
  EXPECT_EQ(options.behind, 5);
}

TEST(OptionEnvironment, LeavesRegisteredAndForeignVariablesAlone) {
  const Variable log("ZSHARD_TEST_SOMETHING", "x");
  const Variable foreign("ZSHARDLIKE", "x");
  std::vector<std::unique_ptr<Variable>> variables;
  for (const auto& known : base::environment_registry()) {
    if (known.prefix || std::getenv(known.name.c_str()) != nullptr) continue;
    variables.push_back(std::make_unique<Variable>(known.name, "x"));
  }
  EngineOptions options;
  EXPECT_NO_THROW(apply_option_environment(options));
  EXPECT_EQ(values_of(options), values_of(EngineOptions{}));
}

// -- command line --

using Arguments = std::vector<std::string>;

std::string refused_arguments(const Arguments& arguments) {
  EngineOptions options;
  return refused(options, [&] { (void)apply_option_arguments(options, arguments); });
}

TEST(OptionArguments, TakesBothFormsAndHandsTheRestBackInOrder) {
  EngineOptions options;
  const Arguments rest = apply_option_arguments(
      options,
      Arguments{"train", "--stage", "2", "-v", "--look-ahead=4", "--epochs", "3", "--zshard-behind",
                "0", "--zshard-offload-optimizer=host", "", "-", "--wire=", "--", "--stage", "1"});
  EXPECT_EQ(rest, (Arguments{"train", "-v", "--epochs", "3", "", "-", "--", "--stage", "1"}));
  EXPECT_EQ(options.stage, Stage::gradients);
  EXPECT_EQ(options.look_ahead, 4);
  EXPECT_EQ(options.behind, 0);
  EXPECT_EQ(options.offload.optimizer, Tier::host);
  EXPECT_TRUE(apply_option_arguments(options, {}).empty());
}

TEST(OptionArguments, SetsEveryOptionByItsArgument) {
  const EngineOptions from = unusual();
  Arguments apart, joined;
  for (const OptionInfo& info : option_table()) {
    apart.push_back(info.argument);
    apart.push_back(get_option(from, info.name));
    joined.push_back("--zshard-" + info.argument.substr(2) + "=" + get_option(from, info.name));
  }
  for (const Arguments& arguments : {apart, joined}) {
    EngineOptions options;
    EXPECT_TRUE(apply_option_arguments(options, arguments).empty());
    EXPECT_EQ(values_of(options), values_of(from));
  }
}

TEST(OptionArguments, NamesTheArgumentThatIsWrong) {
  expect_in(refused_arguments({"--stage", "2", "--look-ahead", "-1"}), "argument --look-ahead");
  expect_in(refused_arguments({"--stage", "2", "--threads=x"}), "from 0 to 1024");
  expect_in(refused_arguments({"--behind", "1", "--stage"}), "argument --stage has no value");
  expect_in(refused_arguments({"--stage", "--behind", "1"}), "argument --stage has no value");
  expect_in(refused_arguments({"--stage="}), "argument --stage");
  expect_in(refused_arguments({"--zshard-look-ahed", "1"}), "'--zshard-look-ahead'?");
  expect_in(refused_arguments({"--zshard-temperature=1"}), "names no option");
  expect_in(refused_arguments({"--zshard-"}), "names no option");
  expect_in(refused_arguments({"--stage", "2", "--stage=2"}), "--stage is given twice");
  expect_in(refused_arguments({"--stage", "2", "--zshard-stage", "3"}),
            "--stage and --zshard-stage both set the option stage");
  EngineOptions options;
  EXPECT_EQ(apply_option_arguments(options, Arguments{"--look-ahed", "1", "--stagex", "--zshard"}),
            (Arguments{"--look-ahed", "1", "--stagex", "--zshard"}))
      << "foreign names are the program's";
}

TEST_F(OptionFile, WhatIsAppliedLastWins) {
  write("look_ahead = 2\nbehind = 2\nthreads = 2\n");
  const Variable behind("ZSHARD_BEHIND", "3");
  const Variable threads("ZSHARD_THREADS", "3");
  EngineOptions options;
  options.look_ahead = options.behind = options.threads = 1;
  options.reduction_group = 1;
  apply_option_file(options, path_);
  apply_option_environment(options);
  (void)apply_option_arguments(options, Arguments{"--threads=4"});
  EXPECT_EQ(options.reduction_group, 1);
  EXPECT_EQ(options.look_ahead, 2);
  EXPECT_EQ(options.behind, 3);
  EXPECT_EQ(options.threads, 4);
}

// -- DeepSpeed --

const std::string kDeepspeed = R"({
  "train_batch_size": 32,
  "gradient_clipping": 1.0,
  "communication_data_type": "bf16",
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
  "fp16": {"enabled": true, "loss_scale": 1024, "initial_scale_power": 16},
  "bf16": {"enabled": false},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true},
    "offload_param": {"device": "cpu"},
    "sub_group_size": 1e6,
    "overlap_comm": true
  }
})";

std::string refused_json(const std::string& json) {
  EngineOptions options;
  return refused(options, [&] { (void)apply_deepspeed_config(options, json); });
}

EngineOptions from_json(const std::string& json) {
  EngineOptions options;
  options.stage = Stage::optimizer;
  (void)apply_deepspeed_config(options, json);
  return options;
}

TEST(DeepspeedConfig, TakesWellKnownNamesAndReturnsTheOthers) {
  EngineOptions options;
  options.stage = Stage::optimizer;
  const std::vector<std::string> others = apply_deepspeed_config(options, kDeepspeed);
  EXPECT_EQ(options.stage, Stage::parameters);
  EXPECT_EQ(options.offload.optimizer, Tier::nvme);
  EXPECT_EQ(options.offload.parameters, Tier::host);
  EXPECT_EQ(options.offload.gradients, Tier::device);
  EXPECT_EQ(options.offload.nvme_dir, "/local_nvme");
  EXPECT_EQ(options.sub_group_bytes, 4'000'000);
  EXPECT_EQ(options.wire, DType::bf16);
  EXPECT_EQ(options.loss_scale, 1024.0);
  EXPECT_EQ(
      std::multiset<std::string>(others.begin(), others.end()),
      (std::multiset<std::string>{
          "train_batch_size", "gradient_clipping", "optimizer.type", "optimizer.params.lr",
          "optimizer.params.betas", "fp16.enabled", "fp16.initial_scale_power", "bf16.enabled",
          "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.overlap_comm"}));
}

TEST(DeepspeedConfig, ChangesOnlyWhatIsThere) {
  const auto before = [] {
    EngineOptions options;
    options.stage = Stage::optimizer;
    return values_of(options);
  }();
  for (const char* json :
       {"{}", " {\n} ", R"({"zero_optimization": {}})", R"({"zero_optimization": null})",
        R"({"zero_optimization": {"offload_optimizer": null, "offload_param": {}}})",
        R"({"communication_data_type": null})", R"({"fp16": {"enabled": false}})",
        R"({"fp16": {"enabled": false, "loss_scale": 0}})", R"({"fp16": {"loss_scale": 8}})",
        R"({"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "/x"}}})",
        R"({"zero_optimization.stage": 2})", R"({"stage": 2})"}) {
    EXPECT_EQ(values_of(from_json(json)), before) << json;
  }
}

TEST(DeepspeedConfig, DynamicLossScalingIsRefusedByName) {
  for (const char* json :
       {R"({"fp16": {"enabled": true}})", R"({"fp16": {"enabled": true, "loss_scale": 0}})",
        R"({"fp16": {"enabled": true, "loss_scale": 0.0}})",
        R"({"fp16": {"loss_scale": -0.0, "enabled": true}})"}) {
    expect_in(refused_json(json), "fp16.loss_scale");
  }
}

TEST(DeepspeedConfig, AValueThatCannotBeServedIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"zero_optimization": true})", "zero_optimization"},
      {R"({"zero_optimization": {"stage": 4}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"stage": -1}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"stage": "3"}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"stage": 2.5}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"stage": null}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"stage": 1e300}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"stage": 18446744073709551615}})", "zero_optimization.stage"},
      {R"({"zero_optimization": {"sub_group_size": "auto"}})", "sub_group_size"},
      {R"({"zero_optimization": {"sub_group_size": 0}})", "sub_group_size"},
      {R"({"zero_optimization": {"sub_group_size": -1000000}})", "sub_group_size"},
      {R"({"zero_optimization": {"sub_group_size": 2305843009213693952}})", "sub_group_size"},
      {R"({"zero_optimization": {"sub_group_size": 9223372036854775808}})", "sub_group_size"},
      {R"({"zero_optimization": {"offload_optimizer": "cpu"}})", "offload_optimizer"},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "tape"}}})", "device"},
      {R"({"zero_optimization": {"offload_param": {"device": 1}}})", "offload_param.device"},
      {R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": 3}}})",
       "nvme_path"},
      {R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a,/b"}}})",
       "nvme_path"},
      {R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "\u0000"}}})",
       "nvme_path"},
      {R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a"},
           "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}})",
       "nvme_path"},
      {R"({"fp16": {"enabled": "auto"}})", "fp16.enabled"},
      {R"({"fp16": {"enabled": 1, "loss_scale": 1}})", "fp16.enabled"},
      {R"({"fp16": {"enabled": true, "loss_scale": "1"}})", "fp16.loss_scale"},
      {R"({"fp16": {"enabled": true, "loss_scale": -8}})", "fp16.loss_scale"},
      {R"({"fp16": {"enabled": true, "loss_scale": 1e300}})", "fp16.loss_scale"},
      {R"({"fp16": []})", "fp16"},
      {R"({"communication_data_type": "int8"})", "communication_data_type"},
      {R"({"communication_data_type": 16})", "communication_data_type"},
  };
  for (const auto& [json, name] : cases) {
    SCOPED_TRACE(json);
    expect_in(refused_json(json), name);
  }
}

TEST(DeepspeedConfig, WireTakesDeepspeedsNames) {
  EXPECT_EQ(from_json(R"({"communication_data_type": "fp16"})").wire, DType::f16);
  EXPECT_EQ(from_json(R"({"communication_data_type": "bfp16"})").wire, DType::bf16);
  EXPECT_EQ(from_json(R"({"communication_data_type": "fp32"})").wire, DType::f32);
}

TEST(DeepspeedConfig, HostileTextIsRefusedWithoutHarm) {
  const std::string deep_arrays(1'000'000, '[');
  std::string deep_objects;
  for (int i = 0; i < 100'000; ++i) deep_objects += "{\"a\":";
  std::string closed = std::string(1000, '[') + std::string(1000, ']');
  for (const std::string& json :
       {std::string(), std::string(" "), std::string("null"), std::string("[]"), std::string("3"),
        std::string("\"x\""), std::string("{\"a\":1e999}"), std::string("{\"a\":1}}"),
        std::string("{\"a\":\"\xFF\"}"), std::string("{\"a\":\"\\ud800\"}"),
        std::string("{\"a\":1,\"a\":2}"),
        std::string(R"({"zero_optimization": {"stage": 1, "stage": 2}})"), std::string("{'a':1}"),
        std::string("{\"a\":NaN}"), std::string("\0", 1), deep_arrays, deep_objects,
        "{\"a\":" + closed + "}", std::string(17 << 20, ' ')}) {
    SCOPED_TRACE(base::quoted(json));
    EXPECT_LT(refused_json(json).size(), 400U);
  }
}

TEST(DeepspeedConfig, EveryTruncationIsRefused) {
  for (std::size_t length = 0; length < kDeepspeed.size(); ++length) {
    SCOPED_TRACE(length);
    const std::string message = refused_json(kDeepspeed.substr(0, length));
    EXPECT_TRUE(length == 0 || message.find("it ends too early, after " + std::to_string(length)) !=
                                   std::string::npos)
        << message;
  }
}

TEST(DeepspeedConfig, EveryChangedByteIsReadOrRefused) {
  int read = 0, wrong = 0;
  for (std::size_t at = 0; at < kDeepspeed.size(); ++at) {
    for (const char byte : {'\0', '"', '{', '}', '[', ',', '9', '-', 'e', '.', '\\', '\xFF'}) {
      std::string json = kDeepspeed;
      json[at] = byte;
      EngineOptions options;
      try {
        (void)apply_deepspeed_config(options, json);
        EXPECT_NO_THROW(validate(options));
        ++read;
      } catch (const UsageError&) {
        EXPECT_EQ(values_of(options), values_of(EngineOptions{}));
        ++wrong;
      }
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_GT(wrong, read);
}

// -- document --

TEST(OptionDocument, DocsOptionsIsWhatTheTableSays) {
  const std::string path = kSource + "/docs/options.md";
  const char* write = std::getenv("ZSHARD_TEST_WRITE_DOCS");
  if (write != nullptr && std::string(write) == "1") {
    std::ofstream(path, std::ios::binary) << options_markdown();
  }
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file) << "cannot read " << path;
  std::ostringstream content;
  content << file.rdbuf();
  EXPECT_TRUE(content.str() == options_markdown())
      << path << " differs from the option table. Write it anew with ZSHARD_TEST_WRITE_DOCS=1 "
      << "test_unit --gtest_filter=OptionDocument.*";
}

TEST(OptionDocument, NamesEverySpelling) {
  const std::string text = options_markdown();
  for (const OptionInfo& info : option_table()) {
    for (const std::string& part : {info.name, info.environment, info.argument, info.range}) {
      expect_in(text, part);
    }
  }
  for (const auto& variable : base::environment_registry()) expect_in(text, variable.name);
}

}  // namespace
}  // namespace zshard
