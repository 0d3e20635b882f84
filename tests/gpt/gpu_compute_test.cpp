// The GPU's kernels, run on the host, against the host's own: each function for odd sizes, and
// whole trainings.
#include <cblas.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "gpt/host_compute.hpp"
#include "gpt/kernels.hpp"
#include "gpt/trainer.hpp"
#include "serial_queue.hpp"

namespace gpt_test {
namespace {

using Floats = std::vector<float>;
using gpt::Compute;

Floats random_values(std::int64_t count, unsigned seed, float deviation = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// The largest difference as a share of the largest value: errors of sums grow with their terms.
double distance(const Floats& a, const Floats& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 1e-30;
  double difference = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(std::isfinite(a[i]) && std::isfinite(b[i])) << i;
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
    difference = std::max(difference, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return difference / largest;
}

constexpr double kClose = 2e-5;

class GpuCompute : public testing::Test {
 protected:
  void SetUp() override {
    openblas_set_num_threads(1);
    for (Compute* compute : {gpu_.get(), host_.get()}) compute->reserve(shape_, kRows);
    std::mt19937 random(5);
    for (std::int64_t row = 0; row < kRows; ++row) {
      auto& text = texts_.emplace_back();
      for (std::int64_t t = 0; t <= shape_.context; ++t) {
        // One token so often that its places fill several chunks.
        text.push_back(static_cast<std::uint8_t>(random() % 3 == 0 ? random() % 256 : 2));
      }
    }
    for (const auto& text : texts_) starts_.push_back(text.data());
    gpu_->start(starts_);
    host_->start(starts_);
  }

  // Calls `use(compute, buffers)` on both and compares all buffers.
  template <class Use>
  void compare(std::vector<Floats> buffers, Use use, double close = kClose) {
    std::vector<Floats> expected = buffers;
    use(*gpu_, buffers);
    use(*host_, expected);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      EXPECT_LE(distance(buffers[i], expected[i]), close) << "buffer " << i;
    }
  }

  static constexpr std::int64_t kRows = 7;
  const gpt::ModelShape shape_{
      .layers = 2, .heads = 3, .width = 39, .context = 43, .vocab = 301, .vocab_units = 3};
  const std::int64_t tokens_ = kRows * shape_.context;
  std::shared_ptr<Compute> gpu_ = make_serial_compute(false);
  std::shared_ptr<Compute> host_ = gpt::make_host_compute();
  std::vector<std::vector<std::uint8_t>> texts_;
  std::vector<const std::uint8_t*> starts_;
};

TEST_F(GpuCompute, Linear) {
  const std::int64_t in = shape_.width;
  for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{128}, tokens_}) {
    for (const std::int64_t out : {std::int64_t{1}, 4 * in}) {
      compare({random_values(rows * in, 1), random_values(in * out, 2), random_values(out, 3),
               random_values(rows * out, 4)},
              [&](Compute& c, auto& b) {
                c.linear_forward(b[0].data(), b[1].data(), b[2].data(), b[3].data(), rows, in, out);
              });
      for (const float beta : {0.0f, 1.0f}) {
        compare(
            {random_values(rows * out, 1), random_values(rows * in, 2), random_values(in * out, 3),
             random_values(rows * in, 4), random_values(in * out, 5), random_values(out, 6)},
            [&](Compute& c, auto& b) {
              c.linear_backward(b[0].data(), b[1].data(), b[2].data(), b[3].data(), b[4].data(),
                                b[5].data(), beta, rows, in, out);
            });
      }
    }
  }
}

TEST_F(GpuCompute, LayerNorm) {
  for (const std::int64_t width : {1, 31, 32, 39, 100}) {
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{129}, tokens_}) {
      if (width > 4 * shape_.width) continue;
      Floats mean(static_cast<std::size_t>(rows));
      Floats inverse(static_cast<std::size_t>(rows));
      const Floats x = random_values(rows * width, 1, 3.0f);
      const Floats gain = random_values(width, 2);
      compare({x, gain, random_values(width, 3), Floats(x.size()), mean, inverse},
              [&](Compute& c, auto& b) {
                c.layer_norm_forward(b[0].data(), b[1].data(), b[2].data(), b[3].data(),
                                     b[4].data(), b[5].data(), rows, width);
              });
      if (width == 1) continue;  // its gradient is zero but for rounding
      Floats y(x.size());
      gpt::layer_norm_forward(x.data(), gain.data(), gain.data(), y.data(), mean.data(),
                              inverse.data(), rows, width);
      for (const float beta : {0.0f, 1.0f}) {
        compare({random_values(rows * width, 4), x, gain, mean, inverse,
                 random_values(rows * width, 5), random_values(width, 6), random_values(width, 7)},
                [&](Compute& c, auto& b) {
                  c.layer_norm_backward(b[0].data(), b[1].data(), b[2].data(), b[3].data(),
                                        b[4].data(), b[5].data(), b[6].data(), b[7].data(), beta,
                                        rows, width);
                });
      }
    }
  }
}

