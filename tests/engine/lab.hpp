// Trains synthetic models through the public interface, and again through a plain oracle that knows
// no layout, slot, stage or shard: whole tensors by name, sums in the stated order. Gradients
// depend on the gathered parameters, so any misplaced byte shows. Shared by the engine's tests and
// the fuzz.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/kernels/kernels.hpp"
#include "runtime/shard/layout.hpp"
#include "zshard/zshard.hpp"

namespace zshard::lab {

/// A directory for the nvme tier, removed at the end of the process.
inline const std::string& nvme_directory() {
  static const struct Directory {
    std::string path = (std::filesystem::temp_directory_path() / "nvme-of-tests-XXXXXX").string();
    Directory() {
      if (mkdtemp(path.data()) == nullptr) throw Error("cannot make " + path);
    }
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;
    ~Directory() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  } directory;
  return directory.path;
}

/// uses[step][micro-step][rank]: positions of the program that the rank uses.
using Uses = std::vector<std::vector<std::vector<std::set<int>>>>;

/// How a rank's loop reaches the engine's memory where that is a device's: on a stream of its own.
class Access {
 public:
  virtual ~Access() = default;
  [[nodiscard]] virtual StreamHandle stream() const = 0;
  /// Returns when the bytes are there.
  virtual void read(void* host, const void* device, std::int64_t bytes) = 0;
  /// `host` may be changed afterwards.
  virtual void write(void* device, const void* host, std::int64_t bytes) = 0;
};

struct Case {
  ModelSpec spec;
  int world = 1;
  EngineOptions options;
  Optimizer optimizer =
      AdamW{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
  std::optional<double> clip;
  Uses uses;
  int bad_tick = -1;      // micro-step of the run in which rank 0's last elements are infinite
  bool declare = false;   // skips of whole units are declared with skip()
  bool evaluate = false;  // an evaluation range stands before each step
  std::function<std::unique_ptr<Access>(int rank)> access{};  // empty: host memory
};

struct Tensors {
  std::map<std::string, std::vector<float>> values;  // "name" or "name/slot"
  std::vector<double> norms;  // of each step; of skipped ones the offender count, negated
  std::vector<std::string> offenders;
  std::uint64_t forward_hash = 0;  // of what forward uses saw on rank 0
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

/// "" if equal, else the first difference.
inline std::string difference(const Tensors& a, const Tensors& b) {
  std::ostringstream out;
  out.precision(17);
  if (a.values.size() != b.values.size()) out << "other tensors; ";
  for (const auto& [name, x] : a.values) {
    const auto found = b.values.find(name);
    if (found == b.values.end()) {
      out << name << " is missing; ";
    } else if (!same_bits(x, found->second)) {
      std::size_t i = 0;
      while (i < x.size() && i < found->second.size() &&
             std::memcmp(&x[i], &found->second[i], 4) == 0)
        ++i;
      out << name << "[" << i << "]: ";
      if (i < x.size() && i < found->second.size())
        out << x[i] << " and " << found->second[i] << "; ";
    }
  }
  if (a.norms.size() != b.norms.size() ||
      (!a.norms.empty() && std::memcmp(a.norms.data(), b.norms.data(), a.norms.size() * 8) != 0)) {
    out << "norms differ:";
    for (const double x : a.norms) out << " " << x;
    out << " |";
    for (const double x : b.norms) out << " " << x;
  }
  if (a.offenders != b.offenders) out << "; offenders differ";
  if (a.forward_hash != b.forward_hash) out << "; forward passes saw other values";
  return out.str();
}

inline std::vector<float> uniform(std::uint64_t seed, std::uint64_t step, const std::string& name,
                                  std::int64_t count, std::int64_t first = 0) {
  std::vector<float> out(static_cast<std::size_t>(count));
  kernels::uniform(kernels::philox_key(seed, name.data(), name.size()), step,
                   static_cast<std::uint64_t>(first), out.data(), count);
  return out;
}

inline float rounded(float x, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return x;
    case DType::bf16:
      return kernels::bf16_float(kernels::bf16_nearest(x));
    case DType::f16:
      return kernels::f16_float(kernels::f16_nearest(x));
  }
  return x;
}

/// The synthetic backward: 0.5 * parameter + noise of (rank, tick), in the parameter's dtype.
inline std::vector<float> backward(const ParameterSpec& p, const std::vector<float>& values,
                                   int rank, int tick, int bad_tick) {
  std::vector<float> g = uniform(1000 + static_cast<std::uint64_t>(rank),
                                 static_cast<std::uint64_t>(tick), p.name, p.count());
  if (rank == 0 && tick / 64 == bad_tick && !g.empty())
    g.back() = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < g.size(); ++i) {
    g[i] = rounded(values[i] * 0.5f + g[i], p.options.dtype);
  }
  return g;
}

inline std::vector<float> load(const void* from, DType dtype, std::int64_t count) {
  std::vector<float> out(static_cast<std::size_t>(count));
  if (count != 0) kernels::widen(from, dtype, out.data(), count);
  return out;
}

inline void fold(std::uint64_t& hash, const std::vector<float>& values) {
  for (const float x : values) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    hash = (hash ^ bits) * 0x100000001B3ULL;
  }
}

