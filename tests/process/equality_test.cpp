// Ranks as processes give the oracle's bits, as ranks as threads do
// (tests/engine/equality_test.cpp): the same covering array, several rows a start of processes.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/engine/pairwise.hpp"
#include "tests/engine/placements.hpp"
#include "tests/process/rows.hpp"
#include "tests/process/scenario.hpp"

namespace zshard {
namespace {

using lab::Children;
using lab::Ending;
using lab::Json;

// Of many rows, some on a disk that others use: nothing here is about the deadline.
const lab::JobOptions kLong{.seconds = 10 * lab::kJobSeconds, .deadline = 60.0};

const lab::Scenario rows("rows", [](const Json& arguments) {
  const ProcessGroup group = ProcessGroup::from_environment();
  for (const Json& one : arguments) {
    const std::vector<int> row = one[0];
    const std::string problem = lab::run_row(group, row, one[1]);
    if (!problem.empty()) throw Error(lab::text(row) + "seed " + one[1].dump() + ": " + problem);
  }
  lab::say({{"rows", arguments.size()}});
});

TEST(ProcessEquality, EveryPairOfFactorsGivesTheOraclesBits) {
  const auto array = lab::pairwise(lab::kLevels, 11);
  std::map<int, Json> of_world;
  for (std::size_t i = 0; i < array.size(); ++i) {
    for (std::uint64_t model = 0; model < (lab::kSanitized ? 1 : 3); ++model) {
      of_world[lab::world_of(array[i])].push_back(Json::array({array[i], 100 * i + model}));
    }
  }
  ASSERT_EQ(of_world.size(), 7U);
  for (const auto& [world, some] : of_world) {
    const auto ends = lab::run_job(world, "rows", some, kLong);
    lab::expect_success(ends, "world " + std::to_string(world));
    for (const Ending& end : ends) EXPECT_EQ(end.said()["rows"], some.size()) << end.text();
  }
}

TEST(ProcessEquality, EveryRowGivesTheOraclesBitsWithInlineQueuesAndWithPauses) {
  const auto array = lab::pairwise(lab::kLevels, 11);
  std::map<int, Json> of_world;
  for (std::size_t i = 0; i < array.size(); i += lab::kSanitized ? 6 : 1) {
    for (const int queues : {1, 2}) {
      std::vector<int> row = array[i];
      row[lab::kQueues] = queues;
      of_world[lab::world_of(row)].push_back(Json::array({row, 5000 + i}));
    }
  }
  for (const auto& [world, some] : of_world) {
    const auto ends = lab::run_job(world, "rows", some, kLong);
    lab::expect_success(ends, "world " + std::to_string(world));
    for (const Ending& end : ends) EXPECT_EQ(end.said()["rows"], some.size()) << end.text();
  }
}

// All of golden.json's runs of this world size.
const lab::Scenario golden_rows("golden", [](const Json&) {
  const ProcessGroup group = ProcessGroup::from_environment();
  int runs = 0;
  for (const Json& model : golden("adamw", "models")) {
    if (model.at("world").get<int>() != group.size()) continue;
    for (const lab::Case& c : lab::placements(lab::golden_case(model))) {
      const std::string problem = lab::run_case(
          group, c, [&](const lab::Tensors& got) { return lab::golden_difference(model, c, got); });
      if (!problem.empty()) throw Error(lab::where(c) + ": " + problem);
      ++runs;
    }
  }
  lab::say({{"runs", runs}});
});

TEST(ProcessEquality, TrainingGivesTheSpecificationsBits) {
  ZSHARD_NEED_GOLDEN();
  std::set<int> worlds;
  for (const Json& model : golden("adamw", "models")) worlds.insert(model.at("world").get<int>());
  EXPECT_GE(worlds.size(), 3U);
  int runs = 0;
  for (const int world : worlds) {
    const auto ends = lab::run_job(world, "golden", nullptr, kLong);
    lab::expect_success(ends, "world " + std::to_string(world));
    for (const Ending& end : ends) ASSERT_TRUE(end.said().is_object()) << end.text();
    runs += ends[0].said()["runs"].get<int>();
  }
  EXPECT_GE(runs, 25 * (3 - lab::kFirstQueues));
}

// What each rank's forward passes saw, as a hash of every placement.
const lab::Scenario watched("watched", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  std::vector<std::uint64_t> seen;
  for (const lab::Case& c : lab::placements(lab::watched_case(a["model"], group.size()))) {
    seen.push_back(lab::Loop(c, group).run().forward_hash);
  }
  lab::say({{"seen", seen}});
});

TEST(ProcessEquality, ForwardPassesSeeWhatThoseOfThreadsSee) {
  for (int model = 0; model < (lab::kSanitized ? 1 : 3); ++model) {
    const int world = model + 2;
    const lab::Case c = lab::watched_case(model, world);
    std::vector<std::uint64_t> expected(static_cast<std::size_t>(world));
    run_ranks(world, [&](const ProcessGroup& group) {
      expected[static_cast<std::size_t>(group.rank())] = lab::Loop(c, group).run().forward_hash;
    });
    const auto ends = lab::run_job(world, "watched", {{"model", model}}, kLong);
    lab::expect_success(ends, "model " + std::to_string(model));
    for (std::size_t r = 0; r < ends.size(); ++r) {
      ASSERT_TRUE(ends[r].said().is_object()) << ends[r].text();
      const auto seen = ends[r].said()["seen"].get<std::vector<std::uint64_t>>();
      EXPECT_EQ(seen, std::vector(lab::placements(c).size(), expected[r]))
          << "model " << model << ", rank " << r;
    }
  }
}

TEST(ProcessEquality, OneBitChangesADigest) {
  lab::Tensors a;
  a.values["w"] = {0.0f, 1.0f};
  a.norms = {1.0, 2.0};
  a.offenders = {"x"};
  const std::uint64_t whole = lab::digest(a);
  lab::Tensors b = a;
  b.values["w"][0] = -0.0f;
  EXPECT_NE(lab::digest(b), whole);
  b = a;
  b.norms[1] = std::nextafter(2.0, 3.0);
  EXPECT_NE(lab::digest(b), whole);
  b = a;
  b.offenders = {"y"};
  EXPECT_NE(lab::digest(b), whole);
}

// -- the gpt example --

class Gpt : public testing::Test {
 protected:
  void SetUp() override {
    program_ = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gpt";
    if (!std::filesystem::exists(program_)) GTEST_SKIP() << program_ << " is not built";
    std::string pattern = (std::filesystem::temp_directory_path() / "zshard_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    std::ofstream text(directory_ / "text");
    for (int i = 0; i < 300; ++i) text << "the quick brown fox jumps over lazy dog " << i << "\n";
  }
  void TearDown() override {
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  [[nodiscard]] std::vector<std::string> command(int stage) const {
    return {program_.string(),
            "--data",
            (directory_ / "text").string(),
            "--layers",
            "2",
            "--heads",
            "2",
            "--width",
            "32",
            "--context",
            "16",
            "--batch",
            "6",
            "--steps",
            "6",
            "--warmup",
            "2",
            "--accumulation",
            "2",
            "--stage",
            std::to_string(stage),
            "--digest"};
  }

  static std::string digests(const std::string& output) {
    std::string lines;
    std::istringstream in(output);
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("digest ", 0) == 0) lines += line + "\n";
    }
    return lines;
  }

