// A device to run kernels on, through the accelerator's seams alone: the simulated one, or, in a
// program built without ZSHARD_TEST_SIMULATED (tests/gpu/run.sh), a GPU. Device memory that starts
// at any element, between guards.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/engine/accelerator.hpp"
#include "zshard/types.hpp"

namespace zshard::testing {

/// The process' device, its kernels and one stream.
class Lab {
 public:
  static Lab& get() {
    std::unique_ptr<Lab>& lab = instance();
    if (!lab) lab.reset(new Lab);
    return *lab;
  }
  /// Not left to the end of the process, when the runtime may be gone.
  static void close() { instance().reset(); }

  ~Lab() {
    for (const auto& [bytes, blocks] : free_) {
      for (std::byte* block : blocks) device_->free_memory(block);
    }
    device_->destroy_stream(stream_);
  }
  Lab(const Lab&) = delete;
  Lab& operator=(const Lab&) = delete;

  [[nodiscard]] device::Device& device() { return *device_; }
  [[nodiscard]] kernels::DeviceKernels& kernels() { return *kernels_; }
  [[nodiscard]] optimizers::DeviceUpdate& update() { return *update_; }
  [[nodiscard]] device::NativeStream stream() const { return stream_; }

  /// Device memory with any contents, of std::bit_ceil(bytes). To be given back.
  std::byte* take(std::size_t bytes) {
    std::vector<std::byte*>& blocks = free_[std::bit_ceil(bytes)];
    if (blocks.empty()) return device_->allocate(static_cast<std::int64_t>(std::bit_ceil(bytes)));
    std::byte* const block = blocks.back();
    blocks.pop_back();
    return block;
  }
  void give_back(std::byte* block, std::size_t bytes) {
    free_[std::bit_ceil(bytes)].push_back(block);
  }

  /// Returns when all that is queued has been done.
  void finish() { finish(stream_); }
  void finish(device::NativeStream stream) {
    const device::NativeEvent event = device_->make_event();
    device_->record(event, stream);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    bool reached = device_->reached(event);
    while (!reached && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
      reached = device_->reached(event);
    }
    device_->destroy_event(event);
    if (!reached) throw std::runtime_error("the device did not finish within 60 s");
  }

 private:
  static std::unique_ptr<Lab>& instance() {
    static std::unique_ptr<Lab> lab;
    return lab;
  }

  Lab() {
#if defined(ZSHARD_TEST_SIMULATED)
    engine::set_accelerator_path(std::string(ZSHARD_BINARY_DIR) +
                                 "/lib/libzshard_cuda_simulated.so");
#else
    // Where the plug-in lies neither beside the program nor beside the library.
    if (const char* file = std::getenv("ZSHARD_TEST_PLUGIN")) engine::set_accelerator_path(file);
#endif
    engine::Accelerator& accelerator = engine::accelerator();
    device_ = accelerator.open(0, 0);
    kernels_ = accelerator.make_kernels(*device_);
    update_ = accelerator.make_update(*device_);
    stream_ = device_->make_stream("test");
  }

