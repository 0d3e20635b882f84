#include "runtime/engine/state_stream.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

StateStream::StateStream(const TierMap& map, const Storage& storage, offload::Store& store,
                         int rank)
    : map_(map), storage_(storage), store_(store), rank_(rank) {
  buffers_.resize(static_cast<std::size_t>(map.buffer_count));
  progress_.assign(map.groups.size(), Progress::pending);
  sequence_.reserve(map.groups.size());
}

std::byte* StateStream::memory(const Buffer& b) const {
  const auto index = static_cast<std::int64_t>(&b - buffers_.data());
  return storage_.staging(rank_, map_.buffers + index * map_.buffer_bytes);
}

StateStream::Buffer* StateStream::find(std::int32_t g) {
  for (Buffer& b : buffers_) {
    if (b.group == g) return &b;
  }
  return nullptr;
}

bool StateStream::busy(const Buffer& b) const {
  return b.dirty && !(store_.done(b.writes[0]) && store_.done(b.writes[1]));
}

/// Among the next groups of the sequence, as many as there are buffers.
bool StateStream::wanted(std::int32_t g) const {
  const std::size_t end = std::min(sequence_.size(), next_fetch_ + buffers_.size());
  return std::find(sequence_.begin() + static_cast<std::ptrdiff_t>(next_fetch_),
                   sequence_.begin() + static_cast<std::ptrdiff_t>(end),
                   g) != sequence_.begin() + static_cast<std::ptrdiff_t>(end);
}

void StateStream::wait_again(offload::Ticket& ticket) {
  try {
    store_.wait(ticket);
  } catch (const IoError&) {
    if (!store_.done(ticket)) throw;
  }
  ticket = 0;
}

void StateStream::wait_reads(Buffer& b) {
  std::exception_ptr cause;
  bool hung = false;
  for (offload::Ticket& ticket : b.reads) {
    try {
      store_.wait(ticket);
    } catch (const IoError&) {
      cause = std::current_exception();
      if (!store_.done(ticket)) {
        hung = true;
        continue;
      }
    }
    ticket = 0;
  }
  if (cause == nullptr) return;
  // Nothing in it can be used.
  if (hung) {
    b.group = kHung;
  } else {
    b = Buffer{};
  }
  std::rethrow_exception(cause);
}

void StateStream::wait_writes(Buffer& b) {
  if (!b.dirty) return;
  for (offload::Ticket& ticket : b.writes) {
    try {
      store_.wait(ticket);
    } catch (const IoError&) {
      b.failure = std::current_exception();
      if (!store_.done(ticket)) continue;
    }
    ticket = 0;
  }
  // Stays dirty then: its bytes are all there is.
  if (b.failure != nullptr) std::rethrow_exception(b.failure);
  b.dirty = false;
  b.gradient = false;
  progress_[static_cast<std::size_t>(b.group)] = Progress::done;
}

StateStream::Buffer* StateStream::acquire(bool wait) {
  // Free ones first; then the oldest content that the next groups do not want.
  Buffer* oldest = nullptr;
  for (Buffer& b : buffers_) {
    if (b.group == kFree) return &b;
    if (b.group == kHung || b.held || wanted(b.group)) continue;
    if (busy(b)) {
      if (oldest == nullptr) oldest = &b;
      continue;
    }
    wait_writes(b);
    try {
      wait_reads(b);
    } catch (const IoError&) {  // of a group that the step left out after all
      if (b.group == kHung) continue;
    }
    b = Buffer{};
    return &b;
  }
  if (!wait) return nullptr;
  if (oldest == nullptr) {
    // What later groups have read ahead can be read again; a device that hangs may never answer.
    for (Buffer& b : buffers_) {
      if (b.group == kHung || b.held || b.dirty) continue;
      try {
        wait_reads(b);
      } catch (const IoError&) {
        if (b.group == kHung) continue;
      }
      b = Buffer{};
      return &b;
    }
    for (Buffer& b : buffers_) {
      if (b.group != kHung) continue;
      for (offload::Ticket& ticket : b.reads) wait_again(ticket);
      b = Buffer{};
      return &b;
    }
  }
  if (oldest == nullptr) throw Error("internal: no buffer for a sub-group");
  // Of those under way any will do: they were started in order.
  for (Buffer& b : buffers_) {
    if (busy(b) && (oldest == nullptr || b.writes[0] < oldest->writes[0]) && !wanted(b.group)) {
      oldest = &b;
    }
  }
  wait_writes(*oldest);
  *oldest = Buffer{};
  return oldest;
}

