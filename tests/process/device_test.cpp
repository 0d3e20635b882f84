// Ranks as processes on the simulated device: the bits of host ranks and of device ranks as
// threads, which device a rank takes, and machines that do not fit together.
#if defined(ZSHARD_TEST_SIMULATED)
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/engine/pairwise.hpp"
#include "tests/process/rows.hpp"
#include "tests/process/simulated.hpp"

namespace zshard {
namespace {

using lab::Children;
using lab::Ending;
using lab::expect_error;
using lab::Json;

constexpr double kDeadline = lab::kSanitized ? 20.0 : 5.0;
// The rest is for a loaded machine.
constexpr double kSlack = lab::kSanitized ? 20.0 : 4.0;

// -- equality --

/// "stage", "world", "tiers", "native", "seed": training of a random model, alike in every process.
lab::Case case_of(const Json& a) {
  std::mt19937_64 random(a.value("seed", std::uint64_t{1}));
  lab::Case c;
  c.spec = lab::random_spec(random);
  c.world = a["world"];
  c.uses = lab::random_uses(random, c.spec, c.world, 3, 2, 80);
  c.clip = 0.5;
  c.options.stage = static_cast<Stage>(a["stage"].get<int>());
  if (c.options.stage == Stage::parameters) {
    c.options.gather_budget = minimum_gather_budget(c.spec, c.world);
  }
  if (a.value("native", false)) c.options.reduction = Reduction::native;
  c.options.sub_group_bytes = 8192;
  c.options.poison_slots = true;
  c.options.deadline_seconds = kDeadline;
  lab::set_tiers(c.options, a.value("tiers", std::size_t{lab::kAllDevice}));
  return c;
}

std::string text_of(std::uint64_t digest) {
  return std::to_string(digest);
}

const lab::Scenario trained("device trains", [](const Json& a) {
  lab::set_up_machine(a);
  Json digests = Json::array();
  {
    const ProcessGroup group = ProcessGroup::from_environment();
    for (const Json& one : a["cases"]) {
      lab::Case c = case_of(one);
      lab::on_cuda(c);
      lab::Tensors got = lab::Loop(c, group).run();
      got.forward_hash = 0;
      digests.push_back(text_of(lab::digest(got)));
    }
  }
  lab::expect_clean_machine();
  lab::say({{"digests", digests}});
});

/// The digest of ranks as threads of this process.
std::string digest_of_threads(lab::Case c) {
  lab::Tensors got = lab::train(c);
  got.forward_hash = 0;
  return text_of(lab::digest(got));
}

TEST(DeviceProcesses, GiveTheBitsOfHostRanksAtEveryStageAndTier) {
  for (const int world : {1, 2, 3, 4}) {
    Json cases = Json::array();
    std::vector<std::string> wanted;
    for (int stage = 0; stage < 4; ++stage) {
      for (const std::size_t tiers :
           {lab::kAllDevice, lab::kOptimizerHost, lab::kOptimizerNvme, lab::kHalfOptimizerNvme}) {
        if (lab::kSanitized && (stage + static_cast<int>(tiers)) % 2 != 0) continue;
        const Json one{{"world", world}, {"stage", stage}, {"tiers", tiers}, {"seed", 10 * world}};
        cases.push_back(one);
        wanted.push_back(digest_of_threads(case_of(one)));
      }
    }
    const auto ends = lab::run_job(world, "device trains", {{"cases", cases}, {"delay", 10}},
                                   {.seconds = 4 * lab::kJobSeconds});
    lab::expect_success(ends, "world " + std::to_string(world));
    for (const Ending& end : ends) EXPECT_EQ(end.said()["digests"], Json(wanted)) << end.text();
  }
}

// Its order of summation is that of the communicator: the same between processes and threads.
TEST(DeviceProcesses, GiveTheBitsOfDeviceThreadsWithNativeReduction) {
  for (const int world : {2, 3, 4}) {
    Json cases = Json::array();
    std::vector<std::string> wanted;
    bool other = false;
    for (int stage = 0; stage < 4; ++stage) {
      const Json one{{"world", world}, {"stage", stage}, {"native", true}, {"seed", 3}};
      cases.push_back(one);
      lab::Case c = case_of(one);
      simulator::reset();
      simulator::set_device_memory(std::int64_t{64} << 20);
      lab::on_cuda(c);
      wanted.push_back(digest_of_threads(c));
      c.options.reduction = Reduction::ordered;
      other = other || digest_of_threads(c) != wanted.back();
    }
    const auto ends =
        lab::run_job(world, "device trains", {{"cases", cases}}, {.seconds = 4 * lab::kJobSeconds});
    lab::expect_success(ends, "world " + std::to_string(world));
    for (const Ending& end : ends) EXPECT_EQ(end.said()["digests"], Json(wanted)) << end.text();
    if (world == 4) {
      EXPECT_TRUE(other) << "the order of summation changed nothing";
    }
  }
}

const lab::Scenario rows("device rows", [](const Json& a) {
  lab::set_up_machine(a);
  {
    const ProcessGroup group = ProcessGroup::from_environment();
    for (const Json& one : a["rows"]) {
      const std::vector<int> row = one[0];
      lab::Case c = lab::make_case(row, one[1]);
      lab::on_cuda(c);
      lab::Tensors got = lab::Loop(c, group).run();
      got.forward_hash = 0;
      const std::string problem =
          group.rank() == 0 ? lab::difference(lab::oracle(c), got) : std::string();
      if (!problem.empty()) throw Error(lab::text(row) + "seed " + one[1].dump() + ": " + problem);
    }
  }
  lab::expect_clean_machine();
  lab::say({{"rows", a["rows"].size()}});
});

TEST(DeviceProcesses, EveryPairOfFactorsGivesTheOraclesBits) {
  const auto array = lab::pairwise(lab::kLevels, 11);
  std::map<int, Json> of_world;
  for (std::size_t i = 0; i < array.size(); ++i) {
    const int world = lab::world_of(array[i]);
    if (world > 4 || (lab::kSanitized && i % 4 != 0)) continue;
    of_world[world].push_back(Json::array({array[i], 100 * i}));
  }
  std::size_t count = 0;
  for (const auto& [world, some] : of_world) {
    const auto ends = lab::run_job(world, "device rows", {{"rows", some}, {"delay", 5}},
                                   {.seconds = 10 * lab::kJobSeconds});
    lab::expect_success(ends, "world " + std::to_string(world));
    for (const Ending& end : ends) EXPECT_EQ(end.said()["rows"], some.size()) << end.text();
    count += some.size();
  }
  EXPECT_GT(count, lab::kSanitized ? 5U : 20U);
}

// -- which device --

const lab::Scenario placed("device placed", [](const Json& a) {
  lab::set_up_machine(a);
  Json used = Json::array();
  {
    const ProcessGroup group = ProcessGroup::from_environment();
    EngineOptions options = lab::at_stage(2);
    options.deadline_seconds = kDeadline;
    options.device = DeviceKind::cuda;
    if (a.contains("index")) {
      options.device_index = a["index"][static_cast<std::size_t>(group.rank())];
    }
    Engine engine(lab::small_model(), AdamW{}, group, options);
    int devices = 0;
    lab::cuda_ok(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    for (int d = 0; d < devices; ++d) {
      if (simulator::allocated_bytes(d) != 0) used.push_back(d);
    }
    // And they work together.
    for ([[maybe_unused]] const MicroStep m : engine.micro_steps(1)) {
      for (int u = 0; u < 3; ++u) (void)engine.forward(lab::unit(u));
    }
    engine.step();
  }
  lab::expect_clean_machine();
  lab::say({{"devices", used}});
});

TEST(DeviceProcesses, ARankTakesTheDeviceOfItsNumberOrOfItsOption) {
  const auto devices = [](const std::vector<Ending>& ends) {
    Json all = Json::array();
    for (const Ending& end : ends) all.push_back(end.said()["devices"]);
    return all;
  };
  auto ends = lab::run_job(3, "device placed", Json::object());
  lab::expect_success(ends, "by number");
  EXPECT_EQ(devices(ends), (Json{{0}, {1}, {2}}));

  ends = lab::run_job(3, "device placed", {{"index", {5, 0, 2}}});
  lab::expect_success(ends, "by option");
  EXPECT_EQ(devices(ends), (Json{{5}, {0}, {2}}));

  // Launchers that show each rank one GPU: all of them are number 0 to their process.
  lab::JobOptions options;
  for (int r = 0; r < 3; ++r) options.of_rank[r] = {{"CUDA_VISIBLE_DEVICES", std::to_string(r)}};
  ends = lab::run_job(3, "device placed", Json::object(), options);
  lab::expect_success(ends, "by CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(devices(ends), (Json{{0}, {0}, {0}}));

  for (int r = 0; r < 3; ++r) options.of_rank[r] = {{"LOCAL_RANK", std::to_string(2 - r)}};
  ends = lab::run_job(3, "device placed", Json::object(), options);
  lab::expect_success(ends, "by LOCAL_RANK");
  EXPECT_EQ(devices(ends), (Json{{2}, {1}, {0}}));
}

/// Every rank ended by itself within the deadline with an error of that type that has the parts.
void expect_refused(const std::vector<Ending>& ends, std::int64_t start, const std::string& type,
                    const std::vector<std::string>& parts, const std::string& what) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    expect_error(ends[r], type, parts, what + ", rank " + std::to_string(r));
    EXPECT_LT(static_cast<double>(ends[r].time - start) * 1e-9, kDeadline + kSlack) << what;
  }
}

TEST(DeviceProcesses, MoreRanksThanDevicesAreRefusedOnEveryRankUnlessNcclAllowsIt) {
  const int recent = NCCL_VERSION(2, 30, 3);
  const int old = NCCL_VERSION(2, 28, 9);
  std::int64_t start = lab::now();
  expect_refused(
      lab::run_job(3, "device placed", {{"devices", 2}, {"nccl", old}}), start, "CommError",
      {"Duplicate GPU detected", "rank 2 and rank 0", "at most one rank for each GPU"}, "old");
  start = lab::now();
  expect_refused(lab::run_job(2, "device placed", {{"index", {3, 3}}, {"nccl", old}}), start,
                 "CommError", {"Duplicate GPU detected", "rank 1 and rank 0", "CUDA device 3"},
                 "chosen");

  auto ends = lab::run_job(3, "device placed", {{"devices", 2}, {"nccl", recent}});
  lab::expect_success(ends, "recent");
  EXPECT_EQ(ends[2].said()["devices"], Json{0}) << ends[2].text();

  // What the user says counts.
  lab::JobOptions options;
  for (int r = 0; r < 3; ++r) options.of_rank[r] = {{"NCCL_MULTI_RANK_GPU_ENABLE", "0"}};
  start = lab::now();
  expect_refused(lab::run_job(3, "device placed", {{"devices", 2}, {"nccl", recent}}, options),
                 start, "CommError", {"Duplicate GPU detected"}, "switched off");
}

TEST(DeviceProcesses, TwoRanksOfOneDeviceGiveTheSameBits) {
  const Json one{{"world", 3}, {"stage", 3}, {"seed", 5}};
  const auto ends = lab::run_job(
      3, "device trains",
      {{"cases", Json::array({one})}, {"devices", 2}, {"nccl", NCCL_VERSION(2, 30, 3)}});
  lab::expect_success(ends, "two on one");
  for (const Ending& end : ends) {
    EXPECT_EQ(end.said()["digests"][0], digest_of_threads(case_of(one))) << end.text();
  }
}

TEST(DeviceProcesses, NoDeviceOrOneThatIsNotThereIsAnErrorOnEveryRank) {
  std::int64_t start = lab::now();
  expect_refused(lab::run_job(2, "device placed", {{"devices", 0}}), start, "DeviceError",
                 {"no GPU is visible"}, "none");
  start = lab::now();
  const auto ends = lab::run_job(2, "device placed", {{"index", {0, 9}}});
  expect_error(ends[1], "UsageError", {"device_index: 9", "there are 8 GPUs"}, "rank 1");
  for (const Ending& end : ends) {
    EXPECT_NE(end.output.find("device_index"), std::string::npos) << end.text();
    EXPECT_LT(static_cast<double>(end.time - start) * 1e-9, kDeadline + kSlack);
  }
}

// -- machines that do not fit --

const lab::Scenario unlike("device unlike", [](const Json& a) {
  const bool odd = std::getenv("RANK") == std::string("1");
  lab::set_up_machine(odd ? a["odd"] : a["others"]);
  if (odd && a["odd"].contains("plugin")) engine::set_accelerator_path(a["odd"]["plugin"]);
  const ProcessGroup group = ProcessGroup::from_environment();
  EngineOptions options = lab::at_stage(3);
  options.deadline_seconds = kDeadline;
  options.device = odd && a["odd"].value("host", false) ? DeviceKind::host : DeviceKind::cuda;
  const Engine engine(lab::small_model(), AdamW{}, group, options);
});

TEST(DeviceProcesses, MachinesThatDoNotFitTogetherAreAnErrorOnEveryRank) {
  const Json others = Json::object();
  std::int64_t start = lab::now();
  expect_refused(lab::run_job(3, "device unlike",
                              {{"odd", {{"nccl", NCCL_VERSION(2, 27, 3)}}},
                               {"others", {{"nccl", NCCL_VERSION(2, 28, 9)}}}}),
                 start, "CommError", {"Mismatched NCCL version", "rank 1 version 22703", "22809"},
                 "versions");

  start = lab::now();
  auto ends =
      lab::run_job(3, "device unlike",
                   {{"odd", {{"plugin", "/nowhere/libzshard_cuda.so"}}}, {"others", others}});
  expect_error(ends[1], "DeviceError", {"/nowhere/libzshard_cuda.so does not exist"}, "no plug-in");
  for (const std::size_t r : {0, 2}) {
    expect_error(ends[r], "CommError", {"rank 1", "/nowhere/libzshard_cuda.so does not exist"},
                 "no plug-in, rank " + std::to_string(r));
    EXPECT_LT(static_cast<double>(ends[r].time - start) * 1e-9, kDeadline + kSlack);
  }

  start = lab::now();
  expect_refused(lab::run_job(3, "device unlike", {{"odd", {{"host", true}}}, {"others", others}}),
                 start, "UsageError", {"device", "rank 1"}, "a host rank among device ranks");
}

// -- mpirun --

TEST(DeviceProcesses, RanksOfMpirunGiveTheSameBits) {
  if (std::system("command -v mpirun > /dev/null 2>&1 < /dev/null") != 0) {
    GTEST_SKIP() << "mpirun is not installed";
  }
  std::string directory = (std::filesystem::temp_directory_path() / "zshard_test_XXXXXX").string();
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const Json one{{"world", 2}, {"stage", 3}, {"tiers", lab::kOptimizerHost}, {"seed", 4}};
  const Json arguments{{"cases", Json::array({one})}};
  Children launcher(4 * lab::kJobSeconds);
  launcher.start({"mpirun", "--oversubscribe", "--allow-run-as-root", "--mca", "orte_tmpdir_base",
                  directory, "-n", "2", std::filesystem::read_symlink("/proc/self/exe").string(),
                  "--scenario", "device trains", arguments.dump()},
                 {{"ZSHARD_DEADLINE_SECONDS", std::to_string(kDeadline)}});
  const Ending& end = launcher.wait(0);
  EXPECT_EQ(end.code(), 0) << end.text();
  const std::string line = Json{{"digests", Json::array({digest_of_threads(case_of(one))})}}.dump();
  const std::size_t first = end.output.find(line);
  EXPECT_NE(first, std::string::npos) << end.text();
  EXPECT_NE(end.output.find(line, first + 1), std::string::npos) << end.text();
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace zshard
#endif
