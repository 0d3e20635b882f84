#include "runtime/comm/nccl_communicator.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "runtime/base/log.hpp"
#include "runtime/comm/nccl_check.hpp"
#include "zshard/error.hpp"

namespace zshard::comm {

namespace {

constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kShortSleep{20};
constexpr std::chrono::milliseconds kLongSleep{1};
/// How long abort() waits for a call of another thread. Such a call ends at once, unless CUDA's
/// queue of launches is full behind a collective that hangs: then only the abort itself frees it.
constexpr std::chrono::milliseconds kAbortPatience{2000};

// NCCL's groups belong to the thread, not to a communicator: what is issued inside one is launched
// at the outermost end, whichever communicator closes it.
// Whoever is in the group stays locked until then: NCCL would launch on a communicator that an
// abort has freed.
struct Member {
  NcclCommunicator* communicator = nullptr;
  std::unique_lock<std::mutex> lock;
};
thread_local int group_depth = 0;
thread_local std::vector<Member> in_group;

bool is_in_group(const NcclCommunicator* communicator) {
  return std::any_of(in_group.begin(), in_group.end(),
                     [&](const Member& member) { return member.communicator == communicator; });
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
  }
  throw UsageError("invalid DType");
}

std::size_t counted(std::int64_t count, const char* call) {
  if (count >= 0) return static_cast<std::size_t>(count);
  throw UsageError(std::string("Communicator::") + call + ": a size of " + std::to_string(count));
}

std::chrono::steady_clock::duration duration_of(double seconds) {
  if (!(seconds > 0)) throw UsageError("make_communicator: the deadline must be positive");
  // A year: what is longer would overflow the clock.
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(std::min(seconds, 365.0 * 86400)));
}

std::string seconds_text(std::chrono::steady_clock::duration time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

}  // namespace

CommunicatorId make_nccl_id() {
  ncclUniqueId unique{};
  ZSHARD_NCCL(ncclGetUniqueId(&unique));
  CommunicatorId id;
  static_assert(sizeof unique == sizeof id.bytes);
  std::memcpy(id.bytes, &unique, sizeof unique);
  return id;
}

namespace {
constexpr int kFirstWithLaunchOrder = 22600;
constexpr const char* kLaunchOrder = "NCCL_LAUNCH_ORDER_IMPLICIT";
}  // namespace

void prepare_nccl_environment() {
  const int version = nccl_version_code();
  // Collectives of the gather and of the reduce communicator run beside each other. Without this,
  // their kernels may start in another order on another rank and wait for each other for ever. With
  // it, NCCL (2.26 and later) starts them in the order in which the host issued them, which is the
  // same on all ranks.
  if (version >= kFirstWithLaunchOrder) setenv(kLaunchOrder, "1", 0);
  // Several ranks on one GPU: NCCL before 2.30 refuses them ("Duplicate GPU detected"); 2.30 and
  // later takes them if this is set in every rank's environment before its first communicator. All
  // kernels of one GPU's ranks must fit on it at once, or a rank waits for a peer that cannot
  // start: NCCL_MAX_CTAS bounds what each takes.
  if (version >= 23000) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
}

bool nccl_orders_collectives() {
  if (nccl_version_code() < kFirstWithLaunchOrder) return false;
  const char* value = std::getenv(kLaunchOrder);
  return value != nullptr && std::strtoll(value, nullptr, 0) != 0;  // as NCCL reads it
}

