// Numbers and names of the command line, with errors that say what is allowed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zshard::cli {

/// "124,439,808".
std::string grouped(std::int64_t number);

/// All of these throw UsageError that names the argument, its value and what is allowed.
std::int64_t whole(std::string_view argument, std::string_view text, std::int64_t least,
                   std::int64_t most);
/// Bytes, with suffixes as in the options (16GiB).
std::int64_t bytes(std::string_view argument, std::string_view text, std::int64_t least,
                   std::int64_t most);
/// One of the names; returns its index. The error has the nearest one.
std::size_t one_of(std::string_view argument, std::string_view text,
                   const std::vector<std::string>& names);

/// Throws UsageError for the first of `others`, the arguments that nothing knows, with the nearest
/// of `known` (with their dashes).
void refuse_others(const std::vector<std::string>& others, const std::vector<std::string>& known,
                   std::string_view command);

/// Throws UsageError if one of `others` sets the engine's option too that the argument `own` is a
/// short form of.
void refuse_second_name(std::string_view own, std::string_view option,
                        const std::vector<std::string>& others);

/// "1 rank", "2,000 ranks".
std::string count_text(std::int64_t count, std::string_view thing);

}  // namespace zshard::cli
