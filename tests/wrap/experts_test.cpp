// Mixture of experts. Each rank routes its own tokens, so ranks use different experts, some experts
// get nothing on a rank and one gets nothing anywhere. Every expert is a unit; a rank says with
// skip() what it will not use, because a collective of its own stands in the middle of a
// micro-step.
#include <gtest/gtest.h>

#include "tests/wrap/compare.hpp"
#include "tests/wrap/kernels.hpp"

namespace zshard::wrap {
namespace {

constexpr int kExperts = 5, kRows = 4, kWidth = 6, kInner = 10, kOut = 3;

/// The last expert never gets a token; the one before only in even steps.
int experts_of(int step) {
  return step % 2 == 0 ? kExperts - 1 : kExperts - 2;
}

/// A rank may get no token at all in a micro-step.
int rows_of(int step, int micro, int rank) {
  return step == 1 && micro == 0 && rank == 1 ? 0 : kRows;
}

struct Pointers {
  float* in = nullptr;         // [kWidth, kWidth]
  float* router = nullptr;     // [kExperts, kWidth]
  float* up[kExperts] = {};    // [kInner, kWidth]
  float* down[kExperts] = {};  // [kWidth, kInner]
  float* out = nullptr;        // [kOut, kWidth]
};

/// Sum over the rank's tokens of |y|, and their number: what the ranks tell each other.
struct Load {
  float sum = 0.0f;
  float tokens = 0.0f;
};

class Moe {
 public:
  Pointers w;
  Pointers g;

  void enter(int step, int micro, int rank) {
    rows_ = rows_of(step, micro, rank);
    const auto seed = static_cast<std::uint64_t>((step * 8 + micro) * 8 + rank);
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] = noise(seed, i);
    for (std::size_t i = 0; i < target_.size(); ++i) target_[i] = x_[i] + noise(3, i);
    enabled_ = experts_of(step);
  }
  [[nodiscard]] int rows() const { return rows_; }

  void in_forward() {
    linear_forward(h_.data(), x_.data(), w.in, nullptr, rows_, kWidth, kWidth);
    y_ = h_;
  }

  /// Each token goes to the enabled expert with the largest gate.
  void route() {
    linear_forward(gates_.data(), h_.data(), w.router, nullptr, rows_, kWidth, kExperts);
    for (std::vector<int>& tokens : tokens_) tokens.clear();
    for (int r = 0; r < rows_; ++r) {
      float* gate = &gates_[idx(r * kExperts)];
      float sum = 0.0f;
      for (int e = 0; e < kExperts; ++e) gate[e] = e < enabled_ ? std::exp(3.0f * gate[e]) : 0.0f;
      for (int e = 0; e < kExperts; ++e) sum += gate[e];
      for (int e = 0; e < kExperts; ++e) gate[e] /= sum;
      tokens_[std::max_element(gate, gate + kExperts) - gate].push_back(r);
    }
  }
  [[nodiscard]] bool uses(int e) const { return rows_ > 0 && !tokens_[e].empty(); }

  void expert_forward(int e) {
    const int n = gather(e);
    linear_forward(inner_[e].data(), packed_[e].data(), w.up[e], nullptr, n, kWidth, kInner);
    tanh_forward(inner_[e].data(), inner_[e].data(), n * kInner);
    linear_forward(result_[e].data(), inner_[e].data(), w.down[e], nullptr, n, kInner, kWidth);
    for (int t = 0; t < n; ++t) {
      const int r = tokens_[e][idx(t)];
      for (int i = 0; i < kWidth; ++i)
        y_[idx(r * kWidth + i)] += gates_[idx(r * kExperts + e)] * result_[e][idx(t * kWidth + i)];
    }
  }

  [[nodiscard]] Load load() const {
    Load mine;
    for (int i = 0; i < rows_ * kWidth; ++i) mine.sum += std::fabs(y_[idx(i)]);
    mine.tokens = static_cast<float>(rows_);
    return mine;
  }

  /// The same factor on every rank, from what all of them measured.
  void balance(std::span<const Load> all) {
    Load total;
    for (const Load& load : all) {
      total.sum += load.sum;
      total.tokens += load.tokens;
    }
    factor_ = 1.0f / (0.5f + total.sum / (total.tokens * kWidth));
  }

  float out_forward() {
    for (int i = 0; i < rows_ * kWidth; ++i) z_[idx(i)] = factor_ * y_[idx(i)];
    Tensor prediction(idx(rows_ * kOut));
    linear_forward(prediction.data(), z_.data(), w.out, nullptr, rows_, kWidth, kOut);
    return squared_error(d_out_.data(), prediction.data(), target_.data(), rows_ * kOut);
  }

