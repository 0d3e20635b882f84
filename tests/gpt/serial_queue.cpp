#include "serial_queue.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>

// The kernels' own text, compiled as C++.
#include "gpt/cuda/compute.cu"

namespace gpt_test {
namespace {

using gpt::gpu::Operand;
using gpt::gpu::Product;

class SerialQueue final : public gpt::gpu::Queue {
 public:
  ~SerialQueue() override {
    EXPECT_TRUE(device_.empty()) << device_.size() << " device allocations were not released";
    EXPECT_TRUE(pinned_.empty()) << "pinned memory was not released";
    for (const auto& [memory, bytes] : device_) std::free(memory);
    for (const auto& [memory, bytes] : pinned_) std::free(memory);
  }
  [[nodiscard]] std::string name() const override { return "serial"; }
  [[nodiscard]] void* stream() const override { return nullptr; }
  [[nodiscard]] std::int64_t own_bytes() const override { return 0; }
  void use() override {}

  void* allocate(std::int64_t bytes) override { return take(device_, bytes); }
  void release(void* memory) noexcept override { give(device_, memory); }
  void* allocate_pinned(std::int64_t bytes) override { return take(pinned_, bytes); }
  void release_pinned(void* memory) noexcept override { give(pinned_, memory); }
  void upload(void* device, const void* pinned, std::int64_t bytes) override {
    EXPECT_TRUE(holds(device_, device, bytes) && holds(pinned_, pinned, bytes));
    std::memcpy(device, pinned, static_cast<std::size_t>(bytes));
  }
  void download(void* pinned, const void* device, std::int64_t bytes) override {
    EXPECT_TRUE(holds(device_, device, bytes) && holds(pinned_, pinned, bytes));
    std::memcpy(pinned, device, static_cast<std::size_t>(bytes));
  }
  void zero(void* device, std::int64_t bytes) override {
    std::memset(device, 0, static_cast<std::size_t>(bytes));
  }
  void mark(int index) override { EXPECT_TRUE(0 <= index && index < kMarks); }
  void wait(int index) override { EXPECT_TRUE(0 <= index && index < kMarks); }

  void multiply(const Product& p) override {
    for (std::int64_t item = 0; item < p.batch; ++item) {
      float* c = p.c + item * p.c_step;
      for (std::int64_t i = 0; i < p.rows; ++i) {
        for (std::int64_t j = 0; j < p.columns; ++j) {
          double sum = 0.0;
          for (std::int64_t k = 0; k < p.inner; ++k) {
            sum += element(p.a, item, i, k, p.bf16) * element(p.b, item, k, j, p.bf16);
          }
          float& out = c[i * p.c_stride + j];
          out = static_cast<float>(p.beta == 0.0f ? sum : sum + static_cast<double>(out));
        }
      }
    }
  }

 private:
  using Memory = std::map<void*, std::int64_t>;

  static void* take(Memory& memory, std::int64_t bytes) {
    void* block = std::aligned_alloc(256, static_cast<std::size_t>((bytes + 255) / 256 * 256));
    if (block == nullptr) throw std::bad_alloc();
    std::memset(block, 0, static_cast<std::size_t>(bytes));
    memory.emplace(block, bytes);
    return block;
  }
  static void give(Memory& memory, void* block) noexcept {
    EXPECT_EQ(memory.erase(block), 1U);
    std::free(block);
  }
  static bool holds(const Memory& memory, const void* at, std::int64_t bytes) {
    for (const auto& [block, size] : memory) {
      const auto offset = static_cast<const std::byte*>(at) - static_cast<std::byte*>(block);
      if (offset >= 0 && offset + bytes <= size) return true;
    }
    return false;
  }
  static double element(const Operand& x, std::int64_t item, std::int64_t row, std::int64_t column,
                        bool bf16) {
    const std::int64_t at =
        item * x.step + (x.transposed ? column * x.stride + row : row * x.stride + column);
    if (!bf16) return static_cast<const float*>(x.data)[at];
    const std::uint32_t bits =
        static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(x.data)[at]) << 16U;
    float value = 0.0f;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  Memory device_;
  Memory pinned_;
};

}  // namespace

std::unique_ptr<gpt::gpu::Queue> make_serial_queue() {
  return std::make_unique<SerialQueue>();
}

std::shared_ptr<gpt::Compute> make_serial_compute(bool bf16) {
  return gpt::gpu::make_gpu_compute(make_serial_queue(), bf16);
}

}  // namespace gpt_test
