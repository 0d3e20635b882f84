// Stands in for the calls of cuBLAS that the gpt example makes: products are tasks of a simulated
// stream that declare what they read and write. Sums are in fp64, in the order of the inner index.
#include <cublas_v2.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/simulator/launch.hpp"

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

/// A column-major matrix for each item of a batch.
struct Matrix {
  const void* data;
  bool bf16;
  bool transposed;
  std::int64_t stride;  // elements between columns
  std::int64_t step;    // elements between items

  [[nodiscard]] std::int64_t size() const { return bf16 ? 2 : 4; }
  /// Element (row, column) of op(matrix).
  [[nodiscard]] double at(std::int64_t item, std::int64_t row, std::int64_t column) const {
    const std::int64_t place =
        item * step + (transposed ? row * stride + column : column * stride + row);
    float value = 0.0f;
    if (bf16) {
      const std::uint32_t bits =
          static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(data)[place]) << 16U;
      std::memcpy(&value, &bits, sizeof value);
    } else {
      value = static_cast<const float*>(data)[place];
    }
    return static_cast<double>(value);
  }
  /// What one item's op(matrix), [rows, columns], covers.
  [[nodiscard]] simulator::Range range(std::int64_t item, std::int64_t rows,
                                       std::int64_t columns) const {
    const std::int64_t last =
        transposed ? (rows - 1) * stride + columns : (columns - 1) * stride + rows;
    return {static_cast<const std::byte*>(data) + item * step * size(), last * size()};
  }
  /// Whether its columns hold op(matrix)'s rows, and its address is an element's.
  [[nodiscard]] bool valid(std::int64_t rows, std::int64_t columns) const {
    return stride >= (transposed ? columns : rows) && stride > 0 &&
           reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(size()) == 0;
  }
};

}  // namespace

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t /*handle*/, void* workspace,
                                     std::size_t /*bytes*/) {
  return workspace == nullptr ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t /*handle*/, cublasAtomicsMode_t /*mode*/) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t /*handle*/, cublasMath_t /*mode*/) {
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
      return "CUBLAS_STATUS_INVALID_VALUE";
  }
}
const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "the device failed";
    default:
      return "an argument is invalid";
  }
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa,
                                          cublasOperation_t transb, int m, int n, int k,
                                          const void* alpha, const void* A, cudaDataType Atype,
                                          int lda, long long strideA, const void* B,
                                          cudaDataType Btype, int ldb, long long strideB,
                                          const void* beta, void* C, cudaDataType Ctype, int ldc,
                                          long long strideC, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t /*algorithm*/) {
  const auto known = [](cudaDataType type) { return type == CUDA_R_32F || type == CUDA_R_16BF; };
  if (!known(Atype) || Atype != Btype || Ctype != CUDA_R_32F || compute != CUBLAS_COMPUTE_32F ||
      m < 0 || n < 0 || k < 0 || batch < 0) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Matrix a{A, Atype == CUDA_R_16BF, transa != CUBLAS_OP_N, lda, strideA};
  const Matrix b{B, Btype == CUDA_R_16BF, transb != CUBLAS_OP_N, ldb, strideB};
  const Matrix c{C, false, false, ldc, strideC};
  if (!a.valid(m, k) || !b.valid(k, n) || !c.valid(m, n)) return CUBLAS_STATUS_INVALID_VALUE;
  if (m == 0 || n == 0 || batch == 0) return CUBLAS_STATUS_SUCCESS;
  const double by = static_cast<double>(*static_cast<const float*>(alpha));
  const double keep = static_cast<double>(*static_cast<const float*>(beta));
  simulator::Ranges reads;
  simulator::Ranges writes;
  for (std::int64_t item = 0; item < batch; ++item) {
    reads.push_back(a.range(item, m, k));
    reads.push_back(b.range(item, k, n));
    writes.push_back(c.range(item, m, n));
    if (keep != 0.0) reads.push_back(writes.back());
  }
  simulator::launch("gemm", handle->stream, reads, writes, [=] {
    Matrix x = a;
    Matrix y = b;
    x.data = simulator::reach(x.data);
    y.data = simulator::reach(y.data);
    auto* const out = static_cast<float*>(simulator::reach(C));
    for (std::int64_t item = 0; item < batch; ++item) {
      for (std::int64_t column = 0; column < n; ++column) {
        for (std::int64_t row = 0; row < m; ++row) {
          double sum = 0.0;
          for (std::int64_t i = 0; i < k; ++i) sum += x.at(item, row, i) * y.at(item, i, column);
          float& to = out[item * strideC + column * ldc + row];
          // With beta 0 what is there is not read: it may be a NaN.
          to = static_cast<float>(keep == 0.0 ? by * sum
                                              : by * sum + keep * static_cast<double>(to));
        }
      }
    }
  });
  return cudaPeekAtLastError() == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                              : CUBLAS_STATUS_EXECUTION_FAILED;
}
