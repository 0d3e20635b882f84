// Files of extents: nameless, of this process alone, with their space reserved, around the page
// cache where the file system allows that.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/descriptor.hpp"

namespace zshard::offload {

/// The directories of a list that commas separate (offload.nvme_dir).
std::vector<std::string> split_directories(const std::string& list);

/// Throws UsageError, with what to do, unless `path` is a directory, not a symbolic link, that this
/// user owns and may write to.
void check_directory(const std::string& path);
/// The same of each, and that no two are one directory, whatever they are called.
void check_directories(const std::vector<std::string>& paths);

/// Space that is wanted in a directory.
struct SpaceWanted {
  std::string directory;
  std::int64_t bytes = 0;  // of one rank
};
/// Throws IoError, with the bytes that are needed and free, unless the file systems have room for
/// `ranks` times as much.
void check_space(const std::vector<SpaceWanted>& wanted, int rank, int ranks);

class ExtentFile {
 public:
  /// Makes the file in a directory that check_directory() has passed. Nothing of it stays behind
  /// when the process ends, in whatever way. Throws UsageError for a read-only file system, IoError
  /// (with the bytes that are needed and free) for anything else.
  static ExtentFile make(const std::string& directory, std::int64_t bytes, int rank);

  [[nodiscard]] int descriptor() const { return descriptor_.get(); }
  [[nodiscard]] const std::string& directory() const { return directory_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] bool direct() const { return refusal_.empty(); }
  /// Why transfers go through the page cache; "" if they do not.
  [[nodiscard]] const std::string& refusal() const { return refusal_; }
  /// The file system has set the space aside: it cannot run out later.
  [[nodiscard]] bool reserved() const { return reserved_; }

 private:
  ExtentFile() = default;
  void open(int rank);
  void open_named(int directory, bool direct, int rank);
  void decide_direct();
  void reserve(int rank);

  std::string directory_;
  base::Descriptor descriptor_;
  std::int64_t bytes_ = 0;
  std::string refusal_;
  bool reserved_ = false;
};

}  // namespace zshard::offload
