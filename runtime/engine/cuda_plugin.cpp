// The CUDA back end behind engine::Accelerator.
#include "runtime/engine/cuda_plugin.hpp"

#include <cuda_runtime_api.h>

#include <utility>

#include "optimizers/cuda_update.hpp"
#include "runtime/comm/cuda_single_communicator.hpp"
#include "runtime/device/cuda_check.hpp"
#include "runtime/device/cuda_device.hpp"
#include "runtime/device/cuda_log.hpp"
#include "runtime/engine/accelerator.hpp"
#include "runtime/kernels/cuda_kernels.hpp"
#include "zshard/error.hpp"
#if ZSHARD_PLUGIN_NCCL
#include "runtime/comm/nccl_check.hpp"
#include "runtime/comm/nccl_communicator.hpp"
#endif

namespace zshard::engine {

namespace {

device::CudaDevice& cuda_device(device::Device& device) {
  auto* result = dynamic_cast<device::CudaDevice*>(&device);
  if (result == nullptr) throw UsageError("Accelerator: the device is another accelerator's");
  return *result;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// The kernels of a device, from whatever thread: a launch goes to the thread's current device.
class BoundKernels final : public kernels::DeviceKernels {
 public:
  explicit BoundKernels(device::CudaDevice& device) : device_(device) {
    device_.make_current();
    kernels_ = kernels::make_cuda_kernels();
  }
  void convert(const void* src, DType from, void* dst, DType to, std::int64_t count,
               device::NativeStream stream) override {
    device_.make_current();
    kernels_->convert(src, from, dst, to, count, stream);
  }
  void reduce_add(const void* sources, std::int64_t stride, int ranks, DType dtype, int group,
                  float* acc, std::int64_t count, bool from_zero,
                  device::NativeStream stream) override {
    device_.make_current();
    kernels_->reduce_add(sources, stride, ranks, dtype, group, acc, count, from_zero, stream);
  }
  void accumulate(const void* gradient, DType dtype, float* buffer, std::int64_t count,
                  device::NativeStream stream) override {
    device_.make_current();
    kernels_->accumulate(gradient, dtype, buffer, count, stream);
  }
  void block_squares(const float* values, std::int64_t count, double* blocks,
                     device::NativeStream stream) override {
    device_.make_current();
    kernels_->block_squares(values, count, blocks, stream);
  }

 private:
  device::CudaDevice& device_;
  std::unique_ptr<kernels::DeviceKernels> kernels_;
};

class BoundUpdate final : public optimizers::DeviceUpdate {
 public:
  explicit BoundUpdate(device::CudaDevice& device) : device_(device) {
    device_.make_current();
    update_ = optimizers::make_cuda_update();
  }
  void run(const optimizers::Rule& rule, const optimizers::Elements& elements,
           const optimizers::Constants& constants, std::int64_t step,
           device::NativeStream stream) override {
    device_.make_current();
    update_->run(rule, elements, constants, step, stream);
  }

 private:
  device::CudaDevice& device_;
  std::unique_ptr<optimizers::DeviceUpdate> update_;
};

class CudaAccelerator final : public Accelerator {
 public:
  CudaAccelerator() {
#if ZSHARD_PLUGIN_NCCL
    comm::prepare_nccl_environment();
#endif
  }

  std::vector<GpuFacts> gpus() override {
    std::vector<GpuFacts> result;
    const int count = count_gpus();
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      cudaDeviceProp properties{};
      ZSHARD_CUDA(cudaGetDeviceProperties(&properties, ordinal));
      result.push_back({ordinal, properties.name,
                        static_cast<std::int64_t>(properties.totalGlobalMem), properties.major,
                        properties.minor});
    }
    return result;
  }

  std::string driver_version() override {
    const int version = driver();
    return version == 0 ? "" : version_text(version);
  }

  std::string runtime_version() override {
    int version = 0;
    ZSHARD_CUDA(cudaRuntimeGetVersion(&version));
    return version_text(version);
  }

  std::string nccl_version() override {
#if ZSHARD_PLUGIN_NCCL
    return comm::nccl_version();
#else
    return "";
#endif
  }

  std::unique_ptr<device::Device> open(int ordinal, int rank) override {
    const int count = count_gpus();
    if (ordinal < 0 || ordinal >= count) {
      throw UsageError(
          "GPU " + std::to_string(ordinal) + " for rank " + std::to_string(rank) + ": " +
          (count == 0 ? std::string("CUDA shows no GPU to this process (CUDA_VISIBLE_DEVICES may "
                                    "hide them)")
                      : "there are " + std::to_string(count) + ", numbered from 0") +
          ". Start at most one rank for each GPU.");
    }
    return std::make_unique<device::CudaDevice>(ordinal, rank);
  }

  std::unique_ptr<kernels::DeviceKernels> make_kernels(device::Device& device) override {
    return std::make_unique<BoundKernels>(cuda_device(device));
  }

  std::unique_ptr<optimizers::DeviceUpdate> make_update(device::Device& device) override {
    return std::make_unique<BoundUpdate>(cuda_device(device));
  }

  bool orders_collectives() override {
#if ZSHARD_PLUGIN_NCCL
    return comm::nccl_orders_collectives();
#else
    return true;  // nobody to wait for
#endif
  }

  comm::CommunicatorId make_id() override {
#if ZSHARD_PLUGIN_NCCL
    return comm::make_nccl_id();
#else
    return {};    // enough for one rank; make_communicator refuses more
#endif
  }

  std::unique_ptr<comm::Communicator> make_communicator(device::Device& device,
                                                        const comm::CommunicatorId& id, int rank,
                                                        int world,
                                                        double deadline_seconds) override {
    device::CudaDevice& gpu = cuda_device(device);
    if (world == 1 && rank == 0) return std::make_unique<comm::SingleCommunicator>(gpu);
#if ZSHARD_PLUGIN_NCCL
    return std::make_unique<comm::NcclCommunicator>(gpu, id, rank, world, deadline_seconds);
#else
    (void)id;
    (void)deadline_seconds;
    throw CommError("rank " + std::to_string(rank) + " of " + std::to_string(world) +
                    ": this build has CUDA without NCCL, so a GPU rank cannot have peers. Install "
                    "NCCL (nccl.h and libnccl.so), configure and build again.");
#endif
  }

 private:
  /// 0: there is no driver.
  static int driver() {
    int version = 0;
    ZSHARD_CUDA(cudaDriverGetVersion(&version));
    return version;
  }

  static int count_gpus() {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaSuccess) return count;
    (void)cudaGetLastError();
    if (code == cudaErrorNoDevice) return 0;
    if (code == cudaErrorInsufficientDriver) {
      const int version = driver();
      if (version == 0) {
        throw DeviceError(
            "there is no NVIDIA driver on this machine, or the container does not show it "
            "(libcuda.so.1 is missing)");
      }
      throw DeviceError("the NVIDIA driver is too old: it serves CUDA " + version_text(version) +
                        ", and this build uses CUDA " + version_text(CUDART_VERSION) +
                        ". Update the driver, or build with an older CUDA Toolkit.");
    }
    ZSHARD_CUDA_CHECK(code, "cudaGetDeviceCount");
    return 0;
  }
};

}  // namespace

}  // namespace zshard::engine

extern "C" {

const char* zshard_cuda_abi() {
  return ZSHARD_PLUGIN_ABI;
}

void zshard_cuda_log(zshard::engine::PluginLogEnabled enabled,
                     zshard::engine::PluginLogLine line) noexcept {
  zshard::device::set_log(enabled, line);
}

zshard::engine::Accelerator* zshard_cuda_accelerator() {
  // Never destroyed: ranks may end after static objects have gone.
  static zshard::engine::CudaAccelerator& accelerator = *new zshard::engine::CudaAccelerator;
  return &accelerator;
}
}
