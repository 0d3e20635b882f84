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

/// What a CUDA rank serves of a case's options.
inline void on_cuda(Case& c) {
  open_plugin();
  c.options.device = DeviceKind::cuda;
  OffloadOptions& tiers = c.options.offload;
  tiers.gradients = Tier::device;
  if (tiers.parameters != Tier::device && tiers.optimizer == Tier::device) {
    tiers.optimizer = Tier::host;
  }
  c.access = [](int rank) { return std::make_unique<CudaAccess>(rank % gpus()); };
}

}  // namespace zshard::lab
