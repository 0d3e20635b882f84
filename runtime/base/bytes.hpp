// Sizes in bytes as people write and read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace zshard::base {

/// "0 B", "1023 B", "1.50 GiB", "-2.00 KiB": two decimals, to nearest, in the largest binary unit
/// that leaves at least 1.
std::string human_bytes(std::int64_t bytes);

/// A whole number of bytes, or a decimal number with a unit: B, KiB, MiB, GiB, TiB (powers of
/// 1024), KB, MB, GB, TB (powers of 1000), in any case, with or without blanks between. What is not
/// a whole number of bytes is rounded down. A leading '-' is read, so that the caller can name its
/// range. Unset for anything else and for what does not fit 64 bits.
std::optional<std::int64_t> parse_bytes(std::string_view text);

}  // namespace zshard::base
