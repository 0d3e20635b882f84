// zshard info: what it says is so, and what the system refuses is said with the reason.
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

#include "runtime/base/build_config.hpp"
#include "tests/cli/program.hpp"

namespace zshard::lab {
namespace {

nlohmann::json info(const Variables& variables = {}) {
  const Ending end = run_tool({"info", "--json"}, variables);
  EXPECT_EQ(end.code(), 0) << end.text();
  return end.said();
}

TEST(Info, FactsAreThoseOfTheMachine) {
  const nlohmann::json said = info();
  EXPECT_EQ(said.at("version"), ZSHARD_VERSION);
  EXPECT_EQ(said.at("build").at("compiler"), ZSHARD_COMPILER);
  EXPECT_EQ(said.at("build").at("cuda").is_null(), ZSHARD_HAS_CUDA == 0);
  EXPECT_EQ(said.at("build").at("liburing").is_null(), ZSHARD_HAS_IO_URING == 0);
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  EXPECT_EQ(said.at("cpu").at("usable_cores"), CPU_COUNT(&set));
  EXPECT_EQ(said.at("cpu").at("cores"), sysconf(_SC_NPROCESSORS_ONLN));
  const nlohmann::json memory = said.at("memory");
  EXPECT_GT(memory.at("total_bytes").get<std::int64_t>(), std::int64_t{1} << 28);
  EXPECT_LE(memory.at("available_bytes").get<std::int64_t>(),
            memory.at("total_bytes").get<std::int64_t>());
  EXPECT_TRUE(said.at("backends").at("host").at("usable").get<bool>());
  EXPECT_TRUE(said.at("backends").at("posix").at("usable").get<bool>());
  std::string level = "x86-64";
#if defined(__x86_64__) && !defined(__clang__)
  for (const char* name : {"x86-64-v2", "x86-64-v3", "x86-64-v4"}) {
    const bool has = std::string(name) == "x86-64-v2"   ? __builtin_cpu_supports("x86-64-v2")
                     : std::string(name) == "x86-64-v3" ? __builtin_cpu_supports("x86-64-v3")
                                                        : __builtin_cpu_supports("x86-64-v4");
    if (has) level = name;
  }
  EXPECT_EQ(said.at("cpu").at("level"), level);
#endif
}

// A GPU is listed, or it is said why there is none.
TEST(Info, GpusOrTheReason) {
  const nlohmann::json said = info();
  EXPECT_EQ(said.at("gpus").empty(), !said.at("no_gpu_because").is_null());
  EXPECT_FALSE(said.at("backends").at("cuda").at("usable").get<bool>());
  const auto reason = said.at("backends").at("cuda").at("reason").get<std::string>();
  EXPECT_GT(reason.size(), 10U);
  if (said.at("gpus").empty()) {
    const bool known = reason.find("no CUDA in this build") != std::string::npos ||
                       reason.find("no driver library") != std::string::npos ||
                       reason.find("finds no device") != std::string::npos ||
                       reason.find("does not start") != std::string::npos;
    EXPECT_TRUE(known) << reason;
  }
}

TEST(Info, MemlockLimitIsThatOfTheProcess) {
  const Ending end = run_script("ulimit -S -l 64; \"$1\" info --json");
  ASSERT_EQ(end.code(), 0) << end.text();
  EXPECT_EQ(end.said().at("memory").at("memlock_bytes"), 64 * 1024);
  EXPECT_EQ(end.said().at("memory").at("memlock_exempt").get<bool>(), geteuid() == 0);
}

TEST(Info, AffinityCounts) {
  const Ending end = run_script("taskset -c 0 \"$1\" info --json");
  if (end.code() != 0) GTEST_SKIP() << "CPU 0 is not to be had: " << end.text();
  EXPECT_EQ(end.said().at("cpu").at("usable_cores"), 1);
}

/// From here on, and in what is started, io_uring_setup fails with `error`.
bool refuse_io_uring(int error) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{sizeof program / sizeof program[0], program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

/// What the tool says under such a filter. The child ends by itself after a minute.
nlohmann::json info_without_io_uring(int error) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const std::string program = tool();
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    dup2(ends[1], 1);
    close(ends[0]);
    close(ends[1]);
    if (!refuse_io_uring(error)) _exit(77);
    execl(program.c_str(), program.c_str(), "info", "--json", nullptr);
    _exit(127);
  }
  close(ends[1]);
  std::string output;
  char piece[4096];
  for (ssize_t got = 0; (got = read(ends[0], piece, sizeof piece)) > 0;) {
    output.append(piece, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return nullptr;
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status << output;
  return nlohmann::json::parse(output, nullptr, false);
}

TEST(Info, RefusedIoUringIsSaidWithTheReason) {
  for (const auto& [error, text] :
       {std::pair{EPERM, "not permitted"}, std::pair{ENOSYS, "not implemented"}}) {
    const nlohmann::json said = info_without_io_uring(error);
    if (said.is_null()) GTEST_SKIP() << "system call filters cannot be set here";
    const nlohmann::json ring = said.at("backends").at("io_uring");
    EXPECT_FALSE(ring.at("usable").get<bool>());
    EXPECT_NE(ring.at("reason").get<std::string>().find(text), std::string::npos) << ring;
    EXPECT_TRUE(said.at("backends").at("posix").at("usable").get<bool>());
  }
}

TEST(Info, TextSaysTheSame) {
  const Ending end = run_tool({"info"});
  ASSERT_EQ(end.code(), 0) << end.text();
  for (const char* part : {"found by the build", "usable here", "io_uring", "huge pages",
                           "memlock limit", "kernels run as", "GPU"}) {
    EXPECT_NE(end.output.find(part), std::string::npos) << part << "\n" << end.output;
  }
}

}  // namespace
}  // namespace zshard::lab
