// The simulated NCCL between processes: collectives and sends give what they give between threads,
// and a peer that is gone, stopped or different is an error or a hang, as with NCCL.
#if defined(ZSHARD_TEST_SIMULATED)
#include <gtest/gtest.h>
#include <nccl.h>

#include <atomic>
#include <filesystem>
#include <numeric>

#include "tests/process/simulated.hpp"

namespace zshard {
namespace {

using lab::Children;
using lab::cuda_ok;
using lab::Ending;
using lab::expect_error;
using lab::Json;
using lab::say;
using std::chrono::milliseconds;

void nccl_ok(ncclResult_t code, const std::string& what) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  throw std::runtime_error(what + ": " + std::to_string(code) + " " + ncclGetLastError(nullptr));
}

ncclUniqueId shared_id(const ProcessGroup& group, int maker) {
  ncclUniqueId id{};
  if (group.rank() == maker) nccl_ok(ncclGetUniqueId(&id), "ncclGetUniqueId");
  group.broadcast(std::as_writable_bytes(std::span(&id, 1)), maker);
  return id;
}

/// A rank with a device, a stream and a communicator.
class Rank {
 public:
  explicit Rank(const ProcessGroup& group)
      : Rank(shared_id(group, 0), group.rank(), group.size()) {}
  Rank(const ncclUniqueId& id, int rank, int size) : rank_(rank), size_(size) {
    cuda_ok(cudaSetDevice(rank), "cudaSetDevice");
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    nccl_ok(ncclCommInitRankConfig(&comm_, size, id, rank, &config), "init");
    settle("init");
  }
  ~Rank() {
    for (float* memory : memory_) (void)cudaFree(memory);
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
    (void)cudaStreamDestroy(stream_);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] ncclComm_t comm() const { return comm_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  float* memory(const std::vector<float>& values) {
    void* made = nullptr;
    cuda_ok(cudaMalloc(&made, values.size() * sizeof(float)), "cudaMalloc");
    memory_.push_back(static_cast<float*>(made));
    cuda_ok(cudaMemcpyAsync(made, values.data(), values.size() * sizeof(float), cudaMemcpyDefault,
                            stream_),
            "cudaMemcpyAsync");
    return memory_.back();
  }
  std::vector<float> values(const float* memory, std::size_t count) {
    std::vector<float> result(count);
    cuda_ok(
        cudaMemcpyAsync(result.data(), memory, count * sizeof(float), cudaMemcpyDefault, stream_),
        "cudaMemcpyAsync");
    cuda_ok(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return result;
  }

  /// Of a call: an error that a peer has caused by then counts as one that comes behind it.
  void called(ncclResult_t code) {
    if (refused_ == ncclSuccess && code != ncclInProgress) refused_ = code;
  }
  /// Until the communicator is not in progress, or 60 s.
  ncclResult_t state() {
    const std::int64_t end = lab::now() + std::int64_t{60} * 1'000'000'000;
    ncclResult_t now = ncclInProgress;
    while (now == ncclInProgress && lab::now() < end) {
      nccl_ok(ncclCommGetAsyncError(comm_, &now), "ncclCommGetAsyncError");
      std::this_thread::yield();
    }
    return now;
  }
  void settle(const std::string& what) {
    const ncclResult_t now = refused_ != ncclSuccess ? refused_ : state();
    if (now == ncclSuccess) return;
    throw std::runtime_error(what + ": " + std::to_string(now) + " " + ncclGetLastError(comm_));
  }
  /// The error that comes within so many seconds, or ncclSuccess.
  ncclResult_t error_within(double seconds) {
    const std::int64_t end = lab::now() + static_cast<std::int64_t>(seconds * 1e9);
    ncclResult_t now = refused_;
    while (lab::now() < end && (now == ncclSuccess || now == ncclInProgress)) {
      nccl_ok(ncclCommGetAsyncError(comm_, &now), "ncclCommGetAsyncError");
      std::this_thread::sleep_for(milliseconds(1));
    }
    return now == ncclInProgress ? ncclSuccess : now;
  }
  void finish() {
    nccl_ok(ncclCommFinalize(comm_), "ncclCommFinalize");
    settle("ncclCommFinalize");
    nccl_ok(ncclCommDestroy(comm_), "ncclCommDestroy");
    comm_ = nullptr;
  }
  void abort() {
    nccl_ok(ncclCommAbort(comm_), "ncclCommAbort");
    comm_ = nullptr;
    cuda_ok(cudaStreamSynchronize(stream_), "after ncclCommAbort");
  }

 private:
  const int rank_;
  const int size_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
  ncclResult_t refused_ = ncclSuccess;
  std::vector<float*> memory_;
};

/// base, base + 1, ...
std::vector<float> ramp(std::size_t count, float base) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), base);
  return values;
}

