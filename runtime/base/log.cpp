#include "runtime/base/log.hpp"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/base/environment.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"

namespace zshard::base {

namespace {

constexpr std::array<std::string_view, 6> kLevelNames = {"trace",   "debug", "info",
                                                         "warning", "error", "off"};
constexpr std::array<std::string_view, kTopics> kTopicNames = {
    "base",       "device",  "memory", "kernels",    "comm", "shard",
    "optimizers", "offload", "engine", "checkpoint", "cli"};
constexpr LogLevel kDefaultLevel = LogLevel::warning;

using Levels = std::array<LogLevel, kTopics>;

Levels all_at(LogLevel level) {
  Levels levels{};
  levels.fill(level);
  return levels;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

template <class Names>
std::optional<std::size_t> index_of(const Names& names, std::string_view name) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return i;
  }
  return std::nullopt;
}

template <class Names>
std::string unknown(const std::string& what, const Names& names, std::string_view name) {
  const std::vector<std::string> candidates(names.begin(), names.end());
  std::string all;
  for (const std::string& candidate : candidates) all += (all.empty() ? "" : ", ") + candidate;
  return base::quoted(name) + " is no " + what + " (" + all + ")." + did_you_mean(name, candidates);
}

// Fills levels, or returns what is wrong.
std::string parse_levels(std::string_view text, Levels& levels) {
  levels = all_at(kDefaultLevel);
  if (trimmed(text).empty()) return "";
  bool first = true;
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view item = trimmed(text.substr(0, comma));
    const std::size_t equals = item.find('=');
    std::string_view name = trimmed(item.substr(equals == std::string_view::npos ? 0 : equals + 1));
    if (name == "warn") name = "warning";
    const std::optional<std::size_t> level = index_of(kLevelNames, name);
    if (!level) return unknown("log level", kLevelNames, name);
    if (equals == std::string_view::npos) {
      if (!first) return "the level for all topics, " + base::quoted(name) + ", must stand first.";
      levels = all_at(static_cast<LogLevel>(*level));
    } else {
      const std::string_view topic_name = trimmed(item.substr(0, equals));
      const std::optional<std::size_t> topic = index_of(kTopicNames, topic_name);
      if (!topic) return unknown("log topic", kTopicNames, topic_name);
      levels[*topic] = static_cast<LogLevel>(*level);
    }
    if (comma == std::string_view::npos) return "";
    text.remove_prefix(comma + 1);
    first = false;
  }
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::trace:
      return spdlog::level::trace;
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

class Log {
 public:
  // Never destroyed: threads may log while static objects are being destroyed.
  static Log& instance() {
    static Log& log = *new Log;
    return log;
  }

  void set_levels(const Levels& levels) {
    for (std::size_t i = 0; i < levels.size(); ++i) {
      levels_[i].store(levels[i], std::memory_order_relaxed);
    }
  }

  [[nodiscard]] bool enabled(Topic topic, LogLevel level) const {
    const auto index = static_cast<std::size_t>(topic);
    return level != LogLevel::off && index < levels_.size() &&
           level >= levels_[index].load(std::memory_order_relaxed);
  }

  LogSink set_sink(LogSink sink) {
    const std::lock_guard lock(mutex_);
    std::swap(sink_, sink);
    return sink;
  }

  void write(const LogRecord& record) {
    // A sink that logs would wait for itself.
    if (in_sink_) {
      to_stderr(record);
      return;
    }
    const std::lock_guard lock(mutex_);
    if (!sink_) {
      to_stderr(record);
      return;
    }
    in_sink_ = true;
    try {
      sink_(record);
    } catch (...) {
    }
    in_sink_ = false;
  }

 private:
  Log() : logger_("zshard", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    // Not in spdlog's registry: the program's own use of spdlog stays as it is.
    logger_.set_pattern("[%H:%M:%S.%e] [zshard] [%l] %v");
    logger_.set_level(spdlog::level::trace);
    logger_.flush_on(spdlog::level::trace);
    logger_.set_error_handler([](const std::string&) {});
    Levels levels{};
    const std::string text = environment_variable("ZSHARD_LOG").value_or("");
    const std::string wrong = parse_levels(text, levels);
    set_levels(wrong.empty() ? levels : all_at(kDefaultLevel));
    if (!wrong.empty()) {
      to_stderr({LogLevel::warning, Topic::base, kNoRank,
                 "ZSHARD_LOG=" + base::quoted(text) + " is ignored: " + wrong +
                     " Write a level, then topics with their own: info,comm=debug."});
    }
  }

  void to_stderr(const LogRecord& record) {
    const std::string_view topic = to_string(record.topic);
    if (record.rank == kNoRank) {
      logger_.log(spdlog_level(record.level), "{}: {}", topic, record.message);
    } else {
      logger_.log(spdlog_level(record.level), "[rank {}] {}: {}", record.rank, topic,
                  record.message);
    }
  }

  static thread_local bool in_sink_;
  std::array<std::atomic<LogLevel>, kTopics> levels_{};
  std::mutex mutex_;
  LogSink sink_;
  spdlog::logger logger_;
};

thread_local bool Log::in_sink_ = false;

}  // namespace

std::string_view to_string(LogLevel level) {
  const auto index = static_cast<std::size_t>(level);
  return index < kLevelNames.size() ? kLevelNames[index] : "invalid";
}

std::string_view to_string(Topic topic) {
  const auto index = static_cast<std::size_t>(topic);
  return index < kTopicNames.size() ? kTopicNames[index] : "invalid";
}

LogSink set_log_sink(LogSink sink) {
  return Log::instance().set_sink(std::move(sink));
}

std::string set_log_levels(std::string_view text) {
  Levels levels{};
  std::string wrong = parse_levels(text, levels);
  if (wrong.empty()) Log::instance().set_levels(levels);
  return wrong;
}

bool log_enabled(Topic topic, LogLevel level) noexcept {
  try {
    return Log::instance().enabled(topic, level);
  } catch (...) {
    return false;
  }
}

void log_line(LogLevel level, Topic topic, int rank, std::string_view message) noexcept {
  if (!log_enabled(topic, level)) return;
  try {
    Log::instance().write({level, topic, rank, message});
  } catch (...) {
  }
}

}  // namespace zshard::base
