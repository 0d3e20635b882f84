// What the backend knows of a transfer that failed. Plain data: the store makes the message.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "offload/io/driver.hpp"

namespace zshard::offload {

/// Pages of a read that are not what was last written there.
struct Mismatch {
  std::int64_t offset = 0;            // of the first such page, in the store
  std::int64_t pages = 0;             // of the block that was looked at
  std::int64_t former = 0;            // hold what was there before the last write
  std::int64_t elsewhere = 0;         // hold what was written to another place
  std::int64_t unknown = 0;           // hold neither
  std::int64_t elsewhere_offset = 0;  // where the first of `elsewhere` belongs
};

struct IoFailure {
  enum class Kind : std::uint8_t {
    system,       // the system refused it: error
    end_of_file,  // a read found nothing at its place
    no_progress,  // retried as often as allowed; error: what the system said last, 0 short counts
    bad_count,    // the system says that it moved more than was asked for: done
    mismatch,     // verification
    no_answer,    // nothing came back within the deadline; it may still be under way
  };
  Kind kind = Kind::system;
  Operation operation = Operation::read;
  bool filling = false;          // the first zeros of the file, not a caller's transfer
  int file = 0;                  // index
  std::int64_t offset = 0;       // of the request, in the store
  std::int64_t bytes = 0;        // of the request
  std::int64_t file_offset = 0;  // in the file
  std::int64_t done = 0;         // bytes that had been moved
  int error = 0;                 // errno
  Mismatch found;
};

/// The message of an IoError: what, where, why, and what to do. directory: of the file. lies_there:
/// what the offset holds, "" if unknown.
std::string failure_text(const IoFailure& failure, const std::string& directory, int rank,
                         const std::string& lies_there, double deadline_seconds);

/// Thrown inside offload/ only.
class IoFailed : public std::exception {
 public:
  explicit IoFailed(const IoFailure& failure) : failure_(failure) {}
  [[nodiscard]] const IoFailure& failure() const { return failure_; }
  [[nodiscard]] const char* what() const noexcept override { return "transfer failed"; }

 private:
  IoFailure failure_;
};

}  // namespace zshard::offload
