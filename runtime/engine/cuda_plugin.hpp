// What libzshard_cuda.so exports and the loader looks up. Both sides compile this header; the
// string of zshard_cuda_abi() tells them whether they saw the same one.
#pragma once

#include <string_view>

#include "runtime/base/log.hpp"
#include "runtime/engine/accelerator.hpp"

namespace zshard::engine {

using PluginLogEnabled = bool (*)(base::Topic topic, base::LogLevel level) noexcept;
using PluginLogLine = void (*)(base::LogLevel level, base::Topic topic, int rank,
                               std::string_view message) noexcept;

using PluginAbi = const char* (*)();
using PluginLog = void (*)(PluginLogEnabled enabled, PluginLogLine line) noexcept;
using PluginAccelerator = Accelerator* (*)();

inline constexpr const char* kPluginFile = "libzshard_cuda.so";
inline constexpr const char* kPluginAbi = "zshard_cuda_abi";
inline constexpr const char* kPluginLog = "zshard_cuda_log";
inline constexpr const char* kPluginAccelerator = "zshard_cuda_accelerator";

}  // namespace zshard::engine

extern "C" {
/// Version and a hash of the headers that both sides share. Safe to call whatever it says.
const char* zshard_cuda_abi();
/// Where the plug-in's log lines go: to the program's log.
void zshard_cuda_log(zshard::engine::PluginLogEnabled enabled,
                     zshard::engine::PluginLogLine line) noexcept;
}
