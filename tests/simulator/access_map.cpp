#include "tests/simulator/access_map.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace simulator {

namespace {

bool ordered(const Operation& earlier, const Clock& clock) {
  return clock.at(earlier.id) >= earlier.count;
}

/// Adds [begin, end) to the conflict with `first`, if it adjoins, or as a new one.
void add(std::vector<Conflict>& conflicts, std::size_t from, const OperationPointer& first,
         bool first_writes, const OperationPointer& second, bool second_writes,
         std::uintptr_t begin, std::uintptr_t end) {
  for (std::size_t i = from; i < conflicts.size(); ++i) {
    Conflict& known = conflicts[i];
    if (known.first != first || known.first_writes != first_writes) continue;
    if (known.end == begin) known.end = end;
    return;
  }
  conflicts.push_back({first, second, first_writes, second_writes, begin, end});
}

}  // namespace

void AccessMap::access(std::uintptr_t begin, std::uintptr_t end, bool writes,
                       const OperationPointer& operation, const Clock& clock,
                       std::vector<Conflict>& conflicts) {
  if (begin >= end) return;
  const std::lock_guard lock(mutex_);
  split(begin);
  split(end);
  const std::size_t from = conflicts.size();
  for (auto at = intervals_.lower_bound(begin); at != intervals_.end() && at->first < end; ++at) {
    const Interval& interval = at->second;
    if (interval.writer && !ordered(*interval.writer, clock)) {
      add(conflicts, from, interval.writer, true, operation, writes, at->first, interval.end);
    }
    if (!writes) continue;
    for (const OperationPointer& reader : interval.readers) {
      if (ordered(*reader, clock)) continue;
      add(conflicts, from, reader, false, operation, true, at->first, interval.end);
    }
  }
  if (writes) {
    write(begin, end, operation);
  } else {
    read(begin, end, operation, clock);
  }
}

void AccessMap::split(std::uintptr_t where) {
  auto next = intervals_.upper_bound(where);
  if (next == intervals_.begin()) return;
  auto at = std::prev(next);
  if (at->first == where || at->second.end <= where) return;
  Interval tail = at->second;
  at->second.end = where;
  intervals_.emplace_hint(next, where, std::move(tail));
}

void AccessMap::write(std::uintptr_t begin, std::uintptr_t end, const OperationPointer& operation) {
  intervals_.erase(intervals_.lower_bound(begin), intervals_.lower_bound(end));
  intervals_[begin] = {end, operation, {}};
}

void AccessMap::read(std::uintptr_t begin, std::uintptr_t end, const OperationPointer& operation,
                     const Clock& clock) {
  std::uintptr_t at = begin;
  while (at < end) {
    auto next = intervals_.lower_bound(at);
    if (next == intervals_.end() || next->first > at) {
      const std::uintptr_t stop = next == intervals_.end() ? end : std::min(end, next->first);
      intervals_.emplace_hint(next, at, Interval{stop, nullptr, {operation}});
      at = stop;
      continue;
    }
    // Whatever comes after this reader comes after those that it comes after itself.
    std::vector<OperationPointer>& readers = next->second.readers;
    std::erase_if(readers, [&](const OperationPointer& r) { return ordered(*r, clock); });
    readers.push_back(operation);
    at = next->second.end;
  }
  merge(begin, end);
}

void AccessMap::merge(std::uintptr_t begin, std::uintptr_t end) {
  auto at = intervals_.lower_bound(begin);
  if (at != intervals_.begin()) --at;
  while (at != intervals_.end() && at->first <= end) {
    const auto next = std::next(at);
    if (next == intervals_.end()) return;
    if (at->second.end == next->first && at->second.writer == next->second.writer &&
        at->second.readers == next->second.readers) {
      at->second.end = next->second.end;
      intervals_.erase(next);
    } else {
      at = next;
    }
  }
}

void AccessMap::forget(std::uintptr_t begin, std::uintptr_t end) {
  const std::lock_guard lock(mutex_);
  split(begin);
  split(end);
  intervals_.erase(intervals_.lower_bound(begin), intervals_.lower_bound(end));
}

std::size_t AccessMap::intervals() const {
  const std::lock_guard lock(mutex_);
  return intervals_.size();
}

}  // namespace simulator