// -- through the engine --

class Loop {
 public:
  Loop(const Case& c, const ProcessGroup& group)
      : case_(c),
        program_(c.spec.program()),
        engine_(c.spec, c.optimizer, group, c.options),
        rank_(group.rank()),
        access_(c.access ? c.access(group.rank()) : nullptr) {
    for (std::size_t u = 0; u < c.spec.units().size(); ++u) {
      engine_.initialize(UnitId{static_cast<std::int32_t>(u)}, [](const ParameterRange& range,
                                                                  std::span<float> out) {
        const auto values = uniform(1, 0, std::string(range.name), range.count, range.first);
        std::copy(values.begin(), values.end(), out.begin());
      });
    }
  }

  Tensors run() {
    int tick = 0;
    for (const auto& step : case_.uses) {
      if (case_.evaluate) evaluation();
      int micro = 0;
      for ([[maybe_unused]] const MicroStep m :
           engine_.micro_steps(static_cast<int>(step.size()))) {
        micro_step(step[static_cast<std::size_t>(micro++)][static_cast<std::size_t>(rank_)],
                   tick++);
      }
      StepOptions how;
      how.clip_norm = case_.clip;
      const StepReport report = engine_.step(how);
      result_.norms.push_back(report.skipped ? -static_cast<double>(report.non_finite)
                                             : report.norm);
      if (report.skipped) result_.offenders.push_back(engine_.describe(*report.first));
    }
    collect();
    return result_;
  }

  Engine& engine() { return engine_; }

 private:
  const UnitSpec& unit(UnitId id) const {
    return case_.spec.units()[static_cast<std::size_t>(id.value)];
  }

  StreamHandle stream() const { return access_ == nullptr ? StreamHandle{} : access_->stream(); }

  std::vector<float> load(const void* from, DType dtype, std::int64_t count) {
    if (access_ == nullptr || count == 0) return lab::load(from, dtype, count);
    std::vector<std::byte> raw(static_cast<std::size_t>(count * size_of(dtype)));
    access_->read(raw.data(), from, count * size_of(dtype));
    return lab::load(raw.data(), dtype, count);
  }

  void store(const std::vector<float>& values, DType dtype, void* target) {
    const auto count = static_cast<std::int64_t>(values.size());
    if (count == 0) return;
    if (access_ == nullptr) {
      kernels::narrow(values.data(), dtype, target, count);
      return;
    }
    std::vector<std::byte> raw(values.size() * static_cast<std::size_t>(size_of(dtype)));
    kernels::narrow(values.data(), dtype, raw.data(), count);
    access_->write(target, raw.data(), count * size_of(dtype));
  }

  void see(const Position& at) {
    for (const ParameterSpec& p : unit(at.unit).parameters) {
      if (!p.options.alias.empty()) continue;
      fold(result_.forward_hash, load(engine_.pointer(p.id), p.options.dtype, p.count()));
    }
  }

  void evaluation() {
    for ([[maybe_unused]] const MicroStep m : engine_.evaluation_passes(2)) {
      for (const Position& at : program_) {
        if (at.pass != Pass::forward || (m.index() == 1 && at.unit.value % 2 == 1)) continue;
        const Guard guard = engine_.forward(at.unit, stream());
        see(at);
      }
    }
  }

