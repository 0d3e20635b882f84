// Processes that a launcher starts meet, or end with an error that says what is wrong with their
// variables, on every rank and within the deadline.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <thread>

#include "tests/process/scenario.hpp"

namespace zshard {
namespace {

using lab::Children;
using lab::Ending;
using lab::expect_error;
using lab::Json;
using lab::Variables;

constexpr double kDeadline = lab::kSanitized ? 5.0 : 3.0;
// The rest is for a loaded machine.
constexpr double kSlack = lab::kSanitized ? 20.0 : 4.0;

const lab::Scenario meeting("meet", [](const Json& a) {
  for (int turn = 0; turn < a.value("turns", 1); ++turn) {
    const ProcessGroup group = ProcessGroup::from_environment();
    std::vector<int> all(static_cast<std::size_t>(group.size()));
    const int mine = 7 * group.rank();
    group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    for (int r = 0; r < group.size(); ++r) {
      if (all[static_cast<std::size_t>(r)] != 7 * r) throw Error("wrong values");
    }
    for (int i = 0; i < a.value("barriers", 1); ++i) group.barrier();
    if (turn + 1 == a.value("turns", 1)) {
      lab::say({{"rank", group.rank()}, {"size", group.size()}});
    }
  }
});

/// Runs one process for each set of variables.
std::vector<Ending> meet(std::vector<Variables> ranks, const Json& arguments = Json::object(),
                         double deadline = kDeadline) {
  Children children(lab::kJobSeconds);
  for (Variables& variables : ranks) {
    variables.emplace("ZSHARD_DEADLINE_SECONDS", std::to_string(deadline));
    children.start(lab::command_of("meet", arguments), variables);
  }
  return children.wait();
}

void expect_met(const std::vector<Ending>& ends, const std::string& what) {
  lab::expect_success(ends, what);
  for (std::size_t r = 0; r < ends.size(); ++r) {
    EXPECT_EQ(ends[r].said(), (Json{{"rank", r}, {"size", ends.size()}})) << ends[r].text();
  }
}

// -- families --

struct Family {
  std::string name;
  std::string rank;
  std::string world;
  std::string local_rank;
  std::string local_world;  // "" none
  std::string job;          // "" none
};

const std::vector<Family> kFamilies = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"},
};

std::vector<Variables> job_of(const Family& family, int world) {
  std::vector<Variables> ranks;
  const std::string job = lab::new_job();
  for (int r = 0; r < world; ++r) {
    Variables v{{family.rank, std::to_string(r)},
                {family.world, std::to_string(world)},
                {family.local_rank, std::to_string(r)}};
    if (!family.local_world.empty()) v[family.local_world] = std::to_string(world);
    if (!family.job.empty()) v[family.job] = job;
    ranks.push_back(v);
  }
  return ranks;
}

TEST(Launcher, EachFamilyOfVariablesMakesAGroup) {
  for (const Family& family : kFamilies) {
    for (const int world : {1, 2, 5}) {
      expect_met(meet(job_of(family, world)), family.name + " " + std::to_string(world));
    }
  }
}

// `mpiexec bash script.sh`: the ranks have different parents, and nothing but them names the job.
TEST(Launcher, RanksThatScriptsStartMeet) {
  for (const Family& family : kFamilies) {
    auto ranks = job_of(family, 3);
    Children children(lab::kJobSeconds);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks[r]["ZSHARD_DEADLINE_SECONDS"] = std::to_string(kDeadline);
      std::vector<std::string> command = lab::command_of("meet", Json::object());
      command[0] = std::filesystem::read_symlink(command[0]);
      for (std::size_t scripts = 0; scripts < r; ++scripts) {
        command.insert(command.begin(), {"/bin/sh", "-c", "\"$@\"; exit $?", "script"});
      }
      children.start(command, ranks[r]);
    }
    expect_met(children.wait(), family.name);
  }
}

TEST(Launcher, WithoutVariablesAProcessIsARankAlone) {
  expect_met(meet({Variables{}}), "no variables");
  // Set to nothing is not set; a batch script of Slurm is no step of it.
  expect_met(meet({Variables{{"RANK", ""}, {"WORLD_SIZE", ""}}}), "empty variables");
  expect_met(meet({Variables{{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}}}), "a batch script");
}

