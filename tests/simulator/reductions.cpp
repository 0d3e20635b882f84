#include "tests/simulator/reductions.hpp"

#include <cstring>
#include <type_traits>

namespace simulator {

namespace {

/// How a type is computed with: Storage in memory, Value in registers.
template <class T>
struct Plain {
  using Storage = T;
  using Value = T;
  static Value load(Storage x) { return x; }
  static Storage store(Value x) { return x; }
};

struct Half {
  using Storage = __half;
  using Value = float;
  static Value load(Storage x) { return __half2float(x); }
  static Storage store(Value x) { return __float2half_rn(x); }
};

struct Brain {
  using Storage = __nv_bfloat16;
  using Value = float;
  static Value load(Storage x) { return __bfloat162float(x); }
  static Storage store(Value x) { return __float2bfloat16_rn(x); }
};

template <class Format>
typename Format::Value combine(typename Format::Value a, typename Format::Value b, ncclRedOp_t op) {
  using Value = typename Format::Value;
  switch (op) {
    case ncclProd:
      return static_cast<Value>(a * b);
    case ncclMax:
      return a < b ? b : a;
    case ncclMin:
      return b < a ? b : a;
    default:
      return static_cast<Value>(a + b);
  }
}

template <class Format>
void reduce_as(const std::vector<const std::byte*>& sources, std::size_t first, std::byte* out,
               std::size_t count, ncclRedOp_t op) {
  using Storage = typename Format::Storage;
  using Value = typename Format::Value;
  const auto load = [](const std::byte* from, std::size_t i) {
    Storage x;
    std::memcpy(&x, from + i * sizeof(Storage), sizeof(Storage));
    return x;
  };
  for (std::size_t i = 0; i < count; ++i) {
    Storage sum = load(sources[first % sources.size()], i);
    for (std::size_t k = 1; k < sources.size(); ++k) {
      const Storage next = load(sources[(first + k) % sources.size()], i);
      sum = Format::store(combine<Format>(Format::load(sum), Format::load(next), op));
    }
    if (op == ncclAvg) {
      sum =
          Format::store(static_cast<Value>(Format::load(sum) / static_cast<Value>(sources.size())));
    }
    std::memcpy(out + i * sizeof(Storage), &sum, sizeof(Storage));
  }
}

}  // namespace

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

bool can_reduce(ncclDataType_t type, ncclRedOp_t op) {
  return size_of(type) != 0 && type != ncclFloat8e4m3 && type != ncclFloat8e5m2 && op >= ncclSum &&
         op <= ncclAvg;
}

void reduce(const std::vector<const std::byte*>& sources, std::size_t first, std::byte* out,
            std::size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return reduce_as<Plain<std::int8_t>>(sources, first, out, count, op);
    case ncclUint8:
      return reduce_as<Plain<std::uint8_t>>(sources, first, out, count, op);
    case ncclInt32:
      return reduce_as<Plain<std::int32_t>>(sources, first, out, count, op);
    case ncclUint32:
      return reduce_as<Plain<std::uint32_t>>(sources, first, out, count, op);
    case ncclInt64:
      return reduce_as<Plain<std::int64_t>>(sources, first, out, count, op);
    case ncclUint64:
      return reduce_as<Plain<std::uint64_t>>(sources, first, out, count, op);
    case ncclFloat16:
      return reduce_as<Half>(sources, first, out, count, op);
    case ncclBfloat16:
      return reduce_as<Brain>(sources, first, out, count, op);
    case ncclFloat32:
      return reduce_as<Plain<float>>(sources, first, out, count, op);
    case ncclFloat64:
      return reduce_as<Plain<double>>(sources, first, out, count, op);
    default:
      return;
  }
}

}  // namespace simulator
