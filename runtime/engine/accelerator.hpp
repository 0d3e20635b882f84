// What the CUDA plug-in gives a rank, and the loader that opens it at run time: a program that is
// linked to zshard starts where there is no driver, no libcudart and no libnccl.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "optimizers/device_update.hpp"
#include "runtime/comm/communicator.hpp"
#include "runtime/device/device.hpp"
#include "runtime/kernels/device_kernels.hpp"

namespace zshard::engine {

/// What `zshard info` says about one GPU.
struct GpuFacts {
  int ordinal = 0;
  std::string name;
  std::int64_t memory_bytes = 0;
  int major = 0;  // compute capability
  int minor = 0;
};

/// One process' use of the plug-in. Objects that it makes must go before the process ends; the
/// library stays loaded.
class Accelerator {
 public:
  virtual ~Accelerator() = default;
  /// GPUs that can be used. Throws DeviceError if the driver cannot be asked (none, too old).
  [[nodiscard]] virtual std::vector<GpuFacts> gpus() = 0;
  [[nodiscard]] virtual std::string driver_version() = 0;   // "13.0"; "" none
  [[nodiscard]] virtual std::string runtime_version() = 0;  // "13.0"
  [[nodiscard]] virtual std::string nccl_version() = 0;     // "2.28.9"; "" built without

  /// The GPU for a rank. rank: for messages. Throws DeviceError, UsageError for an ordinal that
  /// does not exist.
  virtual std::unique_ptr<device::Device> open(int ordinal, int rank) = 0;
  virtual std::unique_ptr<kernels::DeviceKernels> make_kernels(device::Device& device) = 0;
  virtual std::unique_ptr<optimizers::DeviceUpdate> make_update(device::Device& device) = 0;
  /// Whether collectives of several communicators start on the device in the order in which the
  /// host issued them. Else two of a rank may wait for each other for ever: it must have only one.
  [[nodiscard]] virtual bool orders_collectives() = 0;
  /// Made by one rank, passed to all.
  virtual comm::CommunicatorId make_id() = 0;
  /// Collective over `world` ranks. Gives up after the deadline. Throws CommError.
  virtual std::unique_ptr<comm::Communicator> make_communicator(device::Device& device,
                                                                const comm::CommunicatorId& id,
                                                                int rank, int world,
                                                                double deadline_seconds) = 0;
};

/// The process' accelerator, opened at the first call. Throws DeviceError that says why there is
/// none: not built, the file is missing, a library that it needs is missing (dlerror's text).
Accelerator& accelerator();

/// For tests: the file to open instead of the libzshard_cuda.so that is found. Only before a call
/// of accelerator() has succeeded: then UsageError for another file.
void set_accelerator_path(const std::string& path);

}  // namespace zshard::engine

/// The plug-in's entry (cuda_plugin.hpp has what else it exports). Never null.
extern "C" zshard::engine::Accelerator* zshard_cuda_accelerator();
