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
#include <filesystem>
#include <utility>

#include "offload/io/lock_limit.hpp"
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
  const nlohmann::json cuda = said.at("backends").at("cuda");
  if (cuda.at("usable").get<bool>()) {
    EXPECT_FALSE(said.at("cuda_runtime").is_null());
    EXPECT_FALSE(said.at("cuda_driver").is_null());
    for (const nlohmann::json& gpu : said.at("gpus")) {
      EXPECT_FALSE(gpu.at("name").get<std::string>().empty());
      EXPECT_GT(gpu.at("memory_bytes").get<std::int64_t>(), std::int64_t{1} << 28);
      EXPECT_NE(gpu.at("compute_capability").get<std::string>().find('.'), std::string::npos);
    }
    return;
  }
  const auto reason = cuda.at("reason").get<std::string>();
  bool known = false;
  for (const char* text :
       {"this build of zshard has no CUDA", "the CUDA plug-in is missing", "cannot be loaded",
        "there is no NVIDIA driver", "driver is too old", "shows no GPU to this process"}) {
    known = known || reason.find(text) != std::string::npos;
  }
  EXPECT_TRUE(known) << reason;
}

// What the plug-in needs is not asked for by the programs: they start where none of it is.
TEST(Info, ProgramsNeedNoCuda) {
  for (const char* name : {"zshard", "gpt"}) {
    const std::string program = (std::filesystem::path(tool()).parent_path() / name).string();
    if (!std::filesystem::exists(program)) continue;
    Children children(kToolSeconds);
    const Ending end = children.wait(children.start({"ldd", program}, {}));
    ASSERT_EQ(end.code(), 0) << end.text();
    EXPECT_NE(end.output.find("libstdc++"), std::string::npos) << end.output;
    for (const char* library : {"libcuda", "libnccl", "libzshard_cuda"}) {
      EXPECT_EQ(end.output.find(library), std::string::npos) << program << ": " << end.output;
    }
  }
}

/// What a copy of the tool says with a file in the plug-in's place.
nlohmann::json info_beside(const std::string& file) {
  const Directory directory;
  std::filesystem::copy_file(tool(), directory.file("zshard"));
  std::filesystem::copy_file(file, directory.file("libzshard_cuda.so"));
  Children children(kToolSeconds);
  const Ending end =
      children.wait(children.start({directory.file("zshard"), "info", "--json"}, {}));
  EXPECT_EQ(end.code(), 0) << end.text();
  return end.said().at("backends").at("cuda");
}

TEST(Info, PluginThatCannotBeUsedIsSaidWithTheReason) {
  if (ZSHARD_HAS_CUDA == 0) GTEST_SKIP() << "no CUDA in this build: no plug-in is looked for";
  const std::string fixtures = ZSHARD_BINARY_DIR "/lib/fixtures/libzshard_fixture_";
  const Directory directory;
  for (const auto& [file, text] :
       {std::pair{fixtures + "orphan.so",
                  "libzshard_fixture_absent.so: cannot open shared object file"},
        std::pair{fixtures + "foreign.so", "belongs to another build of zshard"},
        std::pair{fixtures + "hollow.so", "lacks zshard_cuda_abi"},
        std::pair{directory.write("text", std::string(200, '.')), "invalid ELF header"}}) {
    const nlohmann::json cuda = info_beside(file);
    EXPECT_FALSE(cuda.at("usable").get<bool>());
    EXPECT_NE(cuda.at("reason").get<std::string>().find(text), std::string::npos) << cuda;
  }
}

// With every GPU hidden, or without a driver, the versions of what was loaded are told all the
// same.
TEST(Info, LoadedVersionsAreToldWithoutAGpu) {
  const std::string plugin = ZSHARD_BINARY_DIR "/lib/libzshard_cuda.so";
  if (!std::filesystem::exists(plugin)) GTEST_SKIP() << "this build has no plug-in";
  const nlohmann::json said = info({{"CUDA_VISIBLE_DEVICES", ""}});
  EXPECT_FALSE(said.at("backends").at("cuda").at("usable").get<bool>());
  EXPECT_EQ(said.at("cuda_runtime").get<std::string>().substr(0, 2),
            std::string(ZSHARD_CUDA_VERSION).substr(0, 2));
  const std::string nccl = said.at("nccl").is_null() ? "" : said.at("nccl").get<std::string>();
  EXPECT_EQ(nccl, ZSHARD_NCCL_VERSION);
  if (said.at("cuda_driver").is_null()) {
    const auto reason = said.at("backends").at("cuda").at("reason").get<std::string>();
    EXPECT_NE(reason.find("there is no NVIDIA driver"), std::string::npos) << reason;
  }
}

TEST(Info, MemlockLimitIsThatOfTheProcess) {
  const Ending end = run_script("ulimit -S -l 64; \"$1\" info --json");
  ASSERT_EQ(end.code(), 0) << end.text();
  EXPECT_EQ(end.said().at("memory").at("memlock_bytes"), 64 * 1024);
  EXPECT_EQ(end.said().at("memory").at("memlock_exempt").get<bool>(), offload::lock_limit().exempt);
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
                           "memlock limit", "kernels run as", "GPU", "CUDA driver", "NCCL"}) {
    EXPECT_NE(end.output.find(part), std::string::npos) << part << "\n" << end.output;
  }
}

}  // namespace
}  // namespace zshard::lab