void require(bool held, const std::string& what) {
  if (!held) throw std::runtime_error(what);
}

/// Every collective, and sends, `turns` times.
void use_all(Rank& me, int turns) {
  const auto world = static_cast<std::size_t>(me.size());
  const auto self = static_cast<std::size_t>(me.rank());
  constexpr std::size_t kCount = 1000;
  for (int turn = 0; turn < turns; ++turn) {
    const auto base = static_cast<float>(1000 * turn);
    // In place: rank r's piece is ramp(1000 * turn + r).
    std::vector<float> mine(world * kCount, -1.0f);
    const auto own = ramp(kCount, base + static_cast<float>(self));
    std::copy(own.begin(), own.end(), mine.begin() + static_cast<std::ptrdiff_t>(self * kCount));
    float* all = me.memory(mine);
    nccl_ok(ncclAllGather(all + self * kCount, all, kCount, ncclFloat, me.comm(), me.stream()),
            "ncclAllGather");
    me.settle("ncclAllGather");
    const auto gathered = me.values(all, world * kCount);
    for (std::size_t i = 0; i < gathered.size(); ++i) {
      require(gathered[i] == base + static_cast<float>(i / kCount + i % kCount), "all-gather");
    }
    float* sum = me.memory(ramp(kCount, 0));
    nccl_ok(ncclReduceScatter(all, sum, kCount, ncclFloat, ncclSum, me.comm(), me.stream()),
            "ncclReduceScatter");
    me.settle("ncclReduceScatter");
    const auto reduced = me.values(sum, kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const float one = base + static_cast<float>(self + i);
      require(reduced[i] == static_cast<float>(world) * one, "reduce-scatter");
    }
    nccl_ok(ncclAllReduce(sum, sum, kCount, ncclFloat, ncclMax, me.comm(), me.stream()),
            "ncclAllReduce");
    me.settle("ncclAllReduce");
    require(me.values(sum, kCount)[7] ==
                static_cast<float>(world) * (base + static_cast<float>(world - 1 + 7)),
            "all-reduce");
    float* told = me.memory(ramp(kCount, static_cast<float>(self)));
    nccl_ok(ncclBroadcast(told, told, kCount, ncclFloat, static_cast<int>(world) - 1, me.comm(),
                          me.stream()),
            "ncclBroadcast");
    me.settle("ncclBroadcast");
    require(me.values(told, 1)[0] == static_cast<float>(world - 1), "broadcast");
    // More of them between two ranks than wait at a time, of sizes 0, 1, 2, ...
    constexpr std::size_t kMessages = 40;
    constexpr std::size_t kRoom = kMessages * kMessages;
    float* out = me.memory(ramp(world * kRoom, 10000 * static_cast<float>(self)));
    float* in = me.memory(std::vector<float>(world * kRoom, -1.0f));
    nccl_ok(ncclGroupStart(), "ncclGroupStart");
    for (std::size_t k = 0; k < kMessages; ++k) {
      for (std::size_t peer = 0; peer < world; ++peer) {
        const std::size_t at = peer * kRoom + k * kMessages;
        nccl_ok(ncclSend(out + at, k, ncclFloat, static_cast<int>(peer), me.comm(), me.stream()),
                "ncclSend");
        nccl_ok(ncclRecv(in + at, k, ncclFloat, static_cast<int>(peer), me.comm(), me.stream()),
                "ncclRecv");
      }
    }
    nccl_ok(ncclGroupEnd(), "ncclGroupEnd");
    me.settle("ncclGroupEnd");
    const auto arrived = me.values(in, world * kRoom);
    for (std::size_t i = 0; i < arrived.size(); ++i) {
      const std::size_t peer = i / kRoom;
      const std::size_t message = i % kRoom / kMessages;
      const bool written = i % kMessages < message;
      const auto from = static_cast<float>(10000 * peer + self * kRoom + i % kRoom);
      require(arrived[i] == (written ? from : -1.0f), "sends at " + std::to_string(i));
    }
  }
  me.finish();
}

