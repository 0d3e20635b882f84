// runtime/base: names, suggestions, sizes, environment, log.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/bytes.hpp"
#include "runtime/base/environment.hpp"
#include "runtime/base/log.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"
#include "runtime/base/system_reason.hpp"
#include "zshard/types.hpp"

namespace zshard::base {
namespace {

TEST(TypeNames, AreThoseOfTheEnumerators) {
  EXPECT_EQ(to_string(DType::f32), "f32");
  EXPECT_EQ(to_string(DType::bf16), "bf16");
  EXPECT_EQ(to_string(DType::f16), "f16");
  EXPECT_EQ(to_string(Stage::replicated), "replicated");
  EXPECT_EQ(to_string(Stage::optimizer), "optimizer");
  EXPECT_EQ(to_string(Stage::gradients), "gradients");
  EXPECT_EQ(to_string(Stage::parameters), "parameters");
  EXPECT_EQ(to_string(Tier::device), "device");
  EXPECT_EQ(to_string(Tier::host), "host");
  EXPECT_EQ(to_string(Tier::nvme), "nvme");
  EXPECT_EQ(to_string(Pass::forward), "forward");
  EXPECT_EQ(to_string(Pass::recompute), "recompute");
  EXPECT_EQ(to_string(Pass::backward), "backward");
  EXPECT_EQ(to_string(GradientMode::overwrite), "overwrite");
  EXPECT_EQ(to_string(GradientMode::accumulate), "accumulate");
  EXPECT_EQ(to_string(Accumulation::reduced), "reduced");
  EXPECT_EQ(to_string(Accumulation::local), "local");
  EXPECT_EQ(to_string(Reduction::ordered), "ordered");
  EXPECT_EQ(to_string(Reduction::native), "native");
  EXPECT_EQ(to_string(MasterWeights::f32), "f32");
  EXPECT_EQ(to_string(MasterWeights::remainder), "remainder");
  EXPECT_EQ(to_string(MasterWeights::none), "none");
  EXPECT_EQ(to_string(Moments::f32), "f32");
  EXPECT_EQ(to_string(Moments::bf16), "bf16");
  EXPECT_EQ(to_string(Moments::q8), "q8");
}

TEST(TypeNames, SayInvalidForAValueWithoutEnumerator) {
  EXPECT_EQ(to_string(static_cast<DType>(99)), "invalid");
  EXPECT_EQ(to_string(static_cast<Stage>(4)), "invalid");
  EXPECT_EQ(to_string(static_cast<Tier>(3)), "invalid");
  EXPECT_EQ(to_string(static_cast<Pass>(255)), "invalid");
}

TEST(Nearest, FindsTheNameThatWasMeant) {
  const std::vector<std::string> names = {"look_ahead", "behind", "loss_scale", "offload.optimizer",
                                          "wire"};
  EXPECT_EQ(nearest("look_ahed", names), "look_ahead");
  EXPECT_EQ(nearest("lookahead", names), "look_ahead");
  EXPECT_EQ(nearest("LOOK-AHEAD", names), "look_ahead");
  EXPECT_EQ(nearest("behnid", names), "behind");
  EXPECT_EQ(nearest("offload_optimzer", names), "offload.optimizer");
  EXPECT_EQ(nearest("wire", names), "wire");
  EXPECT_EQ(did_you_mean("bihind", names), " Did you mean 'behind'?");
}

TEST(Nearest, IsSilentWhereNothingIsNear) {
  const std::vector<std::string> names = {"look_ahead", "wire", ""};
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest("temperature", names), "");
  EXPECT_EQ(nearest("x", names), "");
  EXPECT_EQ(nearest("wire", {}), "");
  EXPECT_EQ(nearest(std::string(1 << 20, 'w'), names), "");
  EXPECT_EQ(did_you_mean("temperature", names), "");
}

TEST(Nearest, CountsASwapOfNeighboursAsOneEdit) {
  const std::vector<std::string> names = {"abXYef", "abdcef"};
  EXPECT_EQ(nearest("abcdef", names), "abdcef");
  const std::vector<std::string> equals = {"wirex", "wirey"};
  EXPECT_EQ(nearest("wire", equals), "wirex") << "the first of equals";
}

TEST(Quote, KeepsForeignTextFromBreakingOrFloodingAMessage) {
  EXPECT_EQ(base::quoted("plain"), "'plain'");
  EXPECT_EQ(base::quoted(""), "''");
  EXPECT_EQ(base::quoted(std::string_view("a\n\x1b[2J\0b", 7)), "'a\\x0a\\x1b[2J\\x00'");
  EXPECT_EQ(base::quoted(std::string(81, 'a')), "'" + std::string(80, 'a') + "...'");
  EXPECT_EQ(base::quoted(std::string(80, 'a')), "'" + std::string(80, 'a') + "'");
  EXPECT_EQ(base::quoted(std::string(79, 'a') + "\xC3\xA9"), "'" + std::string(79, 'a') + "...'")
      << "a UTF-8 sequence is not cut";
  EXPECT_EQ(base::quoted("\xff\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"),
            "'\\xff\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80'");
  for (const char* wrong :
       {"\x80", "\xC3", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82"}) {
    for (const char c : base::quoted(wrong)) EXPECT_GE(c, 0x20) << "a byte that is no UTF-8";
  }
  EXPECT_LT(base::quoted(std::string(100 << 20, '\x80')).size(), 100U);
}

TEST(HumanBytes, HasTwoDecimalsInTheLargestUnit) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1), "1 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(3LL << 29), "1.50 GiB");
  EXPECT_EQ(human_bytes(2 << 20), "2.00 MiB");
  EXPECT_EQ(human_bytes(-1024), "-1.00 KiB");
}

