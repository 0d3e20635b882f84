#include "tests/simulator/communicator.hpp"

#include <algorithm>
#include <cstring>

#include "tests/simulator/queue.hpp"
#include "tests/simulator/reductions.hpp"

namespace simulator {

namespace {

const std::byte* bytes_at(const void* memory) {
  return static_cast<const std::byte*>(reach(memory));
}

}  // namespace

void Lane::finish(std::uint64_t ticket) {
  finished_[ticket % kWindow].store(ticket + 1, std::memory_order_relaxed);
  while (true) {
    std::uint64_t now = turn_.load(std::memory_order_relaxed);
    if (finished_[now % kWindow].load(std::memory_order_relaxed) != now + 1) return;
    if (turn_.compare_exchange_strong(now, now + 1, std::memory_order_relaxed)) bell.ring();
  }
}

std::uint64_t Lane::take() {
  const std::uint64_t ticket = next_++;
  bell.wait_until([&] { return ticket < turn_.load(std::memory_order_relaxed) + kWindow; });
  return ticket;
}

std::size_t Issued::bytes() const {
  return signature.count * size_of(signature.type);
}

Communicator::Communicator(std::shared_ptr<Clique> of, int of_rank, int of_world, int on_device,
                           bool is_blocking, std::shared_ptr<Lane> lane, const void* made_at)
    : clique(std::move(of)),
      rank(of_rank),
      world(of_world),
      device(on_device),
      blocking(is_blocking),
      site(made_at),
      lane_(std::move(lane)) {
  for (auto& numbers : pairs_) numbers.resize(static_cast<std::size_t>(world));
}

void Communicator::say(const std::string& why) {
  const std::lock_guard lock(mutex_);
  last_error_ = why;
}

std::string Communicator::last_error() {
  if (error_.load(std::memory_order_acquire) == ncclSuccess) {
    const std::string text = clique->failure_text();
    if (!text.empty()) return text;
  }
  const std::lock_guard lock(mutex_);
  return last_error_;
}

void Communicator::set_error(ncclResult_t code, const std::string& why) {
  int none = ncclSuccess;
  if (error_.compare_exchange_strong(none, code, std::memory_order_acq_rel)) say(why);
  clique->bell().ring();
}

void Communicator::advance() {
  if (error() != ncclSuccess) return;
  std::string why;
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (!connected_) result = clique->connect(rank, why);
    connected_ = connected_ || result == ncclSuccess;
  }
  if (result != ncclSuccess && result != ncclInProgress) set_error(result, why);
  if (!State::get().remote_errors.load(std::memory_order_relaxed)) return;
  // NCCL sees that a connection was closed, not by whom.
  if (clique->dead()) set_error(ncclRemoteError, "Connection closed by remote peer");
}

bool Communicator::has_remote() const {
  for (int r = 0; r < world; ++r) {
    if (clique->remote(r)) return true;
  }
  return false;
}

ncclResult_t Communicator::poll() {
  advance();
  if (const ncclResult_t code = error(); code != ncclSuccess) return code;
  if (!made()) return ncclInProgress;
  {
    const std::lock_guard lock(mutex_);
    if (!pending_.empty() && polls_ > 0) {
      --polls_;
      return ncclInProgress;
    }
  }
  flush();
  if (finalizing_.load(std::memory_order_relaxed) && !idle()) return ncclInProgress;
  return error();
}

void Communicator::flush() {
  std::vector<Launch> now;
  {
    const std::lock_guard lock(mutex_);
    now.swap(pending_);
  }
  for (Launch& one : now) launch(std::move(one));
}

ncclResult_t Communicator::ready() {
  if (const ncclResult_t code = error(); code != ncclSuccess) return code;
  const bool unfinished = [&] {
    if (!made()) return true;
    const std::lock_guard lock(mutex_);
    return !pending_.empty();
  }();
  if (!unfinished) return ncclSuccess;
  say("Attempt to use communicator before the previous operation returned ncclSuccess");
  return ncclInvalidArgument;
}

