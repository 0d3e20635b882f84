#include "offload/io/backend.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "offload/io/thread.hpp"

namespace zshard::offload {
namespace {

constexpr std::int64_t kAligned = 4096;
/// Tries of a block without progress before it fails; about 0.3 s with their pauses.
constexpr int kMostTries = 40;
constexpr int kTriesAtOnce = 4;
constexpr std::int64_t kLongestPause = 10'000'000;  // nanoseconds
constexpr std::int64_t kLateness = 500'000'000;     // nanoseconds
constexpr int kTurns = 3;
constexpr int kZerosTurn = 2;

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::size_t index_of(Operation operation) {
  return static_cast<std::size_t>(operation);
}

}  // namespace

IoBackend::IoBackend(std::unique_ptr<Driver> driver, StripeMap map, const BackendOptions& options)
    : driver_(std::move(driver)),
      map_(std::move(map)),
      block_bytes_(options.block_bytes),
      deadline_(static_cast<std::int64_t>(options.deadline_seconds * 1e9)),
      batches_(kBatches),
      entries_(kEntries),
      slots_(static_cast<std::size_t>(driver_->capacity())),
      completions_(slots_.size()) {
  free_batches_.reserve(kBatches);
  for (std::size_t i = kBatches; i-- > 0;) free_batches_.push_back(i);
  free_entries_.reserve(kEntries);
  for (int i = static_cast<int>(kEntries); i-- > 0;) free_entries_.push_back(i);
  free_slots_.reserve(slots_.size());
  for (int i = driver_->capacity(); i-- > 0;) free_slots_.push_back(i);
  thread_ = start_thread("zshard-io", [this] { run(); });
}

IoBackend::~IoBackend() {
  if (!stop()) thread_.join();
}

// -- any thread --

IoBackend::Ticket IoBackend::submit(std::span<const IoRequest> batch) {
  if (batch.empty()) return 0;
  std::unique_lock lock(mutex_);
  while (free_batches_.empty()) {
    if (active_batches_ == 0) {
      // Every place holds a failure that nobody has waited for: tell one of them.
      const auto held = std::find_if(batches_.begin(), batches_.end(),
                                     [](const Batch& b) { return b.failed != 0; });
      const IoFailure failure = held->failure;
      held->failed = 0;
      free_batches_.push_back(static_cast<std::size_t>(held - batches_.begin()));
      throw IoFailed(failure);
    }
    lock.unlock();
    const bool free = wait_for(
        [this] {
          const std::lock_guard guard(mutex_);
          return !free_batches_.empty() || active_batches_ == 0;
        },
        nullptr);
    if (!free) {
      throw IoFailed({.kind = IoFailure::Kind::no_answer,
                      .operation = batch[0].operation,
                      .offset = batch[0].offset,
                      .bytes = batch[0].bytes});
    }
    lock.lock();
  }
  const std::size_t index = free_batches_.back();
  free_batches_.pop_back();
  ++active_batches_;
  Batch& mine = batches_[index];
  const Ticket ticket = ++mine.uses * kBatches + index;
  mine.left = static_cast<int>(batch.size());
  mine.unissued.store(mine.left, std::memory_order_relaxed);
  mine.request = batch[0];
  mine.last_event.store(now(), std::memory_order_relaxed);
  mine.running.store(ticket, std::memory_order_release);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    while (free_entries_.empty()) {
      lock.unlock();
      const bool free = wait_for(
          [this] {
            const std::lock_guard guard(mutex_);
            return !free_entries_.empty();
          },
          nullptr);
      lock.lock();
      if (free) continue;
      // What was not submitted is not waited for; the rest of the batch still runs.
      const int rest = static_cast<int>(batch.size() - i);
      mine.left -= rest;
      mine.unissued.fetch_sub(rest);
      if (mine.left == 0) finish_batch(index);
      throw IoFailed({.kind = IoFailure::Kind::no_answer,
                      .operation = batch[i].operation,
                      .offset = batch[i].offset,
                      .bytes = batch[i].bytes});
    }
    append(batch[i], index);
    if (std::exchange(sleeping_, false)) {
      lock.unlock();
      driver_->wake();
      lock.lock();
    }
  }
  return ticket;
}

void IoBackend::append(const IoRequest& request, std::size_t batch) {
  const int place = free_entries_.back();
  free_entries_.pop_back();
  entries_[static_cast<std::size_t>(place)] = {.request = request, .batch = batch};
  List& list = lists_[index_of(request.operation)];
  if (list.last == kNone) {
    list.first = place;
  } else {
    entries_[static_cast<std::size_t>(list.last)].next = place;
  }
  list.last = place;
  count(request.operation, 1);
}