TEST(Launcher, NonsenseIsAUsageErrorThatNamesTheVariableAndPeersHearWithinTheDeadline) {
  struct Nonsense {
    bool world;  // of the world's variable, else of the rank's
    std::string value;
    std::string part;
  };
  const std::vector<Nonsense> cases = {
      {false, "5", "is not below"},
      {false, "abc", "whole number"},
      {false, "-1", "whole number"},
      {false, "99999", "whole number"},
      {false, "", "is not set"},
      {false, "1.0", "whole number"},
      {false, " 1", "whole number"},
      {true, "abc", "whole number"},
      {true, "-1", "whole number"},
      {true, "0", "whole number"},
      {true, "99999", "whole number"},
      {true, "3x", "whole number"},
      {true, "99999999999999999999", "whole number"},
  };
  for (const Family& family : kFamilies) {
    for (const Nonsense& c : cases) {
      // On every rank alike: nobody waits. One family at a time is enough for peers that wait.
      auto ranks = job_of(family, 3);
      const std::string& name = c.world ? family.world : family.rank;
      const std::string what = name + "=" + c.value;
      for (Variables& v : ranks) v[name] = c.value;
      const std::int64_t start = lab::now();
      for (const Ending& end : meet({ranks[0], ranks[1]})) {
        expect_error(end, "UsageError", {name, c.part}, what);
        EXPECT_LT(static_cast<double>(end.time - start) * 1e-9, kSlack) << what;
      }
    }
    for (const std::string value : {"3", "-1", "x"}) {
      auto ranks = job_of(family, 3);
      for (Variables& v : ranks) v[family.local_rank] = value;
      for (const Ending& end : meet(ranks)) {
        expect_error(end, "UsageError", {family.local_rank + "=" + value, "from 0 to 2"}, value);
      }
    }
    if (!family.local_world.empty()) {
      auto ranks = job_of(family, 3);
      for (Variables& v : ranks) v[family.local_world] = "2";
      for (const Ending& end : meet(ranks)) {
        expect_error(end, "UsageError", {family.local_world, "several machines"}, family.name);
      }
    }
    if (!family.job.empty()) {
      auto ranks = job_of(family, 2);
      for (Variables& v : ranks) v.erase(family.job);
      for (const Ending& end : meet(ranks)) {
        expect_error(end, "UsageError", {family.job, "is not set"}, family.name);
      }
    }
  }
  for (const std::string deadline : {"abc", "0", "-1", "nan"}) {
    auto ranks = job_of(kFamilies[0], 2);
    for (Variables& v : ranks) v["ZSHARD_DEADLINE_SECONDS"] = deadline;
    for (const Ending& end : meet(ranks)) {
      expect_error(end, "UsageError", {"deadline_seconds", deadline}, deadline);
    }
  }
  auto ranks = job_of(kFamilies[0], 2);
  for (Variables& v : ranks) v["MASTER_PORT"] = std::string(200, 'x');
  for (const Ending& end : meet(ranks)) expect_error(end, "UsageError", {"too long"}, "job name");
  ranks = job_of(kFamilies[3], 2);
  for (Variables& v : ranks) v["SLURM_STEP_NUM_NODES"] = "2";
  for (const Ending& end : meet(ranks)) {
    expect_error(end, "UsageError", {"SLURM_STEP_NUM_NODES", "several machines"}, "Slurm");
  }
}

