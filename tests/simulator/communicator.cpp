#include "tests/simulator/communicator.hpp"

#include <algorithm>
#include <cstring>

#include "tests/simulator/queue.hpp"
#include "tests/simulator/reductions.hpp"

namespace simulator {

namespace {

bool is(const Signature& signature, const char* call) {
  return std::strcmp(signature.call, call) == 0;
}

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

Communicator::Communicator(std::shared_ptr<Clique> of, int of_rank, int on_device, bool is_blocking,
                           std::shared_ptr<Lane> lane, const void* made_at)
    : clique(std::move(of)),
      rank(of_rank),
      device(on_device),
      blocking(is_blocking),
      site(made_at),
      lane_(std::move(lane)) {}

void Communicator::say(const std::string& why) {
  const std::lock_guard lock(mutex_);
  last_error_ = why;
}

std::string Communicator::last_error() {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

void Communicator::set_error(ncclResult_t code, const std::string& why) {
  int none = ncclSuccess;
  if (error_.compare_exchange_strong(none, code, std::memory_order_acq_rel)) say(why);
  clique->bell.ring();
}

ncclResult_t Communicator::poll() {
  if (const ncclResult_t code = error(); code != ncclSuccess) return code;
  if (!clique->complete()) return ncclInProgress;
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
    if (!clique->complete()) return true;
    const std::lock_guard lock(mutex_);
    return !pending_.empty();
  }();
  if (!unfinished) return ncclSuccess;
  say("Attempt to use communicator before the previous operation returned ncclSuccess");
  return ncclInvalidArgument;
}

ncclResult_t Communicator::issue(std::vector<Issued> calls) {
  Launch made;
  for (Issued& call : calls) {
    if (call.peer < 0) {
      made.rounds.push_back(clique->issue(rank, call.signature, call.send, call.received));
      made.signatures.push_back(call.signature);
    } else {
      const int from = call.way == 0 ? rank : call.peer;
      const int to = call.way == 0 ? call.peer : rank;
      made.pairs.emplace_back(
          clique->issue(from, to, call.way, call.signature.count * size_of(call.signature.type),
                        call.send),
          call);
    }
  }
  made.calls = std::move(calls);
  if (blocking) {
    launch(std::move(made));
    return ncclSuccess;
  }
  const std::lock_guard lock(mutex_);
  polls_ = static_cast<int>(++issued_ % 3);
  pending_.push_back(std::move(made));
  return ncclInProgress;
}

void Communicator::launch(Launch made) {
  State& state = State::get();
  const StreamPointer stream = made.calls.front().stream;
  // One group on several streams: it starts after all of them, and all of them go on after it.
  std::vector<StreamPointer> others;
  std::vector<Touch> touches;
  for (const Issued& call : made.calls) {
    touches.insert(touches.end(), call.touches.begin(), call.touches.end());
    if (call.stream != stream &&
        std::find(others.begin(), others.end(), call.stream) == others.end()) {
      others.push_back(call.stream);
    }
  }
  for (const StreamPointer& other : others) state.wait(stream, state.mark(other));
  const bool serial = state.serial_collectives.load();
  std::uint64_t position = 0;
  {
    const std::lock_guard lock(lane_->launching);
    const std::uint64_t ticket = serial ? lane_->take() : 0;
    position =
        state.submit(stream, touches,
                     [self = shared_from_this(), ticket, serial,
                      launch = std::make_shared<const Launch>(std::move(made))](bool faulted) {
                       self->running_.fetch_add(1, std::memory_order_seq_cst);
                       if (serial) {
                         self->lane_->bell.wait_until(
                             [&] { return self->lane_->turn(ticket) || self->stopped(); });
                       }
                       self->run(*launch, faulted);
                       if (serial) self->lane_->finish(ticket);
                       self->running_.fetch_sub(1, std::memory_order_seq_cst);
                       self->clique->bell.ring();
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
  clique->bell.wait_until([&] { return stopped(); });
}

void Communicator::run(const Launch& made, bool faulted) {
  if (faulted || stopped()) return;
  for (const Issued& call : made.calls) {
    if (!call.injected) continue;
    if (call.injected->how == How::fault) {
      const auto code = static_cast<ncclResult_t>(call.injected->code);
      clique->fail(ncclRemoteError, "remote process exited or there was a network error", this,
                   code);
    }
    stall();
    return;
  }
  for (std::size_t i = 0; i < made.rounds.size(); ++i) {
    run_round(*made.rounds[i], made.signatures[i]);
  }
  if (!made.pairs.empty()) run_pairs(made);
}

void Communicator::run_round(Round& round, const Signature& signature) {
  if (error() != ncclSuccess) return stall();
  const auto world = static_cast<std::size_t>(clique->world);
  const auto all = static_cast<std::uint32_t>(world);
  round.arrived.fetch_add(1, std::memory_order_acq_rel);
  clique->bell.ring();
  bool broken = false;
  clique->bell.wait_until([&] {
    std::uint32_t seen = round.arrived.load(std::memory_order_acquire);
    broken = (seen & Round::kBroken) != 0;
    if (broken || seen == all) return true;
    // Breaks it for all unless it has just become full: nobody waits for a rank that left.
    if (!stopped()) return false;
    broken = round.arrived.compare_exchange_strong(seen, seen | Round::kBroken,
                                                   std::memory_order_acq_rel);
    return broken;
  });
  if (broken) return stall();

  if (signature.count == 0) return;
  // All are here. Peers' memory is read first, and written when everybody has read: so operations
  // in place need no special care, and nobody's buffer changes under a peer.
  const Round::Part& mine = round.parts[static_cast<std::size_t>(rank)];
  const std::size_t bytes = signature.count * size_of(signature.type);
  const auto place = static_cast<std::size_t>(rank);
  std::vector<const std::byte*> sources;
  for (const Round::Part& part : round.parts) sources.push_back(bytes_at(part.send));
  std::vector<std::byte> result;
  if (is(signature, "ncclAllGather")) {
    result.resize(bytes * world);
    for (std::size_t r = 0; r < world; ++r) {
      std::memcpy(result.data() + r * bytes, sources[r], bytes);
    }
  } else if (is(signature, "ncclBroadcast")) {
    const std::byte* root = sources[static_cast<std::size_t>(signature.root)];
    result.assign(root, root + bytes);
  } else if (is(signature, "ncclReduceScatter")) {
    result.resize(bytes);
    for (const std::byte*& source : sources) source += place * bytes;
    reduce(sources, place + 1, result.data(), signature.count, signature.type, signature.op);
  } else {  // all-reduce: pieces begin at different ranks of the ring
    result.resize(bytes);
    const std::size_t size = size_of(signature.type);
    for (std::size_t r = 0; r < world; ++r) {
      const std::size_t from = signature.count * r / world;
      const std::size_t to = signature.count * (r + 1) / world;
      std::vector<const std::byte*> pieces;
      for (const std::byte* source : sources) pieces.push_back(source + from * size);
      reduce(pieces, r + 1, result.data() + from * size, to - from, signature.type, signature.op);
    }
  }
  round.read.fetch_add(1, std::memory_order_acq_rel);
  clique->bell.ring();
  clique->bell.wait_until([&] { return round.read.load(std::memory_order_acquire) == all; });

  auto* out = static_cast<std::byte*>(reach(mine.received));
  if (is(signature, "ncclAllGather")) {
    for (std::size_t r = 0; r < world; ++r) {
      // In place the own piece is not written: other streams may read it meanwhile.
      if (out + r * bytes == bytes_at(mine.send)) continue;
      std::memcpy(out + r * bytes, result.data() + r * bytes, bytes);
    }
  } else if (!is(signature, "ncclBroadcast") || out != bytes_at(mine.send) ||
             signature.root != rank) {
    std::memcpy(out, result.data(), result.size());
  }
}

void Communicator::run_pairs(const Launch& made) {
  if (error() != ncclSuccess) return stall();
  for (const auto& [pair, call] : made.pairs) {
    pair->state.fetch_or(call.way == 0 ? Pair::kSender : Pair::kReceiver,
                         std::memory_order_acq_rel);
  }
  clique->bell.ring();
  std::vector<bool> ended(made.pairs.size());
  bool broken = false;
  clique->bell.wait_until([&] {
    const bool stop = stopped();
    bool all = true;
    for (std::size_t i = 0; i < made.pairs.size(); ++i) {
      if (ended[i]) continue;
      Pair& pair = *made.pairs[i].first;
      const Issued& call = made.pairs[i].second;
      std::uint32_t seen = pair.state.load(std::memory_order_acquire);
      if ((seen & Pair::kBroken) != 0) {
        broken = true;
        ended[i] = true;
      } else if ((seen & Pair::kDone) != 0) {
        ended[i] = true;
      } else if (call.way == 1 && seen == (Pair::kSender | Pair::kReceiver) &&
                 pair.state.compare_exchange_strong(seen, seen | Pair::kTaken,
                                                    std::memory_order_acq_rel)) {
        if (pair.bytes[0] > 0) {
          std::memcpy(reach(call.received), bytes_at(pair.source), pair.bytes[0]);
        }
        pair.state.fetch_or(Pair::kDone, std::memory_order_acq_rel);
        clique->bell.ring();
        ended[i] = true;
      } else if (stop && (seen & Pair::kTaken) == 0 &&
                 pair.state.compare_exchange_strong(seen, seen | Pair::kBroken,
                                                    std::memory_order_acq_rel)) {
        broken = true;
        ended[i] = true;
      } else {
        all = false;
      }
    }
    return all;
  });
  if (broken) stall();
}

void Communicator::abort() {
  aborted_.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    pending_.clear();
  }
  clique->bell.ring();
  clique->bell.wait_until([&] { return running_.load(std::memory_order_seq_cst) == 0; });
}

bool Communicator::idle() {
  const std::lock_guard lock(mutex_);
  if (!pending_.empty()) return false;
  return std::all_of(outstanding_.begin(), outstanding_.end(),
                     [](const auto& one) { return one.first->reached(one.second); });
}

void Communicator::wait_idle() {
  clique->bell.wait_until([&] { return idle(); });
}

}  // namespace simulator
