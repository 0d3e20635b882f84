#include "runtime/base/quote.hpp"

namespace zshard::base {

std::string quoted(std::string_view text) {
  constexpr std::size_t kMost = 80;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::size_t end = text.size();
  if (end > kMost) {
    end = kMost;
    // Not inside a UTF-8 sequence.
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  }
  std::string result = "'";
  for (const char c : text.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      result += "\\x";
      result += kHex[byte >> 4U];
      result += kHex[byte & 15U];
    } else {
      result += c;
    }
  }
  if (end < text.size()) result += "...";
  return result + "'";
}

}  // namespace zshard::base
