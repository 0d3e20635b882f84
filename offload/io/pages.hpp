// Memory of its own for zeros, probes and measurements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zshard::offload {

/// Zero-filled pages, in huge pages from 1 MiB on where the system gives them. Move only.
class Pages {
 public:
  Pages() = default;
  /// Throws OutOfMemory. bytes: rounded up to 4096.
  explicit Pages(std::int64_t bytes);
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  [[nodiscard]] std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;  // what was mapped, larger for the sake of alignment
  std::size_t mapped_ = 0;
};

}  // namespace zshard::offload
