// All-gathers and reductions of an engine that does nothing else, in GB/s of the full buffer,
// against plain loops that move the same bytes with the same number of ranks at the same time; and
// what meeting costs.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/common/memory.hpp"
#include "bench/common/row.hpp"
#include "bench/common/team.hpp"
#include "runtime/comm/endpoint.hpp"
#include "zshard/zshard.hpp"

namespace {

using bench::Arguments;
using bench::Emit;
using bench::Ranks;
using zshard::Pass;
using zshard::ProcessGroup;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// Enough repeats of an operation on so many bytes that clocks and the barrier do not count.
int repeats(std::int64_t bytes) {
  const std::int64_t total = (bench::quick() ? 256 : 1024) * kMiB;
  return static_cast<int>(std::clamp<std::int64_t>(total / bytes, 2, 512)) / 2 * 2;
}

/// Seconds for fn() on all ranks, from when all are there to when all have ended.
double together(const ProcessGroup& group, const std::function<void()>& fn) {
  group.barrier();
  const bench::Stopwatch watch;
  fn();
  group.barrier();
  return watch.seconds();
}

// -- all-gather --

/// arguments: bytes, repeats, repetitions. Lines: seconds of an all-gather, of a memcpy.
void gather_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  const std::int64_t bytes = std::stoll(arguments[0]);
  const int count = std::stoi(arguments[1]);
  // Two units and room for one: each use gathers. Frozen, so that there is nothing but parameters.
  zshard::ModelSpec spec;
  std::vector<zshard::UnitId> units;
  for (const char* name : {"a", "b"}) {
    zshard::UnitBuilder unit = spec.unit(name);
    unit.parameter(std::string(name) + ".w", {bytes / 4}, {.frozen = true});
    units.push_back(unit.id());
  }
  zshard::Engine engine(spec, zshard::SGD{}, group, {.gather_budget = bytes, .look_ahead = 0});
  bench::Floats from(bytes / 4);
  bench::Floats to(bytes / 4);
  const auto gathers = [&] {
    engine.begin_evaluation_passes(count / 2);
    while (engine.next_micro_step()) {
      for (const zshard::UnitId unit : units) {
        engine.acquire(unit, Pass::forward);
        engine.release(unit, Pass::forward);
      }
    }
  };
  const auto copies = [&] {
    for (int i = 0; i < count; ++i) {
      std::memcpy(to.data(), from.data(), static_cast<std::size_t>(bytes));
      benchmark::ClobberMemory();
    }
  };
  together(group, gathers);  // first touch
  together(group, copies);
  for (int i = std::stoi(arguments[2]); i > 0; --i) {
    const double ours = together(group, gathers) / count;
    emit({ours, together(group, copies) / count});
  }
}

// -- reduction --

/// arguments: bytes, repeats, repetitions. Lines: seconds of a reduction, of a plain loop.
void reduce_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  const std::int64_t bytes = std::stoll(arguments[0]);
  const int count = std::stoi(arguments[1]);
  const int world = group.size();
  zshard::ModelSpec spec;
  zshard::UnitBuilder unit = spec.unit("u");
  unit.parameter("u.w", {bytes / 4});
  // At stage 2 a micro-step has reductions only; `overwrite` leaves gradients as they are.
  zshard::Engine engine(
      spec, zshard::SGD{}, group,
      {.stage = zshard::Stage::gradients, .gradient_mode = zshard::GradientMode::overwrite});
  const std::int64_t piece = bytes / 4 / world;
  bench::Floats from(piece * world);
  bench::Floats to(piece);
  std::vector<const float*> sources;
  for (int r = 0; r < world; ++r) sources.push_back(from.data() + r * piece);

  // The next backward use waits for the reduction before it, so count + 1 micro-steps show count
  // reductions.
  const auto reductions = [&] {
    bench::Stopwatch watch;
    double seconds = 0.0;
    engine.begin_micro_steps(count + 1);
    for (int micro = 0; engine.next_micro_step(); ++micro) {
      engine.acquire(unit.id(), Pass::forward);
      engine.release(unit.id(), Pass::forward);
      engine.acquire(unit.id(), Pass::backward);
      if (micro == 0) {
        group.barrier();
        watch = {};
      }
      if (micro == count) seconds = watch.seconds();
      engine.commit(unit.id());
      engine.release(unit.id(), Pass::backward);
    }
    engine.step();
    return seconds;
  };
  const auto loops = [&] {
    for (int i = 0; i < count; ++i) {
      bench::add_sources(sources.data(), world, to.data(), piece);
      benchmark::ClobberMemory();
    }
  };
  reductions();
  together(group, loops);
  for (int i = std::stoi(arguments[2]); i > 0; --i) {
    const double ours = reductions() / count;
    emit({ours, together(group, loops) / count});
  }
}

// -- meeting --

/// The least that a meeting can be: a counter that every rank adds to and yields for.
class BareBarrier {
 public:
  explicit BareBarrier(const ProcessGroup& group) : world_(group.size()) {
    zshard::comm::Group& g = *group.implementation();
    memory_ = g.share(g.make_arena(64))[0];
    counter_ = reinterpret_cast<std::atomic<std::uint64_t>*>(memory_->data());
  }
  void meet() {
    target_ += static_cast<std::uint64_t>(world_);
    counter_->fetch_add(1);
    while (counter_->load() < target_) std::this_thread::yield();
  }