  void micro_step(const std::set<int>& used, int tick) {
    std::vector<std::pair<Position, int>> held;
    std::set<int> declared;
    if (case_.declare) declare(used, declared);
    for (const int p : used) {
      const Position& at = program_[static_cast<std::size_t>(p)];
      while (!held.empty() && held.front().second <= p - case_.spec.hold()) {
        engine_.release(held.front().first.unit, held.front().first.pass, stream());
        held.erase(held.begin());
      }
      // A second use of a held unit would be counted on the first one's position: let that go.
      std::erase_if(held, [&](const auto& h) {
        const bool counted = h.first.unit == at.unit &&
                             (at.pass != Pass::backward || h.first.pass == Pass::backward);
        if (counted) engine_.release(h.first.unit, h.first.pass, stream());
        return counted;
      });
      const GradientMode mode = engine_.acquire(at.unit, at.pass, stream());
      held.push_back({at, p});
      if (at.pass != Pass::backward) {
        see(at);
        continue;
      }
      for (const ParameterSpec& q : unit(at.unit).parameters) {
        if (!q.options.alias.empty()) continue;
        void* target = engine_.gradient(q.id);
        if (target == nullptr) continue;  // frozen
        const auto values = load(engine_.pointer(q.id), q.options.dtype, q.count());
        auto g = backward(q, values, rank_, tick * 64 + p, case_.bad_tick);
        if (mode == GradientMode::accumulate) {
          const auto old = load(target, q.options.dtype, q.count());
          for (std::size_t i = 0; i < g.size(); ++i) g[i] = rounded(old[i] + g[i], q.options.dtype);
        }
        store(g, q.options.dtype, target);
      }
      engine_.commit(at.unit, stream());
    }
    for (const auto& [at, p] : held) engine_.release(at.unit, at.pass, stream());
  }

  void declare(const std::set<int>& used, std::set<int>& declared) {
    std::set<int> needed;
    for (const int p : used) needed.insert(program_[static_cast<std::size_t>(p)].unit.value);
    for (const Position& at : program_) {
      if (needed.count(at.unit.value) == 0 && declared.insert(at.unit.value).second)
        engine_.skip(at.unit);
    }
  }

  void collect() {
    std::vector<std::string> slots = case_.optimizer.slots();
    for (const UnitSpec& u : case_.spec.units()) {
      for (const ParameterSpec& p : u.parameters) {
        auto& out = result_.values[p.name];
        out.resize(static_cast<std::size_t>(p.count()));
        engine_.read_parameter(p.name, out);
        if (p.options.frozen || !p.options.alias.empty()) continue;
        std::vector<std::string> names = slots;
        if (p.options.dtype != DType::f32) names.push_back("master");
        for (const std::string& slot : names) {
          auto& state = result_.values[p.name + "/" + slot];
          state.resize(static_cast<std::size_t>(p.count()));
          engine_.read_state(p.name, slot, state);
        }
      }
    }
  }

  const Case& case_;
  std::vector<Position> program_;
  Engine engine_;
  int rank_;
  std::unique_ptr<Access> access_;
  Tensors result_;
};

/// Result of rank 0; throws Error if another rank ended with other bits.
inline Tensors train(const Case& c) {
  std::mutex mutex;
  std::map<int, Tensors> results;
  run_ranks(c.world, [&](const ProcessGroup& group) {
    Tensors mine = Loop(c, group).run();
    const std::lock_guard<std::mutex> lock(mutex);
    results[group.rank()] = std::move(mine);
  });
  for (int r = 1; r < c.world; ++r) {
    Tensors other = results[r];
    other.forward_hash = results[0].forward_hash;  // ranks use other positions
    const std::string d = difference(results[0], other);
    if (!d.empty()) throw Error("rank " + std::to_string(r) + " ended with other bits: " + d);
  }
  return results[0];
}

// -- the oracle --

class Oracle {
 public:
  explicit Oracle(const Case& c)
      : case_(c), program_(c.spec.program()), layout_(shard::Layout::make(c.spec, c.world)) {
    for (const UnitSpec& u : c.spec.units()) {
      for (const ParameterSpec& p : u.parameters) {
        if (!p.options.alias.empty()) continue;
        value_[p.name] = uniform(1, 0, p.name, p.count());
        m_[p.name].assign(static_cast<std::size_t>(p.count()), 0.0f);
        v_[p.name] = m_[p.name];
      }
    }
  }

  Tensors run() {
    int tick = 0;
    for (const auto& step : case_.uses) tick = run_step(step, tick);
    for (const UnitSpec& u : case_.spec.units()) {
      for (const ParameterSpec& p : u.parameters) {
        const std::string& owner = p.options.alias.empty() ? p.name : p.options.alias;
        auto& out = result_.values[p.name];
        for (const float x : value_[owner]) out.push_back(rounded(x, p.options.dtype));
        if (p.options.frozen || !p.options.alias.empty()) continue;
        result_.values[p.name + "/exp_avg"] = m_[p.name];
        result_.values[p.name + "/exp_avg_sq"] = v_[p.name];
        if (p.options.dtype != DType::f32) result_.values[p.name + "/master"] = value_[p.name];
      }
    }
    return result_;
  }

