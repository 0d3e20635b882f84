#include "data.hpp"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "config.hpp"

namespace gpt {
namespace {

void append_file(const std::string& path, std::vector<std::uint8_t>& bytes) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!error && !std::filesystem::is_regular_file(status) && !std::filesystem::is_fifo(status)) {
    throw ConfigError("--data: " + path + " is no file; give the files themselves");
  }
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) {
    throw ConfigError("--data: cannot open " + path + ": " + std::strerror(errno));
  }
  std::uint8_t buffer[1 << 16];
  while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, file.get())) {
    bytes.insert(bytes.end(), buffer, buffer + count);
  }
  if (std::ferror(file.get()) != 0) {
    throw ConfigError("--data: cannot read " + path + " past byte " + std::to_string(bytes.size()) +
                      ": " + std::strerror(errno));
  }
}

}  // namespace

std::vector<std::uint8_t> Dataset::read(const std::vector<std::string>& paths) {
  std::vector<std::uint8_t> bytes;
  for (const std::string& path : paths) append_file(path, bytes);
  return bytes;
}

Dataset::Dataset(std::vector<std::uint8_t> bytes, double validation_fraction, std::int64_t context)
    : bytes_(std::move(bytes)) {
  const auto validation_bytes = static_cast<std::size_t>(
      std::floor(static_cast<double>(bytes_.size()) * validation_fraction));
  training_bytes_ = bytes_.size() - validation_bytes;
  const auto least = static_cast<std::size_t>(context) + 1;
  if (training_bytes_ < least) {
    throw ConfigError("--data: " + std::to_string(training_bytes_) +
                      " bytes to train on, but a row is --context + 1 = " + std::to_string(least) +
                      " bytes; give more text or a smaller --context or --val-fraction");
  }
  if (validation_fraction > 0.0 && validation_bytes < least) {
    throw ConfigError(
        "--data: " + std::to_string(validation_bytes) +
        " bytes for validation, but a row is --context + 1 = " + std::to_string(least) +
        " bytes; give more text, a larger --val-fraction, or --val-fraction 0 for "
        "no validation");
  }
}

}  // namespace gpt
