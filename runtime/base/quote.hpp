// Foreign text inside messages.
#pragma once

#include <string>
#include <string_view>

namespace zshard::base {

/// 'text', with control characters as \xNN, cut with "..." after 80 bytes: what a user or a file
/// hands in must not break or flood a message. Call it with its namespace: std::quoted is found by
/// argument-dependent lookup.
std::string quoted(std::string_view text);

}  // namespace zshard::base
