#include "golden.hpp"

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace gpt_test {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

std::map<std::string, std::vector<float>> read_safetensors(const std::string& path) {
  const std::string content = read_file(path);
  std::uint64_t header_bytes = 0;
  if (content.size() < sizeof header_bytes) throw std::runtime_error(path + " is too short");
  std::memcpy(&header_bytes, content.data(), sizeof header_bytes);
  const std::string header = content.substr(sizeof header_bytes, header_bytes);
  const std::string data = content.substr(sizeof header_bytes + header.size());
  std::map<std::string, std::vector<float>> tensors;
  const nlohmann::json entries = nlohmann::json::parse(header);
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    if (entry.at("dtype") != "F32") throw std::runtime_error(path + ": " + name + " is not F32");
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::size_t>();
    std::vector<float>& values = tensors[name];
    values.resize((end - begin) / sizeof(float));
    const std::string bytes = data.substr(begin, end - begin);
    if (bytes.size() != end - begin) throw std::runtime_error(path + " ends within " + name);
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return tensors;
}

nlohmann::json read_json(const std::string& path) {
  return nlohmann::json::parse(read_file(path));
}

}  // namespace gpt_test
