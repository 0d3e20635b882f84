// Control of the simulated device: what tests of the CUDA back end set, inject and read. The
// library libzshard_simulator.so stands in for libcudart and libnccl: it exports those of their
// calls that zshard makes. Ranks are threads of one process, or processes of one machine, or both;
// each usually has its own device. Everything that is set, injected and read here is of the calling
// process alone.
//
// What it simulates
// - A stream is a FIFO worker thread that waits a random while before each task. The default stream
//   is the legacy one: it waits for earlier work of the streams of its device that were created
//   without cudaStreamNonBlocking, and their later work waits for it.
// - A copy reads its source when the task runs. Pageable host memory is staged at the call when it
//   is a source, and blocks the caller until the copy is done when it is a target; pinned memory
//   (cudaHostRegister, cudaMallocHost) is touched later by the stream alone. A host range that is
//   pinned in part, or lies in two registrations, is refused as CUDA does.
// - Device memory cannot be touched by host code: its address is mapped without access. Fresh
//   memory holds 0xFF bytes, a NaN in every floating type.
// - cudaFree waits for the whole device. After a fault every call of that device returns the same
//   error, and queued work of it is dropped.
// - A collective waits on its stream until all ranks of the communicator came to it, then moves
//   data. Collectives of one rank run one after the other in the order in which they were launched,
//   over all communicators, as with NCCL_LAUNCH_ORDER_IMPLICIT: another order on another rank is
//   a deadlock, which ncclCommAbort ends. A reduction adds in ring order, not in rank order. Sends
//   and receives of two ranks match in order. Two ranks on one device are refused as by NCCL 2.28;
//   from version 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 allows them.
// - A communicator made with blocking = 0 launches what was issued at a later
//   ncclCommGetAsyncError (or at most three of them): code that records an event before it was told
//   ncclSuccess misses the collective here always, on a GPU sometimes.
// - Between processes a unique id names a memfd of the process that made it, where all meet
//   (clique_block.hpp); nothing has a name that could be left behind. Data is read from the peer's
//   device memory, which is mapped for that; pinned host memory is not shown to other processes. A
//   process' devices are numbers of one machine: two ranks on device 0 share a GPU. Only
//   CUDA_VISIBLE_DEVICES=3,1 gives a process other ones. Ranks of different versions of NCCL are
//   refused.
//
// How races are found
// Each stream has a vector clock. It takes over the clock of an event that it waits for, and, with
// each operation, what the host knows to be complete. Kernels, copies, fills and collectives
// declare ranges; two accesses of overlapping bytes of which one writes and neither is ordered
// before the other are a race. The verdict is made when the second one is queued, from the order of
// the calls alone, so delays do not change it.
// - What the host knows: a synchronise or a successful query of an event or stream, and cudaFree,
//   teach the calling thread everything that is ordered before it, and likewise all host threads
//   that use the same device: a rank whose threads hand work to each other through locks needs no
//   annotation. Whether those hand-overs are right is the thread sanitizer's business. A call that
//   queues work orders nothing by itself: not even two calls of one thread on two streams.
// - Between threads of different devices nothing is known, unless they say so: release(token) in
//   one, acquire(token) in the other.
// - Events: record captures the stream's position and clock; later records do not change waits that
//   were queued before. A wait for an event that was never recorded orders nothing. If one thread
//   records and another waits, the order in which both calls came in counts; ordering them is the
//   host code's duty.
// - A collective orders nothing between ranks: what rank 0 did before it is not known to rank 1's
//   stream afterwards, in the same process or in another. (No rule of zshard relies on it, and
//   which collectives will have met cannot be known when an operation is queued.) So clocks have
//   nothing to say between processes, and what a peer does to memory that a collective still reads
//   is not checked beyond the peer's own ranges. Nor do two collectives of one rank on two streams
//   order each other.
// - Host memory is checked where it is pinned and a stream touches it. Host code that does so can
//   say it with touch().
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/simulator/launch.hpp"