TEST_F(GpuCompute, Gelu) {
  Floats x = random_values(1000, 1, 4.0f);
  for (const float far : {-100.0f, -20.0f, 0.0f, 20.0f, 100.0f}) x.push_back(far);
  const auto count = static_cast<std::int64_t>(x.size());
  compare({x, Floats(x.size())},
          [&](Compute& c, auto& b) { c.gelu_forward(b[0].data(), b[1].data(), count); });
  compare({random_values(count, 2), x, Floats(x.size())}, [&](Compute& c, auto& b) {
    c.gelu_backward(b[0].data(), b[1].data(), b[2].data(), count);
  });
}

TEST_F(GpuCompute, Attention) {
  const gpt::AttentionShape sizes{kRows, shape_.context, shape_.heads, shape_.width / shape_.heads};
  const std::int64_t scores = kRows * sizes.heads * sizes.context * sizes.context;
  const Floats qkv = random_values(tokens_ * 3 * shape_.width, 1);
  compare({qkv, random_values(scores, 2), Floats(static_cast<std::size_t>(tokens_ * shape_.width))},
          [&](Compute& c, auto& b) {
            c.attention_forward(b[0].data(), b[1].data(), b[2].data(), sizes);
          });
  Floats probabilities(static_cast<std::size_t>(scores));
  Floats out(static_cast<std::size_t>(tokens_ * shape_.width));
  gpt::attention_forward(qkv.data(), probabilities.data(), out.data(), sizes);
  compare({random_values(tokens_ * shape_.width, 3), qkv, probabilities, Floats(qkv.size())},
          [&](Compute& c, auto& b) {
            Floats scratch(
                static_cast<std::size_t>(c.heads_at_once(shape_) * sizes.context * sizes.context));
            c.attention_backward(b[0].data(), b[1].data(), b[2].data(), b[3].data(), scratch.data(),
                                 sizes);
          });
}

TEST_F(GpuCompute, HeadOfAPiece) {
  const std::int64_t V = shape_.vocab;
  for (std::int64_t k = 0; k < shape_.vocab_units; ++k) {
    const gpt::VocabPiece piece = gpt::vocab_piece(shape_, k);
    const Floats x = random_values(tokens_ * shape_.width, 1);
    const Floats wte = random_values(piece.count * shape_.width, 2);
    const Floats logits = random_values(tokens_ * V, 3);
    compare({x, wte, logits}, [&](Compute& c, auto& b) {
      c.head_logits(b[0].data(), b[1].data(), b[2].data() + piece.first, V, tokens_, shape_.width,
                    piece.count);
    });
    for (const float beta : {0.0f, 1.0f}) {
      compare({logits, wte, x}, [&](Compute& c, auto& b) {
        c.head_input_backward(b[0].data() + piece.first, V, b[1].data(), b[2].data(), beta, tokens_,
                              shape_.width, piece.count);
      });
      compare({logits, x, wte}, [&](Compute& c, auto& b) {
        c.head_weight_backward(b[0].data() + piece.first, V, b[1].data(), b[2].data(), beta,
                               tokens_, shape_.width, piece.count);
      });
    }
  }
}

TEST_F(GpuCompute, EmbeddingOfAPiece) {
  const std::int64_t C = shape_.width;
  for (std::int64_t k = 0; k < shape_.vocab_units; ++k) {
    const gpt::VocabPiece piece = gpt::vocab_piece(shape_, k);
    const Floats wte = random_values(piece.count * C, 1);
    const Floats wpe = random_values(shape_.context * C, 2);
    const Floats d = random_values(tokens_ * C, 3);
    for (const bool positions : {true, false}) {
      compare({wte, wpe, d}, [&](Compute& c, auto& b) {
        c.embedding_forward(b[0].data(), positions ? b[1].data() : nullptr, b[2].data(), piece, C);
      });
      for (const float beta : {0.0f, 1.0f}) {
        compare({d, wte, wpe}, [&](Compute& c, auto& b) {
          c.embedding_backward(b[0].data(), b[1].data(), positions ? b[2].data() : nullptr, piece,
                               beta, C);
        });
      }
    }
  }
}

