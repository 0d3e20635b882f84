// Ranks on the simulated device, as processes: what their machine is, and whether they left it as
// they found it.
#pragma once

#if defined(ZSHARD_TEST_SIMULATED)

#include <string>
#include <vector>

#include "tests/device_engine/cuda_lab.hpp"
#include "tests/process/scenario.hpp"

namespace zshard::lab {

/// Of a rank's process, before it touches a device. a: "devices", "nccl" (version), "remote_errors"
/// (whether NCCL notices that a peer has died), "delay" (microseconds).
inline void set_up_machine(const Json& a) {
  simulator::reset();
  simulator::set_device_memory(std::int64_t{64} << 20);
  if (a.contains("devices")) simulator::set_devices(a["devices"]);
  if (a.contains("nccl")) simulator::set_nccl_version(a["nccl"]);
  if (a.contains("delay")) simulator::set_delays(a["delay"], 1);
  simulator::set_remote_errors(a.value("remote_errors", true));
  open_plugin();
}

/// Throws if a wait was missing, a call was wrong or something was not given back.
inline void expect_clean_machine() {
  std::string text;
  for (const simulator::Race& race : simulator::races()) text += race.text() + "\n";
  for (const std::string& fault : simulator::faults()) text += fault + "\n";
  for (const std::string& leak : simulator::leaks()) text += leak + "\n";
  if (!text.empty()) throw std::runtime_error("the simulator reports: " + text);
}

}  // namespace zshard::lab

#endif
