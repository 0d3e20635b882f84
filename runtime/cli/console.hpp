// Standard output and the terminal.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace zshard::cli {

/// Standard output is a pipe that nobody reads any more (`zshard options | head -1`): no error.
struct OutputClosed {};

/// Makes sure that descriptors 0 to 2 are taken, so that no file of ours becomes standard output,
/// and that a closed pipe is an error code instead of a signal.
void prepare_streams();

/// Writes all of the text to standard output. Throws OutputClosed or IoError.
void print(std::string_view text);

/// Writes "zshard: TEXT" to standard error. Never throws.
void complain(std::string_view text) noexcept;

/// A line on standard error, if that is a terminal, once something has taken two seconds; the
/// destructor clears it.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(std::string_view text);

 private:
  std::chrono::steady_clock::time_point next_;
  bool terminal_;
  bool shown_ = false;
};

}  // namespace zshard::cli