NcclCommunicator::NcclCommunicator(device::CudaDevice& device, const CommunicatorId& id, int rank,
                                   int world, double deadline_seconds)
    : device_(device), rank_(rank), world_(world), deadline_(duration_of(deadline_seconds)) {
  if (world < 1 || rank < 0 || rank >= world) {
    throw UsageError("make_communicator: rank " + std::to_string(rank) + " of " +
                     std::to_string(world));
  }
  device_.make_current();
  ncclUniqueId unique{};
  std::memcpy(&unique, id.bytes, sizeof unique);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const ncclResult_t code = ncclCommInitRankConfig(&comm, world, unique, rank, &config);
  comm_.store(comm);
  try {
    if (code != ncclSuccess && code != ncclInProgress) {
      fail(code, "ncclCommInitRankConfig", __LINE__);
    }
    await("ncclCommInitRankConfig", __LINE__);
  } catch (...) {
    abort();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (aborted_.load() || failed_.load() || !finish()) abort();
}

/// The orderly end. False if it did not come in time.
bool NcclCommunicator::finish() noexcept {
  try {
    issue("ncclCommFinalize", __LINE__, [](ncclComm_t comm) { return ncclCommFinalize(comm); });
    const std::lock_guard lock(mutex_);
    const ncclComm_t comm = comm_.exchange(nullptr);
    if (comm == nullptr) return false;
    ZSHARD_NCCL(ncclCommDestroy(comm));
    return true;
  } catch (const std::exception& error) {
    base::log_warning(base::Topic::comm, rank_, "closing a communicator: {}", error.what());
  } catch (...) {
  }
  return false;
}

/// After an error inside a group: NCCL drops what was recorded and the thread is outside again. Of
/// the communicators that were in it peers may wait for what was dropped: they end by an abort.
void NcclCommunicator::leave_groups() noexcept {
  while (group_depth > 0) {
    --group_depth;
    (void)ncclGroupEnd();
  }
  for (const Member& member : in_group) {
    NcclCommunicator& one = *member.communicator;
    try {
      one.keep_failure("rank " + std::to_string(one.rank_) + ": an error left a group of calls");
    } catch (...) {
      one.failed_.store(true);
    }
  }
  in_group.clear();
}

void NcclCommunicator::check_usable() const {
  if (aborted_.load() || failed_.load()) throw CommError(failure_text());
}

std::string NcclCommunicator::failure_text() const {
  const std::lock_guard lock(text_mutex_);
  if (!failure_.empty()) return failure_;
  return "the communicator of rank " + std::to_string(rank_) + " was aborted";
}

void NcclCommunicator::keep_failure(const std::string& text) {
  const std::lock_guard lock(text_mutex_);
  if (failure_.empty()) failure_ = text;
  failed_.store(true);
}

/// For a caller that holds mutex_.
void NcclCommunicator::fail(ncclResult_t code, const char* call, int line) {
  keep_failure(nccl_error(code, comm_.load(), call, __FILE__, line));
  throw_own_fault();
  throw CommError(failure_text());
}

/// A fault of this rank's own GPU is the cause of what NCCL says, and a DeviceError.
void NcclCommunicator::throw_own_fault() const {
  std::int64_t free_bytes = 0;
  std::int64_t total_bytes = 0;
  device_.memory(free_bytes, total_bytes);  // any call tells
}

/// Waits until what was issued is queued on its stream: until then an event recorded there would
/// not stand for it.
void NcclCommunicator::await(const char* call, int line) {
  const Clock::time_point begin = Clock::now();
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      check_usable();
      ncclResult_t state = ncclSuccess;
      const ncclResult_t code = ncclCommGetAsyncError(comm_.load(), &state);
      if (code != ncclSuccess) fail(code, "ncclCommGetAsyncError", line);
      if (state == ncclSuccess) return;
      if (state != ncclInProgress) fail(state, call, line);
    }
    const Clock::duration waited = Clock::now() - begin;
    if (waited > deadline_) {
      keep_failure(std::string(call) + ": the peers of rank " + std::to_string(rank_) +
                   " did not answer within " + seconds_text(deadline_) +
                   device::place(__FILE__, line) +
                   ". One of them has died, left or issued another call.");
      abort();
      throw CommError(failure_text());
    }
    if (waited < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(waited < 100 * kShortSleep ? kShortSleep : kLongSleep);
    }
  }
}

void NcclCommunicator::issue(const char* call, int line, const Call& body) {
  try {
    device_.make_current();
    {
      std::unique_lock<std::mutex> lock;
      if (!is_in_group(this)) lock = std::unique_lock(mutex_);
      check_usable();
      if (group_depth > 0 && lock.owns_lock()) in_group.push_back({this, std::move(lock)});
      const ncclResult_t code = body(comm_.load());
      if (code != ncclSuccess && code != ncclInProgress) fail(code, call, line);
    }
    if (group_depth == 0) await(call, line);
  } catch (...) {
    leave_groups();
    throw;
  }
}

void NcclCommunicator::all_gather(void* buffer, std::int64_t bytes, device::NativeStream stream) {
  const std::size_t piece = counted(bytes, "all_gather");
  if (piece == 0) return;
  const std::byte* own = static_cast<const std::byte*>(buffer) + rank_ * bytes;
  issue("ncclAllGather", __LINE__, [&](ncclComm_t comm) {
    return ncclAllGather(own, buffer, piece, ncclInt8, comm, device::cuda(stream));
  });
}

