// Finds and opens the CUDA plug-in.
#include "runtime/engine/accelerator.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <system_error>

#include "runtime/base/build_config.hpp"
#include "runtime/base/log.hpp"
#include "runtime/engine/cuda_plugin.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {

namespace {

struct Loader {
  std::mutex mutex;
  std::string path;  // of set_accelerator_path
  Accelerator* accelerator = nullptr;
  std::string failure;
};

// Never destroyed: the plug-in stays loaded.
Loader& loader() {
  static Loader& instance = *new Loader;
  return instance;
}

std::vector<std::string> places() {
  std::vector<std::string> result;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const std::filesystem::path directory = program.parent_path();
    result.push_back((directory / kPluginFile).string());
    result.push_back((directory.parent_path() / "lib" / kPluginFile).string());
  }
  for (const char* directory : {ZSHARD_BUILD_LIBRARY_DIR, ZSHARD_INSTALL_LIBRARY_DIR}) {
    const std::string path = (std::filesystem::path(directory) / kPluginFile).string();
    if (std::find(result.begin(), result.end(), path) == result.end()) result.push_back(path);
  }
  return result;
}

std::string last_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown reason" : text;
}

void* open_library(const std::string& path) {
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

template <class Function>
Function function_of(void* library, const std::string& path, const char* name) {
  auto result = reinterpret_cast<Function>(dlsym(library, name));
  if (result != nullptr) return result;
  throw DeviceError(path + " is no CUDA plug-in of this version of zshard: it lacks " + name);
}

/// The library, and where it was found. The first file that exists is the one that counts: going on
/// behind a damaged one would hide which is in use.
void* find(std::string& path) {
  std::string looked;
  std::vector<std::string> candidates = path.empty() ? places() : std::vector{path};
  for (const std::string& candidate : candidates) {
    if (access(candidate.c_str(), F_OK) != 0) {
      looked += (looked.empty() ? "" : ", ") + candidate;
      continue;
    }
    path = candidate;
    if (void* library = open_library(candidate)) return library;
    throw DeviceError("the CUDA plug-in " + candidate + " cannot be loaded: " + last_error() +
                      ". If a library is missing, install it or name its directory in "
                      "LD_LIBRARY_PATH.");
  }
  if (!path.empty()) throw DeviceError("the CUDA plug-in " + path + " does not exist");
  path = kPluginFile;
  if (void* library = open_library(path)) return library;
  throw DeviceError("the CUDA plug-in is missing: " + last_error() + "; nor is it any of " +
                    looked);
}

Accelerator* open(std::string path) {
  if (path.empty() && ZSHARD_HAS_CUDA == 0) {
    throw DeviceError(
        "this build of zshard has no CUDA: configure it on a machine with the CUDA Toolkit and "
        "ZSHARD_CUDA=ON");
  }
  void* library = find(path);
  const std::string abi = function_of<PluginAbi>(library, path, kPluginAbi)();
  if (abi != ZSHARD_PLUGIN_ABI) {
    throw DeviceError("the CUDA plug-in " + path + " belongs to another build of zshard: it is " +
                      abi +
                      ", the program is " ZSHARD_PLUGIN_ABI ". Build or install both together.");
  }
  function_of<PluginLog>(library, path, kPluginLog)(&base::log_enabled, &base::log_line);
  Accelerator* result = function_of<PluginAccelerator>(library, path, kPluginAccelerator)();
  base::log_info(base::Topic::engine, base::kNoRank, "CUDA plug-in {}", path);
  return result;
}

}  // namespace

Accelerator& accelerator() {
  Loader& state = loader();
  const std::lock_guard lock(state.mutex);
  if (state.accelerator != nullptr) return *state.accelerator;
  if (!state.failure.empty()) throw DeviceError(state.failure);
  try {
    state.accelerator = open(state.path);
  } catch (const DeviceError& error) {
    state.failure = error.what();
    throw;
  }
  return *state.accelerator;
}

void set_accelerator_path(const std::string& path) {
  Loader& state = loader();
  const std::lock_guard lock(state.mutex);
  if (state.accelerator != nullptr) {
    if (path == state.path) return;
    throw UsageError("set_accelerator_path: the plug-in is open already");
  }
  state.path = path;
  state.failure.clear();
}

}  // namespace zshard::engine