ncclResult_t Communicator::issue(Launch calls) {
  std::unique_lock lock(mutex_);
  for (Issued& call : calls) {
    const auto way = static_cast<std::size_t>(call.way);
    call.number =
        call.peer < 0 ? collectives_++ : pairs_[way][static_cast<std::size_t>(call.peer)]++;
  }
  if (blocking) {
    lock.unlock();
    launch(std::move(calls));
    return ncclSuccess;
  }
  polls_ = static_cast<int>(++issued_ % 3);
  pending_.push_back(std::move(calls));
  return ncclInProgress;
}

void Communicator::launch(Launch calls) {
  State& state = State::get();
  const StreamPointer stream = calls.front().stream;
  // One group on several streams: it starts after all of them, and all of them go on after it.
  std::vector<StreamPointer> others;
  std::vector<Touch> touches;
  for (const Issued& call : calls) {
    touches.insert(touches.end(), call.touches.begin(), call.touches.end());
    if (call.stream != stream &&
        std::find(others.begin(), others.end(), call.stream) == others.end()) {
      others.push_back(call.stream);
    }
  }
  for (const StreamPointer& other : others) state.wait(stream, state.mark(other));
  std::uint64_t position = 0;
  {
    const std::lock_guard lock(lane_->launching);
    const std::uint64_t ticket = lane_->take();
    position =
        state.submit(stream, touches,
                     [self = shared_from_this(), ticket,
                      made = std::make_shared<const Launch>(std::move(calls))](bool faulted) {
                       self->running_.fetch_add(1, std::memory_order_seq_cst);
                       self->lane_->bell.wait_until(
                           [&] { return self->lane_->turn(ticket) || self->stopped(); });
                       self->run(*made, faulted);
                       self->lane_->finish(ticket);
                       self->running_.fetch_sub(1, std::memory_order_seq_cst);
                       self->clique->bell().ring();
                     });
  }
  for (const StreamPointer& other : others) state.wait(other, state.mark(stream));
  const std::lock_guard lock(mutex_);
  std::erase_if(outstanding_, [](const auto& one) { return one.first->reached(one.second); });
  outstanding_.emplace_back(stream, position);
}

bool Communicator::stopped() const {
  return aborted() || State::get().device(device).fault.load(std::memory_order_relaxed) != 0;
}

void Communicator::stall() {
  clique->bell().wait_until([&] { return stopped(); });
}

void Communicator::run(const Launch& calls, bool faulted) {
  if (faulted || stopped()) return;
  for (const Issued& call : calls) {
    if (!call.injected) continue;
    if (call.injected->how == How::fault) {
      const auto code = static_cast<ncclResult_t>(call.injected->code);
      clique->fail(ncclRemoteError, "remote process exited or there was a network error", rank,
                   code);
    }
    stall();
    return;
  }
  for (const Issued& call : calls) {
    if (call.peer < 0) run_collective(call);
  }
  if (std::any_of(calls.begin(), calls.end(), [](const Issued& c) { return c.peer >= 0; })) {
    run_pairs(calls);
  }
}

// -- collectives --

bool Communicator::meet(const Issued& call) {
  CliqueBlock& block = clique->block();
  CliqueBlock::Member::Offer& offer =
      clique->member(rank).offers[call.number % CliqueBlock::kRounds];
  offer.operation.store(call.signature.packed(), std::memory_order_relaxed);
  offer.count.store(call.signature.count, std::memory_order_relaxed);
  Clique::offer(offer.send, call.send);
  const std::uint64_t full = (call.number + 1) * static_cast<std::uint64_t>(world);
  std::uint64_t seen = block.arrived.load(std::memory_order_relaxed);
  do {
    if ((seen & CliqueBlock::kBroken) != 0) return false;
  } while (!block.arrived.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel));
  clique->bell().ring();
  bool broken = false;
  clique->bell().wait_until([&] {
    std::uint64_t now = block.arrived.load(std::memory_order_acquire);
    if ((now & ~CliqueBlock::kBroken) >= full) return true;
    broken = (now & CliqueBlock::kBroken) != 0;
    // Breaks it for all unless it has just become full: nobody waits for a rank that left.
    if (!broken && stopped()) {
      broken = block.arrived.compare_exchange_strong(now, now | CliqueBlock::kBroken,
                                                     std::memory_order_acq_rel);
    }
    return broken;
  });
  if (broken) return false;
  // All see the same calls, so all know that they differ.
  Signature first;
  for (int r = 0; r < world; ++r) {
    const auto& theirs = clique->member(r).offers[call.number % CliqueBlock::kRounds];
    const Signature made = Signature::unpacked(theirs.operation.load(std::memory_order_relaxed),
                                               theirs.count.load(std::memory_order_relaxed));
    if (r == 0) first = made;
    if (made == first) continue;
    clique->fail(ncclInvalidUsage, "collective " + std::to_string(call.number) + " is " +
                                       first.text() + " on rank 0 and " + made.text() +
                                       " on rank " + std::to_string(r));
    return false;
  }
  return true;
}

