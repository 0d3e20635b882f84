// Log lines of all layers. Quiet by default: warnings and errors, to stderr. ZSHARD_LOG sets other
// levels. Usable from any thread; no call throws or ends the program.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace zshard::base {

enum class LogLevel : std::uint8_t { trace, debug, info, warning, error, off };

/// One a layer; the names are those of the directories.
enum class Topic : std::uint8_t {
  base,
  device,
  memory,
  kernels,
  comm,
  shard,
  optimizers,
  offload,
  engine,
  checkpoint,
  cli,
};
inline constexpr int kTopics = 11;

std::string_view to_string(LogLevel level);
std::string_view to_string(Topic topic);

/// No rank: a line of the process.
inline constexpr int kNoRank = -1;

/// What a sink receives; `message` is valid during the call.
struct LogRecord {
  LogLevel level = LogLevel::info;
  Topic topic = Topic::base;
  int rank = kNoRank;
  std::string_view message;
};

using LogSink = std::function<void(const LogRecord&)>;

/// Replaces the sink; an empty one is stderr. Returns the one before. Calls of a sink are
/// serialised, and the old one is not called any more once this has returned. A sink must not call
/// this; lines that it logs itself go to stderr; what it throws is dropped.
LogSink set_log_sink(LogSink sink);

/// Sets levels from text like "info,comm=debug": a level for all topics (left out: warning), then
/// topics with their own; blanks around the parts do not count. "" is the default. Returns "", or
/// what is wrong with the text: then nothing has changed. The first use of the log does this with
/// ZSHARD_LOG; bad text there is one warning, and the default levels.
std::string set_log_levels(std::string_view text);

/// Whether a line would be written; for lines that cost something to make.
bool log_enabled(Topic topic, LogLevel level) noexcept;

/// Writes a line, if its level is on. rank: the rank it is about, or kNoRank.
void log_line(LogLevel level, Topic topic, int rank, std::string_view message) noexcept;

template <class... Arguments>
void log(LogLevel level, Topic topic, int rank, fmt::format_string<Arguments...> format,
         Arguments&&... arguments) noexcept {
  if (!log_enabled(topic, level)) return;
  try {
    log_line(level, topic, rank, fmt::format(format, std::forward<Arguments>(arguments)...));
  } catch (...) {
    log_line(level, topic, rank, "(a log line could not be formatted)");
  }
}

template <class... Arguments>
void log_debug(Topic topic, int rank, fmt::format_string<Arguments...> format,
               Arguments&&... arguments) noexcept {
  log(LogLevel::debug, topic, rank, format, std::forward<Arguments>(arguments)...);
}
template <class... Arguments>
void log_info(Topic topic, int rank, fmt::format_string<Arguments...> format,
              Arguments&&... arguments) noexcept {
  log(LogLevel::info, topic, rank, format, std::forward<Arguments>(arguments)...);
}
template <class... Arguments>
void log_warning(Topic topic, int rank, fmt::format_string<Arguments...> format,
                 Arguments&&... arguments) noexcept {
  log(LogLevel::warning, topic, rank, format, std::forward<Arguments>(arguments)...);
}
template <class... Arguments>
void log_error(Topic topic, int rank, fmt::format_string<Arguments...> format,
               Arguments&&... arguments) noexcept {
  log(LogLevel::error, topic, rank, format, std::forward<Arguments>(arguments)...);
}

}  // namespace zshard::base