 private:
  using Whole = std::map<std::string, std::vector<float>>;

  float ordered(const std::vector<float>& terms) const {
    const auto chain = [](const float* begin, std::size_t count) {
      float sum = begin[0];
      for (std::size_t i = 1; i < count; ++i) sum = sum + begin[i];
      return sum;
    };
    const std::size_t group = case_.options.reduction_group == 0
                                  ? terms.size()
                                  : static_cast<std::size_t>(case_.options.reduction_group);
    std::vector<float> partial;
    for (std::size_t g = 0; g < terms.size(); g += group) {
      partial.push_back(chain(terms.data() + g, std::min(group, terms.size() - g)));
    }
    return chain(partial.data(), partial.size());
  }

  std::vector<float> seen(const ParameterSpec& p) const {
    std::vector<float> out = value_.at(p.name);
    for (float& x : out) x = rounded(x, p.options.dtype);
    return out;
  }

  int run_step(const std::vector<std::vector<std::set<int>>>& step, int tick) {
    const bool local = case_.options.accumulation == Accumulation::local;
    Whole total;
    std::vector<Whole> buffers(static_cast<std::size_t>(case_.world));
    for (const auto& [name, x] : value_) {
      total[name].assign(x.size(), 0.0f);
      for (Whole& b : buffers) b[name].assign(x.size(), 0.0f);
    }
    std::set<int> touched;
    for (const auto& ranks : step) {
      for (std::size_t u = 0; u < case_.spec.units().size(); ++u) {
        for (const ParameterSpec& p : case_.spec.units()[u].parameters) {
          if (!p.options.alias.empty() || p.options.frozen) continue;
          std::vector<std::vector<float>> terms;
          for (int r = 0; r < case_.world; ++r) {
            std::vector<float> g;
            for (const int at : ranks[static_cast<std::size_t>(r)]) {
              const Position& where = program_[static_cast<std::size_t>(at)];
              if (where.unit.value != static_cast<std::int32_t>(u) || where.pass != Pass::backward)
                continue;
              auto more = backward(p, seen(p), r, tick * 64 + at, case_.bad_tick);
              // Mode accumulate adds the first one to zeros.
              if (g.empty() && case_.options.gradient_mode == GradientMode::accumulate) {
                g.assign(more.size(), 0.0f);
              } else if (g.empty()) {
                g = more;
                touched.insert(static_cast<int>(u));
                continue;
              }
              for (std::size_t i = 0; i < g.size(); ++i)
                g[i] = rounded(g[i] + more[i], p.options.dtype);
              touched.insert(static_cast<int>(u));
            }
            if (g.empty()) g.assign(static_cast<std::size_t>(p.count()), 0.0f);
            auto& buffer = buffers[static_cast<std::size_t>(r)][p.name];
            for (std::size_t i = 0; i < g.size(); ++i) buffer[i] = buffer[i] + g[i];
            if (case_.options.wire) {
              for (float& x : g) x = rounded(x, *case_.options.wire);
            }
            terms.push_back(std::move(g));
          }
          auto& sum = total[p.name];
          for (std::size_t i = 0; i < sum.size(); ++i) {
            std::vector<float> column;
            for (const auto& t : terms) column.push_back(t[i]);
            sum[i] = sum[i] + ordered(column);
          }
        }
      }
      ++tick;
    }
    if (local) {
      for (auto& [name, sum] : total) {
        for (std::size_t i = 0; i < sum.size(); ++i) {
          std::vector<float> column;
          for (const Whole& b : buffers) column.push_back(b.at(name)[i]);
          sum[i] = 0.0f + ordered(column);
        }
      }
    }
    finish_step(total, touched, static_cast<int>(step.size()));
    return tick;
  }

  // Layout order is part of the contract: of the norm's blocks and of the first offender.
  template <class Visit>
  void in_layout_order(Visit&& visit) const {
    for (std::size_t u = 0; u < layout_.units().size(); ++u) {
      for (const shard::Segment& seg : layout_.units()[u].segments) {
        for (const shard::Placed& p : seg.placed) {
          if (seg.trained()) visit(static_cast<int>(u), seg, p, case_.spec.parameter(p.parameter));
        }
      }
    }
  }

