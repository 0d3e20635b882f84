// The calls of NCCL that zshard makes, on the simulated device. What each one does is what NCCL's
// manual says of it.
#include <nccl.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/simulator/communicator.hpp"
#include "tests/simulator/reductions.hpp"
#include "tests/simulator/state.hpp"

namespace simulator {

namespace {

using CommunicatorPointer = std::shared_ptr<Communicator>;

struct Group {
  int depth = 0;
  std::uint64_t generation = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<std::pair<CommunicatorPointer, Issued>> calls;
  std::vector<CommunicatorPointer> joining;  // blocking ones that were made in the group
  std::uint64_t answers = 0;
};

Group& group() {
  thread_local Group mine;
  const std::uint64_t now = State::get().generation.load(std::memory_order_relaxed);
  if (mine.generation != now) {
    mine = Group{};
    mine.generation = now;
  }
  return mine;
}

std::string& thread_error() {
  thread_local std::string text;
  return text;
}

/// All communicators of the process, and those that wait for members.
class Registry {
 public:
  static Registry& get() {
    static Registry* instance = new Registry;
    return *instance;
  }

  /// "" if the system has no room for it.
  std::string new_id() {
    const std::shared_ptr<Clique> made = Clique::make();
    if (!made) return "";
    const std::lock_guard lock(mutex_);
    drop_complete();
    cliques_[made->id()] = made;
    return made->id();
  }

  /// Null, with the reason, if there is none.
  std::shared_ptr<Clique> clique(const std::string& id, std::string& why) {
    const std::lock_guard lock(mutex_);
    drop_complete();
    std::shared_ptr<Clique>& known = cliques_[id];
    if (!known) known = Clique::open(id, why);
    const std::shared_ptr<Clique> result = known;
    if (!known) cliques_.erase(id);
    return result;
  }

  std::shared_ptr<Lane> lane(int device, int rank) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Lane>& known = lanes_[{device, rank}];
    if (!known) known = std::make_shared<Lane>();
    return known;
  }

  void add(const CommunicatorPointer& communicator) {
    const std::unique_lock lock(handles_mutex_);
    handles_[communicator.get()] = communicator;
  }
  CommunicatorPointer find(ncclComm_t handle) {
    const std::shared_lock lock(handles_mutex_);
    const auto at = handles_.find(handle);
    return at == handles_.end() ? nullptr : at->second;
  }
  void remove(ncclComm_t handle) {
    {
      const std::unique_lock lock(handles_mutex_);
      handles_.erase(handle);
    }
    const std::lock_guard lock(mutex_);
    drop_complete();
  }
  std::vector<CommunicatorPointer> all() {
    const std::shared_lock lock(handles_mutex_);
    std::vector<CommunicatorPointer> result;
    for (const auto& [handle, communicator] : handles_) result.push_back(communicator);
    return result;
  }
  void forget() {
    {
      const std::unique_lock lock(handles_mutex_);
      handles_.clear();
    }
    const std::lock_guard lock(mutex_);
    cliques_.clear();
    lanes_.clear();
  }

 private:
  Registry() {
    State& state = State::get();
    state.communicator_leaks = [this](std::vector<std::string>& lines) {
      for (const CommunicatorPointer& c : all()) {
        lines.push_back("communicator, rank " + std::to_string(c->rank) + " of " +
                        std::to_string(c->world) + " on device " + std::to_string(c->device) +
                        ", made in " + describe_site(c->site));
      }
    };
    state.end_communicators = [this] {
      for (const CommunicatorPointer& c : all()) c->abort();
    };
    state.forget_communicators = [this] { forget(); };
  }

