// Reads a DeepSpeed configuration. The text is hostile input: its size and depth are bounded before
// anything is built from it, and every value's type is checked.
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "runtime/base/bytes.hpp"
#include "runtime/base/option_table.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"
#include "zshard/options.hpp"

namespace zshard {

namespace {

using Json = nlohmann::json;
using base::DeepspeedName;
using base::DeepspeedValue;
using base::OptionRow;

constexpr std::size_t kMostBytes = 16 << 20;
constexpr int kMostDepth = 64;

Json parse(std::string_view text) {
  if (text.size() > kMostBytes) {
    throw UsageError("the DeepSpeed configuration holds more than " +
                     base::human_bytes(kMostBytes));
  }
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMostDepth) {
      throw UsageError("the DeepSpeed configuration is nested deeper than " +
                       std::to_string(kMostDepth) + " levels");
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        throw UsageError("the DeepSpeed configuration has the name " + base::quoted(key) +
                         " twice in one object");
      }
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::parse_error& error) {
    throw UsageError(error.byte > text.size()
                         ? "the DeepSpeed configuration is no JSON: it ends too early, after " +
                               std::to_string(text.size()) + " bytes"
                         : "the DeepSpeed configuration is no JSON, at byte " +
                               std::to_string(error.byte) + " of " + std::to_string(text.size()));
  } catch (const Json::exception&) {
    throw UsageError("the DeepSpeed configuration holds a number that no machine type holds");
  }
}

class Importer {
 public:
  explicit Importer(EngineOptions& options) : options_(options) {}

  void read(const Json& document) {
    if (!document.is_object()) {
      throw UsageError("the DeepSpeed configuration is no JSON object");
    }
    walk(document, "");
  }

  std::vector<std::string> take_others() { return std::move(others_); }

 private:
  // Depth is bounded by parse().
  void walk(const Json& object, const std::string& prefix) {
    if (prefix == "fp16.") check_scaling(object);
    for (const auto& [key, value] : object.items()) {
      const std::string path = prefix + key;
      // A dot inside a key must not pass for a step down.
      const bool plain = key.find('.') == std::string::npos;
      if (plain && is_section(path)) {
        // DeepSpeed writes null for an offload that is not wanted.
        if (value.is_null()) continue;
        if (!value.is_object()) refuse(path, "an object");
        walk(value, path + ".");
      } else if (const auto [row, name] = find(path); plain && row != nullptr) {
        take(*row, *name, object, value);
      } else if (value.is_object() && !value.empty()) {
        walk(value, path + ".");
      } else {
        others_.push_back(path);
      }
    }
  }

  static std::pair<const OptionRow*, const DeepspeedName*> find(const std::string& path) {
    for (const OptionRow& row : base::option_rows()) {
      for (const DeepspeedName& name : row.deepspeed) {
        if (name.path == path) return {&row, &name};
      }
    }
    return {nullptr, nullptr};
  }

  static bool is_section(const std::string& path) {
    for (const OptionRow& row : base::option_rows()) {
      for (const DeepspeedName& name : row.deepspeed) {
        if (name.path.substr(0, path.size() + 1) == path + ".") return true;
      }
    }
    return false;
  }

  [[noreturn]] static void refuse(const std::string& path, const std::string& wanted) {
    throw UsageError("DeepSpeed configuration: " + path + " must be " + wanted +
                     "; fill it in, also where another tool allows \"auto\"");
  }

  static void check_scaling(const Json& fp16) {
    const auto enabled = fp16.find("enabled");
    if (enabled == fp16.end()) return;
    if (!enabled->is_boolean()) refuse("fp16.enabled", "true or false");
    if (enabled->get<bool>() && !fp16.contains("loss_scale")) throw_dynamic();
  }

  [[noreturn]] static void throw_dynamic() {
    throw UsageError(
        "DeepSpeed configuration: fp16.loss_scale = 0, also where it is left out, asks for dynamic "
        "loss scaling, which zshard does not do. Set fp16.loss_scale to a constant.");
  }

