// A copy of this program with other arguments and variables, and the pipes to it. It dies with its
// parent.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace bench {

class Child {
 public:
  /// arguments: after the program's name. variables: "NAME=value", in place of this process' own.
  Child(const std::vector<std::string>& arguments, const std::vector<std::string>& variables);
  /// Ends it if it still runs.
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void send(const std::string& line);
  /// The next line of its output, without the end of line; nullopt when it has closed its output.
  std::optional<std::string> receive();
  /// receive() as numbers. Throws std::runtime_error if there is no such line.
  std::vector<double> numbers();
  /// Closes its input and waits for it. Throws std::runtime_error unless it ended well.
  void finish();

 private:
  void close_input();
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::string buffer_;
};

/// Variables that place a process in a job of its own, in the torchrun style.
std::vector<std::string> launcher_variables(int rank, int world, int job);
/// A number for the next job of this process.
int next_job();
/// The numbers of a line, separated by blanks.
std::vector<double> parse_numbers(const std::string& line);

}  // namespace bench
