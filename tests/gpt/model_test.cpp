// The model's forward and backward against an fp64 program and its difference quotients.
#include <cblas.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "gpt/model.hpp"
#include "reference.hpp"

namespace gpt_test {
namespace {

using gpt::ModelShape;
using FloatParameters = std::vector<std::vector<std::vector<float>>>;

FloatParameters narrowed(const Parameters& parameters) {
  FloatParameters result;
  for (const auto& unit : parameters) {
    auto& tensors = result.emplace_back();
    for (const auto& values : unit) tensors.emplace_back(values.begin(), values.end());
  }
  return result;
}

FloatParameters filled_like(const FloatParameters& parameters, float value) {
  FloatParameters result = parameters;
  for (auto& unit : result) {
    for (auto& tensor : unit) std::fill(tensor.begin(), tensor.end(), value);
  }
  return result;
}

template <class Pointers, class T>
Pointers pointers(std::vector<std::vector<float>>& unit) {
  std::vector<T> p;
  for (auto& tensor : unit) p.push_back(tensor.data());
  return Pointers(std::span<const T>(p));
}

template <class Pointers>
Pointers weights(std::vector<std::vector<float>>& unit) {
  return pointers<Pointers, const float*>(unit);
}

template <class Pointers>
Pointers gradients(std::vector<std::vector<float>>& unit) {
  return pointers<Pointers, float*>(unit);
}

double forward(gpt::Model& model, const ModelShape& shape, FloatParameters& p,
               const std::vector<std::vector<std::uint8_t>>& rows, double loss_scale = 1.0) {
  std::vector<const std::uint8_t*> starts;
  for (const auto& row : rows) starts.push_back(row.data());
  const auto piece = [&](std::int64_t k) {
    return weights<gpt::EmbeddingWeights>(p[static_cast<std::size_t>(k)]);
  };
  model.start(starts);
  for (std::int64_t k = 0; k < shape.vocab_units; ++k) model.embedding_forward(k, piece(k));
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const auto unit = static_cast<std::size_t>(shape.vocab_units + layer);
    model.block_forward(layer, weights<gpt::BlockWeights>(p[unit]));
  }
  model.final_norm_forward(weights<gpt::FinalNormWeights>(p.back()));
  for (std::int64_t k = 0; k < shape.vocab_units; ++k) model.head_forward(k, piece(k));
  return model.cross_entropy(loss_scale);
}

// `beta` counts for a parameter's first use; wte's second use always adds.
void backward(gpt::Model& model, const ModelShape& shape, FloatParameters& p, FloatParameters& g,
              float beta) {
  for (std::int64_t k = shape.vocab_units; k-- > 0;) {
    model.head_input_backward(k, weights<gpt::EmbeddingWeights>(p[static_cast<std::size_t>(k)]));
  }
  model.final_norm_backward(weights<gpt::FinalNormWeights>(p.back()),
                            gradients<gpt::FinalNormGradients>(g.back()), beta);
  for (std::int64_t layer = shape.layers; layer-- > 0;) {
    const auto unit = static_cast<std::size_t>(shape.vocab_units + layer);
    model.block_backward(layer, weights<gpt::BlockWeights>(p[unit]),
                         gradients<gpt::BlockGradients>(g[unit]), beta);
  }
  for (std::int64_t k = shape.vocab_units; k-- > 0;) {
    const auto piece = gradients<gpt::EmbeddingGradients>(g[static_cast<std::size_t>(k)]);
    model.head_weight_backward(k, piece, beta);
    model.embedding_backward(k, piece, 1.0f);
  }
}

// The whole model's tensors as those of a model whose token table is cut into pieces.
FloatParameters cut(const FloatParameters& whole, const ModelShape& shape) {
  FloatParameters result;
  for (std::int64_t k = 0; k < shape.vocab_units; ++k) {
    const gpt::VocabPiece piece = gpt::vocab_piece(shape, k);
    const auto first = whole[0][0].begin() + piece.first * shape.width;
    result.push_back({{first, first + piece.count * shape.width}});
  }
  result[0].push_back(whole[0][1]);
  result.insert(result.end(), whole.begin() + 1, whole.end());
  return result;
}

std::vector<std::vector<std::uint8_t>> random_rows(const ModelShape& shape, std::size_t count) {
  std::mt19937 random(7);
  std::vector<std::vector<std::uint8_t>> rows(count);
  for (auto& row : rows) {
    row.resize(static_cast<std::size_t>(shape.context + 1));
    for (auto& token : row) token = static_cast<std::uint8_t>(random() % shape.vocab);
  }
  return rows;
}

class ModelTest : public testing::Test {
 protected:
  void SetUp() override { openblas_set_num_threads(1); }
};

constexpr ModelShape kSmall{.layers = 2, .heads = 2, .width = 6, .context = 5, .vocab = 11};

TEST_F(ModelTest, LossEqualsTheFp64Program) {
  for (const ModelShape& shape :
       {kSmall, ModelShape{1, 1, 1, 1, 3}, ModelShape{3, 3, 51, 19, 100}}) {
    const Parameters exact = random_parameters(shape, 1);
    FloatParameters p = narrowed(exact);
    const auto rows = random_rows(shape, 3);
    gpt::Model model(shape, 3);
    const double expected = reference_loss(shape, exact, rows);
    EXPECT_NEAR(forward(model, shape, p, rows), expected, 1e-6 * expected + 1e-6)
        << "width " << shape.width;
  }
}

// Every element of every parameter. The difference quotient of the fp64 loss with h = 1e-4 is exact
// to about 1e-7 of the third derivative; fp32 arithmetic through two layers loses some 30 units of
// 2^-24 of the largest gradient of the tensor, or, where terms cancel, of all.
TEST_F(ModelTest, GradientsEqualDifferenceQuotients) {
  Parameters exact = random_parameters(kSmall, 2);
  FloatParameters p = narrowed(exact);
  const auto rows = random_rows(kSmall, 2);
  gpt::Model model(kSmall, 2);
  forward(model, kSmall, p, rows);
  FloatParameters g = filled_like(p, std::numeric_limits<float>::quiet_NaN());
  backward(model, kSmall, p, g, 0.0f);

  const std::vector<gpt::UnitInfo> units = gpt::unit_list(kSmall);
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    for (std::size_t index = 0; index < units[unit].parameters.size(); ++index) {
      std::vector<double>& values = exact[unit][index];
      std::vector<double> quotients;
      double largest = 0.0;
      for (double& value : values) {
        constexpr double kStep = 1e-4;
        const double start = value;
        value = start + kStep;
        const double above = reference_loss(kSmall, exact, rows);
        value = start - kStep;
        const double below = reference_loss(kSmall, exact, rows);
        value = start;
        quotients.push_back((above - below) / (2 * kStep));
        largest = std::max(largest, std::abs(quotients.back()));
      }
      const double tolerance = 4e-6 * largest + 1e-6;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double error = std::abs(static_cast<double>(g[unit][index][i]) - quotients[i]);
        EXPECT_LE(error, tolerance)
            << units[unit].parameters[index].name << "[" << i << "] = " << quotients[i];
      }
      // Where all gradients are small the comparison would say nothing.
      EXPECT_GT(largest, 1e-3) << units[unit].parameters[index].name;
    }
  }
}

