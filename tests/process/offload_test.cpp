// The nvme tier of ranks that are processes: limits, full and vanished directories, and ranks that
// are killed while they write. What happens to the disk is real here, not injected.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "offload/io/driver.hpp"
#include "offload/io/lock_limit.hpp"
#include "runtime/base/log.hpp"
#include "runtime/engine/blueprint.hpp"
#include "tests/engine/cases.hpp"
#include "tests/process/scenario.hpp"

namespace zshard {
namespace {

using lab::Children;
using lab::Ending;
using lab::expect_error;
using lab::Json;
using lab::outcome;
using lab::Outcome;
using lab::say;
using lab::train_step;

constexpr int kUnits = 3;
// A disk that others use stalls for seconds; no error here has to wait for a deadline.
constexpr double kPatience = 20.0;

ModelSpec model(std::int64_t elements = 20000) {
  ModelSpec spec;
  for (int u = 0; u < kUnits; ++u) {
    const std::string name = "u" + std::to_string(u);
    UnitBuilder unit = spec.unit(name);
    unit.parameter(name + ".w", {elements});
    unit.parameter(name + ".b", {77});
  }
  return spec;
}

EngineOptions options_of(const Json& a) {
  EngineOptions options = lab::at_stage(a.value("stage", 3));
  lab::set_tiers(options, a.value("tiers", std::size_t{lab::kAllDevice}));
  options.offload.nvme_dir = a.value("dir", "");
  options.offload.io_buffers = a.value("buffers", 3);
  options.offload.io_verify = a.value("verify", false);
  options.offload.io_backend =
      a.value("posix", false) ? IoBackendKind::posix : IoBackendKind::automatic;
  options.sub_group_bytes = 40000;
  options.deadline_seconds = kPatience;
  return options;
}

std::string digest(Engine& engine) {
  std::uint64_t hash = 0;
  for (const UnitSpec& u : engine.spec().units()) {
    for (const ParameterSpec& p : u.parameters) {
      std::vector<float> values(static_cast<std::size_t>(p.count()));
      const auto fold = [&] {
        hash = XXH3_64bits_withSeed(values.data(), values.size() * sizeof(float), hash);
      };
      engine.read_parameter(p.name, values);
      fold();
      for (const char* slot : {"exp_avg", "exp_avg_sq"}) {
        engine.read_state(p.name, slot, values);
        fold();
      }
    }
  }
  return std::to_string(hash);
}

void limit_files(rlim_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  if (setrlimit(RLIMIT_FSIZE, &limit) != 0) throw std::runtime_error("cannot set RLIMIT_FSIZE");
}

/// Another user, who may lock so much memory.
void become(uid_t user, rlim_t locked) {
  const rlimit limit{locked, locked};
  if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || setresgid(user, user, user) != 0 ||
      setresuid(user, user, user) != 0) {
    throw std::runtime_error("cannot become another user");
  }
}

// Four steps; something happens to rank 1's disk before the third.
const lab::Scenario offload("offload", [](const Json& a) {
  const std::string event = a.value("event", "");
  std::string lines;
  if (a.contains("locked")) {
    become(a["user"].get<uid_t>(), a["locked"].get<rlim_t>());
    base::set_log_levels("info");
    base::set_log_sink([&](const base::LogRecord& r) { lines += std::string(r.message) + "\n"; });
  }
  const ProcessGroup group = ProcessGroup::from_environment();
  const bool victim = group.rank() == group.size() - 1;
  Engine engine(model(a.value("elements", 20000)), AdamW{.lr = 0.01}, group, options_of(a));
  train_step(engine, 2);
  train_step(engine, 2);
  Json told{{"interruptions", 0}};
  group.barrier();
  if (victim) {
    if (event == "limit") limit_files(4096);
    if (event == "removed") std::filesystem::remove(a["dir"].get<std::string>());
    if (event == "full") {
      const std::string path = a["dir"].get<std::string>() + "/rest";
      std::ofstream rest(path, std::ios::binary);
      const std::vector<char> block(4096, 'x');
      while (rest.write(block.data(), 4096) && rest.flush()) {
      }
      told["filled"] = !rest.good();
    }
  }
  group.barrier();
  Outcome end = outcome([&] { train_step(engine, 2); });
  if (event == "limit") {
    told["text"] = end.text;
    told["type"] = end.type;
    told["vain"] = outcome([&] { engine.resume_step(); }).type;
    group.barrier();
    if (victim) limit_files(RLIM_INFINITY);
    group.barrier();
    engine.resume_step();
  } else if (end.type != "nothing") {
    throw std::runtime_error(end.type + ": " + end.text);
  }
  train_step(engine, 2);
  told["digest"] = digest(engine);
  told["ledger"] = engine.ledger() == engine.plan();
  told["log"] = lines;
  say(told);
});

const lab::Scenario endless("endless offload", [](const Json& a) {
  const ProcessGroup group = ProcessGroup::from_environment();
  Engine engine(model(), AdamW{}, group, options_of(a));
  Children::inherited_page().ready.fetch_add(1);
  while (true) train_step(engine, 2);
});

const lab::Scenario limited("offload threads under a limit", [](const Json& a) {
  limit_files(4096);
  run_ranks(2, [&](const ProcessGroup& group) {
    EngineOptions options = options_of(a);
    options.offload.optimizer = Tier::nvme;
    Engine engine(model(), AdamW{}, group, options);
  });
});

const lab::Scenario other_user("offload as another user", [](const Json& a) {
  if (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0) {
    throw std::runtime_error("cannot become another user");
  }
  run_ranks(2, [&](const ProcessGroup& group) {
    Engine engine(model(), AdamW{}, group, options_of(a));
    train_step(engine, 2);
  });
});

std::vector<Ending> run_job(int world, const std::string& scenario, const Json& arguments) {
  return lab::run_job(world, scenario, arguments,
                      {.seconds = 4 * kPatience, .deadline = kPatience});
}

class ProcessOffload : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(directory_.data()), nullptr); }
  void TearDown() override {
    if (mounted_) umount2(directory_.c_str(), MNT_DETACH);
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  /// A file system of 8 MiB in memory; "" or why it cannot be had.
  std::string mount_small() {
    if (mount("zshard", directory_.c_str(), "tmpfs", 0, "size=8m,mode=0700") != 0) {
      return std::string("no file system of 8 MiB: mount: ") + std::strerror(errno);
    }
    mounted_ = true;
    return "";
  }
  [[nodiscard]] bool empty() const {
    std::error_code gone;
    const bool is = std::filesystem::is_empty(directory_, gone);
    return gone || is;
  }
  std::string expected(int world, std::int64_t elements = 20000) {
    const auto ends = run_job(world, "offload", {{"stage", 1}, {"elements", elements}});
    lab::expect_success(ends, "in memory");
    return ends[0].said().value("digest", "");
  }
  /// All ranks came to their end with the digest.
  void expect_digest(const std::vector<Ending>& ends, const std::string& digest,
                     const std::string& what) {
    lab::expect_success(ends, what);
    for (const Ending& end : ends) {
      const Json said = end.said();
      ASSERT_TRUE(said.is_object() && said.contains("digest")) << what << ": " << end.text();
      EXPECT_EQ(said["digest"], digest) << what;
      EXPECT_EQ(said["ledger"], true) << what;
    }
    EXPECT_TRUE(empty()) << what;
  }
  std::string directory_ = "/tmp/zshard_test_XXXXXX";
  bool mounted_ = false;
};

