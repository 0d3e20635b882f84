// The fixture gpt2_tiny: weights and ten steps of training by torch and transformers.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace gpt_test {

/// The fp32 tensors of a safetensors file, by name. Throws std::runtime_error for a file that is
/// not one.
std::map<std::string, std::vector<float>> read_safetensors(const std::string& path);

nlohmann::json read_json(const std::string& path);

}  // namespace gpt_test