  void finish_step(const Whole& total, const std::set<int>& touched, int n) {
    int wrong = 0;
    std::string first;
    in_layout_order(
        [&](int u, const shard::Segment&, const shard::Placed&, const ParameterSpec& p) {
          for (std::size_t i = 0; i < total.at(p.name).size(); ++i) {
            if (std::isfinite(total.at(p.name)[i])) continue;
            if (wrong++ == 0) {
              first = "parameter " + p.name + " (unit " +
                      case_.spec.units()[static_cast<std::size_t>(u)].name + "), element " +
                      std::to_string(i);
            }
          }
        });
    if (wrong != 0) {
      result_.norms.push_back(-wrong);
      result_.offenders.push_back(first);
      return;
    }
    double square = 0.0;
    for (int r = 0; r < case_.world; ++r) {
      double of_rank = 0.0;
      double of_unit = 0.0;
      int unit = 0;
      in_layout_order(
          [&](int u, const shard::Segment& seg, const shard::Placed& p, const ParameterSpec& spec) {
            if (u != unit) {
              of_rank += of_unit;
              of_unit = 0.0;
              unit = u;
            }
            const shard::Range own = seg.owned(p, r);
            for (std::int64_t at = own.lo; at < own.hi; at += 1024) {
              of_unit +=
                  block(total.at(spec.name), at - p.start, std::min(own.hi, at + 1024) - p.start);
            }
          });
      of_rank += of_unit;
      square += of_rank;
    }
    const double unscale = 1.0 / (case_.world * n) / case_.options.loss_scale;
    const double norm = std::sqrt(square) * std::fabs(unscale);
    const double coefficient = case_.clip ? std::min(1.0, *case_.clip / (norm + 1e-6)) : 1.0;
    result_.norms.push_back(norm);
    ++count_;
    for (const int u : touched)
      update(case_.spec.units()[static_cast<std::size_t>(u)], total,
             static_cast<float>(unscale * coefficient));
  }

  static double block(const std::vector<float>& x, std::int64_t lo, std::int64_t hi) {
    double lane[16] = {};
    for (std::int64_t i = lo; i < hi; ++i) {
      const double value = x[static_cast<std::size_t>(i)];
      lane[(i - lo) % 16] += value * value;
    }
    for (int width : {8, 4, 2, 1}) {
      for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    }
    return lane[0];
  }

  void update(const UnitSpec& unit, const Whole& total, float factor) {
    const double lr = 0.01, beta1 = 0.9, beta2 = 0.99;
    for (const ParameterSpec& p : unit.parameters) {
      if (p.options.frozen || !p.options.alias.empty()) continue;
      const double rate_of = lr * p.options.lr_scale;
      const auto b1 = static_cast<float>(beta1), c1 = static_cast<float>(1 - beta1);
      const auto b2 = static_cast<float>(beta2), c2 = static_cast<float>(1 - beta2);
      const auto keep = static_cast<float>(1 - rate_of * (p.options.decay ? 0.1 : 0.0));
      const auto rate = static_cast<float>(rate_of / (1 - std::pow(beta1, count_)));
      const auto root = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, count_)));
      auto& x = value_[p.name];
      for (std::size_t i = 0; i < x.size(); ++i) {
        const float g = total.at(p.name)[i] * factor;
        float& m = m_[p.name][i];
        float& v = v_[p.name][i];
        m = m * b1 + g * c1;
        v = v * b2 + (g * g) * c2;
        x[i] = x[i] * keep;
        x[i] = x[i] - rate * (m / (std::sqrt(v) * root + static_cast<float>(1e-8)));
      }
    }
  }

  const Case& case_;
  std::vector<Position> program_;
  shard::Layout layout_;
  Whole value_;
  Whole m_;
  Whole v_;
  int count_ = 0;
  Tensors result_;
};

/// What training must give, by the rules alone. For the default optimizer of Case.
inline Tensors oracle(const Case& c) {
  return Oracle(c).run();
}

// -- random models --

inline int pick(std::mt19937_64& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}
inline bool chance(std::mt19937_64& random, int percent) {
  return pick(random, 0, 99) < percent;
}