// A process has "threads" ranks.
const lab::Scenario all_kinds("nccl all kinds", [](const Json& a) {
  lab::set_up_machine(a);
  {
    const ProcessGroup group = ProcessGroup::from_environment();
    const ncclUniqueId id = shared_id(group, group.size() - 1);
    const int threads = a["threads"];
    std::vector<std::string> problems(static_cast<std::size_t>(threads));
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        const lab::Outcome end = lab::outcome([&] {
          Rank me(id, group.rank() * threads + t, group.size() * threads);
          use_all(me, 3);
        });
        problems[static_cast<std::size_t>(t)] = end.text;
      });
    }
    for (std::thread& thread : running) thread.join();
    for (const std::string& problem : problems) require(problem.empty(), problem);
  }
  lab::expect_clean_machine();
});

TEST(ProcessNccl, CollectivesAndSendsMoveWhatTheyMoveBetweenThreads) {
  for (const auto& [processes, threads] :
       std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 3}, {2, 2}, {3, 2}}) {
    for (const int delay : {0, 20}) {
      lab::expect_success(
          lab::run_job(processes, "nccl all kinds", {{"threads", threads}, {"delay", delay}}),
          std::to_string(processes) + " processes of " + std::to_string(threads) +
              " ranks, delay " + std::to_string(delay));
    }
  }
}

// -- what does not fit --

const lab::Scenario odd_one("nccl odd", [](const Json& a) {
  lab::set_up_machine(a);
  const ProcessGroup group = ProcessGroup::from_environment();
  Rank me(group);
  const std::string kind = a["kind"];
  const bool odd = me.rank() == 1;
  float* memory = me.memory(ramp(100, 0));
  const auto world = static_cast<std::size_t>(me.size());
  // Long enough for the others to have found it: then this rank's own call refuses.
  if (a["late"] && me.rank() == 0) std::this_thread::sleep_for(milliseconds(300));
  if (kind == "bytes") {
    nccl_ok(ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < me.size(); ++peer) {
      const std::size_t sent = odd && peer == 2 ? 3 : 4;
      me.called(ncclSend(memory, sent, ncclFloat, peer, me.comm(), me.stream()));
      me.called(ncclRecv(memory + 10 + 4 * peer, 4, ncclFloat, peer, me.comm(), me.stream()));
    }
    me.called(ncclGroupEnd());
  } else if (odd && kind == "operation") {
    me.called(
        ncclReduceScatter(memory, memory + 50, 4, ncclFloat, ncclSum, me.comm(), me.stream()));
  } else {
    me.called(ncclAllGather(memory, memory + 50, odd && kind == "count" ? 5 : 4,
                            odd && kind == "type" ? ncclInt : ncclFloat, me.comm(), me.stream()));
  }
  require(50 + 5 * world <= 100, "room");
  const ncclResult_t error = me.error_within(20);
  const std::string text = ncclGetLastError(me.comm());
  me.abort();
  say({{"error", error}, {"text", text}});
});

TEST(ProcessNccl, AMismatchIsAnErrorOnAllRanks) {
  for (const std::string kind : {"count", "type", "operation", "bytes"}) {
    for (const bool late : {false, true}) {
      for (const Ending& end : lab::run_job(3, "nccl odd", {{"kind", kind}, {"late", late}})) {
        EXPECT_EQ(end.said()["error"], ncclInvalidUsage) << kind << ": " << end.text();
        EXPECT_NE(end.output.find("rank 1"), std::string::npos) << kind << ": " << end.text();
      }
    }
  }
}

// -- peers that are gone --

