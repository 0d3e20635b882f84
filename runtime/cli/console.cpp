#include "runtime/cli/console.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

constexpr auto kQuiet = std::chrono::seconds(2);
constexpr auto kInterval = std::chrono::milliseconds(100);

/// 0, or the system's reason.
int write_all(int descriptor, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t wrote = ::write(descriptor, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(wrote));
  }
  return 0;
}

}  // namespace

void prepare_streams() {
  // open() gives the lowest free descriptor. Read-only: writes to it fail and are reported.
  int descriptor = 0;
  do {
    descriptor = ::open("/dev/null", O_RDONLY);
  } while (descriptor >= 0 && descriptor <= 2);
  if (descriptor > 2) ::close(descriptor);
  ::signal(SIGPIPE, SIG_IGN);
}

void print(std::string_view text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error == EPIPE) throw OutputClosed{};
  if (error != 0) {
    throw IoError("cannot write to standard output: " + std::generic_category().message(error));
  }
}

void complain(std::string_view text) noexcept {
  // What standard error does not take is lost: there is nowhere else to say it.
  write_all(STDERR_FILENO, "zshard: ");
  write_all(STDERR_FILENO, text);
  if (text.empty() || text.back() != '\n') write_all(STDERR_FILENO, "\n");
}

Progress::Progress()
    : next_(std::chrono::steady_clock::now() + kQuiet), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) write_all(STDERR_FILENO, "\r\033[K");
}

void Progress::show(std::string_view text) {
  if (!terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + kInterval;
  shown_ = true;
  write_all(STDERR_FILENO, "\r\033[K");
  write_all(STDERR_FILENO, text);
}

}  // namespace zshard::cli
