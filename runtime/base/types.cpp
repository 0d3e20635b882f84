#include "zshard/types.hpp"

namespace zshard {

namespace {

// A value that no enumerator has, as a cast or a stray write makes it.
constexpr std::string_view kInvalid = "invalid";

}  // namespace

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
  }
  return kInvalid;
}

std::string_view to_string(Stage stage) {
  switch (stage) {
    case Stage::replicated:
      return "replicated";
    case Stage::optimizer:
      return "optimizer";
    case Stage::gradients:
      return "gradients";
    case Stage::parameters:
      return "parameters";
  }
  return kInvalid;
}

std::string_view to_string(Tier tier) {
  switch (tier) {
    case Tier::device:
      return "device";
    case Tier::host:
      return "host";
    case Tier::nvme:
      return "nvme";
  }
  return kInvalid;
}

std::string_view to_string(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return "forward";
    case Pass::recompute:
      return "recompute";
    case Pass::backward:
      return "backward";
  }
  return kInvalid;
}

std::string_view to_string(GradientMode mode) {
  switch (mode) {
    case GradientMode::overwrite:
      return "overwrite";
    case GradientMode::accumulate:
      return "accumulate";
  }
  return kInvalid;
}

std::string_view to_string(Accumulation accumulation) {
  switch (accumulation) {
    case Accumulation::reduced:
      return "reduced";
    case Accumulation::local:
      return "local";
  }
  return kInvalid;
}

std::string_view to_string(Reduction reduction) {
  switch (reduction) {
    case Reduction::ordered:
      return "ordered";
    case Reduction::native:
      return "native";
  }
  return kInvalid;
}

std::string_view to_string(MasterWeights master) {
  switch (master) {
    case MasterWeights::f32:
      return "f32";
    case MasterWeights::remainder:
      return "remainder";
    case MasterWeights::none:
      return "none";
  }
  return kInvalid;
}

std::string_view to_string(Moments moments) {
  switch (moments) {
    case Moments::f32:
      return "f32";
    case Moments::bf16:
      return "bf16";
    case Moments::q8:
      return "q8";
  }
  return kInvalid;
}

std::string_view to_string(DeviceKind device) {
  switch (device) {
    case DeviceKind::host:
      return "host";
    case DeviceKind::cuda:
      return "cuda";
  }
  return kInvalid;
}

std::string_view to_string(UpdateOn update) {
  switch (update) {
    case UpdateOn::automatic:
      return "auto";
    case UpdateOn::device:
      return "device";
    case UpdateOn::host:
      return "host";
  }
  return kInvalid;
}

std::string_view to_string(IoBackendKind backend) {
  switch (backend) {
    case IoBackendKind::automatic:
      return "auto";
    case IoBackendKind::io_uring:
      return "io_uring";
    case IoBackendKind::posix:
      return "posix";
  }
  return kInvalid;
}

}  // namespace zshard
