// What main memory gives to loops that do nothing else: the limits that kernels and collectives are
// measured against. Counted bytes are those that a loop names, reads and writes both.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/memory/arena.hpp"

namespace bench {

/// Huge pages filled with numbers that no arithmetic turns into denormals.
class Floats {
 public:
  explicit Floats(std::int64_t count);
  [[nodiscard]] float* data() const { return reinterpret_cast<float*>(arena_->data()); }
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] std::int64_t bytes() const { return count_ * 4; }

 private:
  std::int64_t count_;
  std::shared_ptr<zshard::memory::Arena> arena_;
};

/// x[i] = x[i] * a + b: 8 bytes an element.
void update_in_place(float* x, std::int64_t count);
/// Sum of all elements' bits: 4 bytes an element.
std::uint32_t read_all(const float* x, std::int64_t count);
/// y[i] = x[i] through the caches, as a loop does it: 8 bytes an element.
void copy_loop(const float* x, float* y, std::int64_t count);
/// acc[i] += a[i] + b[i] + ... for 1, 2 or 4 sources: 4 (terms + 2) bytes an element. What a
/// reduction must move.
void add_sources(const float* const* sources, int terms, float* acc, std::int64_t count);
/// The same AdamW step that a loop without an engine would write. 28 bytes an element.
void plain_adamw(float* p, float* m, float* v, const float* g, std::int64_t count,
                 std::int64_t step);

}  // namespace bench