inline ModelSpec random_spec(std::mt19937_64& random) {
  const std::vector<Shape> shapes = {{},        {1},  {7},  {6},    {33},     {0, 4},
                                     {2, 7, 3}, {64}, {65}, {1200}, {40, 40}, {5000}};
  const DType dtypes[] = {DType::f32, DType::f32, DType::bf16, DType::f16};
  ModelSpec spec;
  struct Earlier {
    std::string name;
    Shape shape;
    DType dtype;
  };
  std::vector<Earlier> earlier;
  const int units = pick(random, 1, 4);
  for (int u = 0; u < units; ++u) {
    UnitBuilder unit = spec.unit("u" + std::to_string(u));
    const int parameters = pick(random, 1, 4);
    for (int i = 0; i < parameters; ++i) {
      const std::string name = "u" + std::to_string(u) + ".p" + std::to_string(i);
      ParameterOptions options;
      if (!earlier.empty() && chance(random, 10)) {
        const Earlier& owner = earlier[static_cast<std::size_t>(
            pick(random, 0, static_cast<int>(earlier.size()) - 1))];
        options.alias = owner.name;
        options.dtype = owner.dtype;
        unit.parameter(name, owner.shape, options);
        continue;
      }
      options.dtype = dtypes[pick(random, 0, 3)];
      options.frozen = chance(random, 20);
      options.resident = chance(random, 15);
      options.decay = chance(random, 70);
      options.lr_scale = chance(random, 20) ? 0.5 : 1.0;
      const Shape& shape =
          shapes[static_cast<std::size_t>(pick(random, 0, static_cast<int>(shapes.size()) - 1))];
      unit.parameter(name, shape, options);
      earlier.push_back({name, shape, options.dtype});
    }
  }
  auto program = spec.program();
  const auto half = static_cast<std::ptrdiff_t>(program.size() / 2);
  if (chance(random, 40)) {  // a unit used twice: tied weights
    const UnitId u{pick(random, 0, units - 1)};
    program.insert(program.begin() + half, {{u, Pass::forward}, {u, Pass::backward}});
  } else if (chance(random, 30)) {  // recomputation before each backward position
    std::vector<Position> again(program.begin(), program.begin() + half);
    for (auto at = program.begin() + half; at != program.end(); ++at) {
      again.push_back({at->unit, Pass::recompute});
      again.push_back(*at);
    }
    program = again;
  }
  spec.program(program);
  spec.hold(std::vector<int>{1, 1, 2, 3}[static_cast<std::size_t>(pick(random, 0, 3))]);
  return spec;
}

/// The positions that the engine takes for these uses: the first match at or after the cursor.
inline std::set<int> canonical(const std::vector<Position>& program, const std::set<int>& wanted) {
  std::set<int> taken;
  std::size_t cursor = 0;
  for (const int p : wanted) {
    const Position& use = program[static_cast<std::size_t>(p)];
    // Again where the cursor stands: no other position.
    if (use.pass != Pass::backward && cursor != 0 && program[cursor - 1] == use) continue;
    std::size_t at = cursor;
    while (at < program.size() && !(program[at] == use)) ++at;
    if (at == program.size()) continue;
    taken.insert(static_cast<int>(at));
    cursor = at + 1;
  }
  return taken;
}

inline Uses random_uses(std::mt19937_64& random, const ModelSpec& spec, int world, int steps, int n,
                        int keep) {
  const auto positions = static_cast<int>(spec.program().size());
  Uses uses(static_cast<std::size_t>(steps));
  for (auto& step : uses) {
    step.resize(static_cast<std::size_t>(n));
    for (auto& micro : step) {
      micro.resize(static_cast<std::size_t>(world));
      for (auto& rank : micro) {
        for (int p = 0; p < positions; ++p) {
          if (chance(random, keep)) rank.insert(p);
        }
        rank = canonical(spec.program(), rank);
      }
    }
  }
  return uses;
}

/// Budgets worth testing at stage 3: minimum, two of the largest unit more, everything.
inline std::vector<std::optional<std::int64_t>> budgets(const ModelSpec& spec, int world) {
  const std::int64_t low = minimum_gather_budget(spec, world);
  const std::int64_t all = maximum_gather_budget(spec, world);
  std::int64_t largest = 0;
  const shard::Layout layout = shard::Layout::make(spec, world);
  for (const auto& unit : layout.units()) largest = std::max(largest, unit.gather_bytes);
  const std::set<std::int64_t> set{low, std::min(std::max(all, low), low + 2 * largest),
                                   std::max(all, low)};
  return {set.begin(), set.end()};
}

}  // namespace zshard::lab