 private:
  int world_;
  std::uint64_t target_ = 0;
  std::shared_ptr<zshard::memory::Arena> memory_;
  std::atomic<std::uint64_t>* counter_;
};

/// arguments: calls, repetitions. Lines: seconds of ProcessGroup::barrier, of a meeting of the data
/// plane (arrive and finish), of a bare barrier.
void meet_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  const int calls = std::stoi(arguments[0]);
  BareBarrier bare(group);
  zshard::comm::Group& implementation = *group.implementation();
  constexpr std::uint64_t kSignatures = 64;
  constexpr std::size_t kPayload = 64;
  zshard::comm::Endpoint endpoint(
      group.implementation(),
      implementation.make_board(implementation.make_board_memory(kSignatures, kPayload),
                                kSignatures, kPayload),
      120.0, [](const auto&) { return std::string("a meeting"); });
  std::uint64_t sequence = 0;
  for (int i = std::stoi(arguments[1]); i >= 0; --i) {
    const double barrier = together(group, [&] {
      for (int call = 0; call < calls; ++call) group.barrier();
    });
    const double meeting = together(group, [&] {
      for (int call = 0; call < calls; ++call, ++sequence) {
        endpoint.publish(sequence, {1, 2, 3, 4});
        endpoint.meet(zshard::comm::Lane::reduce, sequence, 0);
        endpoint.finish(zshard::comm::Lane::reduce);
      }
    });
    const double least = together(group, [&] {
      for (int call = 0; call < calls; ++call) bare.meet();
    });
    emit({barrier / calls, meeting / calls, least / calls});
  }
}

// -- rows --

struct Collective {
  const char* name;
  const char* job;
  const char* limit;
  const char* peers;  // of 2 ranks and 256 MiB
};

constexpr Collective kCollectives[] = {
    {"all-gather", "gather", "memcpy of the buffer on every rank at once",
     "perf.md, 2 ranks, 256 MiB: Open MPI 8 stock, 10 tuned; Gloo 4.2 GB/s"},
    {"reduction", "reduce", "acc += a + b + ... of a shard on every rank at once",
     "perf.md, 2 ranks, 256 MiB: Open MPI 1.3-1.5 stock, 5.6-6.5 tuned; Gloo 2.5 GB/s"}};

void add_collective(const Collective& collective, Ranks ranks, int world, std::int64_t mib) {
  const std::int64_t bytes = mib * kMiB;
  const auto measured = std::make_shared<bench::Measured>([=] {
    return bench::run_team(ranks, world, collective.job,
                           {std::to_string(bytes), std::to_string(repeats(bytes)),
                            std::to_string(bench::repetitions())});
  });
  const auto turn = std::make_shared<std::size_t>(0);
  bench::add({.name = fmt::format("{}/{} {}/{} MiB", collective.name, world, to_string(ranks), mib),
              .unit = "GB/s",
              .limit = collective.limit,
              .target = mib >= 64 ? "ratio >= 0.80" : "",
              .peers = world == 2 && mib == 256 ? collective.peers : "",
              .measure = [=] {
                const std::vector<double>& line = measured->line((*turn)++);
                const auto size = static_cast<double>(bytes) * 1e-9;
                return bench::Sample{size / line[0], size / line[1], line[0]};
              }});
}

void add_meetings(Ranks ranks, int world) {
  const int calls = bench::quick() ? 200 : 2000;
  const auto measured = std::make_shared<bench::Measured>([=] {
    auto lines = bench::run_team(ranks, world, "meet",
                                 {std::to_string(calls), std::to_string(bench::repetitions())});
    if (!lines.empty()) lines.erase(lines.begin());  // first touch
    return lines;
  });
  const auto add = [&](const std::string& name, std::size_t column) {
    const auto turn = std::make_shared<std::size_t>(0);
    bench::add(
        {.name = fmt::format("{}/{} {}", name, world, to_string(ranks)),
         .unit = "us",
         .limit = "a bare counter to add to and yield for, twice: arrive and finish",
         .target = "",
         .peers = world == 4 ? "perf.md, 4 ranks on 2 cores: pure spin 4040, futex 51 us" : "",
         .measure = [=] {
           const std::vector<double>& line = measured->line((*turn)++);
           return bench::Sample{line[column] * 1e6, 2.0 * line[2] * 1e6, line[column]};
         }});
  };
  add("barrier", 0);
  add("meeting", 1);
}

}  // namespace

int main(int argc, char** argv) {
  bench::add_job("gather", gather_job);
  bench::add_job("reduce", reduce_job);
  bench::add_job("meet", meet_job);
  int code = 0;
  if (bench::worker(argc, argv, &code)) return code;
  bench::initialize(argc, argv);
  for (const Collective& collective : kCollectives) {
    for (const Ranks ranks : {Ranks::threads, Ranks::processes}) {
      for (const int world : {2, 4}) {
        for (const std::int64_t mib : {1, 16, 64, 256}) {
          if (bench::quick() && mib > 64) continue;
          add_collective(collective, ranks, world, mib);
        }
      }
    }
  }
  for (const Ranks ranks : {Ranks::threads, Ranks::processes}) {
    for (const int world : {2, 4}) add_meetings(ranks, world);
  }
  return bench::run();
}
