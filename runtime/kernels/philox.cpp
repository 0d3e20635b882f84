#include <algorithm>

#include "runtime/kernels/kernels.hpp"

namespace zshard::kernels {
namespace {

constexpr std::uint64_t kFnvBasis = 0xcbf29ce484222325u;
constexpr std::uint64_t kFnvPrime = 0x100000001b3u;

std::uint64_t fnv1a64_from(std::uint64_t hash, const unsigned char* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * kFnvPrime;
  return hash;
}

constexpr std::uint32_t low(std::uint64_t x) {
  return static_cast<std::uint32_t>(x);
}
constexpr std::uint32_t high(std::uint64_t x) {
  return static_cast<std::uint32_t>(x >> 32);
}

/// The four words of a block in a step.
void draw(std::uint64_t key, std::uint64_t step, std::uint64_t block, std::uint32_t words[4]) {
  const std::uint32_t counter[4] = {low(block), high(block), low(step), high(step)};
  philox4x32(counter, key, words);
}

}  // namespace

std::uint64_t fnv1a64(const void* data, std::size_t bytes) {
  return fnv1a64_from(kFnvBasis, static_cast<const unsigned char*>(data), bytes);
}

std::uint64_t philox_key(std::uint64_t seed, const char* name, std::size_t length) {
  unsigned char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(seed >> (8 * i));
  const std::uint64_t hash = fnv1a64_from(kFnvBasis, bytes, sizeof bytes);
  return fnv1a64_from(hash, reinterpret_cast<const unsigned char*>(name), length);
}

void philox4x32(const std::uint32_t counter[4], std::uint64_t key, std::uint32_t out[4]) {
  std::uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  std::uint32_t k0 = low(key), k1 = high(key);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{c0} * 0xd2511f53u;
    const std::uint64_t b = std::uint64_t{c2} * 0xcd9e8d57u;
    c0 = high(b) ^ c1 ^ k0;
    c1 = low(b);
    c2 = high(a) ^ c3 ^ k1;
    c3 = low(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

std::uint32_t random16(std::uint64_t key, std::uint64_t step, std::uint64_t index) {
  std::uint32_t words[4];
  draw(key, step, index / 8, words);
  const std::uint64_t lane = index % 8;
  return (words[lane / 2] >> (lane % 2 * 16)) & 0xffffu;
}

void uniform(std::uint64_t key, std::uint64_t step, std::uint64_t first, float* out,
             std::int64_t count) {
  for (std::int64_t i = 0; i < count;) {
    const std::uint64_t index = first + static_cast<std::uint64_t>(i);
    std::uint32_t words[4];
    draw(key, step, index / 4, words);
    const std::uint64_t lane = index % 4;
    const std::int64_t last = std::min(count, i + 4 - static_cast<std::int64_t>(lane));
    for (std::uint64_t word = lane; i < last; ++i, ++word) {
      // 24 bits, a power of two, and a difference with spacing 2^-24: all exact in fp32.
      out[i] = static_cast<float>(words[word] >> 8) * 0x1p-24f - 0.5f;
    }
  }
}

}  // namespace zshard::kernels
