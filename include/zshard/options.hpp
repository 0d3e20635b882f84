// Options of an engine, and the one table that describes them to files, environment, command line
// and documents.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zshard/types.hpp"

namespace zshard {

/// Where each class of tensors lives.
struct OffloadOptions {
  Tier optimizer = Tier::device;   ///< master weights and moments
  Tier gradients = Tier::device;   ///< the fp32 accumulators
  Tier parameters = Tier::device;  ///< stage 3 only
  UpdateOn update_on =
      UpdateOn::automatic;  ///< of optimizer state off a GPU: which cores update it
  std::string nvme_dir{};   ///< directories for the nvme tier, separated by commas
  std::optional<std::int64_t>
      optimizer_nvme_bytes{};  ///< least optimizer state on nvme, of the optimizer tier nvme;
                               ///< unset: all, or what host_budget leaves no room for
  IoBackendKind io_backend = IoBackendKind::automatic;
  int io_buffers =
      8;  ///< sub-groups that the step has in memory at a time; 1 runs, without overlap
  std::int64_t io_block_bytes = 1 << 20;  ///< of one request
  int io_depth = 32;                      ///< requests in flight
  bool io_verify = false;  ///< checksum of everything that is read back: finds lost, torn and
                           ///< misplaced writes
};

/// Options of an engine. None of them changes a bit of the result except where the line says so.
/// Sizes are bytes a rank. docs/options.md lists ranges and the name of each for files, environment
/// and command line.
struct EngineOptions {
  Stage stage = Stage::parameters;
  DeviceKind device = DeviceKind::host;  ///< what the loop's pointers are memory of
  int device_index = -1;  ///< of this rank's GPU; -1: its number on this machine, modulo the GPUs
  OffloadOptions offload{};
  std::optional<std::int64_t>
      gather_budget{};  ///< for gathered parameters at stage 3; unset: all units at once
  int look_ahead = 1;   ///< positions gathered ahead
  int behind = 1;       ///< positions that a reduction may run on behind the loop
  GradientMode gradient_mode = GradientMode::accumulate;
  Accumulation accumulation = Accumulation::reduced;  ///< changes bits
  Reduction reduction = Reduction::ordered;           ///< changes bits
  std::optional<DType> wire{};  ///< dtype of gradients in transit; unset: their own. Changes bits
  int reduction_group = 0;      ///< consecutive ranks summed first; 0: the world. Changes bits
  MasterWeights master = MasterWeights::f32;  ///< changes bits
  Moments moments = Moments::f32;             ///< changes bits
  double loss_scale = 1.0;                    ///< constant factor that the loop puts on its loss
  std::int64_t sub_group_bytes = 16 << 20;    ///< fp32 state that the optimizer processes at a time
  std::optional<std::int64_t> device_budget{};  ///< refuse to start above it
  std::optional<std::int64_t> host_budget{};    ///< refuse to start above it
  double deadline_seconds = 600.0;              ///< how long a collective waits for a slow rank
  int threads = 0;                  ///< threads of the element kernels; 0: cores / ranks
  bool inline_queues = false;       ///< run collectives on the calling thread, not on own queues
  int test_delay_microseconds = 0;  ///< for tests: random pause of up to this before a collective
  bool poison_slots =
      false;  ///< fill freed slots and gradient padding with NaN: finds reads of stale memory
  std::string log_dir{};  ///< directory for a report of the last collectives after a failure
};

/// One row of the table.
struct OptionInfo {
  std::string name;           ///< "offload.optimizer"
  std::string type;           ///< "enum", "integer", "bytes", "number", "boolean", "text"
  std::string unit;           ///< "bytes", "seconds", "ranks", ...; "" none
  std::string default_value;  ///< "" unset
  std::string range;          ///< allowed values, for people
  std::string help;           ///< one line
  std::string environment;    ///< "ZSHARD_OFFLOAD_OPTIMIZER"
  std::string argument;       ///< "--offload-optimizer"
};

/// The table, in document order.
const std::vector<OptionInfo>& option_table();

/// Sets one option from text. Bytes take suffixes (KiB, MiB, GiB, KB, MB, GB). Throws UsageError on
/// an unknown key, with the nearest name, and on a value out of range, with the range. `options` is
/// unchanged after an error.
void set_option(EngineOptions& options, std::string_view key, std::string_view value);

/// The option's present value as text that set_option takes; "" for an unset one.
std::string get_option(const EngineOptions& options, std::string_view key);

/// Applies `key = value` lines ('#' starts a comment) of a file. Throws IoError if it cannot be
/// read, UsageError with the line number for a bad line; `options` is unchanged after an error.
void apply_option_file(EngineOptions& options, const std::string& path);

/// Applies the ZSHARD_* variables that name options. A ZSHARD_ variable that names none is a
/// UsageError, except the ones that zshard uses for other things (ZSHARD_LOG).
void apply_option_environment(EngineOptions& options);

/// Applies `--name value` and `--name=value` arguments that name options, and returns the others in
/// order. An argument that starts with `--zshard-` and names none is a UsageError, and so is an
/// option that is named twice.
std::vector<std::string> apply_option_arguments(EngineOptions& options,
                                                std::span<const std::string> arguments);

/// Reads a DeepSpeed JSON configuration's well-known names (zero_optimization.stage,
/// offload_optimizer.device, ...). Names that have no counterpart are returned; a value that cannot
/// be served is a UsageError.
std::vector<std::string> apply_deepspeed_config(EngineOptions& options, std::string_view json);

/// Throws UsageError, naming the option and its range, if a value set in code is out of range.
void validate(const EngineOptions& options);

/// docs/options.md.
std::string options_markdown();

}  // namespace zshard