void IoBackend::wait(Ticket ticket) {
  if (ticket == 0) return;
  const std::size_t index = ticket % kBatches;
  Batch& batch = batches_[index];
  if (!wait_for([&] { return poll(ticket); }, &batch)) {
    const std::lock_guard lock(mutex_);
    throw IoFailed({.kind = IoFailure::Kind::no_answer,
                    .operation = batch.request.operation,
                    .offset = batch.request.offset,
                    .bytes = batch.request.bytes});
  }
  IoFailure failure;
  {
    const std::lock_guard lock(mutex_);
    if (batch.failed != ticket) return;
    failure = batch.failure;
    batch.failed = 0;
    free_batches_.push_back(index);
  }
  finished_.add();
  throw IoFailed(failure);
}

bool IoBackend::poll(Ticket ticket) const {
  return ticket == 0 ||
         batches_[ticket % kBatches].running.load(std::memory_order_acquire) != ticket;
}

bool IoBackend::settle() noexcept {
  const bool all = wait_for(
      [this] {
        const std::lock_guard lock(mutex_);
        return active_batches_ == 0;
      },
      nullptr);
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < batches_.size(); ++i) {
      if (batches_[i].failed == 0 || batches_[i].running.load() != 0) continue;
      batches_[i].failed = 0;
      free_batches_.push_back(i);
    }
  }
  finished_.add();
  return all;
}

void IoBackend::fill(std::int64_t from, Pages zeros) {
  {
    const std::lock_guard lock(mutex_);
    if (from >= map_.bytes()) return;
    zeros_ = std::move(zeros);
    zeros_next_ = from;
    watermark_.store(from);
    sleeping_ = false;
  }
  driver_->wake();
}

bool IoBackend::filled() const {
  return watermark_.load() == kNever;
}

void IoBackend::set_verifier(Verifier* verifier) {
  const std::lock_guard lock(mutex_);
  verifier_ = verifier;
}

IoTraffic IoBackend::traffic() const {
  const std::lock_guard lock(mutex_);
  IoTraffic result = traffic_;
  const std::int64_t at = now();
  if (active_[0] > 0) result.read_seconds += static_cast<double>(at - active_since_[0]) * 1e-9;
  if (active_[1] > 0) result.write_seconds += static_cast<double>(at - active_since_[1]) * 1e-9;
  return result;
}

void IoBackend::clear_traffic() {
  const std::lock_guard lock(mutex_);
  traffic_ = {};
}

bool IoBackend::stop() noexcept {
  if (!thread_.joinable()) return true;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  driver_->wake();
  if (!wait_for([this] { return ended_.load(); }, nullptr)) return false;
  thread_.join();
  return true;
}

template <class Ready>
bool IoBackend::wait_for(Ready&& ready, const Batch* batch) {
  std::int64_t late_since = 0;
  while (!ready()) {
    const std::uint32_t seen = finished_.value();
    if (ready()) return true;
    bool late = false;
    finished_.wait(seen + 1, [&] {
      if (!(batch != nullptr ? hung(*batch) : hung())) {
        late_since = 0;
        return false;
      }
      // After the whole process was stopped the answers are there, and the thread needs a moment.
      const std::int64_t at = now();
      if (late_since == 0) late_since = at;
      late = at - late_since >= std::min(deadline_, kLateness);
      return late;
    });
    if (late && !ready()) return false;
  }
  return true;
}

bool IoBackend::hung() const {
  return busy_.load() > 0 && now() - last_event_.load() > deadline_;
}

bool IoBackend::hung(const Batch& batch) const {
  if (now() - batch.last_event.load() <= deadline_) return false;
  // With blocks still to be started it waits for others, and they may go on.
  return batch.unissued.load() == 0 || hung();
}

// Called under the lock.
void IoBackend::count(Operation operation, int change) {
  const std::size_t which = index_of(operation);
  const bool was = active_[which] > 0;
  active_[which] += change;
  const bool is = active_[which] > 0;
  if (was == is) return;
  const std::int64_t at = now();
  if (is) {
    active_since_[which] = at;
    return;
  }
  double& seconds = operation == Operation::read ? traffic_.read_seconds : traffic_.write_seconds;
  seconds += static_cast<double>(at - active_since_[which]) * 1e-9;
}

// -- the thread --

void IoBackend::run() {
  while (true) {
    restart_due();
    while (true) {
      const int slot = take();
      if (slot == kNone) break;
      start(slots_[static_cast<std::size_t>(slot)]);
    }
    {
      const std::lock_guard lock(mutex_);
      const bool work = lists_[0].first != kNone || lists_[1].first != kNone;
      if (stopping_ && !work && busy_.load() == 0) break;
    }
    const std::size_t count = driver_->reap(completions_, pause());
    for (std::size_t i = 0; i < count; ++i) complete(completions_[i]);
  }
  ended_.store(true);
  finished_.add();
}