TEST_F(GpuCompute, CrossEntropyAddsUpUntilItIsTaken) {
  const Floats logits = random_values(tokens_ * shape_.vocab, 1, 3.0f);
  std::vector<double> losses;
  for (Compute* compute : {gpu_.get(), host_.get()}) {
    for (const int calls : {1, 3, 0}) {
      for (int i = 0; i < calls; ++i) {
        Floats copy = logits;
        compute->cross_entropy(copy.data(), 2.0f, shape_.vocab);
      }
      compute->queue_loss();
      losses.push_back(compute->take_loss());
    }
  }
  EXPECT_GT(losses[0], 100.0);
  for (int i : {0, 1, 2}) EXPECT_NEAR(losses[i], losses[i + 3], 1e-5 * losses[1]) << i;
  EXPECT_NEAR(losses[1], 3.0 * losses[0], 1e-9 * losses[1]);
  EXPECT_EQ(losses[2], 0.0);
  compare({logits}, [&](Compute& c, auto& b) { c.cross_entropy(b[0].data(), 2.0f, shape_.vocab); });
}

TEST_F(GpuCompute, ElementwiseBitsAreTheHosts) {
  Floats x = random_values(1000, 1);
  x.insert(x.end(), {0.0f, -0.0f, 3.4e38f, INFINITY, -INFINITY, NAN, 1e-40f, 1.00390625f});
  const auto count = static_cast<std::int64_t>(x.size());
  std::vector<std::uint16_t> bits[2];
  Floats wide[2];
  for (int i : {0, 1}) {
    Compute& compute = i == 0 ? *gpu_ : *host_;
    bits[i].resize(x.size());
    wide[i].resize(x.size());
    compute.narrow(x.data(), bits[i].data(), count);
    compute.narrow_add(x.data(), bits[i].data(), count);
    compute.widen(bits[i].data(), wide[i].data(), count);
    compute.add(x.data(), wide[i].data(), count);
  }
  EXPECT_EQ(bits[0], bits[1]);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) continue;
    EXPECT_EQ(wide[0][i], wide[1][i]) << x[i];
  }
}

TEST_F(GpuCompute, MemoryIsCountedAndGivenBack) {
  const std::int64_t before = gpu_->bytes();
  {
    const gpt::Buffer buffer(gpu_, 1000);
    EXPECT_EQ(gpu_->bytes(), before + 4096);
    for (int i = 0; i < 1000; ++i) EXPECT_EQ(buffer.data()[i], 0.0f);
  }
  EXPECT_EQ(gpu_->bytes(), before);
}

// -- whole trainings --

const gpt::Dataset& text() {
  static const gpt::Dataset data(
      [] {
        const std::string words = "to be or not to be, that is the question: whether tis nobler ";
        std::vector<std::uint8_t> bytes(4000);
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          bytes[i] = static_cast<std::uint8_t>(i % 7 == 3 ? i * i : words[i % words.size()]);
        }
        return bytes;
      }(),
      0.2, 7);
  return data;
}

std::vector<double> losses(const gpt::Config& config, int world, bool gpu) {
  std::vector<double> result;
  zshard::run_ranks(world, [&](const zshard::ProcessGroup& group) {
    const bool bf16 = config.dtype == zshard::DType::bf16;
    gpt::Trainer trainer(config, text(), group, gpu ? make_serial_compute(bf16) : nullptr);
    trainer.initialize();
    std::vector<double> mine;
    for (std::int64_t step = 0; step < config.steps; ++step) {
      const gpt::StepResult step_result = trainer.train_step(step);
      mine.push_back(step_result.loss);
      mine.push_back(step_result.report.norm);
    }
    mine.push_back(trainer.validation_loss());
    if (group.rank() == 0) result = mine;
  });
  return result;
}

TEST(GpuTraining, IsTheHosts) {
  openblas_set_num_threads(1);
  for (const zshard::DType dtype : {zshard::DType::f32, zshard::DType::bf16}) {
    for (const int world : {1, 2}) {
      for (const std::int64_t units : {1, 3}) {
        for (const std::int64_t accumulation : {1, 6}) {
          gpt::Config config;
          config.shape = {.layers = 2,
                          .heads = 2,
                          .width = 12,
                          .context = 7,
                          .vocab = 259,
                          .vocab_units = units};
          config.batch = 5;
          config.accumulation = accumulation;
          config.steps = 4;
          config.warmup = 1;
          config.lr = 1e-2;
          config.min_lr = 1e-3;
          config.dtype = dtype;
          config.engine.poison_slots = true;
          config.engine.threads = 1;
          const std::vector<double> gpu = losses(config, world, true);
          const std::vector<double> host = losses(config, world, false);
          ASSERT_EQ(gpu.size(), host.size());
          // bf16: the products' operands are rounded too, by 2^-9 each.
          const double close = dtype == zshard::DType::f32 ? 1e-4 : 3e-2;
          for (std::size_t i = 0; i < gpu.size(); ++i) {
            EXPECT_NEAR(gpu[i], host[i], close * host[i])
                << "value " << i << ", " << to_string(dtype) << ", world " << world << ", units "
                << units << ", accumulation " << accumulation;
          }
          EXPECT_LT(gpu[gpu.size() - 3], gpu[0]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gpt_test