void StateStream::read(Buffer& b, bool gradients) {
  const SubGroup& g = group(b.group);
  std::byte* at = memory(b);
  const auto start = [&](offload::Ticket& ticket, std::int64_t offset, std::byte* target,
                         std::int64_t bytes) {
    ticket = store_.read(offset, {target, static_cast<std::size_t>(bytes)});
  };
  try {
    if (!b.state) {
      b.state = true;
      if (g.state >= 0) start(b.reads[0], g.state, at, g.state_bytes);
      if (g.reads_parameter) {
        start(b.reads[1], g.parameter, at + g.state_bytes, g.parameter_bytes);
      }
    }
    if (gradients && !b.gradient) {
      b.gradient = true;
      if (g.gradient >= 0) {
        start(b.reads[2], g.gradient, at + g.state_bytes + g.parameter_bytes, g.gradient_bytes);
      }
    }
  } catch (const IoError&) {
    // Some pieces may be on their way; without the others they are of no use.
    try {
      wait_reads(b);
      b = Buffer{};
    } catch (const IoError&) {  // emptied
    }
    throw;
  }
}

void StateStream::pump(bool gradients) {
  while (next_read_ < sequence_.size() && next_read_ < next_fetch_ + buffers_.size()) {
    const std::int32_t g = sequence_[next_read_];
    Buffer* b = find(g);
    if (b == nullptr) {
      b = acquire(false);
      if (b == nullptr) return;
      b->group = g;
    }
    read(*b, gradients);
    ++next_read_;
  }
}

void StateStream::prefetch(std::span<const std::int32_t> groups) {
  sequence_.assign(groups.begin(), groups.end());
  next_fetch_ = 0;
  next_read_ = 0;
  try {
    pump(false);
  } catch (const IoError&) {  // fetch() tries again
  }
}

void StateStream::begin(std::span<const std::int32_t> groups) {
  std::fill(progress_.begin(), progress_.end(), Progress::pending);
  sequence_.assign(groups.begin(), groups.end());
  next_fetch_ = 0;
  next_read_ = 0;
  try {
    pump(true);
  } catch (const IoError&) {  // fetch() tries again
  }
}

std::byte* StateStream::fetch(std::int32_t g) {
  const Stopwatch watch(wait_seconds_);
  pump(true);
  Buffer* b = find(g);
  if (b == nullptr) {
    b = acquire(true);
    b->group = g;
  }
  read(*b, true);  // what is missing of it
  wait_reads(*b);
  b->held = true;
  ++next_fetch_;
  next_read_ = std::max(next_read_, next_fetch_);
  return memory(*b);
}

void StateStream::write(Buffer& b) {
  const SubGroup& g = group(b.group);
  const std::byte* at = memory(b);
  const auto start = [&](offload::Ticket& ticket, std::int64_t offset, const std::byte* source,
                         std::int64_t bytes) {
    ticket = store_.write(offset, {source, static_cast<std::size_t>(bytes)});
  };
  b.dirty = true;
  for (offload::Ticket& ticket : b.writes) wait_again(ticket);
  b.failure = nullptr;
  try {
    if (g.state >= 0) start(b.writes[0], g.state, at, g.state_bytes);
    if (g.parameter >= 0) start(b.writes[1], g.parameter, at + g.state_bytes, g.parameter_bytes);
  } catch (const IoError&) {
    b.failure = std::current_exception();
    throw;
  }
}

void StateStream::publish(std::int32_t g) {
  const Stopwatch watch(wait_seconds_);
  Buffer* b = find(g);
  progress_[static_cast<std::size_t>(g)] = Progress::updated;
  b->held = false;
  write(*b);
  pump(true);
}

void StateStream::finish() {
  const Stopwatch watch(wait_seconds_);
  std::exception_ptr cause;
  for (Buffer& b : buffers_) {
    try {
      wait_writes(b);
    } catch (const IoError&) {
      cause = std::current_exception();
    }
  }
  if (cause != nullptr) std::rethrow_exception(cause);
}

void StateStream::settle() noexcept {
  for (Buffer& b : buffers_) {
    try {
      wait_writes(b);
    } catch (...) {  // kept
    }
    if (b.dirty) continue;
    try {
      wait_reads(b);
    } catch (...) {  // emptied
    }
  }
}

void StateStream::resume() {
  const Stopwatch watch(wait_seconds_);
  for (Buffer& b : buffers_) {
    if (b.dirty) write(b);
  }
  finish();
  std::erase_if(sequence_, [&](std::int32_t g) { return updated(g); });
  next_fetch_ = 0;
  next_read_ = 0;
  pump(true);
}

void StateStream::forget() {
  settle();
  for (Buffer& b : buffers_) {
    if (!b.dirty && b.group != kHung) b = Buffer{};
  }
}

}  // namespace zshard::engine
