#include "offload/io/verifier.hpp"

#include <xxhash.h>

#include <algorithm>
#include <array>

namespace zshard::offload {
namespace {

// Mixed into the hash afterwards and not before, so that where a misplaced page belongs can be
// found without hashing it again for each place.
std::uint64_t place_mark(std::int64_t page) {
  std::uint64_t x = static_cast<std::uint64_t>(page) + 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

std::uint64_t content_hash(const std::byte* memory) {
  return XXH3_64bits(memory, static_cast<std::size_t>(Verifier::kPage));
}

std::uint64_t zeros_hash() {
  static const std::uint64_t hash = [] {
    const std::array<std::byte, static_cast<std::size_t>(Verifier::kPage)> zeros{};
    return content_hash(zeros.data());
  }();
  return hash;
}

/// The word of a page with this content; 0 is taken by pages that were never written.
std::uint64_t word_of(std::uint64_t hash, std::int64_t page) {
  const std::uint64_t word = hash ^ place_mark(page);
  return word != 0 ? word : 1;
}

bool holds(std::uint64_t word, std::uint64_t hash, std::int64_t page) {
  return word == word_of(hash, page) || (word == 0 && hash == zeros_hash());
}

}  // namespace

Verifier::Verifier(std::span<std::uint64_t> words) : words_(words) {
  std::fill(words_.begin(), words_.end(), 0);
}

void Verifier::writes(std::int64_t offset, std::span<const std::byte> memory) {
  const std::int64_t first = offset / kPage;
  const auto pages = static_cast<std::int64_t>(memory.size()) / kPage;
  for (std::int64_t i = 0; i < pages; ++i) {
    const std::uint64_t word = word_of(content_hash(memory.data() + i * kPage), first + i);
    std::uint64_t* entry = words_.data() + 2 * (first + i);
    // A repetition, as after a failed write: what was there before may still be there.
    if (entry[0] == word) continue;
    entry[1] = entry[0];
    entry[0] = word;
  }
}

std::optional<Mismatch> Verifier::check(std::int64_t offset,
                                        std::span<const std::byte> memory) const {
  const std::int64_t first = offset / kPage;
  const auto pages = static_cast<std::int64_t>(memory.size()) / kPage;
  std::optional<Mismatch> found;
  for (std::int64_t i = 0; i < pages; ++i) {
    const std::uint64_t hash = content_hash(memory.data() + i * kPage);
    if (holds(words_[static_cast<std::size_t>(2 * (first + i))], hash, first + i)) continue;
    if (!found) found = Mismatch{.offset = (first + i) * kPage, .pages = pages};
    classify(first + i, hash, *found);
  }
  return found;
}

void Verifier::classify(std::int64_t page, std::uint64_t hash, Mismatch& found) const {
  const auto index = static_cast<std::size_t>(2 * page);
  if (holds(words_[index + 1], hash, page)) {
    ++found.former;
    return;
  }
  const auto pages = static_cast<std::int64_t>(words_.size()) / 2;
  // Looked for once a block, and never for zeros, which lie in many places.
  if (found.elsewhere == 0 && found.unknown == 0 && hash != zeros_hash()) {
    for (std::int64_t other = 0; other < pages; ++other) {
      if (words_[static_cast<std::size_t>(2 * other)] != word_of(hash, other)) continue;
      found.elsewhere = 1;
      found.elsewhere_offset = other * kPage;
      return;
    }
  } else if (found.elsewhere > 0) {
    // The pages of one misplaced block lie side by side.
    const std::int64_t other = found.elsewhere_offset / kPage + (page - found.offset / kPage);
    if (other >= 0 && other < pages &&
        words_[static_cast<std::size_t>(2 * other)] == word_of(hash, other)) {
      ++found.elsewhere;
      return;
    }
  }
  ++found.unknown;
}

}  // namespace zshard::offload
