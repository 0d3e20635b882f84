#include "runtime/comm/rendezvous.hpp"

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
#include <thread>

#include "zshard/error.hpp"

namespace zshard::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMagic = 0x7A736831;   // "zsh1": the protocol's version too
constexpr std::size_t kMostDescriptors = 128;  // of one message; the kernel takes 253

struct Hello {
  std::uint32_t magic = kMagic;
  std::int32_t rank = 0;
  std::int32_t world = 0;
};

struct Reply {
  std::uint32_t refused = 0;
  std::array<char, 500> reason{};
};

std::string failure(const std::string& what) {
  return what + ": " + std::strerror(errno);
}

class Deadline {
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
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
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
  Reply reply;
  reply.refused = 1;
  std::memcpy(reply.reason.data(), reason.data(), std::min(reason.size(), reply.reason.size() - 1));
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
  self->watch();
  return self;
}

void Rendezvous::listen_for_all() {
  sockets_.resize(static_cast<std::size_t>(place_.world));
  socklen_t length = 0;
  const sockaddr_un address = address_of(place_, &length);
  const base::Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener.valid()) throw CommError(failure("rank 0 cannot make a socket"));
  const Deadline deadline(deadline_);
  // The ranks of a program that has just ended may hold the name for a moment.
  while (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE || deadline.over()) {
      throw CommError(
          failure("rank 0 of job " + place_.job + " cannot listen (is there another rank 0?)"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (listen(listener.get(), place_.world) != 0) throw CommError(failure("rank 0 cannot listen"));

  const auto give_up = [&](const std::string& reason) {
    for (const base::Descriptor& s : sockets_) {
      if (s.valid()) refuse(s.get(), reason);
    }
    throw CommError(reason);
  };
  for (int joined = 1; joined < place_.world;) {
    if (!readable(listener.get(), deadline)) {
      std::string missing;
      for (int r = 1; r < place_.world; ++r) {
        if (!sockets_[static_cast<std::size_t>(r)].valid()) {
          missing += (missing.empty() ? "" : ", ") + std::to_string(r);
        }
      }
      give_up("rank(s) " + missing + " of " + std::to_string(place_.world) +
              " did not come within " + std::to_string(deadline_) +
              " s; start them, or correct the number of ranks (" + place_.launcher + ")");
    }
    base::Descriptor peer(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.valid()) continue;
    ucred who{};
    socklen_t size = sizeof who;
    Hello hello;
    // A stranger costs one short wait, not the job.
    if (getsockopt(peer.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0 || who.uid != getuid() ||
        !readable(peer.get(), Deadline(std::min(deadline_, 1.0))) ||
        receive_message(peer.get(), &hello, sizeof hello, nullptr) != sizeof hello ||
        hello.magic != kMagic) {
      continue;
    }
    const std::string stated = "process " + std::to_string(who.pid) + " says it is rank " +
                               std::to_string(hello.rank) + " of " + std::to_string(hello.world);
    if (hello.world != place_.world || hello.rank < 1 || hello.rank >= place_.world) {
      const std::string reason =
          stated + ", rank 0 was started as one of " + std::to_string(place_.world);
      refuse(peer.get(), reason);
      give_up(reason);
    }
    base::Descriptor& place = sockets_[static_cast<std::size_t>(hello.rank)];
    if (place.valid()) {
      const std::string reason = stated + ", but process " +
                                 std::to_string(pids_[static_cast<std::size_t>(hello.rank)]) +
                                 " is that rank already";
      refuse(peer.get(), reason);
      give_up(reason);
    }
    place = std::move(peer);
    pids_[static_cast<std::size_t>(hello.rank)] = who.pid;
    ++joined;
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
                              " found no rank 0 within " + std::to_string(deadline_) + " s (" +
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
  const bool spoken = send_message(link.get(), &hello, sizeof hello) &&
                      readable(link.get(), deadline) &&
                      receive_message(link.get(), &reply, sizeof reply, nullptr) ==
                          static_cast<ssize_t>(sizeof reply);
  if (!spoken) {
    throw CommError("rank " + std::to_string(place_.rank) + ": rank 0 (process " +
                    std::to_string(who.pid) + ") did not answer within " +
                    std::to_string(deadline_) + " s or has ended");
  }
  if (reply.refused != 0) throw CommError(std::string(reply.reason.data()));
  const std::size_t bytes = pids_.size() * sizeof(pid_t);
  if (!readable(link.get(), deadline) ||
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
                              std::to_string(place_.world) +
                              " peers; raise the limit of open files (ulimit -n)"));
    }
  }
}

bool Rendezvous::alive(int r) const {
  const base::Descriptor& watched = pidfds_[static_cast<std::size_t>(r)];
  if (!watched.valid()) return r == place_.rank || kill(process(r), 0) == 0 || errno != ESRCH;
  pollfd p{watched.get(), POLLIN, 0};
  return poll(&p, 1, 0) == 0;
}

std::vector<Rendezvous::Passed> Rendezvous::pass(const base::Descriptor& mine,
                                                 std::uint64_t number) {
  const Deadline deadline(deadline_);
  const auto world = static_cast<std::size_t>(place_.world);
  std::vector<Passed> all(world);
  const auto lost = [&](int r, const std::string& what) {
    return CommError("passing memory between ranks: " + what + " rank " + std::to_string(r) +
                     " (process " + std::to_string(process(r)) +
                     ") failed: " + std::strerror(errno) +
                     "; it may have ended, or the limit of open files (ulimit -n) is too low");
  };
  const auto receive = [&](int socket, int from, std::uint64_t* numbers, std::size_t count,
                           std::vector<base::Descriptor>* descriptors) {
    errno = ETIMEDOUT;
    if (!readable(socket, deadline)) throw lost(from, "waiting for");
    const std::size_t before = descriptors->size();
    const ssize_t got =
        receive_message(socket, numbers, count * sizeof(std::uint64_t), descriptors);
    if (got == 0) errno = ECONNRESET;
    if (got != static_cast<ssize_t>(count * sizeof(std::uint64_t)) ||
        descriptors->size() != before + count) {
      throw lost(from, "receiving from");
    }
  };
  base::Descriptor copy(dup(mine.get()));
  if (!copy.valid()) throw lost(place_.rank, "duplicating for");
  all[static_cast<std::size_t>(place_.rank)] = {std::move(copy), number};
  if (place_.rank == 0) {
    for (std::size_t r = 1; r < world; ++r) {
      std::vector<base::Descriptor> one;
      receive(sockets_[r].get(), static_cast<int>(r), &all[r].number, 1, &one);
      all[r].descriptor = std::move(one[0]);
    }
    for (std::size_t r = 1; r < world; ++r) {
      for (std::size_t begin = 0; begin < world; begin += kMostDescriptors) {
        const std::size_t count = std::min(kMostDescriptors, world - begin);
        std::vector<int> descriptors;
        std::vector<std::uint64_t> numbers;
        for (std::size_t i = begin; i < begin + count; ++i) {
          descriptors.push_back(all[i].descriptor.get());
          numbers.push_back(all[i].number);
        }
        if (!send_message(sockets_[r].get(), numbers.data(), count * sizeof(std::uint64_t),
                          descriptors.data(), count)) {
          throw lost(static_cast<int>(r), "sending to");
        }
      }
    }
    return all;
  }
  const int descriptor = mine.get();
  if (!send_message(sockets_[0].get(), &number, sizeof number, &descriptor, 1))
    throw lost(0, "sending to");
  std::vector<base::Descriptor> descriptors;
  std::vector<std::uint64_t> numbers(world);
  for (std::size_t begin = 0; begin < world; begin += kMostDescriptors) {
    receive(sockets_[0].get(), 0, numbers.data() + begin, std::min(kMostDescriptors, world - begin),
            &descriptors);
  }
  for (std::size_t r = 0; r < world; ++r) all[r] = {std::move(descriptors[r]), numbers[r]};
  return all;
}

}  // namespace zshard::comm
