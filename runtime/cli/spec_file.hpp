// A ModelSpec as a JSON file; docs/cli.md describes the format.
#pragma once

#include <string>
#include <string_view>

#include "zshard/model_spec.hpp"
#include "zshard/types.hpp"

namespace zshard::cli {

/// `dtype` is that of parameters that name none. Throws UsageError that says where in the document
/// what is wrong.
ModelSpec parse_spec(std::string_view json, DType dtype);

/// Reads the file. Throws IoError if it cannot be read, UsageError, with the path, for its content.
ModelSpec read_spec(const std::string& path, DType dtype);

/// A whole file of at most 256 MiB. Throws IoError.
std::string read_text(const std::string& path);

}  // namespace zshard::cli