TEST(HumanBytes, MovesToTheNextUnitRatherThanSay1024) {
  EXPECT_EQ(human_bytes((1 << 20) - 1), "1.00 MiB");
  EXPECT_EQ(human_bytes(1023 * 1024), "1023.00 KiB");
}

TEST(HumanBytes, HoldsTheEndsOfTheRange) {
  EXPECT_EQ(human_bytes(std::numeric_limits<std::int64_t>::max()), "8.00 EiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<std::int64_t>::min()), "-8.00 EiB");
}

TEST(ParseBytes, ReadsUnitsOfBothKinds) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("007"), 7);
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("17B"), 17);
  EXPECT_EQ(parse_bytes("1KiB"), 1024);
  EXPECT_EQ(parse_bytes("64 MiB"), 64 << 20);
  EXPECT_EQ(parse_bytes("3GiB"), 3LL << 30);
  EXPECT_EQ(parse_bytes("2TiB"), 2LL << 40);
  EXPECT_EQ(parse_bytes("1KB"), 1000);
  EXPECT_EQ(parse_bytes("5MB"), 5'000'000);
  EXPECT_EQ(parse_bytes("6GB"), 6'000'000'000);
  EXPECT_EQ(parse_bytes("7TB"), 7'000'000'000'000);
  EXPECT_EQ(parse_bytes("1gib"), 1LL << 30);
  EXPECT_EQ(parse_bytes("-3KiB"), -3072);
}

TEST(ParseBytes, ReadsDecimalsWithAUnitExactly) {
  EXPECT_EQ(parse_bytes("1.5GiB"), 3LL << 29);
  EXPECT_EQ(parse_bytes("0.1KB"), 100);
  EXPECT_EQ(parse_bytes("0.0001KB"), 0) << "rounded down";
  EXPECT_EQ(parse_bytes("1.999999999999999999999999999999KB"), 1999);
  EXPECT_EQ(parse_bytes("8388607.9999999999999999999TiB"),
            std::numeric_limits<std::int64_t>::max());
}

