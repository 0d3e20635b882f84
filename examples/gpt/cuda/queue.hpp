// One GPU's memory, its stream and its matrix products, as the kernels of compute.cu need them. The
// real one is cuda_queue.cpp's; tests put one on the host in its place and run the same kernels
// there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpt/compute.hpp"

namespace gpt::gpu {

/// A row-major matrix, or with `step` elements between them one for each item of a batch.
struct Operand {
  const void* data = nullptr;
  std::int64_t stride = 0;  ///< elements between rows, as it lies in memory
  bool transposed = false;
  std::int64_t step = 0;
};

/// c = a b + beta c, in fp32.
struct Product {
  Operand a;           // [rows, inner]
  Operand b;           // [inner, columns]
  float* c = nullptr;  // [rows, columns]
  std::int64_t c_stride = 0;
  std::int64_t c_step = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t inner = 0;
  std::int64_t batch = 1;
  float beta = 0.0f;
  bool bf16 = false;  ///< a and b are bf16, else fp32
};

/// Work that is queued runs in order. Errors are zshard::DeviceError and zshard::OutOfMemory.
class Queue {
 public:
  virtual ~Queue() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  /// A cudaStream_t.
  [[nodiscard]] virtual void* stream() const = 0;
  /// Device memory that the queue holds itself.
  [[nodiscard]] virtual std::int64_t own_bytes() const = 0;
  /// The calling thread's calls from now on go to this queue's GPU.
  virtual void use() = 0;

  /// Device memory, 256-byte aligned, zeros.
  virtual void* allocate(std::int64_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;
  /// Host memory that copies reach directly.
  virtual void* allocate_pinned(std::int64_t bytes) = 0;
  virtual void release_pinned(void* memory) noexcept = 0;
  /// Between pinned and device memory, queued.
  virtual void upload(void* device, const void* pinned, std::int64_t bytes) = 0;
  virtual void download(void* pinned, const void* device, std::int64_t bytes) = 0;
  virtual void zero(void* device, std::int64_t bytes) = 0;
  /// Mark `index`, 0 to kMarks - 1, stands for all that is queued so far.
  virtual void mark(int index) = 0;
  /// The caller waits until the mark is reached; one that was never set is.
  virtual void wait(int index) = 0;

  /// The same bits for the same sizes and values, whatever ran before.
  virtual void multiply(const Product& product) = 0;

  static constexpr int kMarks = 5;
};

/// bf16: see gpt_cuda_compute.
std::unique_ptr<Compute> make_gpu_compute(std::unique_ptr<Queue> queue, bool bf16);

}  // namespace gpt::gpu