/// Returns when no peer reads this rank's memory any more.
void Communicator::finish_reading(std::uint64_t number) {
  clique->member(rank).read.store(number + 1, std::memory_order_release);
  clique->bell().ring();
  clique->bell().wait_until([&] {
    for (int r = 0; r < world; ++r) {
      if (clique->member(r).read.load(std::memory_order_acquire) > number) continue;
      // Another process may be stopped or dead, and reads a mapping of its own.
      if (!clique->remote(r) || !stopped()) return false;
    }
    return true;
  });
}

void Communicator::run_collective(const Issued& call) {
  if (error() != ncclSuccess || !meet(call)) return stall();
  const Signature& signature = call.signature;
  const auto ranks = static_cast<std::size_t>(world);
  // All are here. Peers' memory is read first, and written when everybody has read: so operations
  // in place need no special care, and nobody's buffer changes under a peer.
  const std::size_t bytes = call.bytes();
  const auto place = static_cast<std::size_t>(rank);
  std::vector<const std::byte*> sources;
  for (int r = 0; r < world; ++r) {
    sources.push_back(
        clique->reach_offer(r, clique->member(r).offers[call.number % CliqueBlock::kRounds].send));
  }
  std::vector<std::byte> result;
  switch (signature.collective) {
    case Collective::all_gather:
      result.resize(bytes * ranks);
      for (std::size_t r = 0; r < ranks && bytes != 0; ++r) {
        std::memcpy(result.data() + r * bytes, sources[r], bytes);
      }
      break;
    case Collective::broadcast:
      if (bytes != 0) {
        const std::byte* root = sources[static_cast<std::size_t>(signature.root)];
        result.assign(root, root + bytes);
      }
      break;
    case Collective::reduce_scatter:
      result.resize(bytes);
      for (const std::byte*& source : sources) source += place * bytes;
      reduce(sources, place + 1, result.data(), signature.count, signature.type, signature.op);
      break;
    case Collective::all_reduce:  // pieces begin at different ranks of the ring
      result.resize(bytes);
      for (std::size_t r = 0; r < ranks; ++r) {
        const std::size_t size = size_of(signature.type);
        const std::size_t from = signature.count * r / ranks;
        const std::size_t to = signature.count * (r + 1) / ranks;
        std::vector<const std::byte*> pieces;
        for (const std::byte* source : sources) pieces.push_back(source + from * size);
        reduce(pieces, r + 1, result.data() + from * size, to - from, signature.type, signature.op);
      }
      break;
  }
  finish_reading(call.number);
  if (result.empty()) return;

  auto* out = static_cast<std::byte*>(reach(call.received));
  const std::byte* own = bytes_at(call.send);
  if (signature.collective == Collective::all_gather) {
    for (std::size_t r = 0; r < ranks; ++r) {
      // In place the own piece is not written: other streams may read it meanwhile.
      if (out + r * bytes == own) continue;
      std::memcpy(out + r * bytes, result.data() + r * bytes, bytes);
    }
  } else if (signature.collective != Collective::broadcast || out != own ||
             signature.root != rank) {
    std::memcpy(out, result.data(), result.size());
  }
}

// -- sends and receives --

