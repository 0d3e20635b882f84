#include "tests/simulator/clique.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/simulator/communicator.hpp"
#include "tests/simulator/state.hpp"

namespace simulator {

bool Signature::operator==(const Signature& other) const {
  return std::strcmp(call, other.call) == 0 && count == other.count && type == other.type &&
         op == other.op && root == other.root;
}

std::string Signature::text() const {
  return std::string(call) + " of " + std::to_string(count) + " elements of type " +
         std::to_string(static_cast<int>(type)) + ", op " + std::to_string(static_cast<int>(op)) +
         ", root " + std::to_string(root);
}

Clique::Clique(std::string with_id, int of_world)
    : id(std::move(with_id)),
      world(of_world),
      members_(static_cast<std::size_t>(of_world)),
      devices_(static_cast<std::size_t>(of_world), -1),
      next_round_(static_cast<std::size_t>(of_world)) {}

ncclResult_t Clique::join(const std::shared_ptr<Communicator>& member, std::string& why) {
  const std::lock_guard lock(mutex_);
  const auto rank = static_cast<std::size_t>(member->rank);
  ncclResult_t result = ncclSuccess;
  if (devices_[rank] >= 0) {
    why = "rank " + std::to_string(member->rank) + " joined twice";
    result = ncclInvalidUsage;
  }
  const char* allowed = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool shared = State::get().nccl_version.load() >= NCCL_VERSION(2, 30, 0) &&
                      allowed != nullptr && std::strcmp(allowed, "1") == 0;
  const auto same = std::find(devices_.begin(), devices_.end(), member->device);
  if (result == ncclSuccess && !shared && same != devices_.end()) {
    why = "Duplicate GPU detected : rank " + std::to_string(member->rank) + " and rank " +
          std::to_string(same - devices_.begin()) + " both on CUDA device " +
          std::to_string(member->device);
    result = ncclInvalidUsage;
  }
  if (result != ncclSuccess) {
    member->set_error(result, why);
    fail_locked(result, why, nullptr, ncclSuccess);
    return result;
  }
  members_[rank] = member;
  devices_[rank] = member->device;
  joined_.fetch_add(1, std::memory_order_acq_rel);
  bell.ring();
  return ncclSuccess;
}

std::shared_ptr<Round> Clique::issue(int rank, const Signature& signature, const void* send,
                                     void* received) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = next_round_[static_cast<std::size_t>(rank)]++;
  std::shared_ptr<Round>& known = rounds_[number];
  if (!known) {
    known = std::make_shared<Round>();
    known->signature = signature;
    known->first_rank = rank;
    known->parts.resize(static_cast<std::size_t>(world));
  } else if (!(known->signature == signature)) {
    known->arrived.fetch_or(Round::kBroken);
    fail_locked(ncclInvalidUsage,
                "collective " + std::to_string(number) + " is " + known->signature.text() +
                    " on rank " + std::to_string(known->first_rank) + " and " + signature.text() +
                    " on rank " + std::to_string(rank),
                nullptr, ncclSuccess);
  }
  const std::shared_ptr<Round> round = known;
  round->parts[static_cast<std::size_t>(rank)] = {send, received};
  if (++round->issued == world) rounds_.erase(number);
  return round;
}

std::shared_ptr<Pair> Clique::issue(int from, int to, int way, std::size_t bytes,
                                    const void* source) {
  const std::lock_guard lock(mutex_);
  Channel& channel = channels_[{from, to}];
  const std::uint64_t number = channel.next[way]++;
  std::shared_ptr<Pair>& known = channel.pairs[number];
  if (!known) known = std::make_shared<Pair>();
  const std::shared_ptr<Pair> pair = known;
  pair->bytes[way] = bytes;
  pair->issued[way] = true;
  if (way == 0) pair->source = source;
  if (pair->issued[1 - way]) {
    channel.pairs.erase(number);
    if (pair->bytes[0] != pair->bytes[1]) {
      pair->state.fetch_or(Pair::kBroken);
      fail_locked(ncclInvalidUsage,
                  "rank " + std::to_string(from) + " sends " + std::to_string(pair->bytes[0]) +
                      " bytes and rank " + std::to_string(to) + " receives " +
                      std::to_string(pair->bytes[1]),
                  nullptr, ncclSuccess);
    }
  }
  return pair;
}

void Clique::fail(ncclResult_t code, const std::string& why, const Communicator* by,
                  ncclResult_t by_code) {
  const std::lock_guard lock(mutex_);
  fail_locked(code, why, by, by_code);
}

void Clique::fail_locked(ncclResult_t code, const std::string& why, const Communicator* by,
                         ncclResult_t by_code) {
  for (const std::weak_ptr<Communicator>& weak : members_) {
    if (const std::shared_ptr<Communicator> member = weak.lock()) {
      member->set_error(member.get() == by ? by_code : code, why);
    }
  }
  bell.ring();
}

}  // namespace simulator
