#include "runtime/cli/arguments.hpp"

#include <algorithm>
#include <charconv>
#include <optional>

#include "runtime/base/bytes.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"
#include "zshard/options.hpp"

namespace zshard::cli {
namespace {

[[noreturn]] void not_allowed(std::string_view argument, std::string_view text,
                              const std::string& allowed) {
  throw UsageError("argument " + std::string(argument) + ": " + base::quoted(text) +
                   " is not allowed. Allowed: " + allowed + ".");
}

}  // namespace

std::string grouped(std::int64_t number) {
  std::string digits = std::to_string(number);
  const std::size_t first = number < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

std::int64_t whole(std::string_view argument, std::string_view text, std::int64_t least,
                   std::int64_t most) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || value < least || value > most) {
    not_allowed(argument, text,
                "whole numbers from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

std::int64_t bytes(std::string_view argument, std::string_view text, std::int64_t least,
                   std::int64_t most) {
  const std::optional<std::int64_t> value = base::parse_bytes(text);
  if (!value || *value < least || *value > most) {
    not_allowed(argument, text,
                "sizes from " + std::to_string(least) + " to " + std::to_string(most) +
                    " bytes, as 4096 or 16GiB");
  }
  return *value;
}

std::size_t one_of(std::string_view argument, std::string_view text,
                   const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) return static_cast<std::size_t>(found - names.begin());
  std::string allowed;
  for (const std::string& name : names) allowed += (allowed.empty() ? "" : ", ") + name;
  throw UsageError("argument " + std::string(argument) + ": " + base::quoted(text) +
                   " is not allowed. Allowed: " + allowed + "." + base::did_you_mean(text, names));
}

void refuse_others(const std::vector<std::string>& others, const std::vector<std::string>& known,
                   std::string_view command) {
  if (others.empty()) return;
  const auto option = std::find_if(others.begin(), others.end(), [](const std::string& text) {
    return text.size() > 1 && text.front() == '-';
  });
  const std::string& bad = option == others.end() ? others.front() : *option;
  const std::string name = bad.substr(0, bad.find('='));
  // Without the dashes, which all of them share and which would make all of them near.
  const auto bare = [](const std::string& text) {
    const std::size_t at = text.find_first_not_of('-');
    return at == std::string::npos ? std::string() : text.substr(at);
  };
  std::string suggestion;
  if (option != others.end()) {
    std::vector<std::string> names;
    for (const std::string& candidate : known) names.push_back(bare(candidate));
    const std::string near = base::nearest(bare(name), names);
    for (std::size_t n = 0; n < names.size() && suggestion.empty(); ++n) {
      if (!near.empty() && names[n] == near) suggestion = " Did you mean '" + known[n] + "'?";
    }
  }
  throw UsageError("unknown argument " + base::quoted(name) + "." + suggestion + " '" +
                   std::string(command) + " --help' lists what there is.");
}

void refuse_second_name(std::string_view own, std::string_view option,
                        const std::vector<std::string>& others) {
  std::string bare;
  for (const OptionInfo& info : option_table()) {
    if (info.name == option) bare = info.argument.substr(2);
  }
  for (const std::string& other : others) {
    if (other == "--") break;
    const std::string name = other.substr(0, other.find('='));
    if (name != "--" + bare && name != "--zshard-" + bare) continue;
    throw UsageError("arguments " + std::string(own) + " and " + name + " both set the option " +
                     std::string(option) + ". Leave one of them out.");
  }
}

std::string count_text(std::int64_t count, std::string_view thing) {
  return grouped(count) + " " + std::string(thing) + (count == 1 ? "" : "s");
}

}  // namespace zshard::cli
