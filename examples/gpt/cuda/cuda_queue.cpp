#include "cuda_queue.hpp"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <string>

#include "cuda_check.hpp"

namespace gpt::gpu {
namespace {

void check_cublas(cublasStatus_t code, const char* call, const char* file, int line) {
  if (code == CUBLAS_STATUS_SUCCESS) return;
  throw_failure(code == CUBLAS_STATUS_ALLOC_FAILED, call, cublasGetStatusString(code),
                cublasGetStatusName(code), file, line);
}

#define GPT_CUBLAS(expression) check_cublas((expression), #expression, __FILE__, __LINE__)

int to_int(std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<int>::max()) {
    throw zshard::DeviceError("a matrix has " + std::to_string(value) +
                              " rows, columns or elements between rows; cuBLAS takes less than "
                              "2^31: use a smaller --batch");
  }
  return static_cast<int>(value);
}

class CudaQueue final : public Queue {
 public:
  explicit CudaQueue(int ordinal) : ordinal_(ordinal) {
    GPT_CUDA(cudaSetDevice(ordinal_));
    cudaDeviceProp properties;
    GPT_CUDA(cudaGetDeviceProperties(&properties, ordinal_));
    name_ = properties.name;
    try {
      GPT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
      for (cudaEvent_t& event : events_) {
        GPT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      }
      workspace_ = allocate(kWorkspaceBytes);
      GPT_CUBLAS(cublasCreate(&blas_));
      GPT_CUBLAS(cublasSetStream(blas_, stream_));
      // A workspace of one's own and one stream: the same results in every run. No TF32, and no
      // atomics.
      GPT_CUBLAS(cublasSetWorkspace(blas_, workspace_, kWorkspaceBytes));
      GPT_CUBLAS(cublasSetAtomicsMode(blas_, CUBLAS_ATOMICS_NOT_ALLOWED));
      GPT_CUBLAS(cublasSetMathMode(
          blas_, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                           CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    } catch (...) {
      close();
      throw;
    }
  }
  ~CudaQueue() override { close(); }
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] void* stream() const override { return stream_; }
  [[nodiscard]] std::int64_t own_bytes() const override { return kWorkspaceBytes; }
  void use() override { GPT_CUDA(cudaSetDevice(ordinal_)); }

  void* allocate(std::int64_t bytes) override {
    void* memory = nullptr;
    use();
    GPT_CUDA(cudaMalloc(&memory, static_cast<std::size_t>(bytes)));
    const cudaError_t zeroed = cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), stream_);
    if (zeroed != cudaSuccess) (void)cudaFree(memory);
    GPT_CUDA(zeroed);
    return memory;
  }
  void release(void* memory) noexcept override { (void)cudaFree(memory); }
  void* allocate_pinned(std::int64_t bytes) override {
    void* memory = nullptr;
    GPT_CUDA(cudaMallocHost(&memory, static_cast<std::size_t>(bytes)));
    return memory;
  }
  void release_pinned(void* memory) noexcept override { (void)cudaFreeHost(memory); }
  void upload(void* device, const void* pinned, std::int64_t bytes) override {
    GPT_CUDA(cudaMemcpyAsync(device, pinned, static_cast<std::size_t>(bytes),
                             cudaMemcpyHostToDevice, stream_));
  }
  void download(void* pinned, const void* device, std::int64_t bytes) override {
    GPT_CUDA(cudaMemcpyAsync(pinned, device, static_cast<std::size_t>(bytes),
                             cudaMemcpyDeviceToHost, stream_));
  }
  void zero(void* device, std::int64_t bytes) override {
    GPT_CUDA(cudaMemsetAsync(device, 0, static_cast<std::size_t>(bytes), stream_));
  }
  void mark(int index) override { GPT_CUDA(cudaEventRecord(events_[index], stream_)); }
  void wait(int index) override { GPT_CUDA(cudaEventSynchronize(events_[index])); }

  // cuBLAS counts columns first: row-major c = a b is its c' = b' a', and a row-major matrix is the
  // transposed one to it already.
  void multiply(const Product& p) override {
    const float one = 1.0f;
    const cudaDataType_t type = p.bf16 ? CUDA_R_16BF : CUDA_R_32F;
    GPT_CUBLAS(cublasGemmStridedBatchedEx(
        blas_, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
        p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, to_int(p.columns), to_int(p.rows),
        to_int(p.inner), &one, p.b.data, type, to_int(p.b.stride), p.b.step, p.a.data, type,
        to_int(p.a.stride), p.a.step, &p.beta, p.c, CUDA_R_32F, to_int(p.c_stride), p.c_step,
        to_int(p.batch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

 private:
  static constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;

  void close() noexcept {
    (void)cudaSetDevice(ordinal_);
    if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
    if (blas_ != nullptr) (void)cublasDestroy(blas_);
    if (workspace_ != nullptr) (void)cudaFree(workspace_);
    for (cudaEvent_t event : events_) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  int ordinal_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[kMarks] = {};
  cublasHandle_t blas_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace

std::unique_ptr<Queue> open_cuda_queue(int ordinal) {
  return std::make_unique<CudaQueue>(ordinal);
}

}  // namespace gpt::gpu
