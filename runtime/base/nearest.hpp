// The suggestion in an error about an unknown name.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace zshard::base {

/// The candidate with the smallest edit distance to `word` (insert, delete, replace, swap of
/// neighbours; case and the separators . - _ count as equal), the first of several equals. "" if
/// none is near: a suggestion needs a distance of at most 1 + a third of the word's length, and
/// less than the whole word. Words longer than 256 bytes have no suggestion.
std::string nearest(std::string_view word, std::span<const std::string> candidates);

/// " Did you mean 'NAME'?" for the end of a message, or "" if nothing is near.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

}  // namespace zshard::base
