// The device's element loops against the host's, bit for bit: every dtype, length and start.
#include "runtime/kernels/kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/device_kernels/lab.hpp"

namespace zshard::kernels {
namespace {

using testing::floats;
using testing::Lab;
using testing::SameBits;
using testing::SameNumber;
using testing::Twin;
using testing::Values;

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr std::int64_t kCounts[] = {0, 1, 2, 3, 15, 16, 17, 1023, 1024, 1025, 100000};

std::string name(DType dtype) {
  return std::string(to_string(dtype));
}

/// Values of a dtype as bytes that are aligned for any of them.
std::vector<std::uint16_t> halves(const std::vector<float>& values, DType dtype) {
  std::vector<std::uint16_t> result(values.size());
  narrow(values.data(), dtype, result.data(), static_cast<std::int64_t>(values.size()));
  return result;
}

/// Elements of a dtype that is known at run time.
class Column {
 public:
  /// offset: elements.
  Column(const std::vector<float>& values, DType dtype, std::int64_t offset)
      : dtype_(dtype),
        wide_(dtype == DType::f32 ? values : std::vector<float>(), offset),
        narrow_(dtype == DType::f32 ? std::vector<std::uint16_t>() : halves(values, dtype),
                offset) {}

  [[nodiscard]] void* host() {
    return dtype_ == DType::f32 ? static_cast<void*>(wide_.host()) : narrow_.host();
  }
  [[nodiscard]] void* device() {
    return dtype_ == DType::f32 ? static_cast<void*>(wide_.device()) : narrow_.device();
  }
  /// Signalling NaNs and all, which narrow() would not leave as they are.
  void set_bits(const std::vector<std::uint16_t>& bits) { narrow_.set(bits); }
  [[nodiscard]] ::testing::AssertionResult agrees() {
    return dtype_ == DType::f32 ? wide_.agrees(SameBits()) : narrow_.agrees(SameBits());
  }

 private:
  DType dtype_;
  Twin<float> wide_;
  Twin<std::uint16_t> narrow_;
};

void convert_on_host(const void* src, DType from, void* dst, DType to, std::int64_t count) {
  std::vector<float> wide(static_cast<std::size_t>(count) + 1);
  widen(src, from, wide.data(), count);
  narrow(wide.data(), to, dst, count);
}

TEST(DeviceKernels, ConvertsAsTheHostDoes) {
  constexpr std::int64_t kStarts[][2] = {{0, 0}, {1, 1}, {3, 7}, {2, 3}};
  Lab& lab = Lab::get();
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const std::int64_t count : kCounts) {
        for (const auto& [start, target_start] : kStarts) {
          SCOPED_TRACE(name(from) + " to " + name(to) + ", " + std::to_string(count) +
                       " elements from " + std::to_string(start) + " to " +
                       std::to_string(target_start));
          Column src(floats(count, 1, Values::any), from, start);
          Column dst(std::vector<float>(static_cast<std::size_t>(count), 7.0f), to, target_start);
          convert_on_host(src.host(), from, dst.host(), to, count);
          lab.kernels().convert(src.device(), from, dst.device(), to, count, lab.stream());
          ASSERT_TRUE(dst.agrees());
          ASSERT_TRUE(src.agrees());
        }
      }
    }
  }
}

TEST(DeviceKernels, WidensEveryHalf) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  Lab& lab = Lab::get();
  for (const DType from : {DType::bf16, DType::f16}) {
    for (const DType to : kDTypes) {
      SCOPED_TRACE(name(from) + " to " + name(to));
      Column src(std::vector<float>(all.size()), from, 0);
      src.set_bits(all);
      Column dst(std::vector<float>(all.size()), to, 0);
      convert_on_host(src.host(), from, dst.host(), to, 65536);
      lab.kernels().convert(src.device(), from, dst.device(), to, 65536, lab.stream());
      EXPECT_TRUE(dst.agrees());
    }
  }
}

/// Every exponent and sign, with low halves around the ties of both formats.
TEST(DeviceKernels, NarrowsAroundEveryTie) {
  constexpr std::uint32_t kLows[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff,
                                     0x8000, 0x8001, 0xefff, 0xf000, 0xf001, 0xffff, 0x5a5a};
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : kLows) values.push_back(testing::as_float(high << 16 | low));
  }
  const auto count = static_cast<std::int64_t>(values.size());
  Lab& lab = Lab::get();
  Column src(values, DType::f32, 0);
  for (const DType to : {DType::bf16, DType::f16}) {
    SCOPED_TRACE(name(to));
    Column dst(std::vector<float>(values.size()), to, 0);
    narrow(values.data(), to, dst.host(), count);
    lab.kernels().convert(src.device(), DType::f32, dst.device(), to, count, lab.stream());
    EXPECT_TRUE(dst.agrees());
  }
}

