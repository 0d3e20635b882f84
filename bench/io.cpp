// The nvme tier: the store alone beside fio; an engine's steps beside what their bytes take on the
// same disk; and passes that gather parameters from it. Everything goes around the page cache.
//
//   bench_io [--nvme-dir DIR] [--quick] [Google Benchmark's options]
//
// DIR, by default the present directory, must have 8 GB free; nothing stays there. ZSHARD_*
// variables change the engines' options.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "bench/common/disk.hpp"
#include "bench/common/row.hpp"
#include "bench/common/team.hpp"
#include "offload/tiers/store.hpp"
#include "runtime/engine/blueprint.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/zshard.hpp"

namespace {

using bench::Arguments;
using bench::Emit;
using bench::Move;
using bench::Ranks;
using zshard::Category;
using zshard::DType;
using zshard::EngineOptions;
using zshard::IoBackendKind;
using zshard::Pass;
using zshard::ProcessGroup;
using zshard::Stage;
using zshard::Tier;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

std::string& directory() {
  static std::string path = ".";
  return path;
}

// -- the store --

std::int64_t whole_pages(std::int64_t bytes) {
  constexpr std::int64_t kPage = zshard::offload::kAlignment;
  return (bytes + kPage - 1) / kPage * kPage;
}

/// A store of its own, moved as the engine moves sub-groups: a few transfers under way, from and to
/// one registered arena. The memory counts: what fits a cache is faster.
class StoreDisk {
 public:
  /// buffers: transfers under way, of buffer_bytes each.
  StoreDisk(std::int64_t bytes, const zshard::OffloadOptions& options, int buffers,
            std::int64_t buffer_bytes)
      : bytes_(bytes),
        buffer_bytes_(buffer_bytes),
        tickets_(static_cast<std::size_t>(buffers)),
        arena_(zshard::memory::Arena::make(buffers * buffer_bytes)) {
    const std::span<std::byte> memory{arena_->data(), static_cast<std::size_t>(arena_->bytes())};
    bench::fill_random(memory);
    zshard::offload::StoreOptions store;
    store.directories = {directory()};
    store.backend = options.io_backend;
    store.block_bytes = options.io_block_bytes;
    store.depth = options.io_depth;
    store.bytes = bytes;
    store.buffers = memory;
    store.owner = arena_;
    store_ = zshard::offload::Store::make(std::move(store));
    seconds(Move::write, 1);  // waits for the zeros of the store as well
  }

  /// Seconds for so many passes, each complete before the next.
  double seconds(Move move, int passes) {
    return bench::timed([&] {
      for (int pass = 0; pass < passes; ++pass) run(move);
    });
  }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  void run(Move move) {
    std::int64_t at = 0;
    for (std::size_t i = 0; at < bytes_; i = (i + 1) % tickets_.size()) {
      store_->wait(std::exchange(tickets_[i], 0));
      const std::int64_t size = std::min(buffer_bytes_, bytes_ - at);
      const std::span<std::byte> memory{
          arena_->data() + static_cast<std::int64_t>(i) * buffer_bytes_,
          static_cast<std::size_t>(size)};
      tickets_[i] = move == Move::read ? store_->read(at, memory) : store_->write(at, memory);
      at += size;
    }
    for (zshard::offload::Ticket& ticket : tickets_) store_->wait(std::exchange(ticket, 0));
  }

