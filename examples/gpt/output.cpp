#include "output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "zshard/error.hpp"

namespace gpt {
namespace {

[[noreturn]] void fail(int error) {
  throw zshard::IoError("cannot write to standard output: " +
                        std::generic_category().message(error));
}

}  // namespace

void prepare_streams() {
  // open() gives the lowest free descriptor. Read-only: writes to it fail and are reported.
  int descriptor = 0;
  do {
    descriptor = ::open("/dev/null", O_RDONLY);
  } while (descriptor >= 0 && descriptor <= 2);
  if (descriptor > 2) ::close(descriptor);
}

void say(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) fail(errno);
}

void flush_output() {
  if (std::fflush(stdout) != 0) fail(errno);
}

}  // namespace gpt