TEST(ParseBytes, RefusesWhatIsNoSize) {
  for (const char* text : {"",    " ",      "-",     "+1",    "x",   "1x",     "1 ",  " 1",
                           "1.5", "1.",     ".5GiB", "1.GiB", "nan", "inf",    "1e9", "0x10",
                           "1K",  "1 Ki B", "1KiBs", "1GiB1", "--1", "1,5GiB", "GiB"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << base::quoted(text);
  }
}

TEST(ParseBytes, NeverOverflows) {
  EXPECT_EQ(parse_bytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse_bytes("-9223372036854775807"), -std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse_bytes("9223372036854775808"), std::nullopt);
  EXPECT_EQ(parse_bytes("18446744073709551617"), std::nullopt);
  EXPECT_EQ(parse_bytes("8388607TiB"), 8388607LL << 40);
  EXPECT_EQ(parse_bytes("8388608TiB"), std::nullopt);
  EXPECT_EQ(parse_bytes("9999999999999999999TB"), std::nullopt);
  EXPECT_EQ(parse_bytes("1" + std::string(30, '0')), std::nullopt);
  EXPECT_EQ(parse_bytes(std::string(1 << 20, '9')), std::nullopt);
  EXPECT_EQ(parse_bytes(std::string(1 << 20, '0') + "1"), 1);
}

TEST(ParseBytes, ReadsBackWhatHumanBytesWrites) {
  for (const std::int64_t bytes : {0LL, 1LL, 1023LL, 1024LL, 1536LL, 3LL << 29, 5LL << 40}) {
    EXPECT_EQ(parse_bytes(human_bytes(bytes)), bytes);
  }
}

TEST(Environment, FindsVariablesByPrefixInOrder) {
  ::setenv("ZSHARD_TEST_PREFIX_B", "2=3", 1);
  ::setenv("ZSHARD_TEST_PREFIX_A", "", 1);
  const auto found = environment_variables("ZSHARD_TEST_PREFIX_");
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0], (std::pair<std::string, std::string>("ZSHARD_TEST_PREFIX_A", "")));
  EXPECT_EQ(found[1], (std::pair<std::string, std::string>("ZSHARD_TEST_PREFIX_B", "2=3")));
  EXPECT_EQ(environment_variable("ZSHARD_TEST_PREFIX_A"), "");
  ::unsetenv("ZSHARD_TEST_PREFIX_A");
  ::unsetenv("ZSHARD_TEST_PREFIX_B");
  EXPECT_EQ(environment_variable("ZSHARD_TEST_PREFIX_A"), std::nullopt);
  EXPECT_TRUE(environment_variables("ZSHARD_TEST_PREFIX_").empty());
}

TEST(Environment, RegistryKnowsNamesAndPrefixes) {
  EXPECT_TRUE(registered_variable("ZSHARD_LOG"));
  EXPECT_TRUE(registered_variable("ZSHARD_SPEC_DIR"));
  EXPECT_TRUE(registered_variable("ZSHARD_TEST_ANYTHING"));
  EXPECT_FALSE(registered_variable("ZSHARD_LOGS"));
  EXPECT_FALSE(registered_variable("ZSHARD_LO"));
  EXPECT_FALSE(registered_variable("ZSHARD_TEST"));
  EXPECT_FALSE(registered_variable(""));
}

struct Line {
  LogLevel level;
  Topic topic;
  int rank;
  std::string message;
};

// Collects lines, and puts sink and default levels back.
class LogTest : public testing::Test {
 protected:
  LogTest() {
    before_ = set_log_sink([this](const LogRecord& record) {
      lines_.push_back({record.level, record.topic, record.rank, std::string(record.message)});
    });
    EXPECT_EQ(set_log_levels(""), "");
  }
  ~LogTest() override {
    set_log_sink(before_);
    set_log_levels("");
  }
  std::vector<Line> lines_;

 private:
  LogSink before_;
};

