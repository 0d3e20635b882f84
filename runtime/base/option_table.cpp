#include "runtime/base/option_table.hpp"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/base/bytes.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"

namespace zshard::base {

namespace {

/// How values of one type and range are read and written.
template <class T>
struct Codec {
  std::string type;
  std::string range;
  std::function<std::optional<T>(std::string_view)> parse;  // unset: not allowed
  std::function<std::string(const T&)> format;
};

template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

template <class E>
Codec<E> choice(std::initializer_list<E> values) {
  const std::vector<E> all(values);
  std::string range;
  for (const E value : all) range += (range.empty() ? "" : ", ") + std::string(to_string(value));
  return {.type = "enum",
          .range = range,
          .parse = [all](std::string_view text) -> std::optional<E> {
            for (const E value : all) {
              if (text == to_string(value)) return value;
            }
            return std::nullopt;
          },
          .format = [](const E& value) { return std::string(to_string(value)); }};
}

// Stages have numbers, by which people know them.
Codec<Stage> stages() {
  Codec<Stage> codec =
      choice({Stage::replicated, Stage::optimizer, Stage::gradients, Stage::parameters});
  codec.range = "replicated (0), optimizer (1), gradients (2), parameters (3)";
  codec.parse = [by_name = codec.parse](std::string_view text) -> std::optional<Stage> {
    if (text.size() == 1 && text[0] >= '0' && text[0] <= '3') {
      return static_cast<Stage>(text[0] - '0');
    }
    return by_name(text);
  };
  return codec;
}

Codec<int> whole(int lowest, int highest) {
  return {
      .type = "integer",
      .range = "whole numbers from " + std::to_string(lowest) + " to " + std::to_string(highest),
      .parse = [lowest, highest](std::string_view text) -> std::optional<int> {
        const std::optional<int> value = parse_number<int>(text);
        if (!value || *value < lowest || *value > highest) return std::nullopt;
        return value;
      },
      .format = [](const int& value) { return std::to_string(value); }};
}

Codec<std::int64_t> bytes(std::int64_t lowest) {
  return {.type = "bytes",
          .range = "sizes from " + std::to_string(lowest) + " to " +
                   std::to_string(std::numeric_limits<std::int64_t>::max()) + " bytes",
          .parse = [lowest](std::string_view text) -> std::optional<std::int64_t> {
            const std::optional<std::int64_t> value = parse_bytes(text);
            if (!value || *value < lowest) return std::nullopt;
            return value;
          },
          .format = [](const std::int64_t& value) { return std::to_string(value); }};
}

Codec<double> number(double lowest, double highest, const std::string& range) {
  return {.type = "number",
          .range = range,
          .parse = [lowest, highest](std::string_view text) -> std::optional<double> {
            const std::optional<double> value = parse_number<double>(text);
            // A NaN fails both comparisons.
            if (!value || !(*value >= lowest && *value <= highest)) return std::nullopt;
            return value;
          },
          .format =
              [](const double& value) {
                char text[64];
                const auto result = std::to_chars(text, text + sizeof text, value);
                return std::string(text, result.ptr);
              }};
}

Codec<bool> boolean() {
  return {.type = "boolean",
          .range = "true, false (also 1, 0, yes, no, on, off)",
          .parse = [](std::string_view text) -> std::optional<bool> {
            if (text == "true" || text == "1" || text == "yes" || text == "on") return true;
            if (text == "false" || text == "0" || text == "no" || text == "off") return false;
            return std::nullopt;
          },
          .format = [](const bool& value) { return std::string(value ? "true" : "false"); }};
}

// A list of directories, or "".
Codec<std::string> directories() {
  constexpr std::size_t kMost = 65536;
  return {.type = "text",
          .range = "directories separated by commas, at most " + std::to_string(kMost) +
                   " bytes, no control characters; unset",
          .parse = [](std::string_view text) -> std::optional<std::string> {
            if (text.empty() || text == "unset") return std::string();
            if (text.size() > kMost) return std::nullopt;
            bool after_comma = true;
            for (const char c : text) {
              const auto byte = static_cast<unsigned char>(c);
              if (byte < 0x20 || byte == 0x7F || (c == ',' && after_comma)) return std::nullopt;
              after_comma = c == ',';
            }
            if (after_comma) return std::nullopt;
            return std::string(text);
          },
          .format = [](const std::string& value) { return value; }};
}

// One directory, or "".
Codec<std::string> directory() {
  constexpr std::size_t kMost = 4095;  // a path of the system
  return {.type = "text",
          .range = "a directory, at most " + std::to_string(kMost) +
                   " bytes, no control characters; unset",
          .parse = [](std::string_view text) -> std::optional<std::string> {
            if (text.empty() || text == "unset") return std::string();
            if (text.size() > kMost) return std::nullopt;
            for (const char c : text) {
              const auto byte = static_cast<unsigned char>(c);
              if (byte < 0x20 || byte == 0x7F) return std::nullopt;
            }
            return std::string(text);
          },
          .format = [](const std::string& value) { return value; }};
}

template <class T>
inline constexpr bool kOptional = false;
template <class T>
inline constexpr bool kOptional<std::optional<T>> = true;

std::string spelled(std::string_view name, char separator) {
  std::string result(name);
  for (char& c : result) {
    if (c == '.' || c == '_') c = separator;
  }
  return result;
}

std::string upper(std::string text) {
  for (char& c : text) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return text;
}

struct Description {
  std::string name;
  std::string unit{};
  std::string help;
  std::vector<DeepspeedName> deepspeed{};
};

// access: EngineOptions -> reference to the field, const or not. A field that is a std::optional
// may be unset.
template <class Access, class T>
OptionRow row(Description description, Access access, Codec<T> codec) {
  using Field = std::remove_reference_t<std::invoke_result_t<Access, EngineOptions&>>;
  if (kOptional<Field>) codec.range += "; unset";

  OptionRow result;
  result.deepspeed = std::move(description.deepspeed);
  result.info.name = description.name;
  result.info.type = codec.type;
  result.info.unit = description.unit;
  result.info.range = codec.range;
  result.info.help = description.help;
  result.info.environment = "ZSHARD_" + upper(spelled(description.name, '_'));
  result.info.argument = "--" + spelled(description.name, '-');
  result.get = [access, codec](const EngineOptions& options) -> std::string {
    const auto& field = access(options);
    if constexpr (kOptional<Field>) {
      return field ? codec.format(*field) : "";
    } else {
      return codec.format(field);
    }
  };
  result.set = [access, codec, name = description.name](EngineOptions& options,
                                                        std::string_view text) {
    if constexpr (kOptional<Field>) {
      if (text.empty() || text == "unset") {
        access(options).reset();
        return;
      }
    }
    std::optional<T> value = codec.parse(text);
    if (!value) {
      throw UsageError("option " + name + ": " + base::quoted(text) +
                       " is not allowed. Allowed: " + codec.range + ".");
    }
    access(options) = std::move(*value);
  };
  result.info.default_value = result.get(EngineOptions{});
  return result;
}

// More positions than any program has, and far from overflow in sums of positions.
constexpr int kMostPositions = 1 << 20;
constexpr int kMostRanks = 1 << 20;
constexpr int kMostThreads = 1024;
constexpr int kMostDevices = 1023;
constexpr int kMostBuffers = 1024;
constexpr std::int64_t kLeastBlock = 4096;  // the alignment of direct I/O
constexpr int kMostDepth = 4096;
constexpr int kMostDelay = 1'000'000;
// Extents are cut at the alignment of direct I/O.
constexpr std::int64_t kLeastSubGroup = 4096;
// The factor gradient_scale / loss_scale is an fp32 number: outside it would become 0 or infinite.
constexpr double kLeastLossScale = 1e-30;
constexpr double kMostLossScale = 1e30;
// 31 years, and still exact as a 64-bit number of nanoseconds.
constexpr double kMostSeconds = 1e9;

std::vector<OptionRow> make_rows() {
  const auto tiers = [] { return choice({Tier::device, Tier::host, Tier::nvme}); };
  return {
      row(
          {.name = "stage",
           .help = "what is partitioned across the ranks",
           .deepspeed = {{"zero_optimization.stage", DeepspeedValue::whole}}},
          [](auto& o) -> auto& { return o.stage; }, stages()),
      row(
          {.name = "device", .help = "what the loop's pointers are memory of: the host, or a GPU"},
          [](auto& o) -> auto& { return o.device; }, choice({DeviceKind::host, DeviceKind::cuda})),
      row(
          {.name = "device_index",
           .unit = "GPUs",
           .help = "of this rank's GPU; -1: the rank's number on its machine, modulo its GPUs"},
          [](auto& o) -> auto& { return o.device_index; }, whole(-1, kMostDevices)),
      row(
          {.name = "offload.optimizer",
           .help = "where master weights and moments live",
           .deepspeed = {{"zero_optimization.offload_optimizer.device", DeepspeedValue::tier}}},
          [](auto& o) -> auto& { return o.offload.optimizer; }, tiers()),
      row(
          {.name = "offload.gradients", .help = "where the fp32 accumulators live"},
          [](auto& o) -> auto& { return o.offload.gradients; }, tiers()),
      row(
          {.name = "offload.parameters",
           .help = "where parameter shards live; another tier than device needs stage 3",
           .deepspeed = {{"zero_optimization.offload_param.device", DeepspeedValue::tier}}},
          [](auto& o) -> auto& { return o.offload.parameters; }, tiers()),
      row(
          {.name = "update_on",
           .help = "with device = cuda, what updates optimizer state that is on the host or on "
                   "nvme: the host's cores, or the GPU, through which the state then passes. auto: "
                   "each in turn in the first steps, then the faster one"},
          [](auto& o) -> auto& { return o.offload.update_on; },
          choice({UpdateOn::automatic, UpdateOn::device, UpdateOn::host})),
      row(
          {.name = "offload.nvme_dir",
           .help = "directories for the nvme tier, separated by commas",
           .deepspeed = {{"zero_optimization.offload_optimizer.nvme_path",
                          DeepspeedValue::nvme_path},
                         {"zero_optimization.offload_param.nvme_path", DeepspeedValue::nvme_path}}},
          [](auto& o) -> auto& { return o.offload.nvme_dir; }, directories()),
      row(
          {.name = "offload.optimizer_nvme_bytes",
           .unit = "bytes a rank",
           .help = "with offload.optimizer = nvme: least optimizer state there, the rest is on the "
                   "host; unset: all, or what host_budget leaves no room for"},
          [](auto& o) -> auto& { return o.offload.optimizer_nvme_bytes; }, bytes(0)),
      row(
          {.name = "io_backend", .help = "how the nvme tier talks to its files"},
          [](auto& o) -> auto& { return o.offload.io_backend; },
          choice({IoBackendKind::automatic, IoBackendKind::io_uring, IoBackendKind::posix})),
      row(
          {.name = "io_buffers",
           .unit = "sub-groups",
           .help = "sub-groups that a step from nvme has in memory at a time; 3 and more overlap "
                   "reads, updates and writes",
           .deepspeed = {{"zero_optimization.offload_optimizer.buffer_count",
                          DeepspeedValue::whole}}},
          [](auto& o) -> auto& { return o.offload.io_buffers; }, whole(1, kMostBuffers)),
      row(
          {.name = "io_block_bytes",
           .unit = "bytes",
           .help = "size of one request; rounded up to 4096",
           .deepspeed = {{"aio.block_size", DeepspeedValue::whole}}},
          [](auto& o) -> auto& { return o.offload.io_block_bytes; }, bytes(kLeastBlock)),
      row(
          {.name = "io_depth",
           .unit = "requests",
           .help = "requests in flight",
           .deepspeed = {{"aio.queue_depth", DeepspeedValue::whole}}},
          [](auto& o) -> auto& { return o.offload.io_depth; }, whole(1, kMostDepth)),
      row(
          {.name = "io_verify",
           .help = "check a checksum of everything that is read back from nvme: finds lost, torn "
                   "and misplaced writes; takes 16 bytes of memory for each 4096"},
          [](auto& o) -> auto& { return o.offload.io_verify; }, boolean()),
      row(
          {.name = "gather_budget",
           .unit = "bytes a rank",
           .help = "memory for gathered parameters at stage 3; unset: all units at once"},
          [](auto& o) -> auto& { return o.gather_budget; }, bytes(0)),
      row(
          {.name = "look_ahead", .unit = "positions", .help = "positions gathered ahead"},
          [](auto& o) -> auto& { return o.look_ahead; }, whole(0, kMostPositions)),
      row(
          {.name = "behind",
           .unit = "positions",
           .help = "positions that a reduction may run on behind the loop"},
          [](auto& o) -> auto& { return o.behind; }, whole(0, kMostPositions)),
      row(
          {.name = "gradient_mode",
           .help = "what the loop does with a gradient buffer at a unit's first backward use"},
          [](auto& o) -> auto& { return o.gradient_mode; },
          choice({GradientMode::overwrite, GradientMode::accumulate})),
      row(
          {.name = "accumulation",
           .help = "when gradients are reduced: every micro-step, or once a step from full fp32 "
                   "buffers. Changes bits"},
          [](auto& o) -> auto& { return o.accumulation; },
          choice({Accumulation::reduced, Accumulation::local})),
      row(
          {.name = "reduction",
           .help = "sums in rank order with fixed bits, or the communicator's own reduce-scatter. "
                   "Changes bits"},
          [](auto& o) -> auto& { return o.reduction; },
          choice({Reduction::ordered, Reduction::native})),
      row(
          {.name = "wire",
           .help = "dtype of gradients in transit; unset: their own. Changes bits",
           .deepspeed = {{"communication_data_type", DeepspeedValue::dtype}}},
          [](auto& o) -> auto& { return o.wire; }, choice({DType::f32, DType::bf16, DType::f16})),
      row(
          {.name = "reduction_group",
           .unit = "ranks",
           .help = "consecutive ranks that are summed first; 0: the world. Changes bits"},
          [](auto& o) -> auto& { return o.reduction_group; }, whole(0, kMostRanks)),
      row(
          {.name = "master",
           .help = "fp32 weights behind 16-bit parameters: whole, the missing 16 bits, or none "
                   "(stochastic rounding). Changes bits"},
          [](auto& o) -> auto& { return o.master; },
          choice({MasterWeights::f32, MasterWeights::remainder, MasterWeights::none})),
      row(
          {.name = "moments",
           .help = "storage of the optimizer's moments; q8: 8 bits in blocks of 256. Changes bits"},
          [](auto& o) -> auto& { return o.moments; },
          choice({Moments::f32, Moments::bf16, Moments::q8})),
      row(
          {.name = "loss_scale",
           .help = "constant factor that the loop puts on its loss; the step takes it out again. "
                   "Changes bits, except powers of 2 with which nothing overflows or underflows",
           .deepspeed = {{"fp16.loss_scale", DeepspeedValue::loss_scale}}},
          [](auto& o) -> auto& { return o.loss_scale; },
          number(kLeastLossScale, kMostLossScale, "numbers from 1e-30 to 1e30")),
      row(
          {.name = "sub_group_bytes",
           .unit = "bytes",
           .help = "fp32 state that the optimizer processes at a time",
           .deepspeed = {{"zero_optimization.sub_group_size", DeepspeedValue::elements}}},
          [](auto& o) -> auto& { return o.sub_group_bytes; }, bytes(kLeastSubGroup)),
      row(
          {.name = "device_budget",
           .unit = "bytes a rank",
           .help = "refuse to start if the plan needs more device memory; unset: no limit"},
          [](auto& o) -> auto& { return o.device_budget; }, bytes(0)),
      row(
          {.name = "host_budget",
           .unit = "bytes a rank",
           .help = "refuse to start if the plan needs more host memory; unset: no limit"},
          [](auto& o) -> auto& { return o.host_budget; }, bytes(0)),
      row(
          {.name = "deadline_seconds",
           .unit = "seconds",
           .help = "how long a collective waits for a slow rank; a transfer of the nvme tier has "
                   "half of it"},
          [](auto& o) -> auto& { return o.deadline_seconds; },
          number(std::numeric_limits<double>::denorm_min(), kMostSeconds,
                 "numbers above 0, at most 1000000000")),
      row(
          {.name = "threads",
           .unit = "threads",
           .help = "threads of the element kernels; 0: cores / ranks"},
          [](auto& o) -> auto& { return o.threads; }, whole(0, kMostThreads)),
      row(
          {.name = "inline_queues",
           .help = "run collectives on the calling thread, not on queues of their own"},
          [](auto& o) -> auto& { return o.inline_queues; }, boolean()),
      row(
          {.name = "test_delay_microseconds",
           .unit = "microseconds",
           .help = "for tests: a random pause of up to this before each collective"},
          [](auto& o) -> auto& { return o.test_delay_microseconds; }, whole(0, kMostDelay)),
      row(
          {.name = "poison_slots",
           .help = "fill freed slots and gradient padding with NaN: finds reads of stale memory"},
          [](auto& o) -> auto& { return o.poison_slots; }, boolean()),
      row(
          {.name = "log_dir",
           .help = "directory for a report of the last collectives after a failure; it must be "
                   "there. Unset: only the error's message"},
          [](auto& o) -> auto& { return o.log_dir; }, directory()),
  };
}

}  // namespace

const std::vector<OptionRow>& option_rows() {
  static const std::vector<OptionRow> rows = make_rows();
  return rows;
}

const OptionRow& option_row(std::string_view name) {
  std::vector<std::string> names;
  for (const OptionRow& row : option_rows()) {
    if (row.info.name == name) return row;
    names.push_back(row.info.name);
  }
  const std::string hint = did_you_mean(name, names);
  throw UsageError("unknown option " + base::quoted(name) + "." +
                   (hint.empty() ? " docs/options.md lists all options." : hint));
}

}  // namespace zshard::base