TEST_F(ProcessOffload, ProcessesGiveTheBitsOfMemoryAtEveryStageAndTier) {
  for (const int world : {2, 3}) {
    const std::string digest = expected(world);
    for (int stage = 0; stage < 4; ++stage) {
      for (const std::size_t tiers : {lab::kOptimizerNvme, lab::kAllNvme}) {
        if (!lab::exhaustive() && (static_cast<std::size_t>(stage) + tiers) % 2 != 0) continue;
        const auto ends = run_job(world, "offload",
                                  {{"stage", stage},
                                   {"tiers", tiers},
                                   {"dir", directory_},
                                   {"verify", stage % 2 == 0},
                                   {"posix", world == 3}});
        expect_digest(ends, digest, "stage " + std::to_string(stage));
      }
    }
  }
}

TEST_F(ProcessOffload, ALimitOfFileSizesInterruptsTheStepUntilItIsRaised) {
  const std::string digest = expected(2);
  for (const int stage : {0, 1, 3}) {
    for (const bool posix : {false, true}) {
      const Json arguments = {{"stage", stage},
                              {"tiers", std::size_t{lab::kOptimizerNvme}},
                              {"dir", directory_},
                              {"event", "limit"},
                              {"posix", posix}};
      const auto ends = run_job(2, "offload", arguments);
      expect_digest(ends, digest, "stage " + std::to_string(stage));
      for (const Ending& end : ends) {
        const Json said = end.said();
        ASSERT_TRUE(said.is_object() && said.contains("type")) << end.text();
        lab::expect({said["type"], said["text"], std::nullopt}, "IoError",
                    {"(rank 1", "File too large", "ulimit -f"}, "limit");
        EXPECT_EQ(said["vain"], "IoError");
      }
    }
  }
  // Of processes it limits their shared memory too, of threads only the file.
  const auto ends = run_job(1, "offload threads under a limit", {{"dir", directory_}});
  expect_error(ends[0], "IoError", {"RLIMIT_FSIZE", "ulimit -f"}, "at start");
  EXPECT_TRUE(empty());
}

