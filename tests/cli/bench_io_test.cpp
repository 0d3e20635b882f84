// zshard bench io: rates, a setting that can be pasted, nothing left behind, no page cache.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/vfs.h>

#include "tests/cli/program.hpp"
#include "zshard/options.hpp"

namespace zshard::lab {
namespace {

using Arguments = std::vector<std::string>;

/// In the build's own directory: the directory for temporary files may lie in memory.
class BenchIo : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = std::string(ZSHARD_BINARY_DIR) + "/bench io # XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    const Ending end = bench({"--size", "64KiB", "--depth", "1"});
    if (end.code() == 2 && end.output.find("page cache") != std::string::npos) {
      GTEST_SKIP() << "no direct I/O here: " << end.output;
    }
    ASSERT_EQ(end.code(), 0) << end.text();
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  [[nodiscard]] Ending bench(const Arguments& more) const {
    Arguments arguments = {"bench", "io", "--dir", directory_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_tool(arguments);
  }
  std::string directory_;
};

void expect_rates(const nlohmann::json& setting) {
  for (const char* rate : {"read", "write", "mixed"}) {
    EXPECT_GT(setting.at(rate).get<double>(), 1e5) << setting;
    EXPECT_LT(setting.at(rate).get<double>(), 1e12) << setting;
  }
}

TEST_F(BenchIo, OneSettingIsMeasured) {
  for (const Arguments& backend : {Arguments{}, Arguments{"--backend", "posix"}}) {
    Arguments arguments = {"--size",    "4MiB", "--block",   "256KiB", "--depth", "4",
                           "--threads", "2",    "--repeats", "1",      "--json"};
    arguments.insert(arguments.end(), backend.begin(), backend.end());
    const Ending end = bench(arguments);
    ASSERT_EQ(end.code(), 0) << end.text();
    const nlohmann::json said = end.said();
    ASSERT_EQ(said.at("settings").size(), 1U);
    const nlohmann::json one = said.at("measured");
    expect_rates(one);
    EXPECT_EQ(one.at("block_bytes"), 256 << 10);
    EXPECT_EQ(one.at("depth"), 4);
    EXPECT_EQ(one.at("threads"), 2);
    if (!backend.empty()) {
      EXPECT_EQ(one.at("backend"), "posix");
    }
    EXPECT_GT(said.at("free_bytes").get<std::int64_t>(), 0);
    EXPECT_EQ(said.at("size_bytes"), 4 << 20);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

// Smaller than a block: what is said is what was moved.
TEST_F(BenchIo, SizesAreToldInWholeBlocks) {
  const Ending end =
      bench({"--size", "4097", "--block", "1MiB", "--depth", "1", "--repeats", "1", "--json"});
  ASSERT_EQ(end.code(), 0) << end.text();
  EXPECT_EQ(end.said().at("size_bytes"), 1 << 20);
  const Ending text =
      bench({"--size", "4097", "--block", "1MiB", "--depth", "1", "--repeats", "1"});
  EXPECT_NE(text.output.find("1 stream, 1.00 MiB"), std::string::npos) << text.output;
}

TEST_F(BenchIo, TableHasARecommendationThatCanBePasted) {
  const Ending end = bench({"--size", "8MiB", "--repeats", "1", "--json"});
  ASSERT_EQ(end.code(), 0) << end.text();
  const nlohmann::json said = end.said();
  EXPECT_GE(said.at("settings").size(), 4U);
  for (const nlohmann::json& setting : said.at("settings")) expect_rates(setting);
  bool listed = false;
  for (const nlohmann::json& setting : said.at("settings")) {
    listed = listed || setting == said.at("recommended");
  }
  EXPECT_TRUE(listed);
  EngineOptions options;
  for (const auto& [name, value] : said.at("options").items()) {
    set_option(options, name, value.get<std::string>());
  }
  EXPECT_EQ(options.offload.nvme_dir, directory_);
  EXPECT_EQ(options.offload.io_block_bytes, said.at("recommended").at("block_bytes"));
  EXPECT_EQ(options.offload.io_depth, said.at("recommended").at("depth"));
  EXPECT_EQ(to_string(options.offload.io_backend),
            said.at("recommended").at("backend").get<std::string>());

  // The arguments, through a shell, make a plan use them.
  const Ending plan = run_script("\"$1\" plan --json --layers 1 --width 8 " +
                                 said.at("arguments").get<std::string>());
  ASSERT_EQ(plan.code(), 0) << plan.text();
  for (const auto& [name, value] : said.at("options").items()) {
    EXPECT_EQ(plan.said().at("options").at(name), value);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(BenchIo, LinesOfTheTextAreAFileOfOptions) {
  const Ending end = bench({"--size", "1MiB", "--depth", "2", "--repeats", "1"});
  ASSERT_EQ(end.code(), 0) << end.text();
  const std::size_t begin = end.output.find("in a file of options:\n");
  const std::size_t last = end.output.find("\nor as arguments:");
  ASSERT_NE(begin, std::string::npos) << end.output;
  ASSERT_NE(last, std::string::npos) << end.output;
  const std::size_t lines = end.output.find('\n', begin) + 1;
  const Directory directory;
  const std::string file = directory.write("options", end.output.substr(lines, last - lines));
  EngineOptions options;
  apply_option_file(options, file);
  EXPECT_EQ(options.offload.nvme_dir, directory_);
  EXPECT_EQ(options.offload.io_depth, 2);
  EXPECT_NE(end.output.find("GB/s"), std::string::npos) << end.output;
  EXPECT_NE(end.output.find("free, room for"), std::string::npos) << end.output;
}

TEST_F(BenchIo, NumbersOutOfRangeAreRefused) {
  for (const char* name : {"--size", "--block", "--depth", "--threads", "--repeats"}) {
    for (const char* value : {"0", "-1", "99999999999999999999", "abc", "", "nan"}) {
      const Ending end = bench({name, value});
      EXPECT_EQ(end.code(), 2) << name << " " << value << "\n" << end.text();
      EXPECT_NE(end.output.find(std::string("argument ") + name), std::string::npos) << end.text();
    }
  }
  EXPECT_EQ(bench({"--block", "1GiB", "--depth", "4096"}).code(), 2);
  EXPECT_EQ(bench({"--threads", "256", "--size", "4KiB"}).code(), 2);
  EXPECT_EQ(bench({"--backend", "aio"}).code(), 2);
  const Ending typo = bench({"--dept", "4"});
  EXPECT_EQ(typo.code(), 2);
  EXPECT_NE(typo.output.find("Did you mean '--depth'"), std::string::npos) << typo.output;
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(BenchIo, DiskThatIsTooSmallIsToldBeforeAnythingIsWritten) {
  const Ending end = bench({"--size", "900TiB"});
  EXPECT_EQ(end.code(), 3) << end.text();
  EXPECT_NE(end.output.find("--size is 900.00 TiB, and "), std::string::npos) << end.output;
  EXPECT_NE(end.output.find("are free there. Give a smaller --size"), std::string::npos)
      << end.output;
  EXPECT_EQ(end.output.find("rank"), std::string::npos) << end.output;
}

TEST(BenchIoDirectories, WhatCannotBeMeasuredIsSaid) {
  const auto code = [](const std::string& directory) {
    return run_tool({"bench", "io", "--dir", directory, "--size", "64KiB"}).code();
  };
  const Directory directory;
  EXPECT_EQ(code(directory.file("none")), 2);
  EXPECT_EQ(code(directory.write("file", "x")), 2);
  EXPECT_EQ(code(""), 2);
  EXPECT_EQ(code("a,b"), 2);
  EXPECT_EQ(code("a\nb"), 2);
}

TEST(BenchIoDirectories, PageCacheIsNotMeasured) {
  struct statfs system {};
  constexpr long kTmpfs = 0x01021994;
  if (statfs("/dev/shm", &system) != 0 || system.f_type != kTmpfs) {
    GTEST_SKIP() << "/dev/shm is no tmpfs";
  }
  const Directory directory("/dev/shm");
  const Ending end = run_tool({"bench", "io", "--dir", directory.path(), "--size", "64KiB"});
  EXPECT_EQ(end.code(), 2) << end.text();
  EXPECT_NE(end.output.find("page cache"), std::string::npos) << end.output;
}

/// What the tool writes to a terminal.
std::string on_terminal(const std::vector<std::string>& arguments) {
  int terminal = -1;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    alarm(100);
    const std::string program = tool();
    std::vector<char*> pointers = {const_cast<char*>(program.c_str())};
    for (const std::string& text : arguments) pointers.push_back(const_cast<char*>(text.c_str()));
    pointers.push_back(nullptr);
    execv(program.c_str(), pointers.data());
    _exit(127);
  }
  std::string output;
  char piece[4096];
  for (ssize_t got = 0; (got = read(terminal, piece, sizeof piece)) > 0;) {
    output.append(piece, static_cast<std::size_t>(got));
  }
  close(terminal);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << output;
  return output;
}

TEST_F(BenchIo, ProgressIsForTerminalsAndForWhatTakesLong) {
  std::string shown;
  std::int64_t nanoseconds = 0;
  // As many repeats as take more than two seconds on this disk.
  for (int repeats = 8; nanoseconds < 3'500'000'000 && repeats <= 512; repeats *= 2) {
    const std::int64_t start = now();
    shown = on_terminal({"bench", "io", "--dir", directory_, "--size", "8MiB", "--repeats",
                         std::to_string(repeats)});
    nanoseconds = now() - start;
  }
  EXPECT_NE(shown.find(" settings; "), std::string::npos) << shown;
  EXPECT_NE(shown.find("recommended"), std::string::npos) << shown;
  EXPECT_EQ(on_terminal({"info"}).find("\r\033[K"), std::string::npos);
  const Ending piped = run_tool({"plan", "--layers", "600", "--width", "8", "--world", "4096",
                                 "--memory", "1", "--ranks-here", "1"});
  EXPECT_EQ(piped.code(), 1) << piped.text();
  EXPECT_EQ(piped.output.find('\r'), std::string::npos) << piped.output;
}

}  // namespace
}  // namespace zshard::lab
