// A driver that does what the one behind it does: tests override what they look at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "offload/io/driver.hpp"

namespace zshard::offload::testing {

class ForwardingDriver : public Driver {
 public:
  explicit ForwardingDriver(std::unique_ptr<Driver> inner) : inner_(std::move(inner)) {}
  void start(const RawRequest& request) override { inner_->start(request); }
  std::size_t reap(std::span<RawCompletion> out, std::int64_t microseconds) override {
    return inner_->reap(out, microseconds);
  }
  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] int capacity() const override { return inner_->capacity(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }

 private:
  std::unique_ptr<Driver> inner_;
};

}  // namespace zshard::offload::testing
