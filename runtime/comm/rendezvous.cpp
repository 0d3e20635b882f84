#include "runtime/comm/rendezvous.hpp"

#include <fmt/format.h>

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "runtime/base/system_reason.hpp"
#include "zshard/error.hpp"

namespace zshard::comm {

using Clock = std::chrono::steady_clock;

class Rendezvous::Deadline {
 public:
  explicit Deadline(double seconds)
      : end_(Clock::now() +
             std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  [[nodiscard]] bool over() const { return Clock::now() >= end_; }
  [[nodiscard]] int milliseconds() const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
  }

 private:
  Clock::time_point end_;
};

namespace {

constexpr std::uint32_t kMagic = 0x7A736831;   // "zsh1": the protocol's version too
constexpr std::size_t kMostDescriptors = 128;  // of one message; the kernel takes 253

struct Hello {
  std::uint32_t magic = kMagic;
  std::int32_t rank = 0;
  std::int32_t world = 0;
};

enum Refusal : std::uint32_t { kFine, kCommunication, kMemory };

struct Reply {
  std::uint32_t refused = kFine;
  std::array<char, 500> reason{};
};

Reply refusal(Refusal kind, const std::string& reason) {
  Reply reply;
  reply.refused = kind;
  std::memcpy(reply.reason.data(), reason.data(), std::min(reason.size(), reply.reason.size() - 1));
  return reply;
}

/// What an error of a rank, or null, is to its peers.
Reply verdict_of(const std::exception_ptr& own, int rank) {
  if (own == nullptr) return {};
  const std::string who = "rank " + std::to_string(rank) + ": ";
  try {
    std::rethrow_exception(own);
  } catch (const OutOfMemory& error) {
    return refusal(kMemory, who + error.what());
  } catch (const std::bad_alloc&) {
    return refusal(kMemory, who + "out of memory while the ranks met");
  } catch (const std::exception& error) {
    return refusal(kCommunication, who + error.what());
  } catch (...) {
    return refusal(kCommunication, who + "an unknown exception while the ranks met");
  }
}

std::string failure(const std::string& what) {
  return what + ": " + base::system_reason(errno);
}

sockaddr_un address_of(const Placement& place, socklen_t* length) {
  // Abstract: the name goes with the process. The user is part of it, so that jobs of two users
  // cannot meet by accident.
  const std::string name = "zshard/" + std::to_string(getuid()) + "/" + place.job;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.sun_path)
    throw UsageError("the launcher's job name is too long: " + place.job);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool send_message(int socket, const void* data, std::size_t bytes, const int* descriptors = nullptr,
                  std::size_t count = 0) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(sizeof(int) * std::max<std::size_t>(count, 1)));
  if (count != 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * count);
    std::memcpy(CMSG_DATA(header), descriptors, sizeof(int) * count);
  }
  ssize_t sent = 0;
  // ETOOMANYREFS: as many descriptors of this user are on their way as a process may have open.
  for (int patience = 2000; patience > 0; --patience) {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent >= 0 || (errno != EINTR && errno != ETOOMANYREFS)) break;
    if (errno == ETOOMANYREFS) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return sent == static_cast<ssize_t>(bytes);
}

/// Bytes received; 0 at the end, -1 with errno.
ssize_t receive_message(int socket, void* data, std::size_t bytes,
                        std::vector<base::Descriptor>* descriptors) {
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(sizeof(int) * kMostDescriptors));
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); got >= 0 && header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::vector<int> values(count);
    std::memcpy(values.data(), CMSG_DATA(header), count * sizeof(int));
    for (const int value : values) {
      base::Descriptor owned(value);
      if (descriptors != nullptr) descriptors->push_back(std::move(owned));
    }
  }
  if (got >= 0 && (message.msg_flags & MSG_CTRUNC) != 0) {
    errno = EMFILE;  // descriptors were dropped: the process has no room for them
    return -1;
  }
  return got;
}

/// Waits until the socket can be read.
template <class Deadline>
bool readable(int socket, const Deadline& deadline) {
  while (true) {
    pollfd watched{socket, POLLIN, 0};
    const int ready = poll(&watched, 1, deadline.milliseconds());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (deadline.over()) return false;
  }
}

void refuse(int socket, const std::string& reason) {
  const Reply reply = refusal(kCommunication, reason);
  send_message(socket, &reply, sizeof reply);
}

}  // namespace

std::unique_ptr<Rendezvous> Rendezvous::join(const Placement& place, double deadline_seconds) {
  std::unique_ptr<Rendezvous> self(new Rendezvous(place, deadline_seconds));
  self->pids_.assign(static_cast<std::size_t>(place.world), 0);
  self->pids_[static_cast<std::size_t>(place.rank)] = getpid();
  if (place.rank == 0) {
    self->listen_for_all();
  } else {
    self->find_rank_zero();
  }
  std::exception_ptr own;
  try {
    self->watch();
  } catch (const CommError&) {
    own = std::current_exception();
  }
  self->settle(own);
  return self;
}