  std::filesystem::path program_;
  std::filesystem::path directory_;
};

TEST_F(Gpt, ProcessesOfOurOwnAndOfMpirunGiveTheDigestsOfThreadsAtEveryStage) {
  const bool mpirun = std::system("command -v mpirun > /dev/null 2>&1 < /dev/null") == 0;
  std::string first;
  for (int stage = 0; stage < 4; ++stage) {
    const std::string what = "stage " + std::to_string(stage);
    Children threads(4 * lab::kJobSeconds);
    auto with_threads = command(stage);
    with_threads.insert(with_threads.end(), {"--ranks", "3"});
    threads.start(with_threads, {{"OPENBLAS_NUM_THREADS", "1"}});
    const Ending thread_end = threads.wait(0);
    ASSERT_EQ(thread_end.code(), 0) << thread_end.text();
    const std::string expected = digests(thread_end.output);
    ASSERT_NE(expected, "") << what;
    if (first.empty()) first = expected;
    EXPECT_EQ(expected, first) << what;

    Children processes(4 * lab::kJobSeconds);
    const std::string job = lab::new_job();
    for (int r = 0; r < 3; ++r) processes.start(command(stage), lab::torchrun(job, r, 3));
    const auto ends = processes.wait();
    lab::expect_success(ends, what);
    EXPECT_EQ(digests(ends[0].output), expected) << what;

    if (!mpirun) continue;
    Children launcher(4 * lab::kJobSeconds);
    auto launched = command(stage);
    const std::vector<std::string> front = {"mpirun",
                                            "--oversubscribe",
                                            "--allow-run-as-root",
                                            "--mca",
                                            "orte_tmpdir_base",
                                            directory_.string(),
                                            "-n",
                                            "3"};
    launched.insert(launched.begin(), front.begin(), front.end());
    launcher.start(launched, {});
    const Ending end = launcher.wait(0);
    EXPECT_EQ(end.code(), 0) << what << ": " << end.text();
    EXPECT_EQ(digests(end.output), expected) << what << " with mpirun";
  }
  if (!mpirun) std::cout << "mpirun is not installed: our own launcher only\n";
}

TEST_F(Gpt, SigtermEndsARankWithCode143AndItsPeersWithAnError) {
  Children children(lab::kJobSeconds);
  const std::string job = lab::new_job();
  auto endless = command(3);
  for (std::size_t i = 0; i + 1 < endless.size(); ++i) {
    if (endless[i] == "--steps") endless[i + 1] = "1000000";
  }
  endless.insert(endless.end(), {"--log", (directory_ / "log").string()});
  for (int r = 0; r < 3; ++r) {
    auto variables = lab::torchrun(job, r, 3);
    variables["ZSHARD_DEADLINE_SECONDS"] = std::to_string(lab::kDeadline);
    children.start(endless, variables);
  }
  const auto lines = [&] {
    std::ifstream log(directory_ / "log");
    int count = 0;
    for (std::string line; std::getline(log, line);) ++count;
    return count;
  };
  for (int i = 0; i < 10'000 && lines() < 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  ASSERT_GE(lines(), 2);
  children.signal(1, SIGTERM);
  // A shell reports a process that a signal ended as 128 + its number.
  EXPECT_EQ(children.wait(1).signal(), SIGTERM) << children.wait(1).text();
  for (const std::size_t r : {0, 2}) {
    const Ending& end = children.wait(r);
    EXPECT_EQ(end.code(), 1) << end.text();
    EXPECT_NE(end.output.find("rank 1 is gone"), std::string::npos) << end.text();
    EXPECT_LT(static_cast<double>(end.time - children.wait(1).time) * 1e-9, lab::kDeadline);
  }
}

}  // namespace
}  // namespace zshard
