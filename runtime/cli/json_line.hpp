// JSON as the tool prints it: one line, members in order.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace zshard::cli {

using Json = nlohmann::ordered_json;

/// Text that is no UTF-8, as paths may be, is mended instead of refused.
inline std::string json_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

/// null for an empty text.
inline Json or_null(const std::string& text) {
  return text.empty() ? Json(nullptr) : Json(text);
}

}  // namespace zshard::cli
