// The model's arithmetic on the calling thread.
#pragma once

#include <memory>

#include "compute.hpp"

namespace gpt {

std::shared_ptr<Compute> make_host_compute();

}  // namespace gpt
