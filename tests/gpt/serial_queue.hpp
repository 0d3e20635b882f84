// The GPU's part of the gpt example on the host: its kernels run one after another on the calling
// thread, its matrix products as plain loops, in memory of this process.
#pragma once

#include <memory>

#include "gpt/cuda/queue.hpp"

namespace gpt_test {

/// Copies from or to memory that the queue did not give out, and memory that is not given back,
/// fail the test. Products take bf16 operands as a GPU does and sum in fp64.
std::unique_ptr<gpt::gpu::Queue> make_serial_queue();

/// The compute of a GPU on that queue.
std::shared_ptr<gpt::Compute> make_serial_compute(bool bf16);

}  // namespace gpt_test
