#include "runtime/base/nearest.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace zshard::base {

namespace {

// The tables grow with the product of the lengths, and a longer name is no misspelling.
constexpr std::size_t kLongestWord = 256;

std::string folded(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '.' || c == '-') c = '_';
  }
  return result;
}

// Optimal string alignment: three rows suffice, since a swap looks two rows back.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, std::span<const std::string> candidates) {
  if (word.empty() || word.size() > kLongestWord) return "";
  const std::string folded_word = folded(word);
  std::size_t best = std::min(1 + word.size() / 3, word.size() - 1);
  const std::string* found = nullptr;
  for (const std::string& candidate : candidates) {
    if (candidate.empty() || candidate.size() > kLongestWord) continue;
    const std::size_t d = distance(folded_word, folded(candidate));
    if (d < best || (d == best && found == nullptr)) {
      best = d;
      found = &candidate;
    }
  }
  return found == nullptr ? "" : *found;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> candidates) {
  const std::string found = nearest(word, candidates);
  return found.empty() ? "" : " Did you mean '" + found + "'?";
}

}  // namespace zshard::base
