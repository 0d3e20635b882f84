#include "runtime/comm/nccl_check.hpp"

#include "runtime/device/cuda_context.hpp"
#include "zshard/error.hpp"

namespace zshard::comm {

namespace {

/// What mends an error whose cause only NCCL's own account names.
const char* remedy(const std::string& text) {
  if (text.find("Duplicate GPU detected") != std::string::npos) {
    return " Start at most one rank for each GPU; NCCL 2.30 and later share one with "
           "NCCL_MULTI_RANK_GPU_ENABLE=1.";
  }
  if (text.find("Mismatched NCCL version") != std::string::npos) {
    return " Every rank must load the same libnccl.so.";
  }
  return "";
}

}  // namespace

std::string nccl_error(ncclResult_t code, ncclComm_t comm, const char* call, const char* file,
                       int line) {
  std::string text = std::string(call) + " failed: " + ncclGetErrorString(code);
  // NCCL's own account is often the only hint: "Duplicate GPU detected", "Connection refused".
  const char* account = ncclGetLastError(comm);
  if (account != nullptr && account[0] != '\0') text += ": " + std::string(account);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const char* mends = remedy(text);
  text += device::place(file, line) + ".";
  return text + mends + " NCCL_DEBUG=WARN makes NCCL say more.";
}

void check_nccl(ncclResult_t code, const char* call, const char* file, int line) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  throw CommError(nccl_error(code, nullptr, call, file, line));
}

int nccl_version_code() {
  int code = 0;
  ZSHARD_NCCL(ncclGetVersion(&code));
  return code;
}

std::string nccl_version() {
  const int code = nccl_version_code();
  return std::to_string(code / 10000) + "." + std::to_string(code % 10000 / 100) + "." +
         std::to_string(code % 100);
}

}  // namespace zshard::comm
