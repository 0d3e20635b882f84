// The errors that zshard throws. Each message says what, where (rank, step, phase, unit,
// parameter), the evidence, and the call or option that mends it. docs/errors.md explains each
// class.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace zshard {

/// Base of all errors. Catching it catches everything that zshard throws on purpose.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}

  /// The step counter that this rank's parameters and state stand for after the error, where it is
  /// known.
  [[nodiscard]] std::optional<std::int64_t> state_step() const { return state_step_; }
  void set_state_step(std::int64_t step) { state_step_ = step; }

 private:
  std::optional<std::int64_t> state_step_;
};

/// The caller broke a rule of the interface, or asked for something this build or backend does not
/// do. Thrown before anything changed, unless the message says otherwise.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A peer died, left, was too slow, or issued another collective. The engine is poisoned
/// afterwards.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A device call failed.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A file operation failed; the message has file, offset, length and the system's reason.
class IoError : public Error {
 public:
  using Error::Error;
};

/// A memory budget or the machine's memory is too small. The message holds the plan's table.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A checkpoint is damaged or does not match the model.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace zshard