base::Descriptor Rendezvous::make_listener(const Deadline& deadline) const {
  socklen_t length = 0;
  const sockaddr_un address = address_of(place_, &length);
  base::Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener.valid()) throw CommError(failure("rank 0 cannot make a socket"));
  // The ranks of a program that has just ended may hold the name for a moment.
  while (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE || deadline.over()) {
      throw CommError(
          failure("rank 0 of job " + place_.job + " cannot listen (is there another rank 0?)"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (listen(listener.get(), place_.world) != 0) throw CommError(failure("rank 0 cannot listen"));
  return listener;
}

void Rendezvous::give_up(const std::string& reason) const {
  for (const base::Descriptor& s : sockets_) {
    if (s.valid()) refuse(s.get(), reason);
  }
  throw CommError(reason);
}

void Rendezvous::admit(base::Descriptor peer) {
  ucred who{};
  socklen_t size = sizeof who;
  Hello hello;
  // A stranger is sent away, and the job goes on.
  if (getsockopt(peer.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != getuid() ||
      receive_message(peer.get(), &hello, sizeof hello, nullptr) != sizeof hello ||
      hello.magic != kMagic) {
    return;
  }
  const auto turn_away = [&](const std::string& why) {
    const std::string reason = "process " + std::to_string(who.pid) + " says it is rank " +
                               std::to_string(hello.rank) + " of " + std::to_string(hello.world) +
                               ", " + why;
    refuse(peer.get(), reason);
    give_up(reason);
  };
  if (who.pid <= 0) {
    // Watching it, and telling ranks apart, needs its number.
    turn_away("but it is in another pid namespace; start all ranks in one container");
  }
  if (hello.world != place_.world || hello.rank < 1 || hello.rank >= place_.world) {
    turn_away("rank 0 was started as one of " + std::to_string(place_.world));
  }
  base::Descriptor& place = sockets_[static_cast<std::size_t>(hello.rank)];
  if (place.valid()) {
    turn_away("but process " + std::to_string(process(hello.rank)) + " is that rank already");
  }
  place = std::move(peer);
  pids_[static_cast<std::size_t>(hello.rank)] = who.pid;
}

std::string Rendezvous::absent() const {
  std::string ranks;
  for (int r = 1; r < place_.world; ++r) {
    if (!sockets_[static_cast<std::size_t>(r)].valid()) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
    }
  }
  return ranks;
}

void Rendezvous::listen_for_all() {
  sockets_.resize(static_cast<std::size_t>(place_.world));
  const Deadline deadline(deadline_);
  const base::Descriptor listener = make_listener(deadline);
  std::vector<base::Descriptor> silent;  // connected, and have not said who they are
  std::vector<pollfd> watched;
  while (!absent().empty()) {
    watched.assign(1, {listener.get(), POLLIN, 0});
    for (const base::Descriptor& s : silent) watched.push_back({s.get(), POLLIN, 0});
    for (const base::Descriptor& s : sockets_) watched.push_back({s.get(), POLLIN, 0});
    const int ready = poll(watched.data(), watched.size(), deadline.milliseconds());
    if (ready < 0 && errno != EINTR) give_up(failure("rank 0 cannot wait for its peers"));
    if (ready <= 0) {
      if (!deadline.over()) continue;
      give_up("rank(s) " + absent() + " of " + std::to_string(place_.world) +
              " did not come within " + fmt::format("{:g}", deadline_) +
              " s; start them, or correct the number of ranks (" + place_.launcher + ")");
    }
    for (int r = 1; r < place_.world; ++r) {
      // A rank that has joined says nothing before all have: it is gone.
      if (watched[1 + silent.size() + static_cast<std::size_t>(r)].revents == 0) continue;
      give_up("rank " + std::to_string(r) + " (process " + std::to_string(process(r)) +
              ") has ended while the ranks met");
    }
    for (std::size_t i = silent.size(); i-- > 0;) {
      if (watched[1 + i].revents == 0) continue;
      base::Descriptor peer = std::move(silent[i]);
      silent.erase(silent.begin() + static_cast<std::ptrdiff_t>(i));
      admit(std::move(peer));
    }
    if (watched[0].revents == 0) continue;
    base::Descriptor peer(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.valid()) {
      silent.push_back(std::move(peer));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
      give_up(failure("rank 0 cannot let its " + std::to_string(place_.world - 1) + " peers in"));
    }
  }
  const Reply welcome;
  for (int r = 1; r < place_.world; ++r) {
    const int s = sockets_[static_cast<std::size_t>(r)].get();
    if (!send_message(s, &welcome, sizeof welcome) ||
        !send_message(s, pids_.data(), pids_.size() * sizeof(pid_t))) {
      give_up(failure("rank " + std::to_string(r) + " went away while the ranks met"));
    }
  }
}

void Rendezvous::find_rank_zero() {
  socklen_t length = 0;
  const sockaddr_un address = address_of(place_, &length);
  const Deadline deadline(deadline_);
  base::Descriptor link;
  while (true) {
    link = base::Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!link.valid())
      throw CommError(failure("rank " + std::to_string(place_.rank) + " cannot make a socket"));
    if (connect(link.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    if (deadline.over()) {
      throw CommError(failure("rank " + std::to_string(place_.rank) + " of job " + place_.job +
                              " found no rank 0 within " + fmt::format("{:g}", deadline_) + " s (" +
                              place_.launcher + ")"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ucred who{};
  socklen_t size = sizeof who;
  if (getsockopt(link.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != getuid()) {
    throw CommError("rank 0 of job " + place_.job + " belongs to another user");
  }
  Hello hello;
  hello.rank = place_.rank;
  hello.world = place_.world;
  Reply reply;
  // Rank 0 waits for the others until its own deadline, and then says who is missing.
  const Deadline patience(2 * deadline_);
  const bool spoken = send_message(link.get(), &hello, sizeof hello) &&
                      readable(link.get(), patience) &&
                      receive_message(link.get(), &reply, sizeof reply, nullptr) ==
                          static_cast<ssize_t>(sizeof reply);
  if (!spoken) {
    throw CommError("rank " + std::to_string(place_.rank) + ": rank 0 (process " +
                    std::to_string(who.pid) + ") did not answer within " +
                    fmt::format("{:g}", deadline_) + " s or has ended");
  }
  if (reply.refused != 0) throw CommError(std::string(reply.reason.data()));
  const std::size_t bytes = pids_.size() * sizeof(pid_t);
  if (!readable(link.get(), patience) ||
      receive_message(link.get(), pids_.data(), bytes, nullptr) != static_cast<ssize_t>(bytes)) {
    throw CommError("rank " + std::to_string(place_.rank) +
                    ": rank 0 went away while the ranks met");
  }
  sockets_.push_back(std::move(link));
}

void Rendezvous::watch() {
  for (int r = 0; r < place_.world; ++r) {
    // Without pidfds (before Linux 5.3) a dead peer is noticed by the deadline only.
    pidfds_.emplace_back(
        r == place_.rank ? -1 : static_cast<int>(syscall(SYS_pidfd_open, process(r), 0)));
    if (r != place_.rank && !pidfds_.back().valid() && errno == EMFILE) {
      throw CommError(failure("rank " + std::to_string(place_.rank) + " cannot watch its " +
                              std::to_string(place_.world) + " peers"));
    }
  }
}

bool Rendezvous::alive(int r) const {
  const base::Descriptor& watched = pidfds_[static_cast<std::size_t>(r)];
  if (!watched.valid()) return r == place_.rank || kill(process(r), 0) == 0 || errno != ESRCH;
  pollfd p{watched.get(), POLLIN, 0};
  return poll(&p, 1, 0) == 0;
}

CommError Rendezvous::lost(int r, const std::string& what) const {
  if (errno == EPIPE || errno == ECONNRESET) {
    return CommError("the ranks' meeting: " + what + " rank " + std::to_string(r) + ": rank " +
                     std::to_string(r) + " is gone (its process " + std::to_string(process(r)) +
                     " has ended, or given up)");
  }
  return CommError("the ranks' meeting: " + what + " rank " + std::to_string(r) + " (process " +
                   std::to_string(process(r)) + ") failed: " + base::system_reason(errno) +
                   "; it may have ended, or the limit of open files (ulimit -n) is too low");
}

void Rendezvous::receive(int r, double seconds, void* data, std::size_t bytes,
                         std::vector<base::Descriptor>* descriptors, std::size_t count) {
  base::Descriptor& socket = sockets_[place_.rank == 0 ? static_cast<std::size_t>(r) : 0];
  const std::size_t before = descriptors == nullptr ? 0 : descriptors->size();
  bool whole = false;
  if (!socket.valid()) {
    errno = ECONNRESET;
  } else if (!readable(socket.get(), Deadline(seconds))) {
    errno = ETIMEDOUT;
  } else {
    const ssize_t got = receive_message(socket.get(), data, bytes, descriptors);
    if (got < 0 && errno == EMFILE) throw lost(r, "taking descriptors from");
    whole = got == static_cast<ssize_t>(bytes) &&
            (descriptors == nullptr || descriptors->size() == before + count);
    if (got == 0) errno = ECONNRESET;
    if (got > 0 && !whole) errno = EPROTO;
  }
  if (whole) return;
  const CommError error = lost(r, "waiting for");
  socket = base::Descriptor();  // nobody waits for it a second time, and it hears of it
  throw error;
}

void Rendezvous::settle(const std::exception_ptr& own) {
  Reply verdict = verdict_of(own, place_.rank);
  if (place_.rank != 0) {
    const Reply mine = verdict;
    try {
      if (!send_message(sockets_[0].get(), &mine, sizeof mine)) throw lost(0, "answering");
      receive(0, 2 * deadline_, &verdict, sizeof verdict);
    } catch (const CommError&) {
      if (own == nullptr) throw;
    }
  } else {
    const auto until = Clock::now() + std::chrono::duration<double>(deadline_);
    for (int r = 1; r < place_.world; ++r) {
      Reply theirs;
      try {
        const std::chrono::duration<double> left = until - Clock::now();
        receive(r, std::max(0.0, left.count()), &theirs, sizeof theirs);
      } catch (const CommError&) {
        theirs = verdict_of(std::current_exception(), 0);
      }
      if (verdict.refused == 0) verdict = theirs;
    }
    for (int r = 1; r < place_.world; ++r) {
      const base::Descriptor& socket = sockets_[static_cast<std::size_t>(r)];
      if (socket.valid()) send_message(socket.get(), &verdict, sizeof verdict);
    }
  }
  if (own != nullptr) std::rethrow_exception(own);
  if (verdict.refused == kMemory) throw OutOfMemory(verdict.reason.data());
  if (verdict.refused != kFine) throw CommError(verdict.reason.data());
}

void Rendezvous::pass(const base::Descriptor& mine, std::uint64_t number,
                      const std::function<void(std::vector<Passed>&)>& use) {
  std::vector<Passed> all(static_cast<std::size_t>(place_.world));
  std::exception_ptr own;
  const auto attempt = [&](auto&& body) {
    try {
      body();
    } catch (...) {
      if (own == nullptr) own = std::current_exception();
    }
  };
  // Whatever fails on a rank, it makes every step, so that no peer waits for it and nothing stays
  // in the sockets.
  attempt([&] {
    base::Descriptor copy(dup(mine.get()));
    if (!copy.valid()) throw lost(place_.rank, "duplicating a descriptor for");
    all[static_cast<std::size_t>(place_.rank)] = {std::move(copy), number};
  });
  if (place_.rank == 0) {
    for (int r = 1; r < place_.world; ++r) {
      attempt([&] {
        Passed& theirs = all[static_cast<std::size_t>(r)];
        std::vector<base::Descriptor> one;
        receive(r, deadline_, &theirs.number, sizeof theirs.number, &one, 1);
        theirs.descriptor = std::move(one[0]);
      });
    }
  } else {
    attempt([&] {
      const int descriptor = mine.get();
      if (!send_message(sockets_[0].get(), &number, sizeof number, &descriptor, 1)) {
        throw lost(0, "sending to");
      }
    });
  }
  settle(own);
  for (int r = 1; r < place_.world && place_.rank == 0; ++r) attempt([&] { give_all(r, all); });
  if (place_.rank != 0) attempt([&] { take_all(&all); });
  if (own == nullptr) attempt([&] { use(all); });
  settle(own);
}

void Rendezvous::give_all(int r, const std::vector<Passed>& all) {
  for (std::size_t begin = 0; begin < all.size(); begin += kMostDescriptors) {
    const std::size_t count = std::min(kMostDescriptors, all.size() - begin);
    std::vector<int> descriptors;
    std::vector<std::uint64_t> numbers;
    for (std::size_t i = begin; i < begin + count; ++i) {
      descriptors.push_back(all[i].descriptor.get());
      numbers.push_back(all[i].number);
    }
    if (!send_message(sockets_[static_cast<std::size_t>(r)].get(), numbers.data(),
                      count * sizeof(std::uint64_t), descriptors.data(), count)) {
      throw lost(r, "sending to");
    }
  }
}

void Rendezvous::take_all(std::vector<Passed>* all) {
  std::exception_ptr first;
  for (std::size_t begin = 0; begin < all->size(); begin += kMostDescriptors) {
    const std::size_t count = std::min(kMostDescriptors, all->size() - begin);
    std::vector<base::Descriptor> descriptors;
    std::vector<std::uint64_t> numbers(count);
    try {
      receive(0, 2 * deadline_, numbers.data(), count * sizeof(std::uint64_t), &descriptors, count);
    } catch (const CommError&) {
      if (first == nullptr) first = std::current_exception();
      continue;
    }
    for (std::size_t i = 0; i < count; ++i) {
      (*all)[begin + i] = {std::move(descriptors[i]), numbers[i]};
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace zshard::comm
