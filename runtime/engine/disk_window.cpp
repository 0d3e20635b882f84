#include "runtime/engine/disk_window.hpp"

#include <algorithm>

#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

std::int64_t block_of(std::int64_t offset) {
  return offset / offload::kAlignment * offload::kAlignment;
}

}  // namespace

void DiskWindows::transfer(int w, bool write, std::int64_t offset, std::int64_t bytes) {
  const auto wait = [&] {
    try {
      store_.wait(under_way_[w]);
      under_way_[w] = 0;
    } catch (const IoError&) {
      if (store_.done(under_way_[w])) under_way_[w] = 0;
      throw;
    }
  };
  if (under_way_[w] != 0) wait();
  const auto size = static_cast<std::size_t>(bytes);
  under_way_[w] =
      write ? store_.write(offset, {memory(w), size}) : store_.read(offset, {memory(w), size});
  wait();
}

void DiskWindows::put_back(int w) {
  Window& window = windows_[w];
  if (window.changed) transfer(w, true, window.at.offset, window.at.bytes);
  window = Window{};
}

void DiskWindows::load(int w, std::int64_t offset) {
  Window& window = windows_[w];
  const std::int64_t begin = block_of(offset);
  const std::int64_t bytes = std::min(kWindowBytes, map_.store_bytes - begin);
  // No byte in two windows.
  for (int other = 0; other < kWindows; ++other) {
    const Extent& at = windows_[other].at;
    if (other == w || (begin < at.offset + at.bytes && at.offset < begin + bytes)) put_back(other);
  }
  transfer(w, false, begin, bytes);
  window.at = {begin, bytes};
}

std::byte* DiskWindows::access(std::int64_t offset, std::int64_t bytes, bool change) {
  int found = 0;
  for (int w = 0; w < kWindows; ++w) {
    const Extent& at = windows_[w].at;
    if (offset >= at.offset && offset + bytes <= at.offset + at.bytes) {
      found = w;
      break;
    }
    if (windows_[w].used < windows_[found].used) found = w;
  }
  Window& window = windows_[found];
  if (!(offset >= window.at.offset && offset + bytes <= window.at.offset + window.at.bytes)) {
    load(found, offset);
  }
  window.used = ++uses_;
  window.changed = window.changed || change;
  return memory(found) + (offset - window.at.offset);
}

void DiskWindows::show(std::int64_t offset, std::int64_t bytes) {
  const Window& first = windows_[0];
  const bool there = first.at.bytes != 0 && first.at.offset == block_of(offset) &&
                     offset + bytes <= first.at.offset + first.at.bytes;
  if (!there) load(0, offset);
}

const std::byte* DiskWindows::shown(int r, std::int64_t offset) const {
  return storage_.staging(r, map_.windows) + (offset - block_of(offset));
}

void DiskWindows::flush() {
  for (int w = 0; w < kWindows; ++w) put_back(w);
}

void DiskWindows::forget() {
  for (Window& window : windows_) window = Window{};
}

}  // namespace zshard::engine