Communicator::Progress Communicator::send(const Issued& call, std::uint64_t& posted) {
  CliqueBlock::Channel& channel = clique->channel(rank, call.peer);
  std::uint64_t taken = channel.taken.load(std::memory_order_acquire);
  const std::uint64_t count = (taken & ~CliqueBlock::Channel::kBroken) / 2;
  if (count > call.number) return Progress::ended;
  if ((taken & CliqueBlock::Channel::kBroken) != 0) return Progress::broken;
  if (stopped()) {
    // While a thread of this process reads the memory it must stay; another process has a mapping
    // of its own, and may be stopped or dead.
    const bool reads = taken == 2 * call.number + 1;
    if (reads && !clique->remote(call.peer)) return Progress::waits;
    const bool broken = channel.taken.compare_exchange_strong(
        taken, taken | CliqueBlock::Channel::kBroken, std::memory_order_acq_rel);
    return broken ? Progress::broken : Progress::waits;
  }
  if (posted == call.number && call.number < count + CliqueBlock::kSends) {
    auto& place = channel.sends[call.number % CliqueBlock::kSends];
    place.bytes.store(call.bytes(), std::memory_order_relaxed);
    Clique::offer(place.source, call.send);
    posted = call.number + 1;
    channel.posted.store(posted, std::memory_order_release);
    clique->bell().ring();
  }
  return Progress::waits;
}

Communicator::Progress Communicator::receive(const Issued& call) {
  CliqueBlock::Channel& channel = clique->channel(call.peer, rank);
  std::uint64_t taken = channel.taken.load(std::memory_order_acquire);
  if ((taken & CliqueBlock::Channel::kBroken) != 0) return Progress::broken;
  if (taken != 2 * call.number) return Progress::waits;  // for an earlier one
  if (channel.posted.load(std::memory_order_acquire) <= call.number) {
    if (!stopped()) return Progress::waits;
    channel.taken.fetch_or(CliqueBlock::Channel::kBroken, std::memory_order_acq_rel);
    clique->bell().ring();
    return Progress::broken;
  }
  const auto& place = channel.sends[call.number % CliqueBlock::kSends];
  const std::uint64_t sent = place.bytes.load(std::memory_order_relaxed);
  if (sent != call.bytes()) {
    channel.taken.fetch_or(CliqueBlock::Channel::kBroken, std::memory_order_acq_rel);
    clique->fail(ncclInvalidUsage, "rank " + std::to_string(call.peer) + " sends " +
                                       std::to_string(sent) + " bytes and rank " +
                                       std::to_string(rank) + " receives " +
                                       std::to_string(call.bytes()));
    return Progress::broken;
  }
  if (!channel.taken.compare_exchange_strong(taken, taken + 1, std::memory_order_acq_rel)) {
    return Progress::broken;  // the sender stops
  }
  if (sent != 0) {
    std::memcpy(reach(call.received), clique->reach_offer(call.peer, place.source), sent);
  }
  channel.taken.fetch_add(1, std::memory_order_acq_rel);
  clique->bell().ring();
  return Progress::ended;
}

void Communicator::run_pairs(const Launch& calls) {
  if (error() != ncclSuccess) return stall();
  std::vector<bool> ended(calls.size());
  // What this rank has posted, by receiver: of all launches, since they run one after the other.
  std::vector<std::uint64_t> posted;
  for (int r = 0; r < world; ++r) {
    posted.push_back(clique->channel(rank, r).posted.load(std::memory_order_relaxed));
  }
  bool broken = false;
  clique->bell().wait_until([&] {
    bool all = true;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const Issued& call = calls[i];
      if (ended[i] || call.peer < 0) continue;
      const Progress now =
          call.way == 0 ? send(call, posted[static_cast<std::size_t>(call.peer)]) : receive(call);
      ended[i] = now != Progress::waits;
      broken = broken || now == Progress::broken;
      all = all && ended[i];
    }
    return all;
  });
  if (broken) stall();
}

// -- endings --

void Communicator::abort() {
  aborted_.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    pending_.clear();
  }
  clique->bell().ring();
  clique->bell().wait_until([&] { return running_.load(std::memory_order_seq_cst) == 0; });
}

bool Communicator::idle() {
  const std::lock_guard lock(mutex_);
  if (!pending_.empty()) return false;
  return std::all_of(outstanding_.begin(), outstanding_.end(),
                     [](const auto& one) { return one.first->reached(one.second); });
}

void Communicator::wait_idle() {
  clique->bell().wait_until([&] { return idle(); });
}

}  // namespace simulator
