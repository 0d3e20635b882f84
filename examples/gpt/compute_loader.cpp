#include "compute_loader.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "cuda/plugin.hpp"
#include "host_compute.hpp"

namespace gpt {
namespace {

constexpr const char* kLibrary = "libgpt_cuda.so";

[[noreturn]] void refuse(const std::string& reason) {
  throw ConfigError("--device cuda: " + reason + "; --device host needs no GPU");
}

// The library stays open until the process ends: its GPU context could not be left in order.
void* open_library() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path beside = program.parent_path() / kLibrary;
  if (error || !std::filesystem::exists(beside, error)) {
    refuse(beside.string() + " is missing: this gpt was built without CUDA or cuBLAS");
  }
  void* library = ::dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    refuse(std::string("cannot open the library: ") + ::dlerror());
  }
  return library;
}

template <class Function>
Function* function(const char* name) {
  static void* const library = open_library();
  void* address = ::dlsym(library, name);
  if (address == nullptr) {
    refuse(std::string(kLibrary) + " has no " + name + ": it is of another build");
  }
  return reinterpret_cast<Function*>(address);
}

}  // namespace

std::shared_ptr<Compute> make_compute(const Config& config, const zshard::ProcessGroup& group) {
  if (config.engine.device == zshard::DeviceKind::host) return make_host_compute();
  Compute* compute = function<decltype(gpt_cuda_compute)>("gpt_cuda_compute")(
      config.engine.device_index, group.local_rank(), config.dtype == zshard::DType::bf16);
  return std::shared_ptr<Compute>(compute);
}

GpuFacts gpu_facts(const Config& config, int local_rank) {
  GpuFacts facts;
  try {
    char name[256] = {};
    function<decltype(gpt_cuda_facts)>("gpt_cuda_facts")(
        config.engine.device_index, local_rank, name, static_cast<int>(sizeof name), &facts.gpus,
        &facts.free_bytes, &facts.total_bytes);
    facts.name = name;
  } catch (const zshard::DeviceError& error) {
    refuse(error.what());
  }
  return facts;
}

}  // namespace gpt