TEST(Launcher, VariablesOfTwoLaunchersMayBeNestedButNotContradictEachOther) {
  // RANK and WORLD_SIZE that somebody exported, under each real launcher: every rank of it would
  // train alone, or all would be rank 0.
  for (std::size_t f = 1; f < kFamilies.size(); ++f) {
    const Family& family = kFamilies[f];
    for (const int world : {1, 3}) {
      auto ranks = job_of(family, 3);
      for (Variables& v : ranks) {
        v["RANK"] = "0";
        v["WORLD_SIZE"] = std::to_string(world);
        v["MASTER_PORT"] = "1";
      }
      const std::string what = family.name + " under an exported world of " + std::to_string(world);
      const std::int64_t start = lab::now();
      // Where the two agree the rank cannot know.
      const std::vector<Variables> wrong(ranks.begin() + (world == 1 ? 0 : 1), ranks.end());
      for (const Ending& end : meet(wrong)) {
        expect_error(end, "UsageError",
                     {"RANK=0 of WORLD_SIZE=" + std::to_string(world), " of " + family.world + "=3",
                      "unset"},
                     what);
        EXPECT_LT(static_cast<double>(end.time - start) * 1e-9, kSlack) << what;
      }
    }
    // A launcher that gives both, as torchrun-like wrappers do.
    auto ranks = job_of(family, 3);
    const auto same = job_of(kFamilies[0], 3);
    for (std::size_t r = 0; r < 3; ++r) ranks[r].insert(same[r].begin(), same[r].end());
    expect_met(meet(ranks), family.name + " and the same in torchrun's names");
    // torchrun in each task of an outer launcher: that one's numbers are not this job's.
    for (const int outer : {1, 5}) {
      ranks = job_of(kFamilies[0], 3);
      for (Variables& v : ranks) {
        v[family.rank] = std::to_string(outer - 1);
        v[family.world] = std::to_string(outer);
      }
      expect_met(meet(ranks), "torchrun inside " + family.name);
    }
  }
  // mpirun in a step of Slurm.
  auto ranks = job_of(kFamilies[1], 3);
  for (Variables& v : ranks) {
    v["SLURM_PROCID"] = "1";
    v["SLURM_STEP_NUM_TASKS"] = "2";
    v["SLURM_JOB_ID"] = "7";
  }
  expect_met(meet(ranks), "mpirun inside Slurm");
}

/// Every rank ended with a CommError that has the parts, within the deadline.
void expect_refused(const std::vector<Ending>& ends, std::int64_t start,
                    const std::vector<std::string>& parts, const std::string& what,
                    double deadline = kDeadline) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    expect_error(ends[r], "CommError", parts, what + ", process " + std::to_string(r));
    EXPECT_LT(static_cast<double>(ends[r].time - start) * 1e-9, deadline + kSlack) << what;
  }
}

TEST(Launcher, RanksThatDisagreeOrAreMissingAreNamedOnEveryRank) {
  const Family& family = kFamilies[0];
  std::int64_t start = lab::now();
  auto ranks = job_of(family, 3);
  ranks[2]["WORLD_SIZE"] = "4";
  ranks[2]["LOCAL_WORLD_SIZE"] = "4";
  auto ends = meet(ranks);
  expect_error(ends[0], "CommError", {"says it is rank 2 of 4", "one of 3"}, "rank 0");
  expect_error(ends[2], "CommError", {"says it is rank 2 of 4", "one of 3"}, "rank 2");
  expect_refused(ends, start, {"rank"}, "world sizes differ");

  ranks = job_of(family, 4);
  ranks[2] = ranks[1];  // and 3 comes, but never 2
  start = lab::now();
  ends = meet(ranks);
  expect_error(ends[0], "CommError", {"says it is rank 1 of 4", "is that rank already"}, "rank 0");
  expect_refused(ends, start, {"rank"}, "two ranks 1");

  // The second one may come when the three have met already.
  for (const std::size_t twice : {0, 1}) {
    ranks = job_of(family, 3);
    ranks.push_back(ranks[twice]);
    start = lab::now();
    int met = 0;
    for (const Ending& end : meet(ranks)) {
      met += end.code() == 0;
      if (end.code() != 0) expect_error(end, "CommError", {"rank"}, "one rank twice");
      EXPECT_LT(static_cast<double>(end.time - start) * 1e-9, kDeadline + kSlack);
    }
    EXPECT_TRUE(met == 0 || met == 3) << met;
  }

  for (const std::size_t absent : {0, 1, 3}) {
    ranks = job_of(family, 4);
    ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(absent));
    start = lab::now();
    const std::string part =
        absent == 0 ? "found no rank 0 within"
                    : "rank(s) " + std::to_string(absent) + " of 4 did not come within";
    expect_refused(meet(ranks), start, {part, "torchrun"}, "no rank " + std::to_string(absent));
  }
}

