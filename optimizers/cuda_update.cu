// Each kernel does what the rule's pass on the host does; the update of an element is the same
// source.
#include "optimizers/cuda_update.hpp"

#include "optimizers/adam_update.hpp"
#include "optimizers/sgd_update.hpp"
#include "runtime/kernels/launch.cuh"
#include "zshard/error.hpp"

namespace zshard::optimizers {
namespace {

using kernels::kPack;
using kernels::launch_packs;
using kernels::load_pack;
using kernels::store_pack;
using kernels::Touched;

/// Adam and AdamW. Element: the update of one element.
template <class Element>
struct Adaptive {
  float* parameter;
  float* exp_avg;
  float* exp_avg_sq;
  const float* gradient;
  Element element;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(parameter);
    visit(exp_avg);
    visit(exp_avg_sq);
    visit(gradient);
  }

  template <int n>
  ZSHARD_INLINE void run(std::int64_t i) const {
    auto p = load_pack<n>(parameter + i);
    auto m = load_pack<n>(exp_avg + i);
    auto v = load_pack<n>(exp_avg_sq + i);
    const auto g = load_pack<n>(gradient + i);
    for (int k = 0; k < n; ++k) {
      p.value[k] = element(p.value[k], g.value[k], m.value[k], v.value[k]);
    }
    store_pack(parameter + i, p);
    store_pack(exp_avg + i, m);
    store_pack(exp_avg_sq + i, v);
  }
};

template <bool decays>
struct PlainSgd {
  float* parameter;
  const float* gradient;
  SgdElement<Momentum::none, decays> element;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(parameter);
    visit(gradient);
  }

  template <int n>
  ZSHARD_INLINE void run(std::int64_t i) const {
    auto p = load_pack<n>(parameter + i);
    const auto g = load_pack<n>(gradient + i);
    float none = 0.0f;
    for (int k = 0; k < n; ++k) p.value[k] = element(p.value[k], g.value[k], none);
    store_pack(parameter + i, p);
  }
};

template <Momentum kind, bool decays>
struct BufferedSgd {
  float* parameter;
  float* buffer;
  const float* gradient;
  SgdElement<kind, decays> element;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(parameter);
    visit(buffer);
    visit(gradient);
  }

  template <int n>
  ZSHARD_INLINE void run(std::int64_t i) const {
    auto p = load_pack<n>(parameter + i);
    auto b = load_pack<n>(buffer + i);
    const auto g = load_pack<n>(gradient + i);
    for (int k = 0; k < n; ++k) p.value[k] = element(p.value[k], g.value[k], b.value[k]);
    store_pack(parameter + i, p);
    store_pack(buffer + i, b);
  }
};

/// The passes of one call.
class Launches {
 public:
  Launches(const Elements& elements, const Constants& constants, device::NativeStream stream)
      : elements_(elements),
        constants_(constants),
        stream_(static_cast<cudaStream_t>(stream.handle)),
        parameter_(touched(elements.parameter)),
        gradient_(touched(elements.gradient)) {}

  void run(DevicePass pass) const {
    switch (pass) {
      case DevicePass::adam:
        if (constants_.value[kDecay] != 0.0f) {
          adaptive<AdamElement<true>>("adam");
        } else {
          adaptive<AdamElement<false>>("adam");
        }
        break;
      case DevicePass::adamw:
        adaptive<AdamWElement>("adamw");
        break;
      case DevicePass::sgd:
        if (constants_.value[kSgdDecay] != 0.0f) {
          plain_sgd<true>();
        } else {
          plain_sgd<false>();
        }
        break;
      case DevicePass::sgd_heavy_ball:
        buffered_sgd<Momentum::heavy_ball>();
        break;
      case DevicePass::sgd_nesterov:
        buffered_sgd<Momentum::nesterov>();
        break;
    }
  }

 private:
  [[nodiscard]] Touched touched(const float* memory) const {
    return {memory, elements_.count * size_of(DType::f32)};
  }

  template <class Element>
  void adaptive(const char* name) const {
    float* const exp_avg = elements_.slots[kExpAvg];
    float* const exp_avg_sq = elements_.slots[kExpAvgSq];
    const Adaptive<Element> body{elements_.parameter, exp_avg, exp_avg_sq, elements_.gradient,
                                 Element(constants_, elements_.factor)};
    launch_packs(name, stream_, {parameter_, touched(exp_avg), touched(exp_avg_sq), gradient_},
                 {parameter_, touched(exp_avg), touched(exp_avg_sq)}, elements_.count, body);
  }

  template <bool decays>
  void plain_sgd() const {
    const PlainSgd<decays> body{
        elements_.parameter, elements_.gradient, {constants_, elements_.factor}};
    launch_packs("sgd", stream_, {parameter_, gradient_}, {parameter_}, elements_.count, body);
  }

  template <Momentum kind>
  void buffered_sgd() const {
    if (constants_.value[kSgdDecay] != 0.0f) {
      buffered_sgd<kind, true>();
    } else {
      buffered_sgd<kind, false>();
    }
  }

  template <Momentum kind, bool decays>
  void buffered_sgd() const {
    float* const buffer = elements_.slots[kMomentumBuffer];
    const BufferedSgd<kind, decays> body{
        elements_.parameter, buffer, elements_.gradient, {constants_, elements_.factor}};
    launch_packs("sgd_momentum", stream_, {parameter_, touched(buffer), gradient_},
                 {parameter_, touched(buffer)}, elements_.count, body);
  }

  const Elements& elements_;
  const Constants& constants_;
  cudaStream_t stream_;
  Touched parameter_;
  Touched gradient_;
};

class CudaUpdate final : public DeviceUpdate {
 public:
  void run(const Rule& rule, const Elements& elements, const Constants& constants, std::int64_t,
           device::NativeStream stream) override {
    const std::span<const DevicePass> passes = rule.device_passes();
    if (passes.empty() || passes.size() != rule.passes().size()) {
      throw UsageError(rule.name() + " has no form for devices: keep its state on the host " +
                       "(offload.optimizer = host), where its update then runs.");
    }
    const Launches launches(elements, constants, stream);
    for (const DevicePass pass : passes) launches.run(pass);
  }
};

}  // namespace

std::unique_ptr<DeviceUpdate> make_cuda_update() {
  return std::make_unique<CudaUpdate>();
}

}  // namespace zshard::optimizers