  /// An id serves one communicator: nobody joins it later. The caller holds mutex_.
  void drop_complete() {
    std::erase_if(cliques_, [](const auto& one) { return one.second->complete(); });
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Clique>> cliques_;
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> lanes_;
  std::shared_mutex handles_mutex_;
  std::unordered_map<const void*, CommunicatorPointer> handles_;
};

/// One call: counted, and refused if a failure was injected.
struct Call {
  explicit Call(const char* of) : name(of), state(State::get()), thread(state.thread()) {
    injected = state.count(name, thread.device);
    if (thread.in_worker) {
      refused = fail(ncclInvalidUsage, "called from a host function");
    } else if (injected && injected->how == How::refused) {
      refused = fail(static_cast<ncclResult_t>(injected->code), "injected failure");
    }
  }
  ncclResult_t fail(ncclResult_t code, const std::string& why) const {
    thread_error() = std::string(name) + ": " + why;
    return code;
  }
  /// Null, with the fault noted, for what is no communicator.
  [[nodiscard]] CommunicatorPointer communicator(ncclComm_t handle) const {
    CommunicatorPointer found = Registry::get().find(handle);
    if (!found) state.report_fault(std::string(name) + ": the communicator does not exist");
    return found;
  }
  const char* name;
  State& state;
  ThreadState& thread;
  std::optional<Injected> injected;
  ncclResult_t refused = ncclSuccess;
};

/// Waits until the communicator is made, or cannot be.
ncclResult_t wait_made(Communicator& made) {
  made.clique->bell().wait_until([&] {
    made.advance();
    return made.made() || made.error() != ncclSuccess || made.aborted();
  });
  // Once all are there it is made, whatever a faster rank did with it since.
  return made.made() ? ncclSuccess : made.error();
}

ncclResult_t end_group(Group& mine) {
  std::vector<std::pair<CommunicatorPointer, Issued>> calls = std::move(mine.calls);
  std::vector<CommunicatorPointer> joining = std::move(mine.joining);
  const ncclResult_t error = std::exchange(mine.error, ncclSuccess);
  mine.calls.clear();
  mine.joining.clear();
  if (error != ncclSuccess) return error;
  for (const CommunicatorPointer& c : joining) {
    if (const ncclResult_t code = wait_made(*c); code != ncclSuccess) return code;
  }
  ncclResult_t result = ncclSuccess;
  while (!calls.empty()) {
    const CommunicatorPointer communicator = calls.front().first;
    std::vector<Issued> own;
    for (auto& [of, call] : calls) {
      if (of == communicator) own.push_back(std::move(call));
    }
    std::erase_if(calls, [&](const auto& call) { return call.first == communicator; });
    if (communicator->issue(std::move(own)) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

/// A range of a call; true if it lies where the communicator's device can reach it.
bool add_touch(const Call& call, const Communicator& communicator, Issued& issued,
               const void* memory, std::size_t bytes, bool write) {
  if (bytes == 0) return true;
  Located located = call.state.locate(memory, static_cast<std::int64_t>(bytes));
  if (located.place != Place::pinned &&
      (located.place != Place::device || located.touch.device != communicator.device)) {
    call.state.report_fault(std::string(call.name) + (write ? ": writes " : ": reads ") +
                            std::to_string(bytes) + " bytes in no allocation of device " +
                            std::to_string(communicator.device));
    return false;
  }
  if (!write && located.place == Place::pinned && communicator.has_remote()) {
    call.state.report_fault(std::string(call.name) +
                            ": host memory is not shown to other processes here");
    return false;
  }
  located.touch.operation = call.name;
  located.touch.write = write;
  issued.touches.push_back(std::move(located.touch));
  return true;
}

struct Request {
  Signature signature;
  const void* send = nullptr;
  std::size_t send_count = 0;
  void* received = nullptr;
  std::size_t received_count = 0;
  int peer = -1;
  int way = 0;
};

ncclResult_t issue(const char* name, const Request& request, ncclComm_t handle,
                   cudaStream_t stream_handle) {
  Call call(name);
  Group& mine = group();
  const auto failed = [&](ncclResult_t code, const std::string& why) {
    if (mine.depth > 0 && mine.error == ncclSuccess) mine.error = code;
    return call.fail(code, why);
  };
  if (call.refused != ncclSuccess) {
    if (mine.depth > 0) mine.error = call.refused;
    return call.refused;
  }
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator) return failed(ncclInvalidArgument, "no such communicator");
  if (const ncclResult_t code = communicator->ready(); code != ncclSuccess) {
    return failed(code, communicator->last_error());
  }
  Issued issued;
  issued.signature = request.signature;
  issued.send = request.send;
  issued.received = request.received;
  issued.peer = request.peer;
  issued.way = request.way;
  issued.injected = call.injected;
  const int before = std::exchange(call.thread.device, communicator->device);
  issued.stream = call.state.stream(stream_handle);
  call.thread.device = before;
  if (!issued.stream || issued.stream->device != communicator->device) {
    return failed(ncclInvalidArgument, "the stream is not of the communicator's device");
  }
  if (call.state.device(communicator->device).fault.load(std::memory_order_relaxed) != 0) {
    return failed(ncclUnhandledCudaError, "the device is at fault");
  }
  const int world = communicator->world;
  const std::size_t size = size_of(request.signature.type);
  if (size == 0 || request.signature.root < 0 || request.signature.root >= world ||
      request.peer >= world) {
    return failed(ncclInvalidArgument, "bad type, root or peer");
  }
  const bool reduces =
      std::strcmp(name, "ncclReduceScatter") == 0 || std::strcmp(name, "ncclAllReduce") == 0;
  if (reduces && !can_reduce(request.signature.type, request.signature.op)) {
    return failed(ncclInvalidArgument, "this type cannot be reduced so");
  }

  const std::size_t sent = request.send_count * size;
  const std::size_t received = request.received_count * size;
  const auto* from = static_cast<const std::byte*>(request.send);
  auto* to = static_cast<std::byte*>(request.received);
  const bool overlap = sent > 0 && received > 0 && from < to + received && to < from + sent;
  const std::size_t piece = request.signature.count * size;
  const std::size_t own = static_cast<std::size_t>(communicator->rank) * piece;
  // In place means at this rank's piece for what gathers or scatters, else at the same address.
  const bool gathers = std::strcmp(name, "ncclAllGather") == 0;
  const bool in_place = gathers                                       ? from == to + own
                        : std::strcmp(name, "ncclReduceScatter") == 0 ? to == from + own
                                                                      : from == to;
  if (overlap && !in_place) {
    return failed(ncclInvalidArgument, "send and receive buffers overlap, but not in place");
  }
  bool good = add_touch(call, *communicator, issued, from, sent, false);
  if (gathers && in_place) {
    good = add_touch(call, *communicator, issued, to, own, true) && good;
    good = add_touch(call, *communicator, issued, to + own + piece, received - own - piece, true) &&
           good;
  } else if (!(std::strcmp(name, "ncclBroadcast") == 0 && in_place)) {
    good = add_touch(call, *communicator, issued, to, received, true) && good;
  } else if (request.signature.root != communicator->rank) {
    good = add_touch(call, *communicator, issued, to, received, true) && good;
  }
  if (!good) return failed(ncclInvalidArgument, "memory that is not of the communicator's device");

  mine.calls.emplace_back(communicator, std::move(issued));
  if (mine.depth == 0) return end_group(mine);
  // A group that is open: both answers are right for a communicator that does not block.
  return !communicator->blocking && ++mine.answers % 2 == 1 ? ncclInProgress : ncclSuccess;
}

ncclResult_t init(const char* name, ncclComm_t* handle, int world, ncclUniqueId id, int rank,
                  bool blocking, const void* site) {
  Call call(name);
  if (handle == nullptr || world < 1 || rank < 0 || rank >= world) {
    return call.fail(ncclInvalidArgument, "bad rank or number of ranks");
  }
  *handle = nullptr;
  if (call.refused != ncclSuccess) return call.refused;
  const int device = call.thread.device;
  if (call.state.device(device).fault.load(std::memory_order_relaxed) != 0) {
    return call.fail(ncclUnhandledCudaError, "the device is at fault");
  }
  if (world > CliqueBlock::kMostRanks) {
    return call.fail(ncclInvalidArgument, "more ranks than the simulator serves");
  }
  Registry& registry = Registry::get();
  const std::string key(id.internal, strnlen(id.internal, sizeof id.internal));
  std::string why;
  const std::shared_ptr<Clique> clique = registry.clique(key, why);
  if (!clique) return call.fail(ncclSystemError, why);
  // Collectives of one communicator run one after the other in any case.
  const std::shared_ptr<Lane> lane =
      call.state.serial_collectives.load() ? registry.lane(device, rank) : std::make_shared<Lane>();
  const auto made =
      std::make_shared<Communicator>(clique, rank, world, device, blocking, lane, site);
  if (!call.injected) {
    if (const ncclResult_t code = clique->join(rank, world, device, why); code != ncclSuccess) {
      return call.fail(code, why);
    }
  } else if (call.injected->how == How::fault) {
    made->set_error(static_cast<ncclResult_t>(call.injected->code), "injected failure");
    clique->fail(ncclRemoteError, "remote process exited or there was a network error");
  }
  registry.add(made);
  *handle = reinterpret_cast<ncclComm_t>(made.get());
  if (!blocking) return ncclInProgress;
  Group& mine = group();
  if (mine.depth > 0) {
    mine.joining.push_back(made);
    return ncclSuccess;
  }
  if (const ncclResult_t code = wait_made(*made); code != ncclSuccess) {
    registry.remove(*handle);
    *handle = nullptr;
    return call.fail(code, made->last_error());
  }
  return ncclSuccess;
}

Signature signature(Collective collective, std::size_t count, ncclDataType_t type,
                    ncclRedOp_t op = ncclSum, int root = 0) {
  return {collective, count, type, op, root};
}

/// Of a send or receive.
Signature size(std::size_t count, ncclDataType_t type) {
  return {Collective::all_gather, count, type, ncclSum, 0};
}

std::size_t world_of(ncclComm_t handle) {
  const CommunicatorPointer communicator = Registry::get().find(handle);
  return communicator ? static_cast<std::size_t>(communicator->world) : 0;
}

}  // namespace

}  // namespace simulator

using simulator::Call;
using simulator::Collective;
using simulator::CommunicatorPointer;
using simulator::Registry;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  Call call("ncclGetVersion");
  if (call.refused != ncclSuccess) return call.refused;
  if (version == nullptr) return call.fail(ncclInvalidArgument, "null");
  *version = call.state.nccl_version.load();
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Call call("ncclGetUniqueId");
  if (call.refused != ncclSuccess) return call.refused;
  if (id == nullptr) return call.fail(ncclInvalidArgument, "null");
  std::memset(id, 0, sizeof *id);
  const std::string text = Registry::get().new_id();
  if (text.empty()) return call.fail(ncclSystemError, std::strerror(errno));
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int world, ncclUniqueId id, int rank) {
  return simulator::init("ncclCommInitRank", comm, world, id, rank, true,
                         __builtin_return_address(0));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const ncclConfig_t defaults = NCCL_CONFIG_INITIALIZER;
  if (config != nullptr && (config->magic != defaults.magic || config->size > defaults.size)) {
    return ncclInvalidArgument;
  }
  const bool blocking = config == nullptr || config->blocking != 0;
  return simulator::init("ncclCommInitRankConfig", comm, world, id, rank, blocking,
                         __builtin_return_address(0));
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Call call("ncclCommFinalize");
  if (call.refused != ncclSuccess) return call.refused;
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator) return call.fail(ncclInvalidArgument, "no such communicator");
  if (const ncclResult_t code = communicator->ready(); code != ncclSuccess) return code;
  communicator->finalize();
  if (!communicator->blocking) return ncclInProgress;
  communicator->wait_idle();
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  Call call("ncclCommDestroy");
  if (handle == nullptr) return ncclSuccess;
  if (call.refused != ncclSuccess) return call.refused;
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator) return call.fail(ncclInvalidArgument, "no such communicator");
  if (communicator->error() != ncclSuccess) {
    return call.fail(ncclInvalidUsage, "after an error ncclCommAbort is the way to end it");
  }
  if (communicator->made()) {
    communicator->flush();
    communicator->wait_idle();
  }
  communicator->clique->leave(communicator->rank);
  Registry::get().remove(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  Call call("ncclCommAbort");
  if (handle == nullptr) return ncclSuccess;
  if (call.refused != ncclSuccess) return call.refused;
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator) return call.fail(ncclInvalidArgument, "no such communicator");
  communicator->abort();
  Registry::get().remove(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  Call call("ncclCommGetAsyncError");
  if (call.refused != ncclSuccess) return call.refused;
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator || error == nullptr) {
    return call.fail(ncclInvalidArgument, "no such communicator");
  }
  *error = communicator->poll();
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t handle) {
  if (handle != nullptr) {
    const CommunicatorPointer communicator = Registry::get().find(handle);
    const std::string text = communicator ? communicator->last_error() : "";
    if (!text.empty()) simulator::thread_error() = text;
  }
  return simulator::thread_error().c_str();
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  Call call("ncclCommCount");
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator || count == nullptr) return ncclInvalidArgument;
  *count = communicator->world;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  Call call("ncclCommUserRank");
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator || rank == nullptr) return ncclInvalidArgument;
  *rank = communicator->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  Call call("ncclCommCuDevice");
  const CommunicatorPointer communicator = call.communicator(handle);
  if (!communicator || device == nullptr) return ncclInvalidArgument;
  *device = communicator->device;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  Call call("ncclGroupStart");
  if (call.refused != ncclSuccess) return call.refused;
  ++simulator::group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  Call call("ncclGroupEnd");
  simulator::Group& mine = simulator::group();
  if (mine.depth == 0) return call.fail(ncclInvalidUsage, "no group is open");
  --mine.depth;
  if (call.refused != ncclSuccess) {
    mine.error = call.refused;
  }
  return mine.depth > 0 ? ncclSuccess : simulator::end_group(mine);
}

