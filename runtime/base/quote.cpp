#include "runtime/base/quote.hpp"

namespace zshard::base {
namespace {

/// Bytes of the UTF-8 sequence that the text begins with; 0: it begins with none.
std::size_t sequence(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const std::size_t length = first < 0x80   ? 1
                             : first < 0xC2 ? 0
                             : first < 0xE0 ? 2
                             : first < 0xF0 ? 3
                             : first < 0xF5 ? 4
                                            : 0;
  if (length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
  }
  // Longer than needed, a surrogate, or behind the last character there is.
  if (length > 2) {
    const unsigned second = byte(1);
    if (first == 0xE0 && second < 0xA0) return 0;
    if (first == 0xED && second > 0x9F) return 0;
    if (first == 0xF0 && second < 0x90) return 0;
    if (first == 0xF4 && second > 0x8F) return 0;
  }
  return length;
}

}  // namespace

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
  for (std::size_t at = 0; at < end;) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const std::size_t length = sequence(text.substr(at, end - at));
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      result += "\\x";
      result += kHex[byte >> 4U];
      result += kHex[byte & 15U];
      ++at;
    } else {
      result += text.substr(at, length);
      at += length;
    }
  }
  if (end < text.size()) result += "...";
  return result + "'";
}

}  // namespace zshard::base