void NcclCommunicator::all_to_all(const void* send, void* received, std::int64_t bytes,
                                  device::NativeStream stream) {
  const std::size_t piece = counted(bytes, "all_to_all");
  if (piece == 0) return;
  const auto* from = static_cast<const std::byte*>(send);
  auto* to = static_cast<std::byte*>(received);
  try {
    device_.copy(to + rank_ * bytes, from + rank_ * bytes, bytes, stream);
    if (world_ == 1) return;
    group_start();
  } catch (...) {
    leave_groups();  // of the caller
    throw;
  }
  for (int distance = 1; distance < world_; ++distance) {
    const int next = (rank_ + distance) % world_;
    const int previous = (rank_ + world_ - distance) % world_;
    issue("ncclSend", __LINE__, [&](ncclComm_t comm) {
      return ncclSend(from + next * bytes, piece, ncclInt8, next, comm, device::cuda(stream));
    });
    issue("ncclRecv", __LINE__, [&](ncclComm_t comm) {
      return ncclRecv(to + previous * bytes, piece, ncclInt8, previous, comm, device::cuda(stream));
    });
  }
  close_group("all_to_all (grouped ncclSend and ncclRecv)", __LINE__);
}

void NcclCommunicator::reduce_scatter(const void* send, void* received, std::int64_t count,
                                      DType dtype, device::NativeStream stream) {
  const std::size_t elements = counted(count, "reduce_scatter");
  if (elements == 0) return;
  issue("ncclReduceScatter", __LINE__, [&](ncclComm_t comm) {
    return ncclReduceScatter(send, received, elements, type_of(dtype), ncclSum, comm,
                             device::cuda(stream));
  });
}

void NcclCommunicator::group_start() {
  device_.make_current();
  check_usable();
  ZSHARD_NCCL(ncclGroupStart());
  ++group_depth;
}

void NcclCommunicator::group_end() {
  close_group("ncclGroupEnd", __LINE__);
}

void NcclCommunicator::close_group(const char* call, int line) {
  if (group_depth == 0) {
    // An error inside the group has left it already.
    check_usable();
    throw UsageError("Communicator::group_end without group_start");
  }
  if (group_depth > 1) {
    --group_depth;
    ZSHARD_NCCL(ncclGroupEnd());
    return;
  }
  group_depth = 0;
  const ncclResult_t code = ncclGroupEnd();
  if (code != ncclSuccess && code != ncclInProgress) {
    const std::string text = nccl_error(code, comm_.load(), call, __FILE__, line);
    for (const Member& member : in_group) member.communicator->keep_failure(text);
    in_group.clear();
    throw_own_fault();
    throw CommError(text);
  }
  std::vector<Member> members;
  members.swap(in_group);
  for (Member& member : members) member.lock.unlock();
  for (const Member& member : members) member.communicator->await(call, line);
  // Its memory serves the next group.
  members.clear();
  in_group.swap(members);
}

std::optional<std::string> NcclCommunicator::failure() {
  if (aborted_.load() || failed_.load()) return failure_text();
  const std::unique_lock lock(mutex_, std::try_to_lock);
  // Another thread is inside NCCL: it finds what there is to find.
  if (!lock.owns_lock()) return std::nullopt;
  const ncclComm_t comm = comm_.load();
  if (comm == nullptr) return failure_text();
  ncclResult_t state = ncclSuccess;
  ncclResult_t code = ncclCommGetAsyncError(comm, &state);
  if (code == ncclSuccess) code = state;
  if (code == ncclSuccess || code == ncclInProgress) return std::nullopt;
  keep_failure(nccl_error(code, comm, "a collective", __FILE__, __LINE__));
  return failure_text();
}

std::unique_lock<std::mutex> NcclCommunicator::lock_for(std::chrono::milliseconds time) noexcept {
  std::unique_lock lock(mutex_, std::defer_lock);
  const Clock::time_point end = Clock::now() + time;
  while (!lock.try_lock() && Clock::now() < end) std::this_thread::sleep_for(kLongSleep);
  return lock;
}

void NcclCommunicator::abort() noexcept {
  aborted_.store(true);
  const std::unique_lock lock = lock_for(kAbortPatience);
  const ncclComm_t comm = comm_.exchange(nullptr);
  if (comm == nullptr) return;
  const ncclResult_t code = ncclCommAbort(comm);
  if (code == ncclSuccess || code == ncclInProgress) return;
  base::log_warning(base::Topic::comm, rank_, "ncclCommAbort failed: {}", ncclGetErrorString(code));
}

}  // namespace zshard::comm
