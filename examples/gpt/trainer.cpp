#include "trainer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "compute_loader.hpp"

namespace gpt {

double learning_rate(const Config& config, std::int64_t step) {
  if (step < config.warmup) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup + 1);
  }
  if (step >= config.steps) return config.min_lr;
  const double progress =
      static_cast<double>(step - config.warmup) / static_cast<double>(config.steps - config.warmup);
  const double share = 0.5 * (1.0 + std::cos(3.14159265358979323846 * progress));
  return config.min_lr + share * (config.lr - config.min_lr);
}

Trainer::ValidationSet Trainer::validation_set(const Config& config, const Dataset& data) {
  constexpr std::int64_t kMostBatches = 64;  // enough for a standard error of about 0.01
  const auto bytes = static_cast<std::int64_t>(data.validation().size());
  if (bytes <= config.shape.context || config.eval_interval == 0) return {};
  ValidationSet set;
  set.windows = (bytes - 1) / config.shape.context;
  set.rows.count = std::min(set.windows, kMostBatches * config.batch);
  set.passes = static_cast<int>((set.rows.count + config.batch - 1) / config.batch);
  return set;
}

std::int64_t Trainer::largest_batch(const Config& config, const Dataset& data, int world) {
  const Rows step{0, config.rows_per_step()};
  const ValidationSet validation = validation_set(config, data);
  return std::max(step.largest_piece(world, config.accumulation),
                  validation.rows.largest_piece(world, std::max(1, validation.passes)));
}

Trainer::Trainer(const Config& config, const Dataset& data, const zshard::ProcessGroup& group,
                 std::shared_ptr<Compute> compute)
    : config_(config),
      data_(data),
      group_(group),
      spec_(make_spec(config)),
      engine_(spec_.model, make_optimizer(config), group, config.engine),
      offsets_(config.order, config.seed, config.rows_per_step(), config.shape.context,
               static_cast<std::int64_t>(data.training().size())),
      validation_(validation_set(config, data)),
      compute_(compute ? std::move(compute) : make_compute(config, group)),
      model_(config.shape, largest_batch(config, data, group.size()), compute_),
      views_(spec_, config.dtype, compute_) {}

void Trainer::initialize() {
  for (std::size_t u = 0; u < spec_.units.size(); ++u) {
    const int first_id = spec_.parameter_ids[u].front().value;
    engine_.initialize(
        spec_.unit_ids[u], [&](const zshard::ParameterRange& range, std::span<float> values) {
          const ParameterInfo& info =
              spec_.units[u].parameters[static_cast<std::size_t>(range.parameter.value - first_id)];
          if (info.deviation == 0.0f) {
            std::fill(values.begin(), values.end(), info.mean);
            return;
          }
          const CounterRandom random(config_.seed, info.random_stream());
          const std::int64_t first = info.first + range.first;
          for (std::int64_t i = 0; i < range.count; ++i) {
            const double normal = random.normal(static_cast<std::uint64_t>(first + i));
            values[static_cast<std::size_t>(i)] =
                static_cast<float>(info.mean + info.deviation * normal);
          }
        });
  }
}

template <class Use>
void Trainer::with_weights(zshard::Guard guard, std::size_t unit, Use use) {
  use(views_.weights(guard, unit));
  guard.release();
}

// Holds a unit in its forward pass while the model uses it.
template <class Use>
void Trainer::with_forward(std::size_t unit, Use use) {
  with_weights(engine_.forward(spec_.unit_ids[unit], stream()), unit, use);
}

// Holds a unit in its backward pass while each use in turn writes or adds its gradients, and hands
// them over.
template <class... Uses>
void Trainer::with_backward(std::size_t unit, Uses... uses) {
  zshard::Guard guard = engine_.backward(spec_.unit_ids[unit], stream());
  const auto weights = views_.weights(guard, unit);
  zshard::GradientMode mode = guard.gradient_mode();
  const auto write = [&](auto& use) {
    use(weights, views_.gradients(guard, unit), views_.beta(mode));
    views_.store(guard, unit, mode);
    mode = zshard::GradientMode::accumulate;
  };
  (write(uses), ...);
  guard.commit();
  guard.release();
}

