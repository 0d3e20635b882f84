#include "runtime/base/descriptor.hpp"

#include <unistd.h>

namespace zshard::base {

Descriptor::~Descriptor() {
  if (value_ >= 0) close(value_);
}

}  // namespace zshard::base
