// The simulated device as the engine sees it: the plug-in that was built over tests/simulator,
// opened by the loader. Every test ends with nothing left, no race and no fault.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/engine/accelerator.hpp"
#include "tests/simulator/simulator.hpp"
#include "zshard/error.hpp"

namespace zshard::lab {

inline std::string library(const std::string& name) {
  return std::string(ZSHARD_BINARY_DIR) + "/lib/" + name;
}

inline engine::Accelerator& simulated() {
  static engine::Accelerator& accelerator = [&]() -> engine::Accelerator& {
    engine::set_accelerator_path(library("libzshard_cuda_simulated.so"));
    return engine::accelerator();
  }();
  return accelerator;
}

/// Seconds after which a test gives up on what should happen at once.
#if defined(ZSHARD_SANITIZER)
inline constexpr double kPatience = 60;
#else
inline constexpr double kPatience = 20;
#endif

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Condition>
bool comes_true(const Condition& condition, double seconds = kPatience) {
  const double end = now() + seconds;
  while (!condition()) {
    if (now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

/// What `call` throws: "" nothing.
template <class Exception, class Call>
std::string thrown(const Call& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another class of error: " << error.what();
  }
  return "";
}

inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in \"" << text << "\"";
}

/// Device memory that goes with its owner.
class Block {
 public:
  Block(device::Device& device, std::int64_t bytes)
      : device_(device), memory_(device.allocate(bytes)), bytes_(bytes) {}
  ~Block() { device_.free_memory(memory_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  [[nodiscard]] std::byte* get() const { return memory_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  device::Device& device_;
  std::byte* memory_;
  std::int64_t bytes_;
};

/// A stream and an event to wait for it with.
class Queue {
 public:
  explicit Queue(device::Device& device, const char* name = "queue")
      : device_(device), stream_(device.make_stream(name)), event_(device.make_event()) {}
  ~Queue() {
    device_.destroy_event(event_);
    device_.destroy_stream(stream_);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  [[nodiscard]] device::NativeStream stream() const { return stream_; }
  void mark() { device_.record(event_, stream_); }
  [[nodiscard]] bool reached() { return device_.reached(event_); }
  /// Whether all that was queued comes to an end.
  [[nodiscard]] bool ends(double seconds = kPatience) {
    mark();
    return comes_true([&] { return reached(); }, seconds);
  }

 private:
  device::Device& device_;
  device::NativeStream stream_;
  device::NativeEvent event_;
};

template <class T>
void to_device(device::Device& device, Queue& queue, std::byte* target,
               const std::vector<T>& values) {
  device.copy(target, values.data(), static_cast<std::int64_t>(values.size() * sizeof(T)),
              queue.stream());
  ASSERT_TRUE(queue.ends());
}

template <class T>
std::vector<T> from_device(device::Device& device, Queue& queue, const std::byte* source,
                           std::size_t count) {
  std::vector<T> values(count);
  device.copy(values.data(), source, static_cast<std::int64_t>(count * sizeof(T)), queue.stream());
  EXPECT_TRUE(queue.ends());
  return values;
}

/// Runs body(rank) in a thread for each rank. Rethrows the first error of the lowest rank.
template <class Body>
void on_ranks(int world, const Body& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

class SimulatedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    simulated();
    simulator::reset();
  }
  void TearDown() override {
    for (const std::string& leak : simulator::leaks()) ADD_FAILURE() << "left over: " << leak;
    for (const simulator::Race& race : simulator::races()) ADD_FAILURE() << race.text();
    if (!faults_expected_) {
      for (const std::string& fault : simulator::faults()) ADD_FAILURE() << fault;
    }
    simulator::reset();
  }
  bool faults_expected_ = false;
};

}  // namespace zshard::lab
