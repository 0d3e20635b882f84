#include "offload/io/pages.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "runtime/base/system_reason.hpp"
#include "zshard/error.hpp"

namespace zshard::offload {

Pages::Pages(std::int64_t bytes) {
  constexpr std::size_t kSmall = 4096;
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  constexpr std::size_t kLarge = std::size_t{1} << 20;  // from here on
  const auto wanted = static_cast<std::size_t>(bytes);
  const std::size_t unit = wanted >= kLarge ? kHuge : kSmall;
  size_ = (wanted + kSmall - 1) / kSmall * kSmall;
  if (size_ == 0) return;
  const std::size_t whole = (size_ + unit - 1) / unit * unit;
  mapped_ = whole + (unit == kHuge ? kHuge : 0);
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw OutOfMemory(
        fmt::format("{} bytes of I/O memory: {}", mapped_, base::system_reason(errno)));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = static_cast<std::byte*>(mapping_) + ((unit - address % unit) % unit);
  if (unit == kHuge) madvise(data_, whole, MADV_HUGEPAGE);
  // Present before the first transfer; a shared zero page would be read otherwise.
  for (std::size_t at = 0; at < size_; at += kSmall) {
    *static_cast<volatile std::byte*>(data_ + at) = std::byte{0};
  }
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Pages::~Pages() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

}  // namespace zshard::offload