  void out_backward(GradientMode mode) {
    linear_backward(d_.data(), g.out, nullptr, d_out_.data(), z_.data(), w.out, rows_, kWidth, kOut,
                    mode);
    for (int i = 0; i < rows_ * kWidth; ++i) d_[idx(i)] *= factor_;
    d_h_ = d_;
    std::fill(d_gates_.begin(), d_gates_.end(), 0.0f);
  }

  void expert_backward(int e, GradientMode mode) {
    const int n = gather(e);
    Tensor d_result(idx(n * kWidth)), d_inner(idx(n * kInner)), d_packed(idx(n * kWidth));
    for (int t = 0; t < n; ++t) {
      const int r = tokens_[e][idx(t)];
      for (int i = 0; i < kWidth; ++i) {
        const float d = d_[idx(r * kWidth + i)];
        d_result[idx(t * kWidth + i)] = gates_[idx(r * kExperts + e)] * d;
        d_gates_[idx(r * kExperts + e)] += d * result_[e][idx(t * kWidth + i)];
      }
    }
    linear_backward(d_inner.data(), g.down[e], nullptr, d_result.data(), inner_[e].data(),
                    w.down[e], n, kInner, kWidth, mode);
    tanh_backward(d_inner.data(), d_inner.data(), inner_[e].data(), n * kInner);
    linear_backward(d_packed.data(), g.up[e], nullptr, d_inner.data(), packed_[e].data(), w.up[e],
                    n, kWidth, kInner, mode);
    for (int t = 0; t < n; ++t) {
      for (int i = 0; i < kWidth; ++i)
        d_h_[idx(tokens_[e][idx(t)] * kWidth + i)] += d_packed[idx(t * kWidth + i)];
    }
  }

  void router_backward(GradientMode mode) {
    Tensor d_logits(idx(rows_ * kExperts)), d(idx(rows_ * kWidth));
    for (int r = 0; r < rows_; ++r) {
      float mean = 0.0f;
      for (int e = 0; e < kExperts; ++e)
        mean += gates_[idx(r * kExperts + e)] * d_gates_[idx(r * kExperts + e)];
      for (int e = 0; e < kExperts; ++e) {
        d_logits[idx(r * kExperts + e)] =
            3.0f * gates_[idx(r * kExperts + e)] * (d_gates_[idx(r * kExperts + e)] - mean);
      }
    }
    linear_backward(d.data(), g.router, nullptr, d_logits.data(), h_.data(), w.router, rows_,
                    kWidth, kExperts, mode);
    for (std::size_t i = 0; i < d.size(); ++i) d_h_[i] += d[i];
  }

  void in_backward(GradientMode mode) {
    linear_backward(nullptr, g.in, nullptr, d_h_.data(), x_.data(), w.in, rows_, kWidth, kWidth,
                    mode);
  }

 private:
  static std::size_t idx(int i) { return static_cast<std::size_t>(i); }

  /// Packs the expert's tokens; returns their number.
  int gather(int e) {
    const auto n = static_cast<int>(tokens_[e].size());
    for (int t = 0; t < n; ++t)
      std::copy_n(&h_[idx(tokens_[e][idx(t)] * kWidth)], kWidth, &packed_[e][idx(t * kWidth)]);
    return n;
  }

  int rows_ = 0;
  int enabled_ = kExperts;
  float factor_ = 1.0f;
  std::vector<int> tokens_[kExperts];
  Tensor x_ = Tensor(kRows * kWidth), target_ = Tensor(kRows * kOut), h_ = x_, y_ = x_, z_ = x_;
  Tensor gates_ = Tensor(kRows * kExperts), d_gates_ = gates_, d_out_ = target_, d_ = x_, d_h_ = x_;
  std::vector<Tensor> packed_ = std::vector<Tensor>(kExperts, Tensor(kRows* kWidth));
  std::vector<Tensor> result_ = packed_;
  std::vector<Tensor> inner_ = std::vector<Tensor>(kExperts, Tensor(kRows* kInner));
};

std::string expert_name(int e, const char* what) {
  return "expert." + std::to_string(e) + "." + what;
}

struct Registered {
  ModelSpec spec;
  UnitId in, router, out;
  std::vector<UnitId> experts;

