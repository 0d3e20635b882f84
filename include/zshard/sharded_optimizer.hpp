// The smallest step into zshard: the optimizer of an existing loop, sharded (stage 1) over flat
// buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zshard/engine.hpp"

namespace zshard {

/// A buffer of the loop. Not owned; both pointers stay valid as long as the ShardedOptimizer lives.
struct FlatBuffer {
  std::string name;
  float* parameters = nullptr;       ///< [count], read once at construction, written by every step
  const float* gradients = nullptr;  ///< [count], read by every step
  std::int64_t count = 0;
  bool decay = true;
};

/// Sums gradients over ranks, updates each rank's shard, and gathers the parameters. Construction
/// and step() are collective.
class ShardedOptimizer {
 public:
  /// Every rank passes the same buffers; rank 0's parameter values win. Padding is inside: any
  /// count is legal.
  ShardedOptimizer(std::vector<FlatBuffer> buffers, const Optimizer& optimizer,
                   const ProcessGroup& group, EngineOptions options = {.stage = Stage::optimizer});
  ~ShardedOptimizer();
  ShardedOptimizer(ShardedOptimizer&&) noexcept;
  ShardedOptimizer& operator=(ShardedOptimizer&&) noexcept;

  /// One update from the buffers' present gradients. StepOptions::gradient_scale defaults to 1 /
  /// world.
  StepReport step(const StepOptions& options = {});

  /// Which buffers are copied in each step and why.
  [[nodiscard]] std::string copies() const;
  [[nodiscard]] Engine& engine() { return *engine_; }

 private:
  std::vector<FlatBuffer> buffers_;
  std::vector<UnitId> units_;
  std::vector<ParameterId> parameters_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace zshard