TEST_F(ProcessOffload, ADirectoryThatVanishesUnderTheEngineChangesNothing) {
  const std::string digest = expected(2);
  const auto ends =
      run_job(2, "offload",
              {{"tiers", std::size_t{lab::kAllNvme}}, {"dir", directory_}, {"event", "removed"}});
  expect_digest(ends, digest, "removed");
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

TEST_F(ProcessOffload, ADiskThatIsTooSmallIsAnErrorBeforeTheFirstStepWithNeededAndFree) {
  if (const std::string reason = mount_small(); !reason.empty()) GTEST_SKIP() << reason;
  // Each rank alone would fit.
  const auto ends = run_job(2, "offload",
                            {{"stage", 1},
                             {"tiers", std::size_t{lab::kOptimizerNvme}},
                             {"dir", directory_},
                             {"elements", 400000}});
  for (const Ending& end : ends) {
    expect_error(end, "IoError", {"offload.nvme_dir", "needs", "2 ranks", "are free"}, "too small");
  }
  EXPECT_TRUE(empty());
}

TEST_F(ProcessOffload, ADiskThatFillsUpAfterTheStartChangesNothing) {
  if (const std::string reason = mount_small(); !reason.empty()) GTEST_SKIP() << reason;
  const std::string digest = expected(2);
  for (const int stage : {0, 3}) {
    const auto ends = run_job(2, "offload",
                              {{"stage", stage},
                               {"tiers", std::size_t{lab::kAllNvme}},
                               {"dir", directory_},
                               {"event", "full"}});
    EXPECT_EQ(ends[1].said().value("filled", false), true) << ends[1].text();
    std::filesystem::remove(directory_ + "/rest");
    expect_digest(ends, digest, "stage " + std::to_string(stage));
  }
}

TEST_F(ProcessOffload, ADirectoryWithoutPermissionToWriteIsAUsageError) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  ASSERT_EQ(chown(directory_.c_str(), 65534, 65534), 0);
  const Json arguments = {{"tiers", std::size_t{lab::kAllNvme}}, {"dir", directory_}};
  std::filesystem::permissions(directory_, std::filesystem::perms(0500));
  expect_error(run_job(1, "offload as another user", arguments)[0], "UsageError",
               {"offload.nvme_dir", "cannot be written to"}, "read-only");
  std::filesystem::permissions(directory_, std::filesystem::perms(0700));
  lab::expect_success(run_job(1, "offload as another user", arguments), "writable");
  ASSERT_EQ(chown(directory_.c_str(), 0, 0), 0);
  std::filesystem::permissions(directory_, std::filesystem::perms(0777));
  expect_error(run_job(1, "offload as another user", arguments)[0], "UsageError",
               {"offload.nvme_dir", "belongs to uid 0"}, "of root");
  EXPECT_TRUE(empty());
}

