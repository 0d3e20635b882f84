// Standard output, with its errors: digests and losses that nobody got are no success.
#pragma once

#include <string_view>

namespace gpt {

/// Makes sure that descriptors 0 to 2 are taken, so that no file of ours becomes standard output.
void prepare_streams();

/// Writes to standard output; flush_output() hands on what it has kept. Both throw zshard::IoError
/// with the system's reason.
void say(std::string_view text);
void flush_output();

}  // namespace gpt