TEST_F(LogTest, IsQuietByDefault) {
  log_debug(Topic::comm, 0, "debug");
  log_info(Topic::comm, 0, "info");
  log_warning(Topic::comm, 3, "slow rank {}", 1);
  log_error(Topic::engine, kNoRank, "broken");
  ASSERT_EQ(lines_.size(), 2U);
  EXPECT_EQ(lines_[0].level, LogLevel::warning);
  EXPECT_EQ(lines_[0].topic, Topic::comm);
  EXPECT_EQ(lines_[0].rank, 3);
  EXPECT_EQ(lines_[0].message, "slow rank 1");
  EXPECT_EQ(lines_[1].rank, kNoRank);
}

TEST_F(LogTest, TakesALevelAndTopicsWithTheirOwn) {
  ASSERT_EQ(set_log_levels("info, comm = debug ,engine=off"), "");
  EXPECT_TRUE(log_enabled(Topic::memory, LogLevel::info));
  EXPECT_FALSE(log_enabled(Topic::memory, LogLevel::debug));
  EXPECT_TRUE(log_enabled(Topic::comm, LogLevel::debug));
  EXPECT_FALSE(log_enabled(Topic::comm, LogLevel::trace));
  EXPECT_FALSE(log_enabled(Topic::engine, LogLevel::error));
  EXPECT_FALSE(log_enabled(Topic::engine, LogLevel::off));
  log_error(Topic::engine, 0, "not written");
  log_debug(Topic::comm, 0, "written");
  ASSERT_EQ(lines_.size(), 1U);
  EXPECT_EQ(lines_[0].message, "written");
}

TEST_F(LogTest, TopicsAloneKeepTheDefaultForTheOthers) {
  ASSERT_EQ(set_log_levels("comm=trace"), "");
  EXPECT_TRUE(log_enabled(Topic::comm, LogLevel::trace));
  EXPECT_FALSE(log_enabled(Topic::base, LogLevel::info));
  EXPECT_TRUE(log_enabled(Topic::base, LogLevel::warning));
  ASSERT_EQ(set_log_levels("warn"), "");
  EXPECT_FALSE(log_enabled(Topic::comm, LogLevel::info));
}

TEST_F(LogTest, BadTextChangesNothingAndSaysWhatIsWrong) {
  ASSERT_EQ(set_log_levels("info"), "");
  for (const char* text :
       {"loud", "info,", ",info", "comm=", "=debug", "comm=debug=2", "info,debug",
        "comm=debug,info", "kitchen=debug", "info;comm=debug", "1", ",", "="}) {
    EXPECT_NE(set_log_levels(text), "") << text;
    EXPECT_TRUE(log_enabled(Topic::comm, LogLevel::info)) << text;
    EXPECT_FALSE(log_enabled(Topic::comm, LogLevel::debug)) << text;
  }
  EXPECT_NE(set_log_levels("debgu").find("Did you mean 'debug'?"), std::string::npos);
  EXPECT_NE(set_log_levels("com=debug").find("Did you mean 'comm'?"), std::string::npos);
}

TEST_F(LogTest, EveryTopicAndLevelHasAName) {
  std::set<std::string_view> names;
  for (int i = 0; i < kTopics; ++i) {
    const std::string name(to_string(static_cast<Topic>(i)));
    EXPECT_TRUE(names.insert(to_string(static_cast<Topic>(i))).second);
    EXPECT_EQ(set_log_levels(name + "=trace"), "");
    EXPECT_TRUE(log_enabled(static_cast<Topic>(i), LogLevel::trace)) << name;
  }
  EXPECT_EQ(to_string(static_cast<Topic>(kTopics)), "invalid");
  EXPECT_FALSE(log_enabled(static_cast<Topic>(kTopics), LogLevel::error));
}

TEST_F(LogTest, ASinkThatThrowsOrLogsDoesNoHarm) {
  int calls = 0;
  set_log_sink([&](const LogRecord&) {
    ++calls;
    log_error(Topic::cli, kNoRank, "(a line of a test, from inside a sink)");
    throw std::runtime_error("sink");
  });
  testing::internal::CaptureStderr();
  log_error(Topic::base, 0, "one");
  log_error(Topic::base, 0, "two");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(calls, 2);
  EXPECT_NE(text.find("cli: (a line of a test, from inside a sink)"), std::string::npos);
}

