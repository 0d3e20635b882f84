#include "runtime/base/system_reason.hpp"

#include <cerrno>
#include <cstring>

namespace zshard::base {

std::string system_reason(int error) {
  const std::string text =
      std::string(std::strerror(error)) + " (errno " + std::to_string(error) + ")";
  switch (error) {
    case EMFILE:
      return text + "; raise the limit of open files (ulimit -n)";
    case ENFILE:
      return text + "; the machine has no more open files: raise fs.file-max";
    case EFBIG:
      return text + "; raise the limit of file sizes (ulimit -f)";
    default:
      return text;
  }
}

}  // namespace zshard::base
