// Remembers a hash of every page that was written, and of what was there before, to find writes
// that were lost, torn or misplaced when the page is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "offload/io/failure.hpp"

namespace zshard::offload {

/// Used by one thread at a time.
class Verifier {
 public:
  static constexpr std::int64_t kPage = 4096;

  /// words: two a page of the store, zeroed here: each page holds zeros.
  explicit Verifier(std::span<std::uint64_t> words);

  /// Before a block is written. offset, memory: whole pages.
  void writes(std::int64_t offset, std::span<const std::byte> memory);
  /// After a block was read: what is wrong with it.
  [[nodiscard]] std::optional<Mismatch> check(std::int64_t offset,
                                              std::span<const std::byte> memory) const;

 private:
  void classify(std::int64_t page, std::uint64_t hash, Mismatch& found) const;
  std::span<std::uint64_t> words_;  // now, before; 0: zeros that were never written
};

}  // namespace zshard::offload
