// Starts processes for tests of ranks as processes, and outlives them: output captured, no input,
// a hard time limit, nothing left running. A rank is this test's own binary with the name of a
// scenario (scenario.hpp).
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/descriptor.hpp"

namespace zshard::lab {

using Variables = std::map<std::string, std::string>;

inline std::int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

/// Memory that a test and its processes see.
struct Page {
  static constexpr int kRanks = 256;
  std::atomic<int> ready{0};
  std::array<std::atomic<std::int64_t>, kRanks> at{};  // a time of each rank
};

/// How a process ended.
struct Ending {
  int status = 0;
  bool stopped = false;  // by the time limit
  std::int64_t time = 0;
  std::string output;

  [[nodiscard]] int code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }
  [[nodiscard]] int signal() const { return WIFSIGNALED(status) ? WTERMSIG(status) : 0; }
  /// The last line that is a JSON object, as scenarios print it; null if there is none.
  [[nodiscard]] nlohmann::json said() const {
    std::size_t end = output.size();
    while (end != 0) {
      const std::size_t begin = output.rfind('\n', end - 1);
      const std::size_t from = begin == std::string::npos ? 0 : begin + 1;
      if (from < end && output[from] == '{') {
        auto line = nlohmann::json::parse(output.substr(from, end - from), nullptr, false);
        if (!line.is_discarded()) return line;
      }
      end = from == 0 ? 0 : from - 1;
    }
    return nullptr;
  }
  [[nodiscard]] std::string text() const {
    return "exit code " + std::to_string(code()) + ", signal " + std::to_string(signal()) +
           (stopped ? ", stopped by the time limit" : "") + ", said: " + output;
  }
};

class Children {
 public:
  /// seconds: after which wait() kills what still runs.
  explicit Children(double seconds) : limit_(now() + static_cast<std::int64_t>(seconds * 1e9)) {
    memory_ = base::Descriptor(memfd_create("page", MFD_CLOEXEC));
    if (!memory_.valid() || ftruncate(memory_.get(), sizeof(Page)) != 0) {
      throw std::runtime_error("no memory for a page");
    }
    page_ = map(memory_.get());
  }
  ~Children() {
    for (const Child& child : children_) {
      if (!child.ended) ::kill(-child.pid, SIGKILL);
    }
    for (Child& child : children_) {
      if (!child.ended) waitpid(child.pid, nullptr, 0);
    }
    munmap(page_, sizeof(Page));
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  /// Of this process' launcher and of zshard nothing is passed on but `variables`.
  std::size_t start(const std::vector<std::string>& command, const Variables& variables) {
    std::vector<std::string> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      const bool replaced = variables.count(text.substr(0, text.find('='))) != 0;
      if (!replaced && foreign(*entry)) environment.push_back(text);
    }
    for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
    environment.emplace_back("ZSHARD_TEST_PAGE=" + std::to_string(kPageDescriptor));
    const std::vector<char*> arguments = pointers(command);
    const std::vector<char*> settings = pointers(environment);
    base::Descriptor output(memfd_create("output", MFD_CLOEXEC));
    const base::Descriptor input(open("/dev/null", O_RDONLY | O_CLOEXEC));
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
    if (pid == 0) {
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(126);
      dup2(input.get(), 0);
      dup2(output.get(), 1);
      dup2(output.get(), 2);
      dup2(memory_.get(), kPageDescriptor);
      execvpe(arguments[0], arguments.data(), settings.data());
      _exit(127);
    }
    setpgid(pid, pid);  // here too: whoever comes first
    children_.push_back({pid, false, {}, std::move(output)});
    return children_.size() - 1;
  }

  void signal(std::size_t child, int number) { ::kill(children_[child].pid, number); }
  [[nodiscard]] pid_t pid(std::size_t child) const { return children_[child].pid; }

  /// True once the child has ended; does not wait.
  bool ended(std::size_t child) {
    Child& c = children_[child];
    if (c.ended) return true;
    int status = 0;
    if (waitpid(c.pid, &status, WNOHANG) != c.pid) return false;
    c.ended = true;
    c.end.status = status;
    c.end.time = now();
    c.end.output = read(c.output.get());
    ::kill(-c.pid, SIGKILL);  // what it may have started
    return true;
  }

  /// Waits for one, or kills it at the limit.
  const Ending& wait(std::size_t child) {
    while (!ended(child)) {
      if (now() > limit_ && !children_[child].end.stopped) {
        children_[child].end.stopped = true;
        ::kill(-children_[child].pid, SIGKILL);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (std::size_t c = 0; c < children_.size(); ++c) ended(c);  // for the time of their end
    }
    return children_[child].end;
  }

  std::vector<Ending> wait() {
    std::vector<Ending> all;
    for (std::size_t c = 0; c < children_.size(); ++c) all.push_back(wait(c));
    return all;
  }

  [[nodiscard]] Page& page() { return *page_; }
  /// The page of the test that started this process.
  static Page& inherited_page() {
    static Page* const page = map(kPageDescriptor);
    return *page;
  }
  /// False if the time limit or the end of all children came first.
  bool wait_ready(int count) {
    while (page_->ready.load() < count) {
      bool all_ended = true;
      for (std::size_t c = 0; c < children_.size(); ++c) all_ended = ended(c) && all_ended;
      if (all_ended || now() > limit_) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

 private:
  static constexpr int kPageDescriptor = 9;
  struct Child {
    pid_t pid = 0;
    bool ended = false;
    Ending end;
    base::Descriptor output;
  };

  static Page* map(int descriptor) {
    void* at = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (at == MAP_FAILED) throw std::runtime_error("cannot map the page");
    return static_cast<Page*>(at);
  }

  static bool foreign(const char* entry) {
    for (const char* ours : {"ZSHARD_", "RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=",
                             "MASTER_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_"}) {
      if (std::strncmp(entry, ours, std::strlen(ours)) == 0) return false;
    }
    return true;
  }

  static std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (const std::string& text : texts) all.push_back(const_cast<char*>(text.c_str()));
    all.push_back(nullptr);
    return all;
  }

  static std::string read(int descriptor) {
    std::string all;
    std::array<char, 4096> piece;
    ssize_t got = 0;
    while ((got = pread(descriptor, piece.data(), piece.size(), static_cast<off_t>(all.size()))) >
           0) {
      all.append(piece.data(), static_cast<std::size_t>(got));
    }
    return all;
  }

  std::int64_t limit_;
  base::Descriptor memory_;
  Page* page_;
  std::vector<Child> children_;
};

/// Variables of rank r of a job that no other job of this machine has, in torchrun's manner.
inline Variables torchrun(const std::string& job, int rank, int world) {
  return {{"RANK", std::to_string(rank)},       {"WORLD_SIZE", std::to_string(world)},
          {"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", std::to_string(world)},
          {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", job}};
}

inline std::string new_job() {
  static int number = 0;
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

}  // namespace zshard::lab
