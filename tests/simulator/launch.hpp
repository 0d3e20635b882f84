// How a build for the simulated device runs a kernel: body is a task of the simulated stream and
// may touch only what is declared. Pointers into device memory are translated to where the
// simulator lets kernels reach it: while a body runs, simulator::reach(p) gives that address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace simulator {

struct Range {
  const void* memory = nullptr;
  std::int64_t bytes = 0;
};
using Ranges = std::vector<Range>;

/// Appends `body` to the stream. Errors are those of a launch: cudaGetLastError() tells. A range
/// that is neither in one live allocation of the stream's device nor in pinned host memory is what
/// an illegal address is on a GPU: the launch succeeds, the body does not run, and the device has a
/// sticky cudaErrorIllegalAddress from there on (simulator::faults() says which range).
void launch(const char* name, cudaStream_t stream, const Ranges& reads, const Ranges& writes,
            std::function<void()> body);

/// Where a body finds device memory; host memory stays where it is. Any thread; a comparison and an
/// addition.
void* reach(const void* memory);
template <class T>
T* reach(T* memory) {
  return static_cast<T*>(reach(static_cast<const void*>(memory)));
}

/// What reports call the stream from now on; null names the default stream of the current device.
/// The text is copied.
void name_stream(cudaStream_t stream, const char* name);

/// While it lives, what the calling thread sees to be complete (queries, synchronisation) orders
/// nothing: neither its own calls nor those of other threads. For watchers, which see more or less
/// as time goes.
class Watching {
 public:
  Watching();
  ~Watching();
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  bool before_;
};

}  // namespace simulator
