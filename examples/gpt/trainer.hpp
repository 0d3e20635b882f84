// One rank's training loop: the model between zshard's guards.
#pragma once

#include <cstdint>
#include <memory>

#include "compute.hpp"
#include "config.hpp"
#include "data.hpp"
#include "float_views.hpp"
#include "model.hpp"
#include "spec.hpp"
#include "zshard/zshard.hpp"

namespace gpt {

/// Linear warm-up to lr, then half a cosine down to min_lr at the last step.
double learning_rate(const Config& config, std::int64_t step);

/// What a step did; the same on every rank, as far as its report is.
struct StepResult {
  double loss = 0.0;  ///< mean cross entropy over the step's targets, before the update
  double lr = 0.0;
  zshard::StepReport report;
};

/// One rank. All calls are collective.
class Trainer {
 public:
  /// `data` must outlive the trainer. Parameters start as zero. compute: where the model runs; null
  /// for what config.engine.device says.
  Trainer(const Config& config, const Dataset& data, const zshard::ProcessGroup& group,
          std::shared_ptr<Compute> compute = nullptr);

  /// GPT-2's initial weights, the same for every world size.
  void initialize();
  StepResult train_step(std::int64_t step);
  /// Mean cross entropy over a fixed set of rows of the validation text: NaN if there is none.
  double validation_loss();

  [[nodiscard]] zshard::Engine& engine() { return engine_; }
  [[nodiscard]] const zshard::ProcessGroup& group() const { return group_; }
  [[nodiscard]] const Compute& compute() const { return *compute_; }

  /// The most rows that a rank has at once, in training and in validation.
  static std::int64_t largest_batch(const Config& config, const Dataset& data, int world);

 private:
  // Rows of the validation set over all ranks, and the forward passes they take.
  struct ValidationSet {
    std::int64_t windows = 0;  // rows that the text holds
    Rows rows;
    int passes = 0;
  };
  static ValidationSet validation_set(const Config& config, const Dataset& data);

  template <class Use>
  void with_weights(zshard::Guard guard, std::size_t unit, Use use);
  template <class Use>
  void with_forward(std::size_t unit, Use use);
  template <class... Uses>
  void with_backward(std::size_t unit, Uses... uses);
  // Places of units in spec_; the last norm is the one after all blocks.
  static std::size_t piece_unit(std::int64_t piece) { return static_cast<std::size_t>(piece); }
  [[nodiscard]] std::size_t block_unit(std::int64_t layer) const {
    return static_cast<std::size_t>(config_.shape.vocab_units + layer);
  }
  void forward_pass(double loss_scale);
  void backward_pass();
  [[nodiscard]] zshard::StreamHandle stream() const { return {compute_->stream()}; }
  /// Sums the ranks' values in rank order.
  double sum_over_ranks(double value) const;

  Config config_;
  const Dataset& data_;
  zshard::ProcessGroup group_;
  GptSpec spec_;
  zshard::Engine engine_;
  RowOffsets offsets_;
  ValidationSet validation_;
  std::shared_ptr<Compute> compute_;
  Model model_;
  FloatViews views_;
  std::vector<const std::uint8_t*> rows_;
};

}  // namespace gpt
