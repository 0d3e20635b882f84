// The text that is trained on, and which rank reads which of its rows.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "random.hpp"

namespace gpt {

/// Bytes of a text; the last part is for validation.
class Dataset {
 public:
  /// Takes the last floor(bytes * validation_fraction) bytes for validation. Throws ConfigError if
  /// a part that is used is shorter than context + 1 bytes, one row and its last target.
  Dataset(std::vector<std::uint8_t> bytes, double validation_fraction, std::int64_t context);

  /// Reads the files one after another. Throws ConfigError for a file that cannot be read.
  static std::vector<std::uint8_t> read(const std::vector<std::string>& paths);

  [[nodiscard]] std::span<const std::uint8_t> training() const {
    return std::span(bytes_).first(training_bytes_);
  }
  [[nodiscard]] std::span<const std::uint8_t> validation() const {
    return std::span(bytes_).subspan(training_bytes_);
  }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t training_bytes_;
};

enum class Order : std::uint8_t { random, sequential };

/// Where the rows of a training step start. A row is context + 1 bytes: inputs, and the targets one
/// byte later. Depends on the row's number in the step only, never on ranks.
class RowOffsets {
 public:
  /// `bytes` of training text, at least context + 1.
  RowOffsets(Order order, std::uint64_t seed, std::int64_t rows_per_step, std::int64_t context,
             std::int64_t bytes)
      : order_(order),
        random_(seed, "rows"),
        rows_per_step_(rows_per_step),
        context_(context),
        places_(bytes - context) {}

  /// Sequential: (step * rows_per_step + row) * context, taken modulo the number of places where a
  /// whole row fits, so that the text starts over at its end. Random: any of these places.
  [[nodiscard]] std::int64_t offset(std::int64_t step, std::int64_t row) const {
    const std::int64_t index = step * rows_per_step_ + row;
    if (order_ == Order::sequential) return index * context_ % places_;
    const std::uint64_t bits = random_.bits(static_cast<std::uint64_t>(index));
    return static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(places_));
  }

 private:
  Order order_;
  CounterRandom random_;
  std::int64_t rows_per_step_;
  std::int64_t context_;
  std::int64_t places_;
};

/// Rows [first, first + count).
struct Rows {
  std::int64_t first = 0;
  std::int64_t count = 0;

  /// The part-th of `parts` nearly equal pieces: [count * part / parts, count * (part + 1) /
  /// parts). Pieces may be empty.
  [[nodiscard]] Rows piece(std::int64_t part, std::int64_t parts) const {
    const std::int64_t begin = count * part / parts;
    const std::int64_t end = count * (part + 1) / parts;
    return {first + begin, end - begin};
  }

  /// The most rows that a piece of a piece has.
  [[nodiscard]] std::int64_t largest_piece(std::int64_t parts, std::int64_t parts_of_part) const {
    const std::int64_t outer = (count + parts - 1) / parts;
    return (outer + parts_of_part - 1) / parts_of_part;
  }
};

}  // namespace gpt