TEST(Launcher, ARankWithNonsenseLeavesTheOthersAnErrorAtTheDeadline) {
  for (const std::size_t wrong : {0, 1}) {
    auto ranks = job_of(kFamilies[0], 3);
    ranks[wrong]["RANK"] = "x";
    const std::int64_t start = lab::now();
    const auto ends = meet(ranks);
    for (std::size_t r = 0; r < 3; ++r) {
      if (r == wrong) {
        expect_error(ends[r], "UsageError", {"RANK=x"}, "wrong");
      } else {
        expect_error(ends[r], "CommError", {wrong == 0 ? "no rank 0" : "rank(s) 1 of 3"}, "peer");
      }
      EXPECT_LT(static_cast<double>(ends[r].time - start) * 1e-9, kDeadline + kSlack);
    }
  }
}

// -- strangers --

/// The place where a job meets.
sockaddr_un address_of(const std::string& job, uid_t owner, socklen_t* length) {
  const std::string name = "zshard/" + std::to_string(owner) + "/" + job;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

/// Connects to a job's rank 0 as a foreign program would; -1 if nobody listens within a second.
int connect_to(const std::string& job, uid_t owner = getuid()) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(job, owner, &length);
  for (int i = 0; i < 1000; ++i) {
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connect(s, reinterpret_cast<const sockaddr*>(&address), length) == 0) return s;
    close(s);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return -1;
}

/// Takes the place of a job's rank 0; not listening yet.
int listen_as(const std::string& job) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(job, getuid(), &length);
  const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (bind(s, reinterpret_cast<const sockaddr*>(&address), length) != 0) return -1;
  return s;
}

