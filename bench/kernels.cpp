// Element loops of one or two threads, in main memory, against the bandwidth that loops with
// nothing to compute reach beside them.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/common/memory.hpp"
#include "bench/common/row.hpp"
#include "optimizers/rules.hpp"
#include "runtime/kernels/copy.hpp"
#include "runtime/kernels/kernels.hpp"

namespace {

using bench::Floats;
using bench::Row;
using bench::Sample;
using zshard::DType;
using Range = std::function<void(std::int64_t lo, std::int64_t hi)>;

/// Seconds that this thread has run: other programs' turns on its core do not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

/// Seconds of the slowest thread for body(lo, hi) over [0, count), cut into one piece a thread.
double parallel(int threads, std::int64_t count, const Range& body) {
  std::vector<double> seconds(static_cast<std::size_t>(threads));
  const auto run = [&](int t) {
    const auto cut = [&](int at) { return count * at / threads / 1024 * 1024; };
    const double start = cpu_seconds();
    body(cut(t), t + 1 == threads ? count : cut(t + 1));
    seconds[static_cast<std::size_t>(t)] = cpu_seconds() - start;
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  for (std::thread& other : others) other.join();
  return *std::max_element(seconds.begin(), seconds.end());
}

/// The arrays that all rows share, made when the first one runs.
struct Workspace {
  explicit Workspace(std::int64_t count)
      : parameter(count), m(count), v(count), gradient(count), limit(4 * count) {}
  Floats parameter;
  Floats m;
  Floats v;
  Floats gradient;
  Floats limit;  // what limits work on: as many bytes as the largest kernel's arrays
};

Workspace& workspace() {
  static Workspace all(std::int64_t{bench::quick() ? 16 : 24} << 20);
  return all;
}

/// A kernel is limited by what it reads and by what it updates or writes.
enum class Limit { update, read, copy };

std::string describe(Limit limit) {
  switch (limit) {
    case Limit::update:
      return "update in place";
    case Limit::read:
      return "read";
    case Limit::copy:
      return "copy, the faster of memcpy and a loop";
  }
  return "";
}

/// Seconds a byte.
double measure_limit(Limit limit, int threads) {
  const Floats& x = workspace().limit;
  const std::int64_t count = x.count();
  switch (limit) {
    case Limit::update:
      return parallel(threads, count,
                      [&](auto lo, auto hi) { bench::update_in_place(x.data() + lo, hi - lo); }) /
             static_cast<double>(8 * count);
    case Limit::read:
      return parallel(threads, count,
                      [&](auto lo, auto hi) {
                        benchmark::DoNotOptimize(bench::read_all(x.data() + lo, hi - lo));
                      }) /
             static_cast<double>(4 * count);
    case Limit::copy: {
      // Not a multiple of a page away: stores would wait for loads of the same place in a page.
      const std::int64_t half = count / 2;
      const float* from = x.data();
      float* to = x.data() + count - half + 1040 * 16;
      const std::int64_t copied = half - 1040 * 16;
      const double library = parallel(threads, copied, [&](auto lo, auto hi) {
        std::memcpy(to + lo, from + lo, static_cast<std::size_t>(hi - lo) * 4);
      });
      const double loop = parallel(threads, copied, [&](auto lo, auto hi) {
        bench::copy_loop(from + lo, to + lo, hi - lo);
      });
      return std::min(library, loop) / static_cast<double>(8 * copied);
    }
  }
  return 0.0;
}

/// Bytes that a kernel must move for an element, by the bandwidth that bounds them.
struct Bytes {
  double update = 0.0;
  double read = 0.0;
  double copy = 0.0;
  [[nodiscard]] double sum() const { return update + read + copy; }
};

/// Seconds that memory alone takes for the kernel's bytes of an element.
double measure_limits(const Bytes& bytes, int threads) {
  double seconds = 0.0;
  if (bytes.update != 0.0) seconds += bytes.update * measure_limit(Limit::update, threads);
  if (bytes.read != 0.0) seconds += bytes.read * measure_limit(Limit::read, threads);
  if (bytes.copy != 0.0) seconds += bytes.copy * measure_limit(Limit::copy, threads);
  return seconds;
}

std::string describe(const Bytes& bytes) {
  std::string text;
  const auto add = [&](double count, Limit limit) {
    if (count == 0.0) return;
    text += fmt::format("{}{:g} B {}", text.empty() ? "" : " + ", count, describe(limit));
  };
  add(bytes.update, Limit::update);
  add(bytes.read, Limit::read);
  add(bytes.copy, Limit::copy);
  return text;
}

void add_kernel(const std::string& name, const Bytes& bytes, double target, int threads,
                const std::string& peers, Range body) {
  auto turn = std::make_shared<int>(0);
  const auto measure = [=, body = std::move(body)] {
    const std::int64_t count = workspace().parameter.count();
    double kernel = 0.0;
    double limit = 0.0;
    // Each goes first as often as the other.
    for (int half = 0; half < 2; ++half) {
      if (half == *turn % 2) {
        kernel = parallel(threads, count, body);
      } else {
        limit = measure_limits(bytes, threads);
      }
    }
    ++*turn;
    return Sample{bytes.sum() * static_cast<double>(count) / kernel * 1e-9,
                  bytes.sum() / limit * 1e-9, kernel};
  };
  bench::add({.name = fmt::format("kernels/{}/{} thread{}", name, threads, threads == 1 ? "" : "s"),
              .unit = "GB/s",
              .limit = describe(bytes),
              .target = fmt::format("ratio >= {:.2f}", target),
              .peers = peers,
              .measure = measure,
              .repetitions = bench::quick() ? 5 : 21});
}

/// The passes of a rule, as the engine calls them.
Range update(const std::shared_ptr<const zshard::optimizers::Rule>& rule, bool publish) {
  return [=](std::int64_t lo, std::int64_t hi) {
    Workspace& w = workspace();
    const auto constants = rule->constants(rule->defaults(), 10);
    zshard::optimizers::Elements e;
    e.count = hi - lo;
    e.parameter = w.parameter.data() + lo;
    e.slots[0] = w.m.data() + lo;
    e.slots[1] = w.v.data() + lo;
    e.gradient = w.gradient.data() + lo;
    e.factor = 0.5f;
    if (publish) {
      // The 16-bit parameters lie where nothing else is: in the arrays of the limit.
      e.published = reinterpret_cast<std::uint16_t*>(w.limit.data()) + lo;
      e.streams = true;
    }
    for (const zshard::optimizers::Pass pass : rule->passes()) pass(e, constants, 10);
    if (publish) zshard::kernels::finish_streaming();
  };
}

void add_optimizers() {
  const std::string peers =
      "share of in-place bandwidth (perf.md): DeepSpeed 0.85 / 1.08, torch fused 1.06 / 1.12, "
      "with 1 / 2 threads";
  const auto adamw = zshard::optimizers::make_adamw({});
  const auto sgd = zshard::optimizers::make_sgd({.momentum = 0.9});
  for (const int threads : {1, 2}) {
    add_kernel("AdamW f32", {.update = 28}, 0.90, threads, peers, update(adamw, false));
  }
  for (const int threads : {1, 2}) {
    add_kernel("AdamW bf16, f32 master", {.update = 30}, 0.90, threads, peers, update(adamw, true));
  }
  add_kernel("SGD momentum f32", {.update = 20}, 0.90, 1, "", update(sgd, false));
}

void add_sums() {
  add_kernel("accumulate f32", {.update = 8, .read = 4}, 0.85, 1, "", [](auto lo, auto hi) {
    Workspace& w = workspace();
    zshard::kernels::accumulate(w.gradient.data() + lo, DType::f32, w.parameter.data() + lo,
                                hi - lo);
  });
  add_kernel("accumulate bf16", {.update = 8, .read = 2}, 0.85, 1, "", [](auto lo, auto hi) {
    Workspace& w = workspace();
    zshard::kernels::accumulate(reinterpret_cast<std::uint16_t*>(w.gradient.data()) + lo,
                                DType::bf16, w.parameter.data() + lo, hi - lo);
  });
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto size = size_of(dtype);
    add_kernel("reduce_add of 2 " + std::string(to_string(dtype)),
               {.update = 8, .read = static_cast<double>(2 * size)}, 0.85, 1, "",
               [=](auto lo, auto hi) {
                 Workspace& w = workspace();
                 const auto* a = reinterpret_cast<const std::byte*>(w.gradient.data());
                 const auto* b = reinterpret_cast<const std::byte*>(w.m.data());
                 const void* sources[] = {a + lo * size, b + lo * size};
                 zshard::kernels::reduce_add(sources, 2, dtype, dtype, 0, w.parameter.data() + lo,
                                             hi - lo);
               });
  }
  add_kernel("block_squares", {.read = 4}, 0.85, 1, "", [](auto lo, auto hi) {
    static std::vector<double> blocks(
        static_cast<std::size_t>(workspace().gradient.count() / zshard::kernels::kSquareBlock + 1));
    benchmark::DoNotOptimize(
        zshard::kernels::block_squares(workspace().gradient.data() + lo, hi - lo, blocks.data()));
  });
}

void add_casts() {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::string name(to_string(dtype));
    add_kernel("widen " + name, {.copy = 6}, 0.85, 1, "", [=](auto lo, auto hi) {
      Workspace& w = workspace();
      zshard::kernels::widen(reinterpret_cast<std::uint16_t*>(w.v.data()) + lo, dtype,
                             w.m.data() + lo, hi - lo);
    });
    add_kernel("narrow to " + name, {.copy = 6}, 0.85, 1, "", [=](auto lo, auto hi) {
      Workspace& w = workspace();
      zshard::kernels::narrow(w.gradient.data() + lo, dtype,
                              reinterpret_cast<std::uint16_t*>(w.v.data()) + lo, hi - lo);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench::initialize(argc, argv);
  add_optimizers();
  add_sums();
  add_casts();
  return bench::run();
}
