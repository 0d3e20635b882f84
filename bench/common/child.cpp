#include "bench/common/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace bench {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

std::vector<std::string> environment(const std::vector<std::string>& variables) {
  const auto name = [](const std::string& entry) { return entry.substr(0, entry.find('=')); };
  std::vector<std::string> result = variables;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string entry(*at);
    const bool replaced = std::any_of(variables.begin(), variables.end(),
                                      [&](const auto& mine) { return name(mine) == name(entry); });
    if (!replaced) result.push_back(entry);
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Child::Child(const std::vector<std::string>& arguments, const std::vector<std::string>& variables) {
  // A child that has ended must be an error to write to, not a signal.
  ::signal(SIGPIPE, SIG_IGN);
  std::vector<std::string> argument_texts = {"/proc/self/exe"};
  argument_texts.insert(argument_texts.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variable_texts = environment(variables);
  std::vector<char*> argv = pointers(argument_texts);
  std::vector<char*> envp = pointers(variable_texts);
  int to[2];
  int from[2];
  if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) fail("cannot make a pipe");
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) fail("cannot start a process");
  if (pid_ == 0) {
    // Only calls that are safe between fork and exec.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    dup2(to[0], STDIN_FILENO);
    dup2(from[1], STDOUT_FILENO);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  input_ = to[1];
  output_ = from[0];
}

Child::~Child() {
  close_input();
  if (output_ >= 0) close(output_);
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

void Child::close_input() {
  if (input_ >= 0) close(input_);
  input_ = -1;
}

void Child::send(const std::string& line) {
  const std::string text = line + '\n';
  if (write(input_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    fail("cannot write to a rank");
  }
}

std::optional<std::string> Child::receive() {
  while (true) {
    const std::size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    char chunk[4096];
    const ssize_t got = read(output_, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("cannot read from a rank");
    if (got == 0) return std::nullopt;
    buffer_.append(chunk, static_cast<std::size_t>(got));
  }
}

std::vector<double> Child::numbers() {
  const std::optional<std::string> line = receive();
  if (!line) throw std::runtime_error("a rank ended before it answered; its message is above");
  return parse_numbers(*line);
}

void Child::finish() {
  close_input();
  while (receive()) {
  }
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  throw std::runtime_error(
      WIFSIGNALED(status)
          ? fmt::format("a rank was ended by signal {}", WTERMSIG(status))
          : fmt::format("a rank ended with code {}; its message is above", WEXITSTATUS(status)));
}

std::vector<std::string> launcher_variables(int rank, int world, int job) {
  return {fmt::format("RANK={}", rank), fmt::format("WORLD_SIZE={}", world),
          fmt::format("LOCAL_RANK={}", rank), fmt::format("LOCAL_WORLD_SIZE={}", world),
          "MASTER_ADDR=127.0.0.1",
          // Only a name here: nothing listens on it.
          fmt::format("MASTER_PORT={}{:03}", getpid(), job), "ZSHARD_DEADLINE_SECONDS=120"};
}

int next_job() {
  static int jobs = 0;
  return jobs++;
}

std::vector<double> parse_numbers(const std::string& line) {
  std::istringstream text(line);
  std::vector<double> numbers;
  for (double number = 0.0; text >> number;) numbers.push_back(number);
  if (!text.eof()) throw std::runtime_error("a rank wrote something else than numbers: " + line);
  return numbers;
}

}  // namespace bench