  std::unique_ptr<device::Device> device_;
  std::unique_ptr<kernels::DeviceKernels> kernels_;
  std::unique_ptr<optimizers::DeviceUpdate> update_;
  device::NativeStream stream_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
};

class LabEnvironment final : public ::testing::Environment {
 public:
  void TearDown() override { Lab::close(); }
};
inline ::testing::Environment* const kLabEnvironment =
    ::testing::AddGlobalTestEnvironment(new LabEnvironment);

/// `count` elements of T, `offset` elements behind an aligned address, with guards on both sides;
/// on the host and on the device. A kernel's host form works on host(), its device form on
/// device().
template <class T>
class Twin {
 public:
  explicit Twin(std::int64_t count, std::int64_t offset = 0)
      : offset_(offset),
        count_(count),
        bytes_(static_cast<std::size_t>(count + offset) * sizeof(T)) {
    bytes_ += kGuard;
    host_.assign(bytes_ / sizeof(T) + 1, T{});
    std::memset(host_.data(), 0xff, bytes_);  // NaN in every dtype
    device_ = Lab::get().take(bytes_);
  }
  Twin(const std::vector<T>& values, std::int64_t offset = 0)
      : Twin(static_cast<std::int64_t>(values.size()), offset) {
    set(values);
  }
  ~Twin() { Lab::get().give_back(device_, bytes_); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  void set(const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(host(), values.data(), values.size() * sizeof(T));
    upload();
  }
  /// Host to device, guards included.
  void upload() {
    Lab& lab = Lab::get();
    lab.device().copy(device_, host_.data(), static_cast<std::int64_t>(bytes_), lab.stream());
    lab.finish();
  }

  [[nodiscard]] T* host() { return host_.data() + offset_; }
  [[nodiscard]] T* device() { return reinterpret_cast<T*>(device_) + offset_; }
  [[nodiscard]] std::int64_t count() const { return count_; }

  /// Elements and guards of the device are those of the host, where `same` says what is.
  template <class Same>
  [[nodiscard]] ::testing::AssertionResult agrees(const Same& same) {
    Lab& lab = Lab::get();
    std::vector<T> found(host_.size());
    lab.device().copy(found.data(), device_, static_cast<std::int64_t>(bytes_), lab.stream());
    lab.finish();
    const auto* there = reinterpret_cast<const unsigned char*>(found.data());
    const auto* here = reinterpret_cast<const unsigned char*>(host_.data());
    const std::size_t first = static_cast<std::size_t>(offset_) * sizeof(T);
    const std::size_t end = first + static_cast<std::size_t>(count_) * sizeof(T);
    for (std::size_t i = 0; i < bytes_; ++i) {
      if (i >= first && i < end) continue;
      if (there[i] != here[i]) {
        return ::testing::AssertionFailure() << "the guard's byte " << i << " changed";
      }
    }
    for (std::int64_t i = 0; i < count_; ++i) {
      const T a = found[static_cast<std::size_t>(offset_ + i)];
      const T b = host()[i];
      if (!same(a, b)) {
        return ::testing::AssertionFailure() << "element " << i << " of " << count_ << ": device "
                                             << text(a) << ", host " << text(b);
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  static constexpr std::size_t kGuard = 256;  // bytes

  static std::string text(T value) {
    char buffer[32];
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    std::snprintf(buffer, sizeof buffer, "%0*llx", static_cast<int>(2 * sizeof value),
                  static_cast<unsigned long long>(bits));
    return buffer;
  }

  std::int64_t offset_;
  std::int64_t count_;
  std::size_t bytes_;
  std::vector<T> host_;
  std::byte* device_ = nullptr;
};

/// The same bits.
struct SameBits {
  template <class T>
  bool operator()(T a, T b) const {
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
};

/// The same bits, or NaN both: which NaN an addition makes of two differs between machines.
struct SameNumber {
  template <class T>
  bool operator()(T a, T b) const {
    return SameBits()(a, b) || (a != a && b != b);
  }
};

enum class Values {
  any,    // all bit patterns: NaN of both kinds, infinities, subnormals
  finite  // of ordinary size, with zeros of both signs and subnormals among them
};

inline float as_float(std::uint32_t u) {
  return std::bit_cast<float>(u);
}

inline std::vector<float> floats(std::int64_t count, std::uint32_t seed, Values values) {
  static constexpr std::uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x00000001, 0x807fffff,
                                               0x00800000, 0x33000000, 0x387fe000, 0x477fefff,
                                               0x477ff000, 0x7f7fffff, 0x7f800000, 0xff800000,
                                               0x7f800001, 0xff8fffff, 0x7fc00000, 0xffffffff};
  static constexpr int kFiniteSpecials = 9;
  std::mt19937 engine(seed);
  const auto random = [&engine] { return static_cast<std::uint32_t>(engine()); };
  std::normal_distribution<float> normal;
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& x : result) {
    const std::uint32_t draw = random();
    if (draw % 8 == 0) {
      const std::uint32_t kinds = values == Values::any ? 16 : kFiniteSpecials;
      x = as_float(kSpecial[draw / 8 % kinds]);
    } else {
      x = values == Values::any ? as_float(random()) : normal(engine);
    }
  }
  return result;
}

}  // namespace zshard::testing