const lab::Scenario gone("nccl gone", [](const Json& a) {
  lab::set_up_machine(a);
  const std::string kind = a["kind"];
  const ProcessGroup group = ProcessGroup::from_environment();
  if (kind == "before" && group.rank() == 1) raise(SIGKILL);
  if (kind == "maker") {
    // Rank 0 made the id and is gone before the others join.
    ncclUniqueId id{};
    if (group.rank() == 0) nccl_ok(ncclGetUniqueId(&id), "ncclGetUniqueId");
    group.broadcast(std::as_writable_bytes(std::span(&id, 1)), 0);
    if (group.rank() == 0) raise(SIGKILL);
    std::this_thread::sleep_for(milliseconds(300));
    ncclComm_t comm = nullptr;
    const ncclResult_t code = ncclCommInitRank(&comm, group.size(), id, group.rank());
    say({{"error", code}, {"text", ncclGetLastError(nullptr)}});
    return;
  }
  Rank me(group);
  float* memory = me.memory(ramp(100, 0));
  const auto collective = [&] {
    const auto own = static_cast<std::size_t>(me.rank()) * 8;
    me.called(ncclAllGather(memory + own, memory, 8, ncclFloat, me.comm(), me.stream()));
  };
  const auto exchange = [&] {
    nccl_ok(ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < me.size(); ++peer) {
      me.called(ncclSend(memory, 4, ncclFloat, peer, me.comm(), me.stream()));
      me.called(ncclRecv(memory + 50 + 4 * peer, 4, ncclFloat, peer, me.comm(), me.stream()));
    }
    me.called(ncclGroupEnd());
  };
  collective();
  me.settle("the first");
  exchange();
  me.settle("the second");
  cuda_ok(cudaStreamSynchronize(me.stream()), "cudaStreamSynchronize");
  group.barrier();
  if (me.rank() == 1) {
    if (kind == "left") {
      me.finish();
      _exit(0);
    }
    raise(kind == "SIGSTOP" ? SIGSTOP : SIGKILL);
    return;
  }
  if (a["sends"]) {
    exchange();
  } else {
    collective();
  }
  const ncclResult_t error = me.error_within(a["patience"]);
  const std::string text = ncclGetLastError(me.comm());
  const bool hangs = cudaStreamQuery(me.stream()) == cudaErrorNotReady;
  // The other survivor, if it is slower, must not see this one end.
  std::atomic<int>& ready = Children::inherited_page().ready;
  ready.fetch_add(1);
  for (int i = 0; ready.load() < me.size() - 1 && i < 20'000; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const std::int64_t before = lab::now();
  me.abort();
  say({{"error", error},
       {"text", text},
       {"hangs", hangs},
       {"abort_seconds", static_cast<double>(lab::now() - before) * 1e-9}});
});

TEST(ProcessNccl, ADeadPeerIsARemoteErrorOrAHangAndAnAbortEndsIt) {
  for (const std::string kind : {"SIGKILL", "SIGSTOP", "left"}) {
    for (const bool notices : {true, false}) {
      for (const bool sends : {false, true}) {
        const std::string what =
            kind + (notices ? ", noticed" : ", not noticed") + (sends ? ", sends" : "");
        const bool told = kind == "SIGKILL" && notices;
        Children children(lab::kJobSeconds);
        lab::start_job(children, 3, "nccl gone",
                       {{"kind", kind},
                        {"remote_errors", notices},
                        {"sends", sends},
                        {"patience", told ? 20.0 : 0.4}});
        for (const std::size_t r : {0, 2}) {
          const Ending& end = children.wait(r);
          const Json said = end.said();
          ASSERT_TRUE(said.is_object() && said.contains("error")) << what << ": " << end.text();
          EXPECT_EQ(said["error"], told ? ncclRemoteError : ncclSuccess) << what << end.text();
          if (told) {
            EXPECT_NE(end.output.find("Connection closed by remote peer"), std::string::npos)
                << what << ": " << end.text();
          }
          // An error that comes before NCCL has launched leaves nothing to hang.
          if (!told) {
            EXPECT_EQ(said["hangs"], true) << what << ": " << end.text();
          }
          EXPECT_LT(said["abort_seconds"], 5.0) << what;
        }
        if (kind == "SIGSTOP") children.signal(1, SIGKILL);
        children.wait();
      }
    }
  }
}

TEST(ProcessNccl, ARankThatIsGoneBeforeTheCommunicatorIsMadeIsAnError) {
  const auto ends = lab::run_job(3, "nccl gone", {{"kind", "maker"}});
  for (const std::size_t r : {1, 2}) {
    EXPECT_EQ(ends[r].said()["error"], ncclSystemError) << ends[r].text();
    EXPECT_NE(ends[r].output.find("which made the unique id, is gone"), std::string::npos)
        << ends[r].text();
  }
}

// -- descriptors --

const lab::Scenario repeated("nccl repeated", [](const Json& a) {
  lab::set_up_machine(a);
  const ProcessGroup group = ProcessGroup::from_environment();
  const auto descriptors = [] {
    int count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  };
  int first = 0;
  for (int turn = 0; turn < 20; ++turn) {
    Rank me(group);
    me.finish();
    if (turn == 4) first = descriptors();
  }
  say({{"more", descriptors() - first}});
});

TEST(ProcessNccl, CommunicatorsGiveTheirDescriptorsBack) {
  const auto ends = lab::run_job(3, "nccl repeated", Json::object());
  lab::expect_success(ends, "repeated");
  for (const Ending& end : ends) EXPECT_LE(end.said()["more"].get<int>(), 1) << end.text();
}

}  // namespace
}  // namespace zshard
#endif