ncclResult_t ncclAllGather(const void* send, void* received, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return simulator::issue("ncclAllGather",
                          {simulator::signature(Collective::all_gather, count, type), send, count,
                           received, count * simulator::world_of(comm)},
                          comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* received, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return simulator::issue("ncclReduceScatter",
                          {simulator::signature(Collective::reduce_scatter, count, type, op), send,
                           count * simulator::world_of(comm), received, count},
                          comm, stream);
}

ncclResult_t ncclAllReduce(const void* send, void* received, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return simulator::issue(
      "ncclAllReduce",
      {simulator::signature(Collective::all_reduce, count, type, op), send, count, received, count},
      comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* received, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  const CommunicatorPointer communicator = Registry::get().find(comm);
  // Only the root's send buffer is looked at.
  const bool sends = communicator && communicator->rank == root;
  return simulator::issue("ncclBroadcast",
                          {simulator::signature(Collective::broadcast, count, type, ncclSum, root),
                           send, sends ? count : 0, received, count},
                          comm, stream);
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  if (peer < 0) return ncclInvalidArgument;
  return simulator::issue(
      "ncclSend", {simulator::size(count, type), send, count, nullptr, 0, peer, 0}, comm, stream);
}

ncclResult_t ncclRecv(void* received, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  if (peer < 0) return ncclInvalidArgument;
  return simulator::issue("ncclRecv",
                          {simulator::size(count, type), nullptr, 0, received, count, peer, 1},
                          comm, stream);
}

}  // extern "C"
