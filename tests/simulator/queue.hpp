// What kernels, copies and fills have in common: a place in a stream, the touches that are checked,
// and the failure that was injected.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tests/simulator/state.hpp"

namespace simulator {

/// Queues `body`; with an injected fault the device has the sticky error when the stream comes to
/// it, with a hang the stream goes no further until a fault or reset(). Returns the position.
std::uint64_t queue(const StreamPointer& stream, const std::vector<Touch>& touches,
                    const std::optional<Injected>& injected, std::function<void()> body);

/// Leaves the device with the sticky error, if it has none.
void set_fault(int device, int code);

}  // namespace simulator
