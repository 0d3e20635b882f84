// The one helper through which every result of NCCL goes. Of the plug-in's sources only.
#pragma once

#include <nccl.h>

#include <string>

namespace zshard::comm {

/// What failed, NCCL's name of the error, its own account of it, GPU, rank, file and line.
/// comm: null where there is none yet.
std::string nccl_error(ncclResult_t code, ncclComm_t comm, const char* call, const char* file,
                       int line);

/// Throws CommError with nccl_error(), unless the call has done its work or goes on with it.
void check_nccl(ncclResult_t code, const char* call, const char* file, int line);

/// "2.28.9", of the library that is loaded.
std::string nccl_version();
/// NCCL_VERSION_CODE of the library that is loaded.
int nccl_version_code();

}  // namespace zshard::comm

#define ZSHARD_NCCL(expression) \
  ::zshard::comm::check_nccl((expression), #expression, __FILE__, __LINE__)
