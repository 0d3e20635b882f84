// What a directory's disk gives to programs that only read and write it, around the page cache: the
// limit of everything that zshard does with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "offload/io/extent_file.hpp"
#include "runtime/memory/arena.hpp"

namespace bench {

enum class Move { read, write };

/// Numbers that no disk can compress or leave out.
void fill_random(std::span<std::byte> memory);

/// A file without a name, written once, that fio moves in requests of 1 MiB, eight in flight, from
/// and to huge pages. Where fio is missing an io_uring loop of this program does the same.
class RawDisk {
 public:
  /// engine: fio's, "io_uring" (registered file and buffers) or "libaio". Throws zshard::UsageError
  /// where direct I/O is refused: the page cache would be measured.
  RawDisk(const std::string& directory, std::int64_t bytes, std::string engine);

  /// Seconds for so many passes over the file, each complete before the next. Throws
  /// std::runtime_error.
  double seconds(Move move, int passes);
  /// Who moves the bytes, in words; the same for all objects with this engine.
  static std::string name(const std::string& engine);

 private:
  double fio(Move move, int passes) const;
  double loop(Move move, int passes);

  std::int64_t bytes_;
  std::string engine_;
  zshard::offload::ExtentFile file_;
  std::shared_ptr<zshard::memory::Arena> memory_;
};

}  // namespace bench