/// A slot with the next block that may start; kNone: there is none.
int IoBackend::take() {
  const std::lock_guard lock(mutex_);
  sleeping_ = false;
  if (free_slots_.empty()) return kNone;
  for (int i = 0; i < kTurns; ++i) {
    const int turn = turn_;
    turn_ = (turn_ + 1) % kTurns;
    const int slot = turn == kZerosTurn ? take_zeros() : take_block(static_cast<Operation>(turn));
    if (slot != kNone) return slot;
  }
  sleeping_ = true;
  return kNone;
}

int IoBackend::take_block(Operation operation) {
  const List& list = lists_[index_of(operation)];
  while (list.first != kNone) {
    const int place = list.first;
    Entry& entry = entries_[static_cast<std::size_t>(place)];
    Batch& batch = batches_[entry.batch];
    const IoRequest& request = entry.request;
    if (batch.failed != 0) {
      entry.issued = request.bytes;
      leave_list(operation);
      if (entry.blocks == 0) finish_entry(place);
      continue;
    }
    const std::int64_t offset = request.offset + entry.issued;
    const StripeMap::Place at =
        map_.place(offset, std::min(block_bytes_, request.bytes - entry.issued));
    if (offset + at.bytes > watermark_.load()) {
      if (!zeros_failed_) return kNone;
      fail_batch(batch, zeros_failure_);
      continue;
    }
    std::byte* memory = request.memory + entry.issued;
    entry.issued += at.bytes;
    ++entry.blocks;
    batch.last_event.store(now());
    if (entry.issued == request.bytes) leave_list(operation);
    return use_slot(at, operation, memory, place, offset);
  }
  return kNone;
}

int IoBackend::take_zeros() {
  const std::span<std::byte> zeros = zeros_.bytes();
  if (zeros.empty() || stopping_ || zeros_failed_ || zeros_next_ >= map_.bytes()) return kNone;
  const std::int64_t offset = zeros_next_;
  const StripeMap::Place at = map_.place(
      offset,
      std::min({block_bytes_, static_cast<std::int64_t>(zeros.size()), map_.bytes() - offset}));
  zeros_next_ += at.bytes;
  return use_slot(at, Operation::write, zeros.data(), kNone, offset);
}

int IoBackend::use_slot(const StripeMap::Place& place, Operation operation, std::byte* memory,
                        int entry, std::int64_t offset) {
  const int index = free_slots_.back();
  free_slots_.pop_back();
  slots_[static_cast<std::size_t>(index)] = {.entry = entry,
                                             .raw = {.operation = operation,
                                                     .file = place.file,
                                                     .offset = place.offset,
                                                     .bytes = place.bytes,
                                                     .memory = memory,
                                                     .tag = static_cast<std::uint64_t>(index)},
                                             .offset = offset,
                                             .verifier = entry == kNone ? nullptr : verifier_,
                                             .used = true};
  return index;
}

void IoBackend::leave_list(Operation operation) {
  List& list = lists_[index_of(operation)];
  const Entry& entry = entries_[static_cast<std::size_t>(list.first)];
  batches_[entry.batch].unissued.fetch_sub(1);
  list.first = entry.next;
  if (list.first == kNone) list.last = kNone;
}

/// Starts a block, or the rest of one.
void IoBackend::start(const Slot& slot) {
  if (slot.done == 0 && slot.tries == 0) {
    if (busy_.fetch_add(1) == 0) last_event_.store(now());
    if (slot.verifier != nullptr && slot.raw.operation == Operation::write) {
      slot.verifier->writes(slot.offset,
                            {slot.raw.memory, static_cast<std::size_t>(slot.raw.bytes)});
    }
  }
  RawRequest rest = slot.raw;
  rest.offset += slot.done;
  rest.memory += slot.done;
  rest.bytes -= slot.done;
  driver_->start(rest);
}

void IoBackend::restart_due() {
  if (delayed_ == 0) return;
  const std::int64_t at = now();
  for (Slot& slot : slots_) {
    if (!slot.used || slot.not_before == 0 || slot.not_before > at) continue;
    slot.not_before = 0;
    --delayed_;
    start(slot);
  }
}

/// How long the thread may wait for the driver, in microseconds.
std::int64_t IoBackend::pause() const {
  if (delayed_ == 0) return kForever;
  std::int64_t next = kNever;
  for (const Slot& slot : slots_) {
    if (slot.used && slot.not_before != 0) next = std::min(next, slot.not_before);
  }
  return std::max<std::int64_t>(1, (next - now()) / 1000);
}