TEST_F(ModelTest, AddingGradientsKeepsWhatWasThere) {
  FloatParameters p = narrowed(random_parameters(kSmall, 3));
  const auto rows = random_rows(kSmall, 2);
  gpt::Model model(kSmall, 2);

  forward(model, kSmall, p, rows);
  FloatParameters overwritten = filled_like(p, std::numeric_limits<float>::quiet_NaN());
  backward(model, kSmall, p, overwritten, 0.0f);
  forward(model, kSmall, p, rows);
  FloatParameters from_zero = filled_like(p, 0.0f);
  backward(model, kSmall, p, from_zero, 1.0f);
  EXPECT_EQ(overwritten, from_zero);

  forward(model, kSmall, p, rows);
  FloatParameters from_one = filled_like(p, 1.0f);
  backward(model, kSmall, p, from_one, 1.0f);
  for (std::size_t unit = 0; unit < p.size(); ++unit) {
    for (std::size_t index = 0; index < p[unit].size(); ++index) {
      for (std::size_t i = 0; i < p[unit][index].size(); ++i) {
        const float gradient = from_zero[unit][index][i];
        // The running sums now round at the size of 1 + gradient, once a row and token.
        const float tolerance = 1e-6f * (1.0f + std::abs(gradient)) * 4.0f;
        EXPECT_NEAR(from_one[unit][index][i], 1.0f + gradient, tolerance);
      }
    }
  }
}

TEST_F(ModelTest, EmbeddingBackwardMayOverwrite) {
  FloatParameters p = narrowed(random_parameters(kSmall, 3));
  const auto rows = random_rows(kSmall, 2);
  gpt::Model model(kSmall, 2);
  forward(model, kSmall, p, rows);
  FloatParameters g = filled_like(p, 0.0f);
  backward(model, kSmall, p, g, 1.0f);
  FloatParameters overwritten = filled_like(p, std::numeric_limits<float>::quiet_NaN());
  model.embedding_backward(0, gradients<gpt::EmbeddingGradients>(overwritten[0]), 0.0f);
  FloatParameters added = filled_like(p, 0.0f);
  model.embedding_backward(0, gradients<gpt::EmbeddingGradients>(added[0]), 1.0f);
  EXPECT_EQ(overwritten[0], added[0]);
}

TEST_F(ModelTest, LossScaleMultipliesGradientsExactly) {
  FloatParameters p = narrowed(random_parameters(kSmall, 4));
  const auto rows = random_rows(kSmall, 2);
  gpt::Model model(kSmall, 2);
  FloatParameters plain = filled_like(p, 0.0f);
  const double loss = forward(model, kSmall, p, rows);
  backward(model, kSmall, p, plain, 0.0f);
  FloatParameters scaled = filled_like(p, 0.0f);
  EXPECT_EQ(forward(model, kSmall, p, rows, 1024.0), loss);
  backward(model, kSmall, p, scaled, 0.0f);
  for (auto& unit : plain) {
    for (auto& tensor : unit) {
      for (float& value : tensor) value *= 1024.0f;
    }
  }
  EXPECT_EQ(scaled, plain);
}