  std::int64_t bytes_;
  std::int64_t buffer_bytes_;
  std::vector<zshard::offload::Ticket> tickets_;
  std::shared_ptr<zshard::memory::Arena> arena_;
  std::unique_ptr<zshard::offload::Store> store_;
};

/// Lines: seconds of reading through the store, by fio; of writing through the store, by fio.
std::vector<std::vector<double>> raw_lines(IoBackendKind backend, const std::string& fio,
                                           std::int64_t bytes, int passes) {
  zshard::OffloadOptions options;
  options.io_backend = backend;
  // As fio does: 1 MiB x 8, and io_uring in no more memory than that. Threads of the posix backend
  // go on at once only if as much again lies ready.
  options.io_block_bytes = kMiB;
  options.io_depth = 8;
  StoreDisk ours(bytes, options, backend == IoBackendKind::posix ? 4 : 2, 4 * kMiB);
  bench::RawDisk theirs(directory(), bytes, fio);
  std::vector<std::vector<double>> lines;
  for (int i = 0; i < bench::repetitions(); ++i) {
    std::vector<double> line;
    for (const Move move : {Move::read, Move::write}) {
      double mine = 0.0;
      double other = 0.0;
      if (i % 2 == 0) {
        mine = ours.seconds(move, passes);
        other = theirs.seconds(move, passes);
      } else {
        other = theirs.seconds(move, passes);
        mine = ours.seconds(move, passes);
      }
      line.insert(line.end(), {mine, other});
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

void add_raw(IoBackendKind backend, const std::string& fio, std::int64_t mib) {
  const std::int64_t bytes = mib * kMiB;
  // Enough that fio's clock, which counts milliseconds, does not matter.
  const std::int64_t total = (bench::quick() ? 512 : 2048) * kMiB;
  const int passes = static_cast<int>(std::max<std::int64_t>(1, total / bytes));
  const auto measured =
      std::make_shared<bench::Measured>([=] { return raw_lines(backend, fio, bytes, passes); });
  const auto moved = static_cast<double>(bytes * passes) * 1e-9;
  for (const std::size_t column : {0, 2}) {
    const auto turn = std::make_shared<std::size_t>(0);
    bench::add(
        {.name = fmt::format("raw/{}/{}/{} MiB", to_string(backend), column == 0 ? "read" : "write",
                             mib),
         .unit = "GB/s",
         .limit = bench::RawDisk::name(fio),
         .target = bench::quick() ? "" : "ratio >= 0.95",
         .peers = "perf.md: DeepSpeed's AIO 1.2-1.8 read, 2.9-4.4 write, where fio with "
                  "huge pages reaches 4.0 and 11 GB/s",
         .measure = [=] {
           const std::vector<double>& line = measured->line((*turn)++);
           return bench::Sample{moved / line[column], moved / line[column + 1], line[column]};
         }});
  }
}

// -- an engine --

/// Transformer blocks without anything between them.
struct Model {
  Model(int blocks, std::int64_t width, DType dtype) {
    const zshard::ParameterOptions options{.dtype = dtype};
    for (int b = 0; b < blocks; ++b) {
      const std::string name = fmt::format("h.{}", b);
      zshard::UnitBuilder unit = spec.unit(name);
      const auto add = [&](const char* what, zshard::Shape shape) {
        unit.parameter(name + what, std::move(shape), options);
      };
      add(".norm1", {2, width});
      add(".qkv", {width, 3 * width});
      add(".qkv_bias", {3 * width});
      add(".out", {width, width});
      add(".out_bias", {width});
      add(".norm2", {2, width});
      add(".up", {width, 4 * width});
      add(".up_bias", {4 * width});
      add(".down", {4 * width, width});
      add(".down_bias", {width});
    }
    for (const zshard::UnitSpec& unit : spec.units()) {
      for (const zshard::ParameterSpec& p : unit.parameters) parameters += p.count();
    }
  }
  zshard::ModelSpec spec;
  std::int64_t parameters = 0;
};

class Training {
 public:
  Training(Model model, const ProcessGroup& group, EngineOptions options)
      : model_(std::move(model)),
        options_(complete(std::move(options))),
        engine_(model_.spec, zshard::AdamW{}, group, options_) {}

  /// Forward and backward without any arithmetic. first: writes gradients, which `overwrite` leaves
  /// where they are for the passes after it.
  void pass(bool first = false) {
    engine_.begin_micro_steps(1);
    engine_.next_micro_step();
    const auto units = static_cast<std::int32_t>(model_.spec.units().size());
    for (std::int32_t u = 0; u < units; ++u) {
      engine_.acquire(zshard::UnitId{u}, Pass::forward);
      engine_.release(zshard::UnitId{u}, Pass::forward);
    }
    for (std::int32_t u = units; u-- > 0;) {
      engine_.acquire(zshard::UnitId{u}, Pass::backward);
      if (first) write_gradients(u);
      engine_.commit(zshard::UnitId{u});
      engine_.release(zshard::UnitId{u}, Pass::backward);
    }
  }
  zshard::StepReport step() { return engine_.step(); }
  [[nodiscard]] std::int64_t parameters() const { return model_.parameters; }
  [[nodiscard]] const EngineOptions& options() const { return engine_.options(); }

  /// Bytes that a step has to read and to write, of one rank. What the step before has left in the
  /// buffers, at the end of the sequence where it turned around, is not read again.
  struct Bytes {
    double read[2] = {0.0, 0.0};  // of steps with even and odd numbers
    double written = 0.0;
  };
  [[nodiscard]] Bytes step_bytes(int world) const {
    const auto blueprint =
        zshard::engine::Blueprint::make(model_.spec, zshard::AdamW{}, world, engine_.options());
    const zshard::engine::TierMap& map = blueprint.tiers;
    Bytes bytes;
    std::vector<double> reads;
    for (const zshard::engine::SubGroup& group : map.groups) {
      if (!group.on_disk()) continue;
      reads.push_back(static_cast<double>(group.state_bytes +
                                          (group.reads_parameter ? group.parameter_bytes : 0)));
      bytes.written += static_cast<double>(group.state_bytes + group.parameter_bytes);
    }
    bytes.read[0] = std::accumulate(reads.begin() + map.buffer_count, reads.end(), 0.0);
    bytes.read[1] = std::accumulate(reads.begin(), reads.end() - map.buffer_count, 0.0);
    return bytes;
  }

 private:
  /// Gathered parameters of three units, so that passes read everything.
  EngineOptions complete(EngineOptions options) const {
    options.gradient_mode = zshard::GradientMode::overwrite;
    zshard::apply_option_environment(options);
    if (options.stage == Stage::parameters && !options.gather_budget) {
      const zshard::UnitSpec& unit = model_.spec.units()[0];
      std::int64_t bytes = kMiB;
      for (const zshard::ParameterSpec& p : unit.parameters) {
        bytes += 3 * p.count() * size_of(p.options.dtype);
      }
      options.gather_budget = bytes;
    }
    return options;
  }

  void write_gradients(std::int32_t unit) {
    const zshard::UnitSpec& spec = model_.spec.units()[static_cast<std::size_t>(unit)];
    for (const zshard::ParameterSpec& p : spec.parameters) {
      void* gradient = engine_.gradient(p.id);
      for (std::int64_t i = 0; i < p.count(); ++i) {
        const float value = static_cast<float>(i % 251 - 125) * 0x1p-10f;
        if (p.options.dtype == DType::f32) {
          static_cast<float*>(gradient)[i] = value;
        } else {
          // Eight bits are exact in bf16.
          static_cast<std::uint16_t*>(gradient)[i] =
              static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
        }
      }
    }
  }

  Model model_;
  EngineOptions options_;
  zshard::Engine engine_;
};

/// What the rows about engines differ in.
struct Case {
  Stage stage = Stage::parameters;
  DType dtype = DType::f32;
  int world = 1;
  bool verify = false;

  [[nodiscard]] Arguments arguments() const {
    return {std::to_string(static_cast<int>(stage)), dtype == DType::f32 ? "f32" : "bf16",
            verify ? "verify" : ""};
  }
  static Case of(const Arguments& arguments, int world) {
    return {.stage = static_cast<Stage>(std::stoi(arguments[0])),
            .dtype = arguments[1] == "f32" ? DType::f32 : DType::bf16,
            .world = world,
            .verify = arguments[2] == "verify"};
  }
  [[nodiscard]] std::string text() const {
    return fmt::format("stage {}/{}/{}", static_cast<int>(stage), to_string(dtype),
                       world == 1 ? "1 rank" : fmt::format("{} threads", world));
  }
  [[nodiscard]] Model model(int blocks) const { return {blocks, width(), dtype}; }
  /// Blocks of a model with 199 M parameters.
  static int blocks() { return bench::quick() ? 6 : 28; }
  static std::int64_t width() { return bench::quick() ? 256 : 768; }
  [[nodiscard]] EngineOptions options(bool on_disk) const {
    EngineOptions options;
    options.stage = stage;
    if (on_disk) {
      options.offload.optimizer = Tier::nvme;
      if (stage == Stage::parameters) options.offload.parameters = Tier::nvme;
      options.offload.nvme_dir = directory();
      options.offload.io_verify = verify;
    }
    return options;
  }
};

/// Lines: seconds of a step; of its bytes on the raw disk; of its kernels with everything in
/// memory; of forward and backward; of their bytes on the raw disk.
void step_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  const Case c = Case::of(arguments, group.size());
  Training training(c.model(Case::blocks()), group, c.options(true));
  // A part of the model tells the kernels' speed.
  Training in_memory(c.model(4), group, c.options(false));
  const double share = 4.0 / Case::blocks();
  std::unique_ptr<StoreDisk> raw;
  if (group.rank() == 0) {
    const EngineOptions& options = training.options();
    raw = std::make_unique<StoreDisk>((bench::quick() ? 64 : 512) * kMiB, options.offload,
                                      options.offload.io_buffers,
                                      whole_pages(options.sub_group_bytes));
  }
  const Training::Bytes bytes = training.step_bytes(group.size());
  for (Training* each : {&training, &in_memory}) {
    for (const bool first : {true, false}) {
      each->pass(first);
      each->step();
    }
  }
  const auto together = [&](auto&& fn) {
    group.barrier();
    const bench::Stopwatch watch;
    fn();
    group.barrier();
    return watch.seconds();
  };
  for (int i = 0; i < bench::repetitions(); ++i) {
    double read = 0.0;
    double write = 0.0;
    const auto measure_raw = [&] {
      if (raw != nullptr) {
        read += raw->seconds(Move::read, 1);
        write += raw->seconds(Move::write, 1);
      }
      group.barrier();
    };
    zshard::StepReport report;
    measure_raw();
    const double pass = together([&] { training.pass(); });
    // The last reductions of the pass run on behind it.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const double step = together([&] { report = training.step(); });
    measure_raw();
    in_memory.pass();
    const double kernels = in_memory.step().update_seconds / share;
    if (raw == nullptr) continue;
    read /= 2.0 * static_cast<double>(raw->bytes());  // seconds a byte
    write /= 2.0 * static_cast<double>(raw->bytes());
    const double to_read = bytes.read[report.step % 2];
    const double disk = group.size() * (to_read * read + bytes.written * write);
    const double passed = static_cast<double>(report.disk_read_bytes) - to_read;
    emit({step, disk, kernels, pass, group.size() * passed * read});
    if (i + 1 < bench::repetitions()) continue;
    fmt::print(
        "  a rank's step: {:.2f} GB read and {:.2f} written, raw {:.2f} and {:.2f} GB/s: {:.0f} "
        "ms; kernels {:.0f} ms; took {:.0f} ms, by its own clocks update {:.0f}, wait {:.0f}, "
        "reads {:.0f}, writes {:.0f} (passes included), raw share {:.2f}\n",
        to_read * 1e-9, bytes.written * 1e-9, 1e-9 / read, 1e-9 / write, disk * 1e3, kernels * 1e3,
        step * 1e3, report.update_seconds * 1e3, report.wait_seconds * 1e3,
        report.read_seconds * 1e3, report.write_seconds * 1e3, report.raw_share);
    fmt::print("  its passes: {:.2f} GB read, {:.0f} ms; bytes written {:.3f} of {:.3f} GB\n",
               passed * 1e-9, pass * 1e3, static_cast<double>(report.disk_written_bytes) * 1e-9,
               bytes.written * 1e-9);
  }
}

/// Lines: seconds of a step with io_verify, without.
void verify_job(const ProcessGroup& group, const Arguments& arguments, const Emit& emit) {
  const Case c = Case::of(arguments, group.size());
  Case without = c;
  without.verify = false;
  Training verified(c.model(Case::blocks() / 4), group, c.options(true));
  Training plain(c.model(Case::blocks() / 4), group, without.options(true));
  for (Training* each : {&verified, &plain}) {
    for (const bool first : {true, false}) {
      each->pass(first);
      each->step();
    }
  }
  for (int i = 0; i < bench::repetitions(); ++i) {
    verified.pass();
    const double ours = bench::timed([&] { verified.step(); });
    plain.pass();
    emit({ours, bench::timed([&] { plain.step(); })});
  }
}

std::shared_ptr<bench::Measured> measure_job(const std::string& job, const Case& c) {
  return std::make_shared<bench::Measured>(
      [=] { return bench::run_team(Ranks::threads, c.world, job, c.arguments()); });
}

void add_step(const Case& c) {
  const auto measured = measure_job("step", c);
  const double millions = static_cast<double>(c.model(Case::blocks()).parameters) * 1e-6;
  const auto step_turn = std::make_shared<std::size_t>(0);
  bench::add(
      {.name = "step/nvme/" + c.text(),
       .unit = "M/s",
       .limit = "M parameters/s: bytes read and written at the store's own speed, or the kernels "
                "with everything in memory, whichever takes longer",
       .target = bench::quick() ? "" : "ratio >= 0.90",
       .peers = "perf.md: DeepSpeed 83 by default, 108 at best (199 M parameters in 2.39 and 1.84 "
                "s; 16 B read, 12 B written a parameter)",
       .measure = [=] {
         const std::vector<double>& line = measured->line((*step_turn)++);
         return bench::Sample{millions / line[0], millions / std::max(line[1], line[2]), line[0]};
       }});
  if (c.stage != Stage::parameters) return;
  const auto pass_turn = std::make_shared<std::size_t>(0);
  // Passes run behind the step's lines: the same repetitions.
  bench::add({.name = "passes/nvme/" + c.text(),
              .unit = "M/s",
              .limit = "M parameters/s: bytes read at the store's own speed",
              .target = "",
              .peers = "",
              .measure = [=] {
                const std::vector<double>& line = measured->line((*pass_turn)++);
                return bench::Sample{millions / line[3], millions / line[4], line[3]};
              }});
}

void add_verify(const Case& c) {
  const auto measured = measure_job("verify", c);
  const double millions = static_cast<double>(c.model(Case::blocks() / 4).parameters) * 1e-6;
  const auto turn = std::make_shared<std::size_t>(0);
  bench::add({.name = "step/nvme, io_verify/" + c.text(),
              .unit = "M/s",
              .limit = "M parameters/s: the same without io_verify",
              .target = "",
              .peers = "",
              .measure = [=] {
                const std::vector<double>& line = measured->line((*turn)++);
                return bench::Sample{millions / line[0], millions / line[1], line[0]};
              }});
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<char*> others;
  for (int i = 0; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--nvme-dir" && i + 1 < argc) {
      directory() = argv[++i];
    } else {
      others.push_back(argv[i]);
    }
  }
  directory() = std::filesystem::absolute(directory()).string();
  bench::add_job("step", step_job);
  bench::add_job("verify", verify_job);
  bench::initialize(static_cast<int>(others.size()), others.data());
  for (const std::int64_t mib : {64, 512, 2048}) {
    if (bench::quick() && mib > 512) continue;
    add_raw(IoBackendKind::io_uring, "io_uring", mib);
    add_raw(IoBackendKind::posix, "libaio", mib);
  }
  add_step({.stage = Stage::parameters});
  add_step({.stage = Stage::optimizer});
  add_step({.stage = Stage::parameters, .world = 2});
  add_step({.stage = Stage::parameters, .dtype = DType::bf16});
  add_verify({.stage = Stage::parameters, .verify = true});
  return bench::run();
}