void IoBackend::complete(const RawCompletion& completion) {
  Slot& slot = slots_[static_cast<std::size_t>(completion.tag)];
  const std::int64_t at = now();
  last_event_.store(at);
  if (slot.entry != kNone) {
    batches_[entries_[static_cast<std::size_t>(slot.entry)].batch].last_event.store(at);
  }
  const std::int64_t rest = slot.raw.bytes - slot.done;
  const std::int64_t result = completion.result;
  if (result == -EINTR || result == -EAGAIN) {
    retry(slot, static_cast<int>(-result));
    return;
  }
  IoFailure failure;
  if (result < 0) {
    failure = failure_of(slot, IoFailure::Kind::system, static_cast<int>(-result));
  } else if (result > rest) {
    failure = failure_of(slot, IoFailure::Kind::bad_count, 0);
    failure.done += result;
  } else if (result == 0 && slot.raw.operation == Operation::read) {
    failure = failure_of(slot, IoFailure::Kind::end_of_file, 0);
  } else if (result < rest) {
    // The rest, from the last whole page on: direct I/O starts nowhere else.
    const std::int64_t moved = result / kAligned * kAligned;
    if (moved == 0) {
      retry(slot, 0);
      return;
    }
    slot.done += moved;
    slot.tries = 0;
    start(slot);
    return;
  } else {
    const bool read = slot.raw.operation == Operation::read;
    const std::span<const std::byte> memory{slot.raw.memory,
                                            static_cast<std::size_t>(slot.raw.bytes)};
    const auto found =
        read && slot.verifier != nullptr ? slot.verifier->check(slot.offset, memory) : std::nullopt;
    if (!found) {
      end(slot, nullptr);
      return;
    }
    failure = failure_of(slot, IoFailure::Kind::mismatch, 0);
    failure.found = *found;
  }
  end(slot, &failure);
}

void IoBackend::retry(Slot& slot, int error) {
  slot.error = error != 0 ? error : slot.error;
  if (++slot.tries >= kMostTries) {
    const IoFailure failure = failure_of(slot, IoFailure::Kind::no_progress, slot.error);
    end(slot, &failure);
    return;
  }
  if (slot.tries < kTriesAtOnce) {
    start(slot);
    return;
  }
  slot.not_before = now() + std::min(kLongestPause, std::int64_t{1000} << slot.tries);
  ++delayed_;
}

IoFailure IoBackend::failure_of(const Slot& slot, IoFailure::Kind kind, int error) {
  return {.kind = kind,
          .operation = slot.raw.operation,
          .filling = slot.entry == kNone,
          .file = slot.raw.file,
          .offset = slot.offset,
          .bytes = slot.raw.bytes,
          .file_offset = slot.raw.offset,
          .done = slot.done,
          .error = error};
}

void IoBackend::end(Slot& slot, const IoFailure* failure) {
  Pages unused;  // unmapped without the lock
  const std::lock_guard lock(mutex_);
  slot.used = false;
  free_slots_.push_back(static_cast<int>(slot.raw.tag));
  busy_.fetch_sub(1);
  if (slot.entry == kNone) {
    end_zeros(failure);
    if (filled()) unused = std::move(zeros_);
    return;
  }
  Entry& entry = entries_[static_cast<std::size_t>(slot.entry)];
  --entry.blocks;
  if (failure != nullptr) fail_batch(batches_[entry.batch], *failure);
  if (entry.blocks == 0 && entry.issued == entry.request.bytes) finish_entry(slot.entry);
}

void IoBackend::end_zeros(const IoFailure* failure) {
  if (failure != nullptr && !zeros_failed_) {
    zeros_failed_ = true;
    zeros_failure_ = *failure;
  }
  if (zeros_failed_) return;
  std::int64_t below = zeros_next_;
  for (const Slot& slot : slots_) {
    if (slot.used && slot.entry == kNone) below = std::min(below, slot.offset);
  }
  watermark_.store(below == map_.bytes() ? kNever : below);
}

void IoBackend::fail_batch(Batch& batch, const IoFailure& failure) {
  if (batch.failed != 0) return;
  batch.failed = batch.running.load();
  batch.failure = failure;
}

void IoBackend::finish_entry(int place) {
  const Entry& entry = entries_[static_cast<std::size_t>(place)];
  Batch& batch = batches_[entry.batch];
  count(entry.request.operation, -1);
  if (batch.failed == 0) {
    (entry.request.operation == Operation::read ? traffic_.read_bytes : traffic_.written_bytes) +=
        entry.request.bytes;
  }
  free_entries_.push_back(place);
  if (--batch.left == 0) finish_batch(entry.batch);
  finished_.add();
}

void IoBackend::finish_batch(std::size_t index) {
  Batch& batch = batches_[index];
  --active_batches_;
  if (batch.failed == 0) free_batches_.push_back(index);
  batch.running.store(0, std::memory_order_release);
}

}  // namespace zshard::offload
