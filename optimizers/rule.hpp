// An optimizer as the engine sees it: state slots, element passes, per-tensor sums between passes,
// and optionally a transform of whole matrices. The engine knows none by name. Rules are immutable
// and shared between ranks and threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::optimizers {

inline constexpr int kMaxSlots = 4;
inline constexpr int kMaxConstants = 12;
inline constexpr int kMaxSums = 2;

struct StateSlot {
  std::string_view name;  // static storage: "exp_avg"
};

/// A rule's hyper-parameters of one parameter in one step, all levels resolved.
struct Resolved {
  double lr = 0.0;            // ParameterOptions::lr_scale included
  double weight_decay = 0.0;  // 0 for parameters without decay
  double beta1 = 0.0;
  double beta2 = 0.0;
  double eps = 0.0;
  double momentum = 0.0;
};

/// Constants of a pass for one parameter: host arithmetic in fp64, each rounded to fp32 once.
struct Constants {
  float value[kMaxConstants] = {};
};

/// One contiguous run of elements of one parameter. All pointers are fp32 and owned by the engine.
struct Elements {
  float* parameter = nullptr;  // the fp32 parameter, or the master of a 16-bit one
  float* slots[kMaxSlots] = {};
  const float* gradient = nullptr;  // reduced sum; the pass multiplies by factor first
  float factor = 1.0f;
  std::int64_t count = 0;
  const double* sums =
      nullptr;  // [kMaxSums] per-tensor sums of the pass before, complete over all ranks
  // Where the last pass leaves the new parameter rounded to a 16-bit dtype; null: nowhere.
  void* published = nullptr;
  DType dtype = DType::bf16;
  /// Around the caches: for more than they hold. kernels::finish_streaming() has to follow.
  bool streams = false;
};

/// An element pass. Gives the same bits however a range is cut.
using Pass = void (*)(const Elements& elements, const Constants& constants, std::int64_t step);

/// An element pass as a kernel of a device (DeviceUpdate), with the bits of the host's.
enum class DevicePass { adam, adamw, sgd, sgd_heavy_ball, sgd_nesterov };

class Rule {
 public:
  virtual ~Rule() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  [[nodiscard]] virtual std::span<const StateSlot> slots() const = 0;
  /// The hyper-parameters that the user gave the optimizer: the most general level.
  [[nodiscard]] virtual Resolved defaults() const = 0;
  /// What decides the bits beside name and hyper-parameters, as text that ranks compare; "" none.
  [[nodiscard]] virtual std::string variant() const { return {}; }
  /// step counts from 1.
  [[nodiscard]] virtual Constants constants(const Resolved& hyper, std::int64_t step) const = 0;
  [[nodiscard]] virtual std::span<const Pass> passes() const = 0;
  /// The passes as a device runs them, one for one; none: the rule updates on the host only.
  [[nodiscard]] virtual std::span<const DevicePass> device_passes() const { return {}; }
  /// Per-tensor fp64 sums that a pass leaves for the next one (norms of LAMB); 0 for rules without
  /// any.
  [[nodiscard]] virtual int sums() const { return 0; }
  /// True if the rule transforms whole matrices between passes (Muon).
  [[nodiscard]] virtual bool transforms() const { return false; }
  /// Throws UsageError, naming the field, for a value that makes no sense: negative or not finite
  /// lr, eps < 0, betas outside [0, 1), ...
  virtual void validate(const Resolved& hyper) const = 0;
};

/// Fields of `over` that are set replace those of `base`.
Resolved merged(Resolved base, const HyperParameters& over);

}  // namespace zshard::optimizers