// What a smaller batch leaves in the buffers of a larger one must not matter.
TEST_F(ModelTest, BatchesOfDifferentSizesDoNotDisturbEachOther) {
  FloatParameters p = narrowed(random_parameters(kSmall, 5));
  const auto rows = random_rows(kSmall, 4);
  const std::vector<std::vector<std::uint8_t>> one(rows.begin(), rows.begin() + 1);
  gpt::Model fresh(kSmall, 1);
  FloatParameters expected = filled_like(p, 0.0f);
  const double loss = forward(fresh, kSmall, p, one);
  backward(fresh, kSmall, p, expected, 0.0f);

  gpt::Model used(kSmall, 4);
  FloatParameters g = filled_like(p, 0.0f);
  forward(used, kSmall, p, rows);
  backward(used, kSmall, p, g, 0.0f);
  EXPECT_EQ(forward(used, kSmall, p, one), loss);
  backward(used, kSmall, p, g, 0.0f);
  EXPECT_EQ(g, expected);
}

// A token table in pieces, down to one row each, is the same model: the lookup is equal, sums over
// the vocabulary are equal up to rounding.
TEST_F(ModelTest, PiecesOfTheTokenTableGiveTheSameLossAndGradients) {
  const FloatParameters p = narrowed(random_parameters(kSmall, 6));
  const auto rows = random_rows(kSmall, 2);
  gpt::Model model(kSmall, 2);
  FloatParameters whole = p;
  const double loss = forward(model, kSmall, whole, rows);
  FloatParameters g = filled_like(p, std::numeric_limits<float>::quiet_NaN());
  backward(model, kSmall, whole, g, 0.0f);
  for (const std::int64_t pieces : {2, 3, 10, 11}) {
    ModelShape shape = kSmall;
    shape.vocab_units = pieces;
    FloatParameters in_pieces = cut(p, shape);
    gpt::Model other(shape, 2);
    EXPECT_NEAR(forward(other, shape, in_pieces, rows), loss, 1e-6 * loss) << pieces;
    FloatParameters mine = filled_like(in_pieces, std::numeric_limits<float>::quiet_NaN());
    backward(other, shape, in_pieces, mine, 0.0f);
    const FloatParameters expected = cut(g, shape);
    ASSERT_EQ(mine.size(), expected.size());
    for (std::size_t unit = 0; unit < mine.size(); ++unit) {
      ASSERT_EQ(mine[unit].size(), expected[unit].size());
      for (std::size_t index = 0; index < mine[unit].size(); ++index) {
        float largest = 0.0f;
        for (const float value : expected[unit][index])
          largest = std::max(largest, std::abs(value));
        for (std::size_t i = 0; i < mine[unit][index].size(); ++i) {
          // As for difference quotients: some 30 units of 2^-24.
          EXPECT_NEAR(mine[unit][index][i], expected[unit][index][i], 4e-6f * largest + 1e-6f)
              << pieces << " pieces, unit " << unit << ", parameter " << index;
        }
      }
    }
  }
}

std::int64_t count_parameters(const ModelShape& shape) {
  std::int64_t count = 0;
  for (const gpt::UnitInfo& unit : gpt::unit_list(shape)) {
    for (const gpt::ParameterInfo& info : unit.parameters) {
      std::int64_t elements = 1;
      for (const std::int64_t extent : info.shape) elements *= extent;
      count += elements;
    }
  }
  return count;
}

TEST_F(ModelTest, ParametersAreThoseOfGpt2) {
  ModelShape gpt2{.layers = 12, .heads = 12, .width = 768, .context = 1024, .vocab = 50257};
  EXPECT_EQ(count_parameters(gpt2), 124439808);  // the published size of the smallest GPT-2
  EXPECT_EQ(gpt::parameter_count(gpt2), 124439808);
  gpt2.vocab_units = 6;
  EXPECT_EQ(count_parameters(gpt2), 124439808);
}

TEST_F(ModelTest, PiecesOfTheTokenTableCoverItOnce) {
  for (const std::int64_t pieces : {1, 2, 7, 50, 101}) {
    ModelShape shape{.vocab = 101};
    shape.vocab_units = pieces;
    std::int64_t next = 0;
    for (std::int64_t k = 0; k < pieces; ++k) {
      const gpt::VocabPiece piece = gpt::vocab_piece(shape, k);
      EXPECT_EQ(piece.first, next);
      EXPECT_GT(piece.count, 0);
      EXPECT_LE(piece.count, (101 + pieces - 1) / pieces);
      next += piece.count;
      EXPECT_TRUE(piece.holds(piece.first));
      EXPECT_TRUE(piece.holds(next - 1));
      EXPECT_FALSE(piece.holds(next));
      EXPECT_FALSE(piece.holds(piece.first - 1));
    }
    EXPECT_EQ(next, 101);
  }
}

}  // namespace
}  // namespace gpt_test
