// What the command line says.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "data.hpp"
#include "model.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// A value that cannot be served; the message names the argument and what is allowed.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Config {
  ModelShape shape;
  std::vector<std::string> data;
  std::int64_t batch = 12;        ///< rows of a micro-step over all ranks
  std::int64_t accumulation = 1;  ///< micro-steps of a step
  std::int64_t steps = 2000;
  double lr = 1e-3;
  double min_lr = 1e-4;
  std::int64_t warmup = 100;  ///< steps
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.1;
  double clip = 1.0;  ///< global norm; 0: no clipping
  zshard::DType dtype = zshard::DType::f32;
  std::uint64_t seed = 1;
  std::int64_t eval_interval = 250;  ///< steps between validations; 0: none
  double val_fraction = 0.1;
  std::optional<int>
      ranks;  ///< threads of this process; unset: what the launcher's environment says
  Order order = Order::random;
  std::string log;  ///< path; empty: none
  bool digest = false;
  zshard::EngineOptions engine;

  /// Rows of a step over all ranks.
  [[nodiscard]] std::int64_t rows_per_step() const { return batch * accumulation; }
  /// Tokens of a step over all ranks.
  [[nodiscard]] std::int64_t tokens_per_step() const { return rows_per_step() * shape.context; }
};

/// Reads the arguments (without the program's name). The engine's options come from ZSHARD_*
/// variables, then from the arguments that this program does not know itself. Empty if help was
/// asked for and printed. Throws ConfigError or zshard::UsageError for what cannot be served.
std::optional<Config> parse_arguments(std::vector<std::string> arguments);

/// Throws ConfigError for values out of range.
void check(const Config& config);

}  // namespace gpt