TEST(Launcher, StrangersThatConnectDoNotStopAJob) {
  for (const std::string text : {"", "garbage", "GET / HTTP/1.0\r\n\r\n"}) {
    const std::string job = lab::new_job();
    Children children(lab::kJobSeconds);
    auto variables = lab::torchrun(job, 0, 2);
    variables["ZSHARD_DEADLINE_SECONDS"] = "10";
    children.start(lab::command_of("meet", Json::object()), variables);
    const int silent = connect_to(job);
    const int loud = connect_to(job);
    const int gone = connect_to(job);
    ASSERT_GE(silent, 0);
    EXPECT_EQ(send(loud, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    close(gone);
    variables = lab::torchrun(job, 1, 2);
    variables["ZSHARD_DEADLINE_SECONDS"] = "10";
    children.start(lab::command_of("meet", Json::object()), variables);
    expect_met(children.wait(), "strangers that say '" + text + "'");
    close(silent);
    close(loud);
  }
}

/// A process of another user in this test's name space: runs body, and is gone.
template <class Body>
pid_t as_nobody(Body&& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  if (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0) _exit(9);
  body();
  _exit(0);
}

TEST(Launcher, AnotherUsersProcessIsNotLetIn) {
  if (getuid() != 0) GTEST_SKIP() << "only root can act as another user";
  // It knows the protocol and says that it is rank 1.
  const std::string job = lab::new_job();
  Children children(lab::kJobSeconds);
  auto variables = lab::torchrun(job, 0, 2);
  variables["ZSHARD_DEADLINE_SECONDS"] = "10";
  children.start(lab::command_of("meet", Json::object()), variables);
  const pid_t intruder = as_nobody([&] {
    const int s = connect_to(job, 0);
    const std::int32_t hello[] = {0x7A736831, 1, 2};
    if (s < 0 || send(s, hello, sizeof hello, MSG_NOSIGNAL) < 0) _exit(8);
    char answer[600];
    _exit(recv(s, answer, sizeof answer, 0) > 0 ? 7 : 0);
  });
  int status = -1;
  waitpid(intruder, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "it was answered";
  variables = lab::torchrun(job, 1, 2);
  variables["ZSHARD_DEADLINE_SECONDS"] = "10";
  children.start(lab::command_of("meet", Json::object()), variables);
  expect_met(children.wait(), "another user's rank 1");
}

TEST(Launcher, AnotherUsersProcessInThePlaceOfRankZeroIsRefused) {
  if (getuid() != 0) GTEST_SKIP() << "only root can act as another user";
  const std::string job = lab::new_job();
  const int listener = listen_as(job);
  ASSERT_GE(listener, 0);
  // Credentials of a listener are those of the process that called listen().
  const pid_t squatter = as_nobody([&] {
    listen(listener, 8);
    pause();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  Children children(lab::kJobSeconds);
  auto variables = lab::torchrun(job, 1, 2);
  variables["ZSHARD_DEADLINE_SECONDS"] = std::to_string(kDeadline);
  children.start(lab::command_of("meet", Json::object()), variables);
  expect_error(children.wait(0), "CommError", {"belongs to another user"}, "rank 1");
  kill(squatter, SIGKILL);
  waitpid(squatter, nullptr, 0);
  close(listener);
}

TEST(Launcher, AStrangerInThePlaceOfRankZeroIsAnErrorWithinTheDeadline) {
  for (const bool speaks : {false, true}) {
    const std::string job = lab::new_job();
    const int listener = listen_as(job);
    ASSERT_GE(listener, 0);
    ASSERT_EQ(listen(listener, 8), 0);
    Children children(lab::kJobSeconds);
    const std::int64_t start = lab::now();
    for (int r = 0; r < 3; ++r) {
      auto variables = lab::torchrun(job, r, 3);
      variables["ZSHARD_DEADLINE_SECONDS"] = std::to_string(kDeadline);
      children.start(lab::command_of("meet", Json::object()), variables);
    }
    std::vector<int> peers;
    for (int r = 1; r < 3; ++r) {
      peers.push_back(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      if (speaks) send(peers.back(), "hello", 5, MSG_NOSIGNAL);
    }
    const auto ends = children.wait();
    // Whoever has got through waits as long as a rank 0 may wait for others.
    expect_refused(ends, start, {"rank 0"}, "a stranger is rank 0", 2 * kDeadline);
    expect_error(ends[0], "CommError", {"cannot listen", "another rank 0"}, "rank 0");
    for (const int s : peers) close(s);
    close(listener);
  }
}

// -- several jobs --

TEST(Launcher, TwoJobsAtOnceDoNotMeet) {
  auto ranks = job_of(kFamilies[0], 3);
  const auto more = job_of(kFamilies[1], 3);
  ranks.insert(ranks.end(), more.begin(), more.end());
  const auto ends = meet(ranks, {{"barriers", 200}});
  expect_met({ends.begin(), ends.begin() + 3}, "first job");
  expect_met({ends.begin() + 3, ends.end()}, "second job");
}

TEST(Launcher, TheSameJobStartsAgainRightAfterItEndedOrWasKilled) {
  const auto ranks = job_of(kFamilies[0], 3);
  for (int turn = 0; turn < 5; ++turn) expect_met(meet(ranks), "turn " + std::to_string(turn));
  for (int turn = 0; turn < 5; ++turn) {
    Children children(lab::kJobSeconds);
    for (const Variables& v : ranks) {
      children.start(lab::command_of("meet", {{"turns", 1'000'000}}), v);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + 10 * turn));
    for (std::size_t r = 0; r < 3; ++r) children.signal(r, SIGKILL);
    children.wait();
    expect_met(meet(ranks), "after a kill");
  }
}

TEST(Launcher, AProcessMayMakeItsGroupAgainAndAgain) {
  expect_met(meet(job_of(kFamilies[0], 3), {{"turns", lab::kSanitized ? 5 : 50}}), "turns");
}

TEST(Launcher, SixtyFourRanksMeet) {
  const int world = lab::kSanitized ? 16 : 64;
  expect_met(meet(job_of(kFamilies[0], world), {{"barriers", 5}}, 60.0), "many ranks");
}

}  // namespace
}  // namespace zshard
