#include "tests/simulator/queue.hpp"

#include <utility>

namespace simulator {

void set_fault(int device, int code) {
  int none = 0;
  State::get().device(device).fault.compare_exchange_strong(none, code, std::memory_order_relaxed);
}

std::uint64_t queue(const StreamPointer& stream, const std::vector<Touch>& touches,
                    const std::optional<Injected>& injected, std::function<void()> body) {
  State& state = State::get();
  const std::uint64_t generation = state.generation.load(std::memory_order_relaxed);
  return state.submit(
      stream, touches,
      [&state, generation, injected, device = stream->device, run = std::move(body)](bool faulted) {
        if (faulted) return;
        if (injected && injected->how == How::hang) {
          const Bell nobody;
          nobody.wait_until([&] {
            return state.device(device).fault.load(std::memory_order_relaxed) != 0 ||
                   state.generation.load(std::memory_order_relaxed) != generation;
          });
        } else if (injected && injected->how == How::fault) {
          set_fault(device, injected->code);
        } else {
          run();
        }
      });
}

}  // namespace simulator
