// What a GPU does for zshard, through the plug-in alone: copies between the memories, kernels
// against the device's own copy speed, all-gathers between GPUs, and that they overlap.
//
//   bench_device [--plugin FILE] [--quick] [Google Benchmark's options]
//
// Times are the host's, from the first call to the event behind the last one, over so much work
// that calls do not count. Exit code 77, with the reason, where there is no GPU.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/common/row.hpp"
#include "optimizers/rules.hpp"
#include "runtime/engine/accelerator.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/zshard.hpp"

namespace {

using zshard::DType;
using zshard::device::Device;
using zshard::device::NativeEvent;
using zshard::device::NativeStream;
using zshard::engine::accelerator;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
/// Repetitions of rows that take and pin host memory: about a second each, and all rows together
/// have two minutes (tests/gpu/run.sh).
constexpr int kOfHostMemory = 3;

/// Of one buffer.
std::int64_t buffer_bytes() {
  return (bench::quick() ? 16 : 512) * kMiB;
}
int repeats() {
  return bench::quick() ? 2 : 8;
}

/// Device memory that goes with the object.
class Memory {
 public:
  Memory(Device& device, std::int64_t bytes) : device_(device), data_(device.allocate(bytes)) {}
  ~Memory() { device_.free_memory(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  [[nodiscard]] std::byte* bytes() const { return data_; }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  Device& device_;
  std::byte* data_;
};

/// Host memory, pinned or not.
class HostMemory {
 public:
  HostMemory(Device& device, std::int64_t bytes, bool pinned)
      : device_(device),
        bytes_(bytes),
        arena_(zshard::memory::Arena::make(bytes)),
        pinned_(pinned && device.pin(arena_->data(), bytes)) {
    std::memset(arena_->data(), 1, static_cast<std::size_t>(bytes));
  }
  ~HostMemory() {
    if (pinned_) device_.unpin(arena_->data(), bytes_);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  [[nodiscard]] std::byte* bytes() const { return arena_->data(); }
  [[nodiscard]] bool pinned() const { return pinned_; }

 private:
  Device& device_;
  std::int64_t bytes_;
  std::shared_ptr<zshard::memory::Arena> arena_;
  bool pinned_;
};

/// A stream and the event that says when its work is done.
class Lane {
 public:
  Lane(Device& device, const char* name)
      : device_(device), stream_(device.make_stream(name)), event_(device.make_event()) {}
  ~Lane() {
    device_.destroy_event(event_);
    device_.destroy_stream(stream_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  [[nodiscard]] NativeStream stream() const { return stream_; }
  void finish() {
    device_.record(event_, stream_);
    while (!device_.reached(event_)) std::this_thread::yield();
  }

 private:
  Device& device_;
  NativeStream stream_;
  NativeEvent event_;
};

/// One GPU with everything that rows share.
struct Machine {
  explicit Machine(int ordinal)
      : device(accelerator().open(ordinal, 0)),
        kernels(accelerator().make_kernels(*device)),
        update(accelerator().make_update(*device)),
        compute(*device, "compute"),
        down(*device, "down"),
        up(*device, "up") {}

  std::unique_ptr<Device> device;
  std::unique_ptr<zshard::kernels::DeviceKernels> kernels;
  std::unique_ptr<zshard::optimizers::DeviceUpdate> update;
  Lane compute;
  Lane down;
  Lane up;
};

/// Seconds for `work` queued repeats() times on a lane.
double queued(Lane& lane, const std::function<void()>& work) {
  work();  // first touch, module loading
  lane.finish();
  return bench::timed([&] {
           for (int i = repeats(); i > 0; --i) work();
           lane.finish();
         }) /
         repeats();
}

double gigabytes(std::int64_t bytes, double seconds) {
  return static_cast<double>(bytes) * 1e-9 / seconds;
}

/// Bytes read and written by a copy inside the device.
double device_copy_speed(Machine& m, const Memory& from, const Memory& to, std::int64_t bytes) {
  return gigabytes(2 * bytes, queued(m.compute, [&] {
                     m.device->copy(to.bytes(), from.bytes(), bytes, m.compute.stream());
                   }));
}

// -- copies --

/// Pieces as the engine's sub-groups, against the whole in one call.
void add_transfer(const std::shared_ptr<Machine>& m, bool to_host, bool pinned) {
  bench::add(
      {.name = fmt::format("{}/{}", to_host ? "device to host" : "host to device",
                           pinned ? "pinned" : "pageable"),
       .unit = "GB/s",
       .limit = "one copy of the whole buffer, pinned",
       .target = pinned ? "ratio >= 0.90" : "",
       .peers = "",
       .measure =
           [=] {
             const std::int64_t bytes = buffer_bytes();
             const std::int64_t piece = 8 * kMiB;
             Memory on_device(*m->device, bytes);
             HostMemory whole(*m->device, bytes, true);
             HostMemory cut(*m->device, bytes, pinned);
             Lane& lane = to_host ? m->down : m->up;
             const auto move = [&](const HostMemory& host, std::int64_t at, std::int64_t count) {
               std::byte* here = host.bytes() + at;
               std::byte* there = on_device.bytes() + at;
               m->device->copy(to_host ? here : there, to_host ? there : here, count,
                               lane.stream());
             };
             const double seconds = queued(lane, [&] {
               for (std::int64_t at = 0; at < bytes; at += piece) {
                 move(cut, at, std::min(piece, bytes - at));
               }
             });
             const double limit = queued(lane, [&] { move(whole, 0, bytes); });
             return bench::Sample{gigabytes(bytes, seconds), gigabytes(bytes, limit), seconds};
           },
       .repetitions = kOfHostMemory});
}

void add_device_copy(const std::shared_ptr<Machine>& m) {
  bench::add({.name = "device copy",
              .unit = "GB/s",
              .limit = "",
              .target = "",
              .peers = "",
              .measure = [=] {
                const std::int64_t bytes = buffer_bytes();
                Memory from(*m->device, bytes);
                Memory to(*m->device, bytes);
                const double speed = device_copy_speed(*m, from, to, bytes);
                return bench::Sample{speed, {}, static_cast<double>(2 * bytes) * 1e-9 / speed};
              }});
}

// -- kernels --

/// A kernel's counted bytes against the device's copies. make: gets buffers of buffer_bytes()
/// each, queues one run, and returns its bytes.
struct KernelRow {
  const char* name;
  int buffers;
  std::function<std::int64_t(Machine&, const std::vector<std::unique_ptr<Memory>>&)> run;
};

std::vector<KernelRow> kernel_rows() {
  const auto count = [] { return buffer_bytes() / 4; };
  std::vector<KernelRow> rows;
  const auto convert = [=](DType from, DType to) {
    return [=](Machine& m, const auto& b) {
      m.kernels->convert(b[0]->bytes(), from, b[1]->bytes(), to, count(), m.compute.stream());
      return count() * (size_of(from) + size_of(to));
    };
  };
  rows.push_back({"convert f32 to bf16", 2, convert(DType::f32, DType::bf16)});
  rows.push_back({"convert bf16 to f32", 2, convert(DType::bf16, DType::f32)});
  for (const DType dtype : {DType::f32, DType::bf16}) {
    rows.push_back({dtype == DType::f32 ? "accumulate f32" : "accumulate bf16", 2,
                    [=](Machine& m, const auto& b) {
                      m.kernels->accumulate(b[0]->bytes(), dtype, b[1]->floats(), count(),
                                            m.compute.stream());
                      return count() * (size_of(dtype) + 8);
                    }});
    rows.push_back({dtype == DType::f32 ? "reduce 4 of f32" : "reduce 4 of bf16", 2,
                    [=](Machine& m, const auto& b) {
                      const std::int64_t piece = buffer_bytes() / 4 / size_of(dtype);
                      m.kernels->reduce_add(b[0]->bytes(), buffer_bytes() / 4, 4, dtype, 0,
                                            b[1]->floats(), piece, false, m.compute.stream());
                      return buffer_bytes() + 8 * piece;
                    }});
  }
  rows.push_back({"square sums", 2, [=](Machine& m, const auto& b) {
                    m.kernels->block_squares(b[0]->floats(), count(),
                                             reinterpret_cast<double*>(b[1]->bytes()),
                                             m.compute.stream());
                    return count() * 4 + (count() + 1023) / 1024 * 8;
                  }});
  const auto rule = [](auto make, auto config) { return make(config); };
  const std::pair<const char*, std::shared_ptr<const zshard::optimizers::Rule>> optimizers[] = {
      {"update AdamW", rule(zshard::optimizers::make_adamw, zshard::AdamW{})},
      {"update Adam", rule(zshard::optimizers::make_adam, zshard::Adam{})},
      {"update SGD with momentum",
       rule(zshard::optimizers::make_sgd, zshard::SGD{.lr = 0.01, .momentum = 0.9})}};
  for (const auto& [name, of] : optimizers) {
    const auto slots = static_cast<int>(of->slots().size());
    rows.push_back(
        {name, 2 + slots, [=, of = of](Machine& m, const auto& b) {
           zshard::optimizers::Elements elements{
               .parameter = b[0]->floats(), .gradient = b[1]->floats(), .count = count()};
           for (int i = 0; i < slots; ++i) {
             elements.slots[i] = b[static_cast<std::size_t>(2 + i)]->floats();
           }
           m.update->run(*of, elements, of->constants(of->defaults(), 1), 1, m.compute.stream());
           return count() * 4 * (3 + 2 * slots);
         }});
  }
  return rows;
}

void add_kernel(const std::shared_ptr<Machine>& m, const KernelRow& row) {
  bench::add({.name = row.name,
              .unit = "GB/s",
              .limit = "a copy inside the device, bytes read and written",
              .target = "ratio >= 0.85",
              .peers = "",
              .measure = [=] {
                std::vector<std::unique_ptr<Memory>> buffers;
                for (int i = 0; i < row.buffers; ++i) {
                  buffers.push_back(std::make_unique<Memory>(*m->device, buffer_bytes()));
                }
                std::int64_t bytes = 0;
                const double seconds = queued(m->compute, [&] { bytes = row.run(*m, buffers); });
                const double limit =
                    device_copy_speed(*m, *buffers[0], *buffers[1], buffer_bytes());
                return bench::Sample{gigabytes(bytes, seconds), limit, seconds};
              }});
}

// -- overlap --

/// Copies in both directions and the update's kernel at once, against the longest of them alone:
/// what the step does when its state lives on the host.
void add_overlap(const std::shared_ptr<Machine>& m) {
  bench::add({.name = "overlap/update, down and up at once",
              .unit = "ms",
              .limit = "the longest of the three alone",
              .target = "ratio <= 1.25",
              .peers = "",
              .measure =
                  [=] {
                    const std::int64_t bytes = buffer_bytes();
                    const std::int64_t count = bytes / 4;
                    std::vector<std::unique_ptr<Memory>> b;
                    for (int i = 0; i < 6; ++i)
                      b.push_back(std::make_unique<Memory>(*m->device, bytes));
                    HostMemory to(*m->device, bytes, true);
                    HostMemory from(*m->device, bytes, true);
                    const auto rule = zshard::optimizers::make_adamw({});
                    const zshard::optimizers::Elements elements{
                        .parameter = b[0]->floats(),
                        .slots = {b[1]->floats(), b[2]->floats()},
                        .gradient = b[3]->floats(),
                        .count = count};
                    const auto constants = rule->constants(rule->defaults(), 1);
                    const auto copy_down = [&] {
                      m->device->copy(to.bytes(), b[4]->bytes(), bytes, m->down.stream());
                    };
                    const auto copy_up = [&] {
                      m->device->copy(b[5]->bytes(), from.bytes(), bytes, m->up.stream());
                    };
                    // So many that the kernels take about as long as a copy.
                    int updates = 1;
                    const auto update = [&] {
                      for (int i = 0; i < updates; ++i) {
                        m->update->run(*rule, elements, constants, 1, m->compute.stream());
                      }
                    };
                    const double down = queued(m->down, copy_down);
                    const double up = queued(m->up, copy_up);
                    const double one = queued(m->compute, update);
                    updates = std::clamp(static_cast<int>(std::max(down, up) / one), 1, 1000);
                    const double compute = queued(m->compute, update);
                    const double together = bench::timed([&] {
                                              for (int i = repeats(); i > 0; --i) {
                                                copy_down();
                                                copy_up();
                                                update();
                                              }
                                              m->down.finish();
                                              m->up.finish();
                                              m->compute.finish();
                                            }) /
                                            repeats();
                    const double limit = std::max({down, up, compute});
                    return bench::Sample{together * 1e3, limit * 1e3, together};
                  },
              .repetitions = kOfHostMemory});
}

// -- the update of state in host memory --

/// Seconds of an update of `elements` bf16 parameters whose state is on the host, from step() to
/// the last byte that comes back.
double update_seconds(std::int64_t elements, zshard::UpdateOn on) {
  zshard::ModelSpec spec;
  constexpr int kUnits = 4;
  for (int u = 0; u < kUnits; ++u) {
    const std::string name = fmt::format("u{}", u);
    spec.unit(name).parameter(name + ".w", {elements / kUnits}, {.dtype = DType::bf16});
  }
  zshard::EngineOptions options;
  options.device = zshard::DeviceKind::cuda;
  options.stage = zshard::Stage::gradients;
  options.offload.optimizer = zshard::Tier::host;
  options.offload.update_on = on;
  double best = 0.0;
  zshard::run_ranks(1, [&](const zshard::ProcessGroup& group) {
    zshard::Engine engine(spec, zshard::AdamW{}, group, options);
    for (int i = 0; i <= repeats(); ++i) {
      for ([[maybe_unused]] const zshard::MicroStep micro : engine.micro_steps(1)) {
        for (std::int32_t u = kUnits; u-- > 0;) {
          zshard::Guard guard = engine.backward(zshard::UnitId{u});
          guard.commit();
        }
      }
      std::vector<float> one(1);
      engine.read_gradient("u0.w", one);  // the passes are over
      const double seconds = bench::timed([&] {
        engine.step();
        engine.read_state("u0.w", "exp_avg", one);
      });
      if (i == 1 || (i > 1 && seconds < best)) best = seconds;  // the first one warms up
    }
  });
  return best;
}

/// What decides `update_on`: both ways beside each other. The limit is the copies alone: 12 bytes
/// of state a parameter each way at once, or its gradient's 4 down and its 2 up.
void add_update(const std::shared_ptr<Machine>& m, zshard::UpdateOn on) {
  const bool by_device = on == zshard::UpdateOn::device;
  bench::add({.name = fmt::format("update of host state/on the {}", by_device ? "GPU" : "host"),
              .unit = "ns",
              .limit = "the copies alone, pinned, a parameter",
              .target = "",
              .peers = "",
              .measure =
                  [=] {
                    const std::int64_t elements = buffer_bytes() / 4;
                    const double seconds = update_seconds(elements, on);
                    const std::int64_t bytes = buffer_bytes();
                    Memory a(*m->device, bytes);
                    Memory b(*m->device, bytes);
                    HostMemory to(*m->device, bytes, true);
                    HostMemory from(*m->device, bytes, true);
                    const double both = queued(m->down, [&] {
                      m->device->copy(to.bytes(), a.bytes(), bytes, m->down.stream());
                      m->device->copy(b.bytes(), from.bytes(), bytes, m->up.stream());
                      m->up.finish();
                    });
                    const double down = queued(m->down, [&] {
                      m->device->copy(to.bytes(), a.bytes(), bytes, m->down.stream());
                    });
                    // Buffers hold 4 bytes of each parameter.
                    const double limit = by_device ? 3 * both : down;
                    const double scale = 1e9 / static_cast<double>(elements);
                    return bench::Sample{seconds * scale, limit * scale, seconds};
                  },
              .repetitions = kOfHostMemory});
}

// -- between GPUs --

/// In GB/s of the gathered buffer, on `world` GPUs, a thread each. Lines of repetitions.
std::vector<double> gather_seconds(int world) {
  const std::int64_t piece = buffer_bytes() / world / 256 * 256;
  std::vector<double> lines;
  const zshard::comm::CommunicatorId id = accelerator().make_id();
  zshard::run_ranks(world, [&](const zshard::ProcessGroup& group) {
    const auto device = accelerator().open(group.rank(), group.rank());
    const auto communicator =
        accelerator().make_communicator(*device, id, group.rank(), world, 60.0);
    Memory buffer(*device, piece * world);
    Lane lane(*device, "gather");
    for (int repetition = 0; repetition <= bench::repetitions(); ++repetition) {
      group.barrier();
      const bench::Stopwatch watch;
      for (int i = repeats(); i > 0; --i) {
        communicator->all_gather(buffer.bytes(), piece, lane.stream());
      }
      lane.finish();
      group.barrier();
      if (group.rank() == 0 && repetition > 0) lines.push_back(watch.seconds() / repeats());
    }
  });
  return lines;
}

void add_gather(const std::shared_ptr<Machine>& m, int world) {
  struct State {
    std::vector<double> lines;
    std::size_t turn = 0;
  };
  const auto state = std::make_shared<State>();
  bench::add({.name = fmt::format("all-gather/{} GPUs", world),
              .unit = "GB/s",
              .limit = "a copy of the buffer inside one device, bytes written",
              .target = "",
              .peers = "",
              .measure = [=] {
                const std::int64_t bytes = buffer_bytes() / world / 256 * 256 * world;
                if (state->lines.empty()) state->lines = gather_seconds(world);
                const double seconds = state->lines.at(state->turn++);
                Memory from(*m->device, bytes);
                Memory to(*m->device, bytes);
                const double limit = device_copy_speed(*m, from, to, bytes) / 2.0;
                return bench::Sample{gigabytes(bytes, seconds), limit, seconds};
              }});
}

int run(int argc, char** argv) {
  std::vector<char*> others;
  for (int i = 0; i < argc; ++i) {
    if (std::strcmp(argv[i], "--plugin") == 0) {
      if (i + 1 == argc) {
        fmt::print(stderr, "bench_device: --plugin needs a file\n");
        return 2;
      }
      zshard::engine::set_accelerator_path(argv[++i]);
    } else {
      others.push_back(argv[i]);
    }
  }
  bench::initialize(static_cast<int>(others.size()), others.data());
  std::vector<zshard::engine::GpuFacts> gpus;
  try {
    gpus = accelerator().gpus();
  } catch (const zshard::DeviceError& error) {
    fmt::print("bench_device: skipped: {}\n", error.what());
    return 77;
  }
  if (gpus.empty()) {
    fmt::print("bench_device: skipped: no GPU is visible\n");
    return 77;
  }
  fmt::print("{}, CUDA {}, driver {}, NCCL {}\n", gpus[0].name, accelerator().runtime_version(),
             accelerator().driver_version(), accelerator().nccl_version());
  const auto machine = std::make_shared<Machine>(gpus[0].ordinal);
  add_device_copy(machine);
  for (const bool to_host : {true, false}) {
    for (const bool pinned : {true, false}) add_transfer(machine, to_host, pinned);
  }
  for (const KernelRow& row : kernel_rows()) add_kernel(machine, row);
  add_overlap(machine);
  for (const auto on : {zshard::UpdateOn::host, zshard::UpdateOn::device}) add_update(machine, on);
  const auto world = static_cast<int>(gpus.size());
  if (world == 1) {
    fmt::print("all-gather: skipped: one GPU\n");
  } else if (accelerator().nccl_version().empty()) {
    fmt::print("all-gather: skipped: the plug-in was built without NCCL\n");
  } else {
    add_gather(machine, world);
  }
  const int code = bench::run();
  benchmark::ClearRegisteredBenchmarks();  // they hold the device, which must go before the process
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_device: {}\n", error.what());
    return 1;
  }
}