  static std::int64_t whole(const std::string& path, const Json& value) {
    const std::string wanted = "a whole number of at most 63 bits";
    if (value.is_number_unsigned()) {
      const auto number = value.get<std::uint64_t>();
      if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        refuse(path, wanted);
      }
      return static_cast<std::int64_t>(number);
    }
    if (value.is_number_integer()) return value.get<std::int64_t>();
    if (!value.is_number_float()) refuse(path, wanted);
    // 1e9 is how people write sizes.
    const auto number = value.get<double>();
    if (!(std::fabs(number) < 0x1p63) || number != std::floor(number)) refuse(path, wanted);
    return static_cast<std::int64_t>(number);
  }

  static std::string text(const std::string& path, const Json& value) {
    if (!value.is_string()) refuse(path, "a string");
    return value.get<std::string>();
  }

  void take(const OptionRow& row, const DeepspeedName& name, const Json& object,
            const Json& value) {
    const std::string& path = name.path;
    switch (name.value) {
      case DeepspeedValue::whole:
        set(row, path, std::to_string(whole(path, value)));
        return;
      case DeepspeedValue::elements: {
        const std::int64_t elements = whole(path, value);
        if (elements < 0 || elements > std::numeric_limits<std::int64_t>::max() / 4) {
          refuse(path, "a number of fp32 elements whose bytes fit 63 bits");
        }
        set(row, path, std::to_string(elements * 4));
        return;
      }
      case DeepspeedValue::tier: {
        const std::string device = text(path, value);
        if (device != "none" && device != "cpu" && device != "nvme") {
          refuse(path, "\"none\", \"cpu\" or \"nvme\"");
        }
        set(row, path, device == "none" ? "device" : device == "cpu" ? "host" : "nvme");
        return;
      }
      case DeepspeedValue::nvme_path:
        take_nvme_path(row, path, object, value);
        return;
      case DeepspeedValue::dtype: {
        if (value.is_null()) return;
        const std::string dtype = text(path, value);
        if (dtype == "fp32") return set(row, path, "f32");
        if (dtype == "fp16") return set(row, path, "f16");
        if (dtype == "bf16" || dtype == "bfp16") return set(row, path, "bf16");
        refuse(path, "\"fp32\", \"fp16\", \"bf16\" or \"bfp16\"");
      }
      case DeepspeedValue::loss_scale: {
        if (!value.is_number()) refuse(path, "a number");
        const auto enabled = object.find("enabled");
        if (enabled == object.end() || !enabled->get<bool>()) return;
        const auto scale = value.get<double>();
        if (scale == 0.0) throw_dynamic();
        char digits[64];
        const auto result = std::to_chars(digits, digits + sizeof digits, scale);
        set(row, path, std::string_view(digits, static_cast<std::size_t>(result.ptr - digits)));
        return;
      }
    }
  }

  void take_nvme_path(const OptionRow& row, const std::string& path, const Json& object,
                      const Json& value) {
    if (value.is_null()) return;
    const std::string directory = text(path, value);
    const auto device = object.find("device");
    if (device == object.end() || *device != "nvme") return;
    if (directory.find(',') != std::string::npos) {
      refuse(path, "a directory without a comma, which separates directories in " + row.info.name);
    }
    if (!nvme_path_.empty() && nvme_path_ != directory) {
      throw UsageError("DeepSpeed configuration: " + path + " is " + base::quoted(directory) +
                       ", and another nvme_path is " + base::quoted(nvme_path_) +
                       "; all nvme tiers share " + row.info.name + ". Give them one path.");
    }
    nvme_path_ = directory;
    set(row, path, directory);
  }

  void set(const OptionRow& row, const std::string& path, std::string_view value) {
    try {
      row.set(options_, value);
    } catch (const UsageError& error) {
      throw UsageError("DeepSpeed configuration: " + path + ": " + error.what());
    }
  }

  EngineOptions& options_;
  std::vector<std::string> others_;
  std::string nvme_path_;
};

}  // namespace

std::vector<std::string> apply_deepspeed_config(EngineOptions& options, std::string_view json) {
  const Json document = parse(json);
  EngineOptions changed = options;
  Importer importer(changed);
  importer.read(document);
  options = std::move(changed);
  return importer.take_others();
}

}  // namespace zshard
