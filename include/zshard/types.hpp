// Small value types that every part of zshard shares. Nothing here owns memory.
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>
#include <vector>

namespace zshard {

/// Storage type of a parameter and of its gradient. All arithmetic is done in f32.
enum class DType : std::uint8_t { f32, bf16, f16 };

/// What is partitioned across the ranks (ZeRO stages 0-3).
enum class Stage : std::uint8_t {
  replicated = 0,  ///< nothing
  optimizer = 1,   ///< optimizer state
  gradients = 2,   ///< + gradients
  parameters = 3,  ///< + parameters, gathered unit by unit
};

/// Where a class of tensors lives. On host ranks `device` and `host` are both main memory,
/// accounted apart.
enum class Tier : std::uint8_t { device, host, nvme };

/// What a position of the program does with its unit.
enum class Pass : std::uint8_t { forward, recompute, backward };

/// What the loop has to do with a gradient buffer that a backward guard hands out.
enum class GradientMode : std::uint8_t {
  overwrite,   ///< the buffer's content is undefined: write every element
  accumulate,  ///< add to it: it is zeroed before the first use of a micro-step
};

/// When gradients are reduced. `local` sums micro-steps in full fp32 buffers and reduces once a
/// step.
enum class Accumulation : std::uint8_t { reduced, local };

/// `ordered` sums in rank order with fixed bits; `native` uses the communicator's own
/// reduce-scatter.
enum class Reduction : std::uint8_t { ordered, native };

/// fp32 weights behind 16-bit parameters: whole, only the missing 16 bits, or none (stochastic
/// rounding).
enum class MasterWeights : std::uint8_t { f32, remainder, none };

/// Storage of the optimizer's moments; `q8` is 8 bits in blocks of 256.
enum class Moments : std::uint8_t { f32, bf16, q8 };

/// How the nvme tier talks to its files. `automatic` is io_uring where the system allows it.
enum class IoBackendKind : std::uint8_t { automatic, io_uring, posix };

/// What updates optimizer state that is off a GPU. `automatic` is the host.
enum class UpdateOn : std::uint8_t { automatic, device, host };

/// What a rank computes on: its threads, or a GPU through the CUDA plug-in. On `cuda` parameters
/// and gradients are device memory.
enum class DeviceKind : std::uint8_t { host, cuda };

/// Index of a unit in registration order.
struct UnitId {
  std::int32_t value = -1;
  friend constexpr auto operator<=>(UnitId, UnitId) = default;
};

/// Index of a parameter in registration order, over all units of a spec.
struct ParameterId {
  std::int32_t value = -1;
  friend constexpr auto operator<=>(ParameterId, ParameterId) = default;
};

/// Extents of a tensor, outermost first. Empty: a 0-dim tensor of one element.
using Shape = std::vector<std::int64_t>;

/// The caller's execution queue: a cudaStream_t on a GPU, null on a host rank, where the queue is
/// the calling thread.
struct StreamHandle {
  void* handle = nullptr;
};

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  return dtype == DType::f32 ? 4 : 2;
}

std::string_view to_string(DType dtype);
std::string_view to_string(Stage stage);
std::string_view to_string(Tier tier);
std::string_view to_string(Pass pass);
std::string_view to_string(GradientMode mode);
std::string_view to_string(Accumulation accumulation);
std::string_view to_string(Reduction reduction);
std::string_view to_string(MasterWeights master);
std::string_view to_string(Moments moments);
std::string_view to_string(DeviceKind device);
std::string_view to_string(IoBackendKind backend);  // "auto", "io_uring", "posix"
std::string_view to_string(UpdateOn update);        // "auto", "device", "host"

}  // namespace zshard