TEST_F(LogTest, IsUsableFromManyThreads) {
  constexpr int kThreads = 8;
  constexpr int kLines = 500;
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    while (!stop) {
      set_log_levels("info,comm=debug");
      set_log_levels("");
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < kLines; ++i) log_warning(Topic::comm, t, "{}", i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  changer.join();
  set_log_sink({});
  ASSERT_EQ(lines_.size(), std::size_t{kThreads} * kLines);
  std::vector<int> next(kThreads, 0);
  for (const Line& line : lines_) {
    int& expected = next[static_cast<std::size_t>(line.rank)];
    EXPECT_EQ(line.message, std::to_string(expected++));
  }
}

// The first use reads ZSHARD_LOG, so each text needs a process of its own.
std::string lines_of_child(const std::string& text) {
  char path[4096];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return "cannot find this program";
  const std::string command = "ZSHARD_LOG='" + text + "' timeout 60 '" +
                              std::string(path, static_cast<std::size_t>(length)) +
                              "' --gtest_filter=LogOfAProcess.Lines "
                              "2>&1 >/dev/null </dev/null";
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return "cannot start a process";
  std::string output;
  char buffer[4096];
  for (std::size_t got; (got = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    output.append(buffer, got);
  }
  const int status = ::pclose(pipe);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) output += "[failed]";
  return output;
}

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) {
    ++found;
  }
  return found;
}

// The others run this one in a process of its own; here its lines go to the test's output.
TEST(LogOfAProcess, Lines) {
  // Whatever the environment says, a level that is on has those above it on.
  EXPECT_GE(log_enabled(Topic::base, LogLevel::error), log_enabled(Topic::base, LogLevel::debug));
  log_info(Topic::engine, 2, "an info line");
  log_debug(Topic::comm, 2, "a debug line");
  log_warning(Topic::engine, 2, "a warning line");
  log_error(Topic::base, kNoRank, "an error line");
}

TEST(LogOfAProcess, WritesWarningsAndErrorsToStderrByDefault) {
  const std::string text = lines_of_child("");
  EXPECT_EQ(count(text, "\n"), 2) << text;
  EXPECT_EQ(count(text, "[zshard] [warning] [rank 2] engine: a warning line\n"), 1) << text;
  EXPECT_EQ(count(text, "[zshard] [error] base: an error line\n"), 1) << text;
}

TEST(LogOfAProcess, ReadsLevelsFromTheEnvironment) {
  const std::string text = lines_of_child("info,comm=debug");
  EXPECT_EQ(count(text, "\n"), 4) << text;
  EXPECT_EQ(count(text, "[zshard] [info] [rank 2] engine: an info line\n"), 1) << text;
  EXPECT_EQ(count(text, "[zshard] [debug] [rank 2] comm: a debug line\n"), 1) << text;
  EXPECT_EQ(lines_of_child("off"), "");
}

TEST(LogOfAProcess, WarnsOnceAboutBadTextAndGoesOn) {
  const std::string text = lines_of_child("debgu");
  EXPECT_EQ(count(text, "\n"), 3) << text;
  EXPECT_EQ(count(text, "ZSHARD_LOG='debgu' is ignored"), 1) << text;
  EXPECT_EQ(count(text, "a warning line"), 1) << text;
  EXPECT_EQ(count(text, "an info line"), 0) << text;
}

TEST(SystemReason, GivesTextAndNumberAndTheLimitToRaise) {
  EXPECT_EQ(system_reason(ENOENT), "No such file or directory (errno 2)");
  EXPECT_EQ(system_reason(EMFILE),
            "Too many open files (errno 24); raise the limit of open files (ulimit -n)");
  EXPECT_NE(system_reason(ENFILE).find("fs.file-max"), std::string::npos);
  EXPECT_NE(system_reason(EFBIG).find("ulimit -f"), std::string::npos);
}

}  // namespace
}  // namespace zshard::base
