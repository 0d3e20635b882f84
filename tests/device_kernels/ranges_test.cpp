// What each kernel declares beside itself is what it reads and writes, to the byte: the simulated
// device finds a missing wait by that alone. The accesses do race, so the thread sanitizer is not
// shown them.
#if defined(ZSHARD_TEST_SIMULATED) && !defined(__SANITIZE_THREAD__)
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "optimizers/rules.hpp"
#include "tests/device_kernels/lab.hpp"
#include "tests/simulator/simulator.hpp"
#include "zshard/optimizer.hpp"

namespace zshard {
namespace {

using device::NativeStream;
using testing::Lab;

constexpr std::int64_t kCount = 1500;  // elements
constexpr std::int64_t kMargin = 256;  // bytes around each argument
constexpr std::int64_t kMost = 3 * kCount * 4 + 2 * kMargin;

enum class Use { reads, writes };

struct Argument {
  const char* name;
  int buffer;
  std::int64_t bytes;
  Use use;  // writes: also what it reads
};

struct Kernel {
  std::string name;
  std::vector<Argument> arguments;
  std::function<void(NativeStream)> launch;
};

class Ranges : public ::testing::Test {
 protected:
  Ranges() {
    for (std::byte*& buffer : buffers_) buffer = Lab::get().device().allocate(kMost);
    scratch_ = Lab::get().device().allocate(kMost);
  }
  ~Ranges() override {
    for (std::byte* buffer : buffers_) Lab::get().device().free_memory(buffer);
    Lab::get().device().free_memory(scratch_);
  }

  [[nodiscard]] std::byte* at(int buffer) const {
    return buffers_.at(static_cast<std::size_t>(buffer)) + kMargin;
  }
  [[nodiscard]] float* floats(int buffer) const { return reinterpret_cast<float*>(at(buffer)); }

  /// Whether the kernel meets `first` unordered, which another stream was given before it.
  bool meets(const Kernel& kernel, const std::function<void(NativeStream)>& first) {
    static std::deque<std::string> names;  // streams keep the pointers
    device::Device& device = Lab::get().device();
    const std::string number = std::to_string(names.size());
    const NativeStream before = device.make_stream(names.emplace_back("first " + number).c_str());
    const NativeStream after = device.make_stream(names.emplace_back("second " + number).c_str());
    first(before);
    kernel.launch(after);
    Lab::get().finish(before);
    Lab::get().finish(after);
    bool found = false;
    for (const simulator::Race& race : simulator::races()) {
      if (race.second.stream != names.back()) continue;
      EXPECT_EQ(race.second.operation, kernel.name);
      found = true;
    }
    device.destroy_stream(before);
    device.destroy_stream(after);
    return found;
  }

  void check(const Kernel& kernel) {
    device::Device& device = Lab::get().device();
    for (const Argument& argument : kernel.arguments) {
      SCOPED_TRACE(kernel.name + ", " + argument.name);
      std::byte* const begin = at(argument.buffer);
      std::byte* const end = begin + argument.bytes;
      const auto written = [&](std::byte* byte) {
        return meets(kernel, [&](NativeStream stream) { device.fill(byte, 1, 1, stream); });
      };
      const auto read = [&](std::byte* byte) {
        return meets(kernel, [&](NativeStream stream) { device.copy(scratch_, byte, 1, stream); });
      };
      EXPECT_FALSE(written(begin - 1));
      EXPECT_TRUE(written(begin));
      EXPECT_TRUE(written(end - 1));
      EXPECT_FALSE(written(end));
      EXPECT_EQ(read(begin), argument.use == Use::writes);
      EXPECT_EQ(read(end - 1), argument.use == Use::writes);
    }
    EXPECT_EQ(simulator::faults(), std::vector<std::string>());
  }

  /// Parameter, slots and gradient in buffers 0, 1 ...
  void check_rule(const std::string& name, const optimizers::Rule& rule) {
    optimizers::Elements elements{.parameter = floats(0), .factor = 0.5f, .count = kCount};
    Kernel kernel{name, {{"parameter", 0, 4 * kCount, Use::writes}}, {}};
    int buffer = 1;
    for (std::size_t s = 0; s < rule.slots().size(); ++s) {
      kernel.arguments.push_back({"slot", buffer, 4 * kCount, Use::writes});
      elements.slots[s] = floats(buffer++);
    }
    kernel.arguments.push_back({"gradient", buffer, 4 * kCount, Use::reads});
    elements.gradient = floats(buffer);
    kernel.launch = [&](NativeStream stream) {
      Lab::get().update().run(rule, elements, rule.constants(rule.defaults(), 1), 1, stream);
    };
    check(kernel);
  }

 private:
  std::array<std::byte*, 4> buffers_{};
  std::byte* scratch_ = nullptr;
};

TEST_F(Ranges, OfConvert) {
  check({"convert",
         {{"src", 0, 2 * kCount, Use::reads}, {"dst", 1, 4 * kCount, Use::writes}},
         [&](NativeStream stream) {
           Lab::get().kernels().convert(at(0), DType::bf16, at(1), DType::f32, kCount, stream);
         }});
}

TEST_F(Ranges, OfReduceAdd) {
  for (const bool from_zero : {false, true}) {
    check(
        {"reduce_add",
         {{"sources", 0, 3 * 2 * kCount + 2 * 16, Use::reads}, {"acc", 1, 4 * kCount, Use::writes}},
         [&](NativeStream stream) {
           Lab::get().kernels().reduce_add(at(0), 2 * kCount + 16, 3, DType::f16, 2, floats(1),
                                           kCount, from_zero, stream);
         }});
  }
}

TEST_F(Ranges, OfAccumulate) {
  check({"accumulate",
         {{"gradient", 0, 4 * kCount, Use::reads}, {"buffer", 1, 4 * kCount, Use::writes}},
         [&](NativeStream stream) {
           Lab::get().kernels().accumulate(at(0), DType::f32, floats(1), kCount, stream);
         }});
}

TEST_F(Ranges, OfBlockSquares) {
  check({"block_squares",
         {{"values", 0, 4 * kCount, Use::reads}, {"blocks", 1, 2 * 8, Use::writes}},
         [&](NativeStream stream) {
           Lab::get().kernels().block_squares(floats(0), kCount, reinterpret_cast<double*>(at(1)),
                                              stream);
         }});
}

TEST_F(Ranges, OfUpdates) {
  check_rule("adam", *optimizers::make_adam({}));
  check_rule("adamw", *optimizers::make_adamw({}));
  check_rule("sgd", *optimizers::make_sgd({}));
  check_rule("sgd_momentum", *optimizers::make_sgd({.momentum = 0.9}));
  check_rule("sgd_momentum", *optimizers::make_sgd({.momentum = 0.9, .nesterov = true}));
}

}  // namespace
}  // namespace zshard
#endif