void Trainer::forward_pass(double loss_scale) {
  const std::int64_t pieces = config_.shape.vocab_units;
  const std::int64_t layers = config_.shape.layers;
  model_.start(rows_);
  for (std::int64_t k = 0; k < pieces; ++k) {
    with_forward(piece_unit(k), [&](auto w) { model_.embedding_forward(k, EmbeddingWeights(w)); });
  }
  for (std::int64_t l = 0; l < layers; ++l) {
    with_forward(block_unit(l), [&](auto w) { model_.block_forward(l, BlockWeights(w)); });
  }
  with_forward(block_unit(layers), [&](auto w) { model_.final_norm_forward(FinalNormWeights(w)); });
  for (std::int64_t k = 0; k < pieces; ++k) {
    with_forward(piece_unit(k), [&](auto w) { model_.head_forward(k, EmbeddingWeights(w)); });
  }
  model_.add_cross_entropy(loss_scale);
}

void Trainer::backward_pass() {
  const std::int64_t pieces = config_.shape.vocab_units;
  const std::int64_t layers = config_.shape.layers;
  for (std::int64_t k = pieces; k-- > 0;) {
    const std::size_t unit = piece_unit(k);
    with_weights(engine_.recompute(spec_.unit_ids[unit], stream()), unit,
                 [&](auto w) { model_.head_input_backward(k, EmbeddingWeights(w)); });
  }
  with_backward(block_unit(layers), [&](auto w, auto g, float beta) {
    model_.final_norm_backward(FinalNormWeights(w), FinalNormGradients(g), beta);
  });
  for (std::int64_t l = layers; l-- > 0;) {
    with_backward(block_unit(l), [&](auto w, auto g, float beta) {
      model_.block_backward(l, BlockWeights(w), BlockGradients(g), beta);
    });
  }
  for (std::int64_t k = pieces; k-- > 0;) {
    with_backward(
        piece_unit(k),
        [&](auto, auto g, float beta) {
          model_.head_weight_backward(k, EmbeddingGradients(g), beta);
        },
        [&](auto, auto g, float beta) {
          model_.embedding_backward(k, EmbeddingGradients(g), beta);
        });
  }
}

StepResult Trainer::train_step(std::int64_t step) {
  const Rows all{0, config_.rows_per_step()};
  const Rows mine = all.piece(group_.rank(), group_.size());
  for (const zshard::MicroStep micro :
       engine_.micro_steps(static_cast<int>(config_.accumulation))) {
    const Rows rows = mine.piece(micro.index(), micro.count());
    if (rows.count == 0) continue;  // a rank may leave a micro-step to the others
    rows_.clear();
    for (std::int64_t i = rows.first; i < rows.first + rows.count; ++i) {
      rows_.push_back(data_.training().data() + offsets_.offset(step, i));
    }
    forward_pass(micro.loss_scale());
    backward_pass();
  }

  compute_->queue_loss();  // read after the step, which waits for the device anyway
  const auto tokens = static_cast<double>(config_.tokens_per_step());
  StepResult result;
  result.lr = learning_rate(config_, step);
  zshard::StepOptions options{.lr = result.lr, .gradient_scale = 1.0 / tokens};
  if (config_.clip > 0.0) options.clip_norm = config_.clip;
  result.report = engine_.step(options);
  result.loss = sum_over_ranks(compute_->take_loss()) / tokens;
  return result;
}

double Trainer::validation_loss() {
  if (validation_.passes == 0) return std::numeric_limits<double>::quiet_NaN();
  const Rows mine = validation_.rows.piece(group_.rank(), group_.size());
  for (const zshard::MicroStep pass : engine_.evaluation_passes(validation_.passes)) {
    const Rows rows = mine.piece(pass.index(), pass.count());
    if (rows.count == 0) continue;
    rows_.clear();
    for (std::int64_t i = rows.first; i < rows.first + rows.count; ++i) {
      // Evenly spread over the text.
      const std::int64_t window = i * validation_.windows / validation_.rows.count;
      rows_.push_back(data_.validation().data() + window * config_.shape.context);
    }
    forward_pass(1.0);
  }
  compute_->queue_loss();
  return sum_over_ranks(compute_->take_loss()) /
         static_cast<double>(validation_.rows.count * config_.shape.context);
}

double Trainer::sum_over_ranks(double value) const {
  std::vector<double> values(static_cast<std::size_t>(group_.size()));
  group_.all_gather(std::as_bytes(std::span(&value, 1)), std::as_writable_bytes(std::span(values)));
  return std::accumulate(values.begin(), values.end(), 0.0);
}

}  // namespace gpt