  explicit Registered(Moe& moe) {
    UnitBuilder first = spec.unit("in");
    first.parameter("in", {kWidth, kWidth}, &moe.w.in, &moe.g.in);
    in = first.id();
    UnitBuilder gate = spec.unit("router");
    gate.parameter("router", {kExperts, kWidth}, &moe.w.router, &moe.g.router);
    router = gate.id();
    for (int e = 0; e < kExperts; ++e) {
      UnitBuilder expert = spec.unit("expert." + std::to_string(e));
      expert.parameter(expert_name(e, "up"), {kInner, kWidth}, &moe.w.up[e], &moe.g.up[e]);
      expert.parameter(expert_name(e, "down"), {kWidth, kInner}, &moe.w.down[e], &moe.g.down[e]);
      experts.push_back(expert.id());
    }
    UnitBuilder last = spec.unit("out");
    last.parameter("out", {kOut, kWidth}, &moe.w.out, &moe.g.out);
    out = last.id();
  }
  [[nodiscard]] UnitId expert(int e) const { return experts[static_cast<std::size_t>(e)]; }
};

Outcome train_plain(const Setting& setting, bool balanced) {
  std::vector<Moe> ranks(static_cast<std::size_t>(setting.world));
  PlainTrainer trainer(plain_tensors(Registered(ranks[0]).spec), setting.world,
                       setting.options.accumulation, kAdamW);
  Outcome out(setting.world);
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < setting.accumulation; ++micro) {
      std::vector<Load> loads;
      for (int rank = 0; rank < setting.world; ++rank) {
        Moe& moe = ranks[static_cast<std::size_t>(rank)];
        moe.w.in = trainer.value("in");
        moe.w.router = trainer.value("router");
        moe.w.out = trainer.value("out");
        for (int e = 0; e < kExperts; ++e) {
          moe.w.up[e] = trainer.value(expert_name(e, "up"));
          moe.w.down[e] = trainer.value(expert_name(e, "down"));
        }
        moe.enter(step, micro, rank);
        moe.in_forward();
        moe.route();
        for (int e = 0; e < kExperts; ++e) {
          if (moe.uses(e)) moe.expert_forward(e);
        }
        loads.push_back(moe.load());
      }
      trainer.micro_step([&](int rank) {
        Moe& moe = ranks[static_cast<std::size_t>(rank)];
        if (balanced) moe.balance(loads);
        if (moe.rows() == 0) return;
        const GradientMode mode = GradientMode::accumulate;
        out.add_loss(rank, moe.out_forward());
        moe.g.out = trainer.gradient("out");
        moe.out_backward(mode);
        for (int e = kExperts; e-- > 0;) {
          if (!moe.uses(e)) continue;
          moe.g.up[e] = trainer.gradient(expert_name(e, "up"));
          moe.g.down[e] = trainer.gradient(expert_name(e, "down"));
          moe.expert_backward(e, mode);
        }
        moe.g.router = trainer.gradient("router");
        moe.router_backward(mode);
        moe.g.in = trainer.gradient("in");
        moe.in_backward(mode);
      });
    }
    out.norms.push_back(trainer.step());
  }
  out.tensors = trainer.tensors();
  return out;
}

/// balanced: with the ranks' own collective in the middle, and skips declared before it. Otherwise
/// a rank just does not use what it does not need.
void train(const ProcessGroup& group, const Setting& setting, Outcome& out, bool balanced) {
  Moe moe;
  const Registered model(moe);
  Engine engine(model.spec, kAdamW, group, setting.options);
  initialize_all(engine);
  for (int step = 0; step < kSteps; ++step) {
    for (const MicroStep micro : engine.micro_steps(setting.accumulation)) {
      moe.enter(step, micro.index(), group.rank());
      if (moe.rows() > 0) {
        {
          const Guard guard = engine.forward(model.in);
          moe.in_forward();
        }
        {
          const Guard guard = engine.forward(model.router);
          moe.route();
        }
      }
      if (balanced) {
        // Peers may still wait for a gather that this rank takes part in only when it is known that
        // it does not use the unit; a rank that blocks has to say so before.
        if (moe.rows() == 0) {
          for (const UnitId unit : {model.in, model.router, model.out}) engine.skip(unit);
        }
        for (int e = 0; e < kExperts; ++e) {
          if (!moe.uses(e)) engine.skip(model.expert(e));
        }
      }
      for (int e = 0; e < kExperts; ++e) {
        if (!moe.uses(e)) continue;
        const Guard guard = engine.forward(model.expert(e));
        moe.expert_forward(e);
      }
      if (balanced) {
        const Load mine = moe.load();
        std::vector<Load> all(static_cast<std::size_t>(group.size()));
        group.all_gather(std::as_bytes(std::span(&mine, 1)),
                         std::as_writable_bytes(std::span(all)));
        moe.balance(all);
      }
      if (moe.rows() == 0) continue;
      {
        const Guard guard = engine.forward(model.out);
        out.add_loss(group.rank(), moe.out_forward());
      }
      {
        Guard guard = engine.backward(model.out);
        moe.out_backward(guard.gradient_mode());
        guard.commit();
      }
      for (int e = kExperts; e-- > 0;) {
        if (!moe.uses(e)) continue;
        Guard guard = engine.backward(model.expert(e));
        moe.expert_backward(e, guard.gradient_mode());
        guard.commit();
      }
      {
        Guard guard = engine.backward(model.router);
        moe.router_backward(guard.gradient_mode());
        guard.commit();
      }
      Guard guard = engine.backward(model.in);
      moe.in_backward(guard.gradient_mode());
      guard.commit();
    }
    out.norms.push_back(engine.step().norm);
  }
  finish(engine, out);
}

