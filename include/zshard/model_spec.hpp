// What the user registers: units, their parameters, and the order in which a micro-step uses them.
// A ModelSpec is a value; it owns no tensor memory. Not thread-safe while it is being built.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "zshard/error.hpp"
#include "zshard/types.hpp"

namespace zshard {

/// Hyper-parameters that may differ by step or by group; what is unset comes from the next level
/// down. Rules that do not know a field ignore it.
struct HyperParameters {
  std::optional<double> lr{};
  std::optional<double> weight_decay{};
  std::optional<double> beta1{};
  std::optional<double> beta2{};
  std::optional<double> eps{};
  std::optional<double> momentum{};
};

/// Options of one parameter. All of them are part of the spec: they must be the same on every rank.
struct ParameterOptions {
  DType dtype = DType::f32;  ///< of the parameter and of its gradient
  bool decay = true;         ///< weight decay applies
  bool frozen = false;       ///< no gradient, no optimizer state
  bool resident = false;     ///< stage 3: keep a full copy on every rank instead of gathering it
  double lr_scale = 1.0;     ///< factor on the learning rate
  std::string group{};       ///< hyper-parameter group (ModelSpec::group, StepOptions::groups)
  std::string
      alias{};  ///< name of an earlier parameter whose storage and state this one is (tied weights)
  std::string tensor_axis{};  ///< mesh axis over which the parameter is itself a slice; "" none
};

/// Options of a unit.
struct UnitOptions {
  std::string shard_axis{};  ///< mesh axis over which the unit is partitioned; "" all ranks
};

/// A user's pointer variable that zshard sets while a guard lives and nulls afterwards. Does not
/// own.
class PointerBinding {
 public:
  PointerBinding() = default;
  template <class T>
  explicit PointerBinding(T** variable)
      : variable_(variable), assign_([](void* where, void* value) {
          *static_cast<T**>(where) = static_cast<T*>(value);
        }) {}

  void assign(void* value) const {
    if (variable_ != nullptr) assign_(variable_, value);
  }
  [[nodiscard]] bool bound() const { return variable_ != nullptr; }

 private:
  void* variable_ = nullptr;
  void (*assign_)(void*, void*) = nullptr;
};

/// One registered parameter.
struct ParameterSpec {
  std::string name;
  Shape shape;
  ParameterOptions options;
  PointerBinding data;
  PointerBinding gradient;
  ParameterId id;
  UnitId unit;

  [[nodiscard]] std::int64_t count()
      const;  ///< elements; 1 for a 0-dim tensor. UsageError past 2^63 - 1
};

/// One registered unit: the parameters that are gathered together.
struct UnitSpec {
  std::string name;
  UnitOptions options;
  std::vector<ParameterSpec> parameters;
};

/// One position of the program.
struct Position {
  UnitId unit;
  Pass pass = Pass::forward;
  friend constexpr bool operator==(Position, Position) = default;
};

/// A named group of parameters with its own hyper-parameters.
struct GroupSpec {
  std::string name;
  HyperParameters hyper;
};

class ModelSpec;

/// Handle to a unit under construction. Valid as long as its ModelSpec lives and is not moved.
class UnitBuilder {
 public:
  /// Registers a parameter. `data` and `gradient` are optional addresses of the loop's pointer
  /// variables: they are set while a guard of the unit lives and null otherwise. T is float for
  /// f32; for 16-bit dtypes any 2-byte type or void. Throws UsageError if T does not fit
  /// options.dtype. Names and shapes are checked when an engine is made.
  template <class T>
  ParameterId parameter(const std::string& name, Shape shape, T** data,
                        std::type_identity_t<T>** gradient = nullptr,
                        ParameterOptions options = {}) {
    if constexpr (!std::is_void_v<T>) {
      if (sizeof(T) != static_cast<std::size_t>(size_of(options.dtype)) ||
          std::is_same_v<std::remove_cv_t<T>, float> != (options.dtype == DType::f32)) {
        throw UsageError("parameter " + name + ": the pointer's type does not fit dtype " +
                         std::string(to_string(options.dtype)) +
                         "; use float for f32, a 16-bit type for bf16 and f16");
      }
    }
    return add(name, std::move(shape), PointerBinding(data),
               gradient ? PointerBinding(gradient) : PointerBinding(), std::move(options));
  }

  /// Registers a parameter without bound pointers; guards and Engine::on_bind give its addresses.
  ParameterId parameter(const std::string& name, Shape shape, ParameterOptions options = {});

  [[nodiscard]] UnitId id() const { return id_; }

 private:
  friend class ModelSpec;
  UnitBuilder(ModelSpec* spec, UnitId id) : spec_(spec), id_(id) {}
  ParameterId add(const std::string& name, Shape shape, PointerBinding data,
                  PointerBinding gradient, ParameterOptions options);

  ModelSpec* spec_;
  UnitId id_;
};

/// The model as zshard sees it. Must be the same on every rank: construction of an engine compares
/// it.
class ModelSpec {
 public:
  /// Adds a unit. Parameters are registered through the handle.
  UnitBuilder unit(const std::string& name, UnitOptions options = {});

  /// Gives a group of parameters (ParameterOptions::group) its own hyper-parameters. The most
  /// specific level wins: StepOptions::groups, then this, then StepOptions, then the optimizer.
  ModelSpec& group(const std::string& name, HyperParameters hyper);

  /// The order of use in a micro-step. Unset: units in registration order forward, then backward in
  /// reverse. May repeat units, hold recompute passes, and end before the frozen prefix's backward
  /// positions.
  ModelSpec& program(std::vector<Position> positions);

  /// When position p is acquired, positions up to p - k are released. Default 1.
  ModelSpec& hold(int k);

  /// Lays out parameters for state that is quantised in blocks of 256 elements.
  ModelSpec& block_quantised(bool on);

  [[nodiscard]] const std::vector<UnitSpec>& units() const { return units_; }
  [[nodiscard]] const std::vector<GroupSpec>& groups() const { return groups_; }
  [[nodiscard]] std::vector<Position> program() const;  ///< the default one where none was given
  [[nodiscard]] int hold() const { return hold_; }
  [[nodiscard]] bool block_quantised() const { return block_quantised_; }
  [[nodiscard]] std::int32_t parameter_count() const { return next_parameter_; }

  /// The parameter or unit of that name. Throws UsageError, with the nearest name, if there is
  /// none.
  [[nodiscard]] ParameterId parameter_id(const std::string& name) const;
  [[nodiscard]] UnitId unit_id(const std::string& name) const;
  [[nodiscard]] const ParameterSpec& parameter(ParameterId id) const;

 private:
  friend class UnitBuilder;
  std::vector<UnitSpec> units_;
  std::vector<GroupSpec> groups_;
  std::vector<Position> program_;
  std::vector<std::pair<std::int32_t, std::int32_t>>
      where_;  // parameter id -> (unit, index in the unit)
  std::int32_t next_parameter_ = 0;
  int hold_ = 1;
  bool block_quantised_ = false;
};

}  // namespace zshard