/// Sources of all ranks in one buffer, `stride` elements apart.
struct Sources {
  std::int64_t stride;
  Column column;
  std::vector<const void*> host;

  Sources(std::int64_t count, std::int64_t gap, int ranks, DType dtype, std::int64_t start,
          Values values)
      : stride(count + gap), column(floats(stride * ranks, 2, values), dtype, start) {
    for (int r = 0; r < ranks; ++r) {
      host.push_back(static_cast<const std::byte*>(column.host()) + r * stride * size_of(dtype));
    }
  }
};

void check_reduce(std::int64_t count, std::int64_t gap, int ranks, DType dtype, int group,
                  std::int64_t start, std::int64_t acc_start, Values values) {
  Lab& lab = Lab::get();
  Sources sources(count, gap, ranks, dtype, start, values);
  for (const bool from_zero : {false, true}) {
    SCOPED_TRACE(name(dtype) + ", " + std::to_string(ranks) + " ranks, groups of " +
                 std::to_string(group) + ", " + std::to_string(count) + " elements, gap " +
                 std::to_string(gap) + ", starts " + std::to_string(start) + " and " +
                 std::to_string(acc_start) + (from_zero ? ", from zero" : ""));
    Twin<float> acc(floats(count, 3, values), acc_start);
    reduce_add(sources.host.data(), ranks, dtype, dtype, group, acc.host(), count, from_zero);
    lab.kernels().reduce_add(sources.column.device(), sources.stride * size_of(dtype), ranks, dtype,
                             group, acc.device(), count, from_zero, lab.stream());
    ASSERT_TRUE(acc.agrees(SameNumber()));
  }
}