// The limit is one for all processes of a user.
TEST_F(ProcessOffload, ALimitOfLockedMemoryIsComparedWithAllRanksBeforeTheyRegister) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  if (const std::string why = offload::io_uring_refusal(); !why.empty()) GTEST_SKIP() << why;
  Json arguments = {{"tiers", std::size_t{lab::kAllNvme}}, {"dir", directory_}};
  const EngineOptions options = options_of(arguments);
  rlimit most{};
  getrlimit(RLIMIT_MEMLOCK, &most);
  int users = 0;
  for (const int world : {1, 2}) {
    const std::string digest = expected(world);
    const auto need =
        world *
        offload::locked_bytes(
            options.offload.io_depth,
            engine::Blueprint::make(model(), AdamW{}, world, options).tiers.transfer_bytes());
    for (const bool enough : {false, true}) {
      if (enough && static_cast<rlim_t>(need) > most.rlim_max) continue;
      // A user of each job's own: nobody else's locked memory counts, nor that of a ring which the
      // system takes down after its process has ended.
      const auto user = static_cast<uid_t>(10'000'000 * ++users + getpid());
      if (chown(directory_.c_str(), user, user) != 0) {
        GTEST_SKIP() << "no user " << user << " here: " << std::strerror(errno);
      }
      arguments["user"] = user;
      arguments["locked"] =
          std::min(most.rlim_max, static_cast<rlim_t>(need - (enough ? 0 : 4096)));
      const auto ends = run_job(world, "offload", arguments);
      expect_digest(ends, digest, "locked memory");
      for (const Ending& end : ends) {
        const auto log = end.said().value("log", "");
        EXPECT_EQ(log.find("registered buffers\n") != std::string::npos, enough) << log;
        EXPECT_EQ(log.find("io_uring will not register buffers: " + std::to_string(need) +
                           " bytes would be locked") != std::string::npos,
                  !enough)
            << log;
        EXPECT_EQ(log.find("does not register buffers"), std::string::npos) << log;
      }
    }
  }
}

TEST_F(ProcessOffload, AKillInTheMiddleOfAStepLeavesNothingAndNamesTheRank) {
  const int kills = lab::exhaustive() ? 120 : lab::kSanitized ? 6 : 16;
  constexpr int kWorld = 3;
  constexpr double kNoticed = lab::kSanitized ? 10.0 : 5.0;
  std::mt19937_64 random(31);
  for (int turn = 0; turn < kills; ++turn) {
    const auto victim = static_cast<std::size_t>(turn % kWorld);
    const int stage = turn % 4;
    SCOPED_TRACE("turn " + std::to_string(turn));
    Children children(lab::kJobSeconds);
    lab::start_job(children, kWorld, "endless offload",
                   {{"stage", stage},
                    {"tiers", std::size_t{turn % 2 == 0 ? lab::kAllNvme : lab::kOptimizerNvme}},
                    {"dir", directory_},
                    {"posix", turn % 3 == 0}});
    ASSERT_TRUE(children.wait_ready(kWorld)) << children.wait(0).text();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    const std::int64_t start = lab::now();
    if (turn % 5 == 4) {
      for (std::size_t r = 0; r < kWorld; ++r) children.signal(r, SIGKILL);
      children.wait();
    } else {
      children.signal(victim, SIGKILL);
      for (std::size_t r = 0; r < kWorld; ++r) {
        const Ending& end = children.wait(r);
        if (r == victim) {
          EXPECT_EQ(end.signal(), SIGKILL);
          continue;
        }
        expect_error(end, "CommError", {"rank " + std::to_string(victim), "gone"},
                     "survivor " + std::to_string(r));
        EXPECT_LT(static_cast<double>(end.time - start) * 1e-9, kNoticed);
      }
    }
    EXPECT_TRUE(empty());
  }
}

}  // namespace
}  // namespace zshard