TEST(Experts, SkippedExpertsAndACollectiveOfTheLoopsOwnGiveThePlainLoopsBits) {
  Moe moe;
  expect_equal(
      Registered(moe).spec, [](const Setting& setting) { return train_plain(setting, true); },
      [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
        train(group, setting, out, true);
      });
}

TEST(Experts, UnusedExpertsThatAreNotDeclaredGiveThePlainLoopsBits) {
  Moe moe;
  expect_equal(
      Registered(moe).spec, [](const Setting& setting) { return train_plain(setting, false); },
      [](const ProcessGroup& group, const Setting& setting, Outcome& out) {
        train(group, setting, out, false);
      });
}

/// The routing is worth its tests: in one step ranks use different experts.
TEST(Experts, RanksRouteDifferently) {
  std::vector<Moe> ranks(2);
  PlainTrainer values(plain_tensors(Registered(ranks[0]).spec), 2, Accumulation::reduced, kAdamW);
  int different = 0, used_by_none = 0;
  for (int rank = 0; rank < 2; ++rank) {
    Moe& moe = ranks[static_cast<std::size_t>(rank)];
    moe.w.in = values.value("in");
    moe.w.router = values.value("router");
    moe.enter(0, 0, rank);
    moe.in_forward();
    moe.route();
  }
  for (int e = 0; e < kExperts; ++e) {
    different += ranks[0].uses(e) != ranks[1].uses(e) ? 1 : 0;
    used_by_none += !ranks[0].uses(e) && !ranks[1].uses(e) ? 1 : 0;
  }
  EXPECT_GE(different, 1);
  EXPECT_GE(used_by_none, 1);
}

/// Why skips are declared: a rank that blocks in its own collective and has not said what it leaves
/// out keeps its peers waiting, until the deadline names it.
TEST(Experts, ACollectiveBehindUndeclaredSkipsEndsAtTheDeadline) {
  Setting setting{2, 1,
                  options_of(Stage::parameters, GradientMode::accumulate, Accumulation::reduced)};
  setting.options.deadline_seconds = 0.5;
  const auto loop = [](const ProcessGroup& group, const Setting& s, Outcome&) {
    Moe moe;
    const Registered model(moe);
    Engine engine(model.spec, kAdamW, group, s.options);
    for ([[maybe_unused]] const MicroStep micro : engine.micro_steps(1)) {
      if (group.rank() == 1) const Guard guard = engine.forward(model.expert(0));
      group.barrier();
    }
    engine.step();
  };
  EXPECT_THROW(run(setting, loop), CommError);
}

/// No update, no weight decay, no state for an expert that no rank used.
TEST(Experts, AnExpertWithoutTokensKeepsItsBytes) {
  for (int stage = 0; stage < 4; ++stage) {
    const Setting setting{
        3, 2,
        options_of(static_cast<Stage>(stage), GradientMode::accumulate, Accumulation::reduced)};
    const Outcome got = run(setting, [](const ProcessGroup& group, const Setting& s, Outcome& out) {
      train(group, s, out, true);
    });
    for (const char* what : {"up", "down"}) {
      const std::string idle = expert_name(kExperts - 1, what);
      const Tensor& values = got.tensors.at(idle);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(values[i], initial(idle, static_cast<std::int64_t>(i))) << idle << " " << i;
      for (const char* slot : {"/exp_avg", "/exp_avg_sq"}) {
        const Tensor& state = got.tensors.at(idle + slot);
        EXPECT_EQ(state, Tensor(state.size(), 0.0f)) << idle << slot;
      }
    }
    EXPECT_NE(got.tensors.at("router")[0], initial("router", 0));
  }
}

}  // namespace
}  // namespace zshard::wrap