TEST(DeviceKernels, ReducesInTheHostsOrder) {
  for (const DType dtype : kDTypes) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (int group = 0; group <= ranks; ++group) {
        check_reduce(517, 11, ranks, dtype, group, 0, 0, Values::finite);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(DeviceKernels, ReducesAnyLengthAndStart) {
  constexpr std::int64_t kStarts[][2] = {{0, 0}, {1, 1}, {3, 3}, {1, 2}};
  for (const DType dtype : kDTypes) {
    for (const std::int64_t count : kCounts) {
      for (const auto& [start, acc_start] : kStarts) {
        // Without a gap the sources of most lengths are aligned differently.
        for (const std::int64_t gap : {std::int64_t{0}, 4 - count % 4}) {
          if (count > 10000 && start != 1) continue;
          check_reduce(count, gap, 3, dtype, 0, start, acc_start, Values::finite);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(DeviceKernels, ReducesWhatIsNotFinite) {
  for (const DType dtype : kDTypes) {
    check_reduce(1025, 7, 5, dtype, 2, 0, 0, Values::any);
    if (HasFatalFailure()) return;
  }
}

/// A sum of negative zeros only, alone and onto zeros of both signs.
TEST(DeviceKernels, ReducesNegativeZeros) {
  Lab& lab = Lab::get();
  const std::vector<float> minus(64, -0.0f);
  Twin<float> sources(minus);
  for (const float start : {0.0f, -0.0f}) {
    for (const bool from_zero : {false, true}) {
      Twin<float> acc(std::vector<float>(32, start));
      lab.kernels().reduce_add(sources.device(), 32 * 4, 2, DType::f32, 0, acc.device(), 32,
                               from_zero, lab.stream());
      const float expected = from_zero ? 0.0f : start;
      std::fill_n(acc.host(), 32, expected);
      EXPECT_TRUE(acc.agrees(SameBits())) << start << from_zero;
    }
  }
}

TEST(DeviceKernels, AccumulatesAsTheHostDoes) {
  constexpr std::int64_t kStarts[][2] = {{0, 0}, {1, 1}, {5, 1}, {1, 2}};
  Lab& lab = Lab::get();
  for (const DType dtype : kDTypes) {
    for (const Values values : {Values::finite, Values::any}) {
      for (const std::int64_t count : kCounts) {
        for (const auto& [start, buffer_start] : kStarts) {
          SCOPED_TRACE(name(dtype) + ", " + std::to_string(count) + " elements, starts " +
                       std::to_string(start) + " and " + std::to_string(buffer_start));
          Column gradient(floats(count, 4, values), dtype, start);
          Twin<float> buffer(floats(count, 5, values), buffer_start);
          accumulate(gradient.host(), dtype, buffer.host(), count);
          lab.kernels().accumulate(gradient.device(), dtype, buffer.device(), count, lab.stream());
          ASSERT_TRUE(buffer.agrees(SameNumber()));
        }
      }
    }
  }
}

/// Which NaN a sum that is not finite ends in, or whether it ends in one, is nobody's promise.
struct SameSum {
  bool operator()(double a, double b) const {
    return SameBits()(a, b) || (!std::isfinite(a) && !std::isfinite(b));
  }
};

std::int64_t blocks_of(std::int64_t count) {
  return (count + kSquareBlock - 1) / kSquareBlock;
}

TEST(DeviceKernels, SumsSquaresInTheHostsOrder) {
  Lab& lab = Lab::get();
  std::vector<std::int64_t> counts(std::begin(kCounts), std::end(kCounts));
  for (std::int64_t count = 0; count <= 40; ++count) counts.push_back(count);
  for (std::int64_t count = 2040; count <= 2072; ++count) counts.push_back(count);
  for (const std::int64_t count : counts) {
    for (const std::int64_t start : {0, 1, 3}) {
      SCOPED_TRACE(std::to_string(count) + " elements from " + std::to_string(start));
      Twin<float> values(floats(count, 6, Values::finite), start);
      Twin<double> blocks(std::vector<double>(static_cast<std::size_t>(blocks_of(count)), 9.0));
      block_squares(values.host(), count, blocks.host());
      lab.kernels().block_squares(values.device(), count, blocks.device(), lab.stream());
      ASSERT_TRUE(blocks.agrees(SameBits()));
    }
  }
}

TEST(DeviceKernels, ABlockIsFiniteExactlyIfItsElementsAre) {
  constexpr std::int64_t kCount = 5 * kSquareBlock + 100;
  const float largest = std::numeric_limits<float>::max();
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Lab& lab = Lab::get();
  for (const float bad : {infinity, -infinity, nan}) {
    for (const std::int64_t at : {std::int64_t{0}, std::int64_t{1023}, std::int64_t{1024},
                                  std::int64_t{3000}, kCount - 101, kCount - 100, kCount - 1}) {
      SCOPED_TRACE(std::to_string(bad) + " at " + std::to_string(at));
      Twin<float> values(std::vector<float>(kCount, largest));
      values.host()[at] = bad;
      values.upload();
      Twin<double> blocks(std::vector<double>(6, 9.0));
      block_squares(values.host(), kCount, blocks.host());
      for (std::int64_t b = 0; b < 6; ++b) {
        ASSERT_EQ(std::isfinite(blocks.host()[b]), b != at / kSquareBlock);
      }
      lab.kernels().block_squares(values.device(), kCount, blocks.device(), lab.stream());
      ASSERT_TRUE(blocks.agrees(SameSum()));
    }
  }
}

/// What a rank queues for a unit without waiting in between: each kernel sees the one before.
TEST(DeviceKernels, ChainsOnAStream) {
  constexpr std::int64_t kCount = 30000;
  constexpr int kRanks = 3;
  Lab& lab = Lab::get();
  Sources sources(kCount, 16, kRanks, DType::bf16, 0, Values::finite);
  Twin<float> acc(floats(kCount, 8, Values::any));
  Twin<double> blocks(std::vector<double>(static_cast<std::size_t>(blocks_of(kCount)), 9.0));
  Column published(std::vector<float>(kCount), DType::f16, 0);
  for (int micro = 0; micro < 4; ++micro) {
    reduce_add(sources.host.data(), kRanks, DType::bf16, DType::bf16, 0, acc.host(), kCount,
               micro == 0);
    lab.kernels().reduce_add(sources.column.device(), sources.stride * 2, kRanks, DType::bf16, 0,
                             acc.device(), kCount, micro == 0, lab.stream());
  }
  block_squares(acc.host(), kCount, blocks.host());
  lab.kernels().block_squares(acc.device(), kCount, blocks.device(), lab.stream());
  narrow(acc.host(), DType::f16, published.host(), kCount);
  lab.kernels().convert(acc.device(), DType::f32, published.device(), DType::f16, kCount,
                        lab.stream());
  EXPECT_TRUE(published.agrees());
  EXPECT_TRUE(blocks.agrees(SameBits()));
  EXPECT_TRUE(acc.agrees(SameBits()));
}

}  // namespace
}  // namespace zshard::kernels