namespace simulator {

// -- set up; the values hold until the next reset() --

/// Ends everything that hangs, aborts communicators, waits for all streams, frees whatever is left,
/// forgets races, faults, failures, counts and names, and restores the defaults. Handles made
/// before it are invalid. For the start of a test; no other thread may be in a call.
void reset();

/// Number of devices (default 8, at most 16). Only while nothing was made on the devices.
void set_devices(int count);
/// Bytes of each device (default 1 GiB, at most 4 GiB); memory is taken as it is touched.
void set_device_memory(std::int64_t bytes);
/// Whether device memory can be touched at its own address too (default false), for kernels that
/// declare nothing and do not know reach(). Host code that touches it is not found then.
void set_open_memory(bool on);
/// Mean of the random delay before a task (default 5 us; 0 none). Each stream draws from its own
/// generator, seeded by `seed` and the order in which the streams were made; also for the streams
/// that exist.
void set_delays(double mean_microseconds, std::uint64_t seed);
/// As CUDA counts: 13000 is 13.0. 0: no driver. Defaults: those of the headers.
void set_driver_version(int version);
void set_nccl_version(int version);
/// Whether collectives of one rank run in launch order over all communicators (default true), or
/// only over each one; for communicators that are made from now on.
void set_serial_collectives(bool on);
/// Whether ncclCommGetAsyncError says ncclRemoteError once the process of a peer has ended without
/// having destroyed its communicator (default true). NCCL often does not notice: then collectives
/// hang.
void set_remote_errors(bool on);

// -- races --

/// One of the two operations of a race.
struct Access {
  std::string operation;   // kernel or call: "adamw", "cudaMemcpyAsync", "ncclAllGather"
  std::string stream;      // as named, or "stream 3"; "host" for a call of the host
  std::uint64_t position;  // what it is in its stream, from 1; waits count as well
  bool write;
};

struct Race {
  Access first;  // in the order of the calls
  Access second;
  const void* memory;  // the bytes that both touch: the first run of them
  std::int64_t bytes;
  int device;  // -1: pinned host memory
  /// How often the same operations of the same streams met again unordered.
  std::int64_t count;
  [[nodiscard]] std::string text() const;
};

/// All that were found since reset(), in the order of detection, each pair of (operation, stream)
/// names once.
std::vector<Race> races();

/// What a kernel or a call did that a GPU would not survive, in words: bad ranges, dead handles, a
/// CUDA call from a host function.
std::vector<std::string> faults();

/// The calling thread tells others what it knows to be complete. token: any address.
void release(const void* token);
/// ... and learns what was released with the token before.
void acquire(const void* token);
/// The calling thread reads or writes host memory now: a race if a stream may still touch it.
void touch(const char* name, const void* memory, std::int64_t bytes, bool write);

/// From now on clocks leave out waits of a stream with this name for events recorded on streams of
/// that name (null: any stream), as if the call were not there. The streams still wait, so that
/// nothing else goes wrong. For tests that prove that a removed wait is found.
void ignore_waits(const char* waiting, const char* recorded);
/// How many waits were ignored since reset().
std::int64_t ignored_waits();

// -- failures --

enum class How {
  refused,  // the call returns the code and does nothing
  fault,    // the operation is queued; when the stream comes to it, a kernel, copy or fill leaves
            // the device with the sticky error `code` (a lost device is
            // cudaErrorDevicesUnavailable); a collective gives its communicator the asynchronous
            // error `code` on this rank and ncclRemoteError on the others
  hang,     // the operation is queued and never completes: until ncclCommAbort, a fault of the
            // device, or reset()
};

struct Failure {
  std::string call;  // "cudaMalloc", "ncclAllGather", or the name of a kernel
  int after = 0;     // so many matching calls succeed first, counted from fail()
  int code = 0;      // cudaError_t, or ncclResult_t for calls of NCCL
  How how = How::refused;
  int device = -1;  // only calls with this device current; -1 any
  int times = 1;    // how many calls fail then; -1 all
};
void fail(const Failure& failure);
/// A sticky error of the device, now.
void fault(int device, cudaError_t code);

// -- counts and leaks --

/// Calls of a CUDA or NCCL function, or launches of a kernel, by name, since reset(). "pageable
/// copy": copies of any call between device and host memory that is not pinned, which block.
std::int64_t calls(const std::string& name);

/// What exists: streams, events, allocations, registrations, communicators, one a line, with the
/// place of the call that made it as far as the symbol tables tell.
std::vector<std::string> leaks();

/// Bytes allocated on the device now, and the most since reset().
std::int64_t allocated_bytes(int device);
std::int64_t peak_bytes(int device);

}  // namespace simulator
