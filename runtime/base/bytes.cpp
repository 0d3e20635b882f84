#include "runtime/base/bytes.hpp"

#include <array>
#include <cstddef>
#include <cstdio>
#include <limits>

namespace zshard::base {

namespace {

// Products of two 64-bit numbers; -Wpedantic wants the extension named.
__extension__ using Wide = unsigned __int128;

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};

constexpr std::array<Unit, 9> kUnits = {{{"b", 1},
                                         {"kib", 1ULL << 10},
                                         {"mib", 1ULL << 20},
                                         {"gib", 1ULL << 30},
                                         {"tib", 1ULL << 40},
                                         {"kb", 1'000},
                                         {"mb", 1'000'000},
                                         {"gb", 1'000'000'000},
                                         {"tb", 1'000'000'000'000}}};

// More digits than a 64-bit number has are out of range or below one byte.
constexpr std::size_t kMostDigits = 19;

bool digit(char c) {
  return c >= '0' && c <= '9';
}

std::string_view take_digits(std::string_view& text) {
  std::size_t n = 0;
  while (n < text.size() && digit(text[n])) ++n;
  const std::string_view digits = text.substr(0, n);
  text.remove_prefix(n);
  return digits;
}

std::uint64_t number(std::string_view digits) {
  std::uint64_t value = 0;
  for (const char c : digits) value = value * 10 + static_cast<std::uint64_t>(c - '0');
  return value;
}

std::optional<std::uint64_t> unit_bytes(std::string_view name) {
  if (name.size() > 3) return std::nullopt;
  std::string folded(name);
  for (char& c : folded) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  for (const Unit& unit : kUnits) {
    if (unit.name == folded) return unit.bytes;
  }
  return std::nullopt;
}

}  // namespace

std::string human_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 7> kNames = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  const std::string sign = bytes < 0 ? "-" : "";
  const std::uint64_t magnitude =
      bytes < 0 ? 0 - static_cast<std::uint64_t>(bytes) : static_cast<std::uint64_t>(bytes);
  if (magnitude < 1024) return sign + std::to_string(magnitude) + " B";
  std::size_t unit = 1;
  std::uint64_t hundredths = 0;
  for (; unit < kNames.size(); ++unit) {
    const Wide size = Wide{1} << (10 * unit);
    hundredths = static_cast<std::uint64_t>((Wide{magnitude} * 100 + size / 2) / size);
    if (hundredths < 102400) break;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%llu.%02llu %s",
                static_cast<unsigned long long>(hundredths / 100),
                static_cast<unsigned long long>(hundredths % 100), kNames[unit]);
  return sign + text;
}

std::optional<std::int64_t> parse_bytes(std::string_view text) {
  const bool negative = !text.empty() && text.front() == '-';
  if (negative) text.remove_prefix(1);
  std::string_view whole = take_digits(text);
  if (whole.empty()) return std::nullopt;
  while (whole.size() > 1 && whole.front() == '0') whole.remove_prefix(1);
  std::string_view fraction;
  if (!text.empty() && text.front() == '.') {
    text.remove_prefix(1);
    fraction = take_digits(text);
    if (fraction.empty()) return std::nullopt;
  }
  std::uint64_t unit = 1;
  if (text.empty()) {
    if (!fraction.empty()) return std::nullopt;
  } else {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    const std::optional<std::uint64_t> named = unit_bytes(text);
    if (!named) return std::nullopt;
    unit = *named;
  }
  if (whole.size() > kMostDigits) return std::nullopt;
  fraction = fraction.substr(0, kMostDigits);
  Wide scale = 1;
  for (std::size_t i = 0; i < fraction.size(); ++i) scale *= 10;
  const Wide total = Wide{number(whole)} * unit + Wide{number(fraction)} * unit / scale;
  if (total > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return std::nullopt;
  }
  const auto value = static_cast<std::int64_t>(total);
  return negative ? -value : value;
}

}  // namespace zshard::base
