#include "offload/io/extent_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <utility>

#include "offload/io/thread.hpp"
#include "runtime/base/bytes.hpp"
#include "runtime/base/quote.hpp"
#include "runtime/base/system_reason.hpp"
#include "zshard/error.hpp"

namespace zshard::offload {
namespace {

using base::human_bytes;
using base::system_reason;

constexpr char kOption[] = "offload.nvme_dir";
constexpr int kMostTries = 1000;

/// The path without slashes at its end, which would make a symbolic link a directory.
std::string trimmed(const std::string& path) {
  std::size_t end = path.size();
  while (end > 1 && path[end - 1] == '/') --end;
  return path.substr(0, end);
}

base::Descriptor open_directory(const std::string& path) {
  return base::Descriptor(
      ::open(trimmed(path).c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// Bytes that this user may still take; -1 if the system does not say.
std::int64_t free_bytes(const std::string& directory) {
  struct statvfs system {};
  if (statvfs(directory.c_str(), &system) != 0) return -1;
  return static_cast<std::int64_t>(system.f_bavail) * static_cast<std::int64_t>(system.f_frsize);
}

std::string free_text(const std::string& directory) {
  const std::int64_t bytes = free_bytes(directory);
  return bytes < 0 ? "an unknown number of bytes" : human_bytes(bytes);
}

/// As check_directory(); which directory it is.
struct stat checked(const std::string& path) {
  if (path.empty()) {
    throw UsageError(fmt::format("{}: a directory's name is empty", kOption));
  }
  const std::string name = trimmed(path);
  const std::string quoted = base::quoted(path);
  struct stat entry {};
  if (lstat(name.c_str(), &entry) != 0) {
    const int error = errno;
    throw UsageError(fmt::format("{}: {}: {}. {}", kOption, quoted, system_reason(error),
                                 error == ENOENT
                                     ? "Make the directory, on the disk that is to be used"
                                     : "Name a directory that can be reached"));
  }
  if (S_ISLNK(entry.st_mode)) {
    throw UsageError(
        fmt::format("{}: {} is a symbolic link, which somebody else could turn. Name the directory "
                    "itself",
                    kOption, quoted));
  }
  if (!S_ISDIR(entry.st_mode)) {
    throw UsageError(fmt::format("{}: {} is no directory", kOption, quoted));
  }
  const base::Descriptor directory = open_directory(path);
  struct stat opened {};
  if (!directory.valid() || fstat(directory.get(), &opened) != 0) {
    throw UsageError(fmt::format("{}: {}: {}", kOption, quoted, system_reason(errno)));
  }
  if (opened.st_uid != geteuid()) {
    throw UsageError(
        fmt::format("{}: {} belongs to uid {}, this process runs as uid {}. Make a directory of "
                    "your own in it",
                    kOption, quoted, opened.st_uid, geteuid()));
  }
  if (faccessat(directory.get(), ".", W_OK | X_OK, AT_EACCESS) != 0) {
    const int error = errno;
    throw UsageError(
        fmt::format("{}: {} cannot be written to: {}. {}", kOption, quoted, system_reason(error),
                    error == EROFS    ? "Name a directory on a file system that is not read-only"
                    : error == EACCES ? "chmod u+wx it"
                                      : "Name another directory"));
  }
  return opened;
}

}  // namespace

std::vector<std::string> split_directories(const std::string& list) {
  std::vector<std::string> directories;
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    directories.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return directories;
}

void check_directory(const std::string& path) {
  checked(path);
}

void check_directories(const std::vector<std::string>& paths) {
  std::map<std::pair<dev_t, ino_t>, std::string> seen;
  for (const std::string& path : paths) {
    const struct stat entry = checked(path);
    const auto [first, added] = seen.try_emplace({entry.st_dev, entry.st_ino}, path);
    if (added) continue;
    throw UsageError(fmt::format(
        "{}: {} and {} are the same directory; two files there share one disk and gain nothing. "
        "Name each directory once",
        kOption, base::quoted(first->second), base::quoted(path)));
  }
}

void check_space(const std::vector<SpaceWanted>& wanted, int rank, int ranks) {
  struct Need {
    std::int64_t bytes = 0;
    std::string directory;
  };
  std::map<dev_t, Need> needs;
  for (const SpaceWanted& one : wanted) {
    struct stat entry {};
    if (stat(one.directory.c_str(), &entry) != 0) continue;  // making the file tells more
    Need& need = needs[entry.st_dev];
    need.bytes += one.bytes;
    need.directory += (need.directory.empty() ? "" : ", ") + base::quoted(one.directory);
  }
  for (const SpaceWanted& one : wanted) {
    struct stat entry {};
    if (stat(one.directory.c_str(), &entry) != 0) continue;
    const Need& need = needs[entry.st_dev];
    const std::int64_t free = free_bytes(one.directory);
    if (free < 0 || need.bytes <= free / ranks) continue;
    throw IoError(fmt::format(
        "{}: {} needs {} ({} for each of {} ranks here), {} are free (rank {}). Free space, name "
        "another directory, or keep more in memory (offload.optimizer, offload.parameters)",
        kOption, need.directory, human_bytes(need.bytes * ranks), human_bytes(need.bytes), ranks,
        human_bytes(free), rank));
  }
}

ExtentFile ExtentFile::make(const std::string& directory, std::int64_t bytes, int rank) {
  ExtentFile file;
  file.directory_ = directory;
  file.bytes_ = bytes;
  file.open(rank);
  file.decide_direct();
  file.reserve(rank);
  return file;
}

void ExtentFile::open(int rank) {
  const base::Descriptor directory = open_directory(directory_);
  if (!directory.valid()) {
    throw UsageError(
        fmt::format("{}: {}: {}", kOption, base::quoted(directory_), system_reason(errno)));
  }
  // Without a name from the start: there is no moment at which a kill would leave anything, and no
  // other process can open it. O_EXCL: it never gets a name.
  constexpr int kNameless = O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC;
  for (const int direct : {O_DIRECT, 0}) {
    descriptor_ = base::Descriptor(openat(directory.get(), ".", kNameless | direct, 0600));
    const int error = errno;
    if (descriptor_.valid()) {
      if (direct == 0) refusal_ = "the file system refuses O_DIRECT";
      return;
    }
    if (error == EOPNOTSUPP || error == EISDIR || error == ENOENT) {
      open_named(directory.get(), direct != 0, rank);
      if (descriptor_.valid()) {
        if (direct == 0) refusal_ = "the file system refuses O_DIRECT";
        return;
      }
      continue;
    }
    if (error == EINVAL && direct != 0) continue;
    if (error == EROFS || error == EACCES || error == EPERM) {
      throw UsageError(fmt::format("{}: {} cannot be written to: {}", kOption,
                                   base::quoted(directory_), system_reason(error)));
    }
    throw IoError(fmt::format("cannot make a file in {}: {} (rank {})", base::quoted(directory_),
                              system_reason(error), rank));
  }
  throw IoError(fmt::format("cannot make a file in {}: {} (rank {})", base::quoted(directory_),
                            system_reason(errno), rank));
}

/// For file systems without O_TMPFILE: a name for an instant, in a directory that only this user
/// can enter. Leaves the descriptor invalid only where O_DIRECT is refused.
void ExtentFile::open_named(int directory, bool direct, int rank) {
  // mkdtemp follows the path again, so the directory that was checked is named by its descriptor.
  std::string pattern = fmt::format("/proc/self/fd/{}/zshard-XXXXXX", directory);
  const auto fail = [&](const char* what, int error) {
    throw IoError(fmt::format("cannot make {} in {}: {} (rank {})", what, base::quoted(directory_),
                              system_reason(error), rank));
  };
  if (mkdtemp(pattern.data()) == nullptr) fail("a private directory", errno);
  int error = 0;
  {
    const base::Descriptor own(
        ::open(pattern.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (own.valid()) {
      constexpr char kName[] = "extents";
      descriptor_ = base::Descriptor(openat(
          own.get(), kName,
          O_CREAT | O_EXCL | O_NOFOLLOW | O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600));
      error = errno;
      // Some file systems make the file before they refuse O_DIRECT.
      unlinkat(own.get(), kName, 0);
    } else {
      error = errno;
    }
  }
  rmdir(pattern.c_str());
  if (!descriptor_.valid() && !(direct && error == EINVAL)) fail("a file", error);
}

/// Finds file systems that take O_DIRECT and do not mean it, or ask for more than 4096.
void ExtentFile::decide_direct() {
  if (!refusal_.empty()) return;
  struct statfs system {};
  if (fstatfs(descriptor(), &system) == 0 &&
      (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) {
    refusal_ = "the directory lies in memory (tmpfs)";
  }
#ifdef STATX_DIOALIGN
  constexpr unsigned kMostAlignment = 4096;
  struct statx more {};
  if (refusal_.empty() && statx(descriptor(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &more) == 0 &&
      (more.stx_mask & STATX_DIOALIGN) != 0) {
    if (more.stx_dio_offset_align == 0) {
      refusal_ = "the file system says that it has no direct I/O";
    } else if (more.stx_dio_offset_align > kMostAlignment ||
               more.stx_dio_mem_align > kMostAlignment) {
      refusal_ = fmt::format("direct I/O is aligned to {} bytes there",
                             std::max(more.stx_dio_offset_align, more.stx_dio_mem_align));
    }
  }
#endif
  if (refusal_.empty()) return;
  const int flags = fcntl(descriptor(), F_GETFL);
  if (flags >= 0) fcntl(descriptor(), F_SETFL, flags & ~O_DIRECT);
}

void ExtentFile::reserve(int rank) {
  if (bytes_ == 0) return;
  const auto fail = [&](int error, const std::string& remedy) {
    throw IoError(fmt::format("cannot reserve {} bytes ({}) in {}: {} (rank {}); {} are free. {}",
                              bytes_, human_bytes(bytes_), base::quoted(directory_),
                              system_reason(error), rank, free_text(directory_), remedy));
  };
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(bytes_)) {
    fail(EFBIG, fmt::format("RLIMIT_FSIZE is {} bytes", limit.rlim_cur));
  }
  const FileSizeSignalGuard guard;
  // What a signal interrupts has set some of the space aside.
  int error = EINTR;
  for (int tries = 0; error == EINTR && tries < kMostTries; ++tries) {
    error = fallocate(descriptor(), 0, 0, bytes_) == 0 ? 0 : errno;
  }
  if (error == EOPNOTSUPP || error == ENOSYS) {
    error = ftruncate(descriptor(), bytes_) == 0 ? 0 : errno;
    if (error != 0) fail(error, "Name another directory");
    return;
  }
  if (error != 0) {
    fail(error, error == EFBIG
                    ? "The file system or ulimit -f allows no file of this size: name several "
                      "directories, or raise it"
                    : "Free space, name another directory, or keep more in memory "
                      "(offload.optimizer, offload.parameters)");
  }
  reserved_ = true;
}

}  // namespace zshard::offload
