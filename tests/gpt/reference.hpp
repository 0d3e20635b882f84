// The same language model written again in fp64 with plain loops, forward only: the oracle of the
// model's tests.
#pragma once

#include <cstdint>
#include <vector>

#include "gpt/model.hpp"

namespace gpt_test {

/// [unit][parameter][element], in the order of gpt::unit_list.
using Parameters = std::vector<std::vector<std::vector<double>>>;

/// Random ones, none of them zero: biases and gains too, so that nothing hides.
Parameters random_parameters(const gpt::ModelShape& shape, std::uint64_t seed);

/// The cross entropy summed over all targets of the rows; each row holds context + 1 tokens.
double reference_loss(const gpt::ModelShape& shape, const Parameters& parameters,
                      const std::vector<std::vector<std::uint8_t>>& rows);

}  // namespace gpt_test
