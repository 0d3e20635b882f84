// Runs of the lab (tests/engine) on CUDA ranks: the simulated device, or, in the program that
// tests/gpu/run.sh starts, the GPUs of the machine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/engine/accelerator.hpp"
#include "tests/engine/cases.hpp"
#include "tests/engine/lab.hpp"

#if defined(ZSHARD_TEST_SIMULATED)
#include "tests/simulator/simulator.hpp"
#endif

namespace zshard::lab {

inline void cuda_ok(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
  }
}

/// A stream of the rank's own, and copies on it.
class CudaAccess final : public Access {
 public:
  explicit CudaAccess(int ordinal) : ordinal_(ordinal) {
    cuda_ok(cudaSetDevice(ordinal_), "cudaSetDevice");
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
#if defined(ZSHARD_TEST_SIMULATED)
    simulator::name_stream(stream_, "user");
#endif
  }
  ~CudaAccess() override {
    (void)cudaSetDevice(ordinal_);
    (void)cudaStreamDestroy(stream_);
  }
  CudaAccess(const CudaAccess&) = delete;
  CudaAccess& operator=(const CudaAccess&) = delete;

  [[nodiscard]] StreamHandle stream() const override {
    return {stream_};
  }
  void read(void* host, const void* device, std::int64_t bytes) override {
    copy(host, device, bytes);
  }
  void write(void* device, const void* host, std::int64_t bytes) override {
    copy(device, host, bytes);
  }

 private:
  void copy(void* to, const void* from, std::int64_t bytes) {
    cuda_ok(cudaSetDevice(ordinal_), "cudaSetDevice");
    cuda_ok(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_),
            "cudaMemcpyAsync");
    cuda_ok(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  int ordinal_;
  cudaStream_t stream_ = nullptr;
};

inline int gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Once a process: the plug-in that goes with the CUDA runtime that this program is linked to.
inline void open_plugin() {
#if defined(ZSHARD_TEST_SIMULATED)
  static const bool once = [] {
    engine::set_accelerator_path(std::string(ZSHARD_BINARY_DIR) +
                                 "/lib/libzshard_cuda_simulated.so");
    return true;
  }();
  (void)once;
#endif
}

/// Where what can leave the device is, and what updates it.
struct Placement {
  Tier optimizer = Tier::device;
  Tier gradients = Tier::device;
  Tier parameters = Tier::device;
  UpdateOn update_on = UpdateOn::automatic;
  [[nodiscard]] std::string text() const {
    std::string out = "optimizer " + std::string(to_string(optimizer));
    out += ", gradients " + std::string(to_string(gradients));
    out += ", parameters " + std::string(to_string(parameters));
    return out + ", update on " + std::string(to_string(update_on));
  }
};

/// The placement, as far as the stage and the mode have it.
inline Placement served(Placement where, const EngineOptions& o) {
  if (o.stage != Stage::parameters) where.parameters = Tier::device;
  if (o.accumulation == Accumulation::local && where.gradients == Tier::nvme) {
    where.gradients = Tier::host;
  }
  return where;
}

/// Every placement that differs in what is done at this stage and in this mode.
inline std::vector<Placement> placements(Stage stage, Accumulation accumulation) {
  std::vector<Placement> all;
  constexpr Tier kAll[] = {Tier::device, Tier::host, Tier::nvme};
  for (const Tier optimizer : kAll) {
    for (const Tier gradients : kAll) {
      if (gradients == Tier::nvme && accumulation == Accumulation::local) continue;
      for (const Tier parameters : kAll) {
        if (parameters != Tier::device && stage != Stage::parameters) continue;
        for (const UpdateOn on : {UpdateOn::host, UpdateOn::device}) {
          if (optimizer == Tier::device && on == UpdateOn::host) continue;
          all.push_back({optimizer, gradients, parameters, on});
        }
      }
    }
  }
  return all;
}

inline void place(EngineOptions& o, const Placement& where) {
  o.offload.optimizer = where.optimizer;
  o.offload.gradients = where.gradients;
  o.offload.parameters = where.parameters;
  o.offload.update_on = where.update_on;
  o.offload.nvme_dir = nvme_directory();
  if (where.optimizer != Tier::nvme) o.offload.optimizer_nvme_bytes.reset();
}

/// The case on CUDA ranks.
inline void on_cuda(Case& c) {
  open_plugin();
  c.options.device = DeviceKind::cuda;
  c.access = [](int rank) { return std::make_unique<CudaAccess>(rank % gpus()); };
}

}  // namespace zshard::lab
