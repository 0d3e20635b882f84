// Which model a `zshard plan` is about: a preset, a shape in numbers, or a spec from a file.
#pragma once

#include <optional>
#include <string>

#include "runtime/cli/command.hpp"
#include "runtime/cli/shapes.hpp"
#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::cli {

class PlanModel {
 public:
  void describe(CLI::App& command);

  /// Works out the shape from what was given. Throws UsageError.
  void settle();

  /// Unset: the model comes from a file.
  [[nodiscard]] const std::optional<Shape>& shape() const { return shape_; }
  /// With the given number of layers instead of the shape's. Throws IoError for the file.
  [[nodiscard]] ModelSpec spec(std::optional<std::int64_t> layers = {}) const;
  /// "gpt2", "gpt2 with changes", "a gpt shape", or the file.
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] DType dtype() const { return dtype_; }

  static constexpr std::int64_t kMostLayers = 4096;

 private:
  [[nodiscard]] bool any_number() const;

  std::string preset_;
  std::string file_;
  std::optional<Family> family_;
  std::optional<std::int64_t> layers_, width_, heads_, kv_heads_, ffn_, vocab_, context_;
  DType dtype_ = DType::f32;
  std::optional<Shape> shape_;
  std::string name_;
};

}  // namespace zshard::cli
