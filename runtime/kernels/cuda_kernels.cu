// Each kernel does what its namesake in kernels.hpp does, operation for operation; the formats are
// the same source.
#include "runtime/kernels/cuda_kernels.hpp"

#include "runtime/kernels/formats.hpp"
#include "runtime/kernels/kernels.hpp"
#include "runtime/kernels/launch.cuh"

namespace zshard::kernels {
namespace {

/// Calls with(Format{}) for the format of a dtype.
template <class With>
void with_format(DType dtype, const With& with) {
  switch (dtype) {
    case DType::f32:
      with(F32{});
      break;
    case DType::bf16:
      with(Bf16{});
      break;
    case DType::f16:
      with(F16{});
      break;
  }
}

template <class From, class To>
struct Convert {
  const typename From::Storage* src;
  typename To::Storage* dst;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(src);
    visit(dst);
  }

  template <int n>
  ZSHARD_INLINE void run(std::int64_t i) const {
    const auto in = load_pack<n>(src + i);
    Pack<typename To::Storage, n> out;
    for (int k = 0; k < n; ++k) out.value[k] = To::store(From::load(in.value[k]));
    store_pack(dst + i, out);
  }
};

template <class Source>
struct ReduceAdd {
  const typename Source::Storage* sources;
  float* acc;
  std::int64_t stride;  // elements from a rank's source to the next one's
  int ranks;
  int group;
  bool from_zero;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(sources);
    visit(acc);
  }

  template <int n>
  ZSHARD_INLINE void run(std::int64_t i) const {
    auto total = chain<n>(i, 0, group);
    for (int first = group; first < ranks; first += group) {
      const auto partial = chain<n>(i, first, ranks - first < group ? ranks : first + group);
      for (int k = 0; k < n; ++k) total.value[k] = total.value[k] + partial.value[k];
    }
    Pack<float, n> onto{};
    if (!from_zero) onto = load_pack<n>(acc + i);
    // From +0.0 too: a sum of -0.0 becomes +0.0.
    for (int k = 0; k < n; ++k) total.value[k] = onto.value[k] + total.value[k];
    store_pack(acc + i, total);
  }

 private:
  /// The chain over ranks [first, last).
  template <int n>
  ZSHARD_INLINE Pack<float, n> chain(std::int64_t i, int first, int last) const {
    const typename Source::Storage* source = sources + first * stride + i;
    const auto start = load_pack<n>(source);
    Pack<float, n> sum;
    for (int k = 0; k < n; ++k) sum.value[k] = Source::load(start.value[k]);
    // Unrolled, so that the loads of the next ranks do not wait for the sum.
    ZSHARD_UNROLL(4)
    for (int rank = first + 1; rank < last; ++rank) {
      source += stride;
      const auto term = load_pack<n>(source);
      for (int k = 0; k < n; ++k) sum.value[k] = sum.value[k] + Source::load(term.value[k]);
    }
    return sum;
  }
};

template <class Source>
struct Accumulate {
  const typename Source::Storage* gradient;
  float* buffer;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(gradient);
    visit(buffer);
  }

  template <int n>
  ZSHARD_INLINE void run(std::int64_t i) const {
    const auto in = load_pack<n>(gradient + i);
    auto sum = load_pack<n>(buffer + i);
    for (int k = 0; k < n; ++k) sum.value[k] = sum.value[k] + Source::load(in.value[k]);
    store_pack(buffer + i, sum);
  }
};

struct BlockSquares {
  const float* values;
  double* blocks;
  std::int64_t count;

  template <class Visit>
  void pointers(Visit&& visit) {
    visit(values);
    visit(blocks);
  }

  /// Lane j of a block takes j, j + 16, ...
  ZSHARD_INLINE double lane(std::int64_t block, int j) const {
    constexpr int kTerms = static_cast<int>(kSquareBlock) / kGroupLanes;
    const std::int64_t begin = block * kSquareBlock;
    const float* x = values + begin + j;
    double sum = 0.0;
    if (count - begin >= kSquareBlock) {
      // Unrolled, so that several loads are under way.
      ZSHARD_UNROLL(16)
      for (int term = 0; term < kTerms; ++term) {
        const double value = x[term * kGroupLanes];
        sum += value * value;
      }
    } else {
      for (std::int64_t i = j; i < count - begin; i += kGroupLanes) {
        const double value = x[i - j];
        sum += value * value;
      }
    }
    return sum;
  }

  ZSHARD_INLINE void finish(std::int64_t block, double sum) const { blocks[block] = sum; }
};

cudaStream_t native(device::NativeStream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

class CudaKernels final : public DeviceKernels {
 public:
  void convert(const void* src, DType from, void* dst, DType to, std::int64_t count,
               device::NativeStream stream) override {
    with_format(from, [&](auto source) {
      with_format(to, [&](auto target) {
        using From = decltype(source);
        using To = decltype(target);
        const Convert<From, To> body{static_cast<const typename From::Storage*>(src),
                                     static_cast<typename To::Storage*>(dst)};
        launch_packs("convert", native(stream), {{src, count * size_of(from)}},
                     {{dst, count * size_of(to)}}, count, body);
      });
    });
  }

  void reduce_add(const void* sources, std::int64_t stride, int ranks, DType dtype, int group,
                  float* acc, std::int64_t count, bool from_zero,
                  device::NativeStream stream) override {
    if (ranks <= 0 || count <= 0) return;
    const std::int64_t element = size_of(dtype);
    const std::int64_t bytes = count * element;
    const std::int64_t acc_bytes = count * size_of(DType::f32);
    const Touched read_acc{acc, from_zero ? 0 : acc_bytes};
    with_format(dtype, [&](auto source) {
      using Source = decltype(source);
      const ReduceAdd<Source> body{
          static_cast<const typename Source::Storage*>(sources),
          acc,
          stride / element,
          ranks,
          group > 1 && group < ranks ? group : ranks,  // groups of one rank are the plain chain
          from_zero};
      launch_packs("reduce_add", native(stream),
                   {{sources, (ranks - 1) * stride + bytes}, read_acc}, {{acc, acc_bytes}}, count,
                   body, ranks == 1 || stride % (kPack * element) == 0);
    });
  }

  void accumulate(const void* gradient, DType dtype, float* buffer, std::int64_t count,
                  device::NativeStream stream) override {
    const Touched sum{buffer, count * size_of(DType::f32)};
    with_format(dtype, [&](auto source) {
      using Source = decltype(source);
      const Accumulate<Source> body{static_cast<const typename Source::Storage*>(gradient), buffer};
      launch_packs("accumulate", native(stream), {{gradient, count * size_of(dtype)}, sum}, {sum},
                   count, body);
    });
  }

  void block_squares(const float* values, std::int64_t count, double* blocks,
                     device::NativeStream stream) override {
    if (count <= 0) return;
    const std::int64_t groups = (count - 1) / kSquareBlock + 1;
    launch_groups("block_squares", native(stream), {{values, count * size_of(DType::f32)}},
                  {{blocks, groups * static_cast<std::int64_t>(sizeof(double))}}, groups,
                  BlockSquares{values, blocks, count});
  }
};

}  // namespace

std::unique_ptr<DeviceKernels> make_cuda_kernels() {
  return std::make_unique<CudaKernels>();
}

}  // namespace zshard::kernels
