#include "runtime/cli/spec_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "runtime/base/descriptor.hpp"
#include "runtime/base/nearest.hpp"
#include "runtime/base/quote.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostFileBytes = std::size_t{256} << 20;
constexpr int kMostHold = 1 << 20;

[[noreturn]] void wrong(const std::string& where, const std::string& what) {
  throw UsageError(where + ": " + what);
}

/// An object whose members are all known.
void check_object(const Json& json, const std::string& where,
                  const std::vector<std::string>& known) {
  if (!json.is_object()) wrong(where, "expected an object, found " + std::string(json.type_name()));
  for (const auto& member : json.items()) {
    bool found = false;
    for (const std::string& name : known) found = found || name == member.key();
    if (found) continue;
    std::string list;
    for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
    wrong(where, "there is no member " + base::quoted(member.key()) + "." +
                     base::did_you_mean(member.key(), known) + " Known: " + list);
  }
}

const Json* member(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found == json.end() || found->is_null() ? nullptr : &*found;
}

const Json& required(const Json& json, const char* name, const std::string& where) {
  const Json* found = member(json, name);
  if (found == nullptr) wrong(where, "the member \"" + std::string(name) + "\" is missing");
  return *found;
}

const Json& array(const Json& json, const std::string& where) {
  if (!json.is_array()) wrong(where, "expected an array, found " + std::string(json.type_name()));
  return json;
}

std::string text(const Json& json, const std::string& where) {
  if (!json.is_string()) wrong(where, "expected a text, found " + std::string(json.type_name()));
  return json.get<std::string>();
}

std::int64_t whole(const Json& json, const std::string& where) {
  const bool big = json.is_number_unsigned() &&
                   json.get<std::uint64_t>() >
                       static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!json.is_number_integer() || big) {
    wrong(where, "expected a whole number below 2^63, found " + json.dump());
  }
  return json.get<std::int64_t>();
}

void set(bool& value, const Json& json, const char* name, const std::string& where) {
  const Json* found = member(json, name);
  if (found == nullptr) return;
  if (!found->is_boolean()) {
    wrong(where + "." + name, "expected true or false, found " + found->dump());
  }
  value = found->get<bool>();
}

void set(std::string& value, const Json& json, const char* name, const std::string& where) {
  const Json* found = member(json, name);
  if (found != nullptr) value = text(*found, where + "." + name);
}

template <class Number>  // double or std::optional<double>
void set_number(Number& value, const Json& json, const char* name, const std::string& where) {
  const Json* found = member(json, name);
  if (found == nullptr) return;
  if (!found->is_number()) wrong(where + "." + name, "expected a number, found " + found->dump());
  value = found->get<double>();
}

DType dtype_of(const Json& json, const std::string& where) {
  const std::string name = text(json, where);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (name == to_string(dtype)) return dtype;
  }
  wrong(where, "the dtype is " + base::quoted(name) + ", must be f32, bf16 or f16");
}

void read_parameter(UnitBuilder& unit, const Json& json, DType dtype, const std::string& where) {
  check_object(
      json, where,
      {"name", "shape", "dtype", "decay", "frozen", "resident", "lr_scale", "group", "alias"});
  const std::string name = text(required(json, "name", where), where + ".name");
  Shape shape;
  for (const Json& extent : array(required(json, "shape", where), where + ".shape")) {
    shape.push_back(whole(extent, where + ".shape"));
  }
  ParameterOptions options{.dtype = dtype};
  if (const Json* own = member(json, "dtype")) options.dtype = dtype_of(*own, where + ".dtype");
  set(options.decay, json, "decay", where);
  set(options.frozen, json, "frozen", where);
  set(options.resident, json, "resident", where);
  set_number(options.lr_scale, json, "lr_scale", where);
  set(options.group, json, "group", where);
  set(options.alias, json, "alias", where);
  unit.parameter(name, std::move(shape), std::move(options));
}

Pass pass_of(const std::string& name, const std::string& where) {
  for (const Pass pass : {Pass::forward, Pass::recompute, Pass::backward}) {
    if (name == to_string(pass)) return pass;
  }
  wrong(where, "the pass is " + base::quoted(name) + ", must be forward, recompute or backward");
}

/// What every optimizer wants of it; the engine's own message speaks of calls.
void set_hyper(std::optional<double>& value, const Json& json, const char* name,
               const std::string& where, bool fraction) {
  set_number(value, json, name, where);
  if (!value || (*value >= 0.0 && (!fraction || *value < 1.0))) return;
  wrong(where + "." + name, "it is " + json.at(name).dump() + ", must be at least 0" +
                                (fraction ? " and less than 1" : ""));
}

void read_groups(ModelSpec& spec, const Json& json, const std::string& where) {
  if (!json.is_object()) wrong(where, "expected an object, found " + std::string(json.type_name()));
  for (const auto& [name, values] : json.items()) {
    const std::string here = where + "." + name;
    check_object(values, here, {"lr", "weight_decay", "beta1", "beta2", "eps", "momentum"});
    HyperParameters hyper;
    set_hyper(hyper.lr, values, "lr", here, false);
    set_hyper(hyper.weight_decay, values, "weight_decay", here, false);
    set_hyper(hyper.beta1, values, "beta1", here, true);
    set_hyper(hyper.beta2, values, "beta2", here, true);
    set_hyper(hyper.eps, values, "eps", here, false);
    set_hyper(hyper.momentum, values, "momentum", here, true);
    spec.group(name, hyper);
  }
}

std::vector<Position> read_program(const ModelSpec& spec, const Json& json) {
  std::vector<Position> program;
  for (const Json& position : array(json, "program")) {
    const std::string where = "program[" + std::to_string(program.size()) + "]";
    if (!position.is_array() || position.size() != 2) {
      wrong(where, "expected [\"UNIT\", \"PASS\"], found " + position.dump());
    }
    const Pass pass = pass_of(text(position[1], where), where);
    try {
      program.push_back({spec.unit_id(text(position[0], where)), pass});
    } catch (const UsageError& error) {
      wrong(where, error.what());
    }
  }
  if (program.empty()) wrong("program", "it has no positions; leave it out for the default one");
  return program;
}

/// The engine would find it too, and say it in terms of ModelSpec.
void check_groups(const ModelSpec& spec) {
  std::vector<std::string> names;
  for (const auto& group : spec.groups()) names.push_back(group.name);
  for (std::size_t u = 0; u < spec.units().size(); ++u) {
    const auto& parameters = spec.units()[u].parameters;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const std::string& group = parameters[p].options.group;
      if (group.empty() || std::find(names.begin(), names.end(), group) != names.end()) continue;
      wrong("units[" + std::to_string(u) + "].parameters[" + std::to_string(p) + "].group",
            "there is no group " + base::quoted(group) + " in \"groups\"." +
                base::did_you_mean(group, names));
    }
  }
}

void check_not_empty(const ModelSpec& spec) {
  for (const UnitSpec& unit : spec.units()) {
    for (const ParameterSpec& parameter : unit.parameters) {
      if (parameter.count() > 0) return;
    }
  }
  wrong("units", "the model has no parameters");
}

}  // namespace

ModelSpec parse_spec(std::string_view json, DType dtype) {
  Json document;
  try {
    document = Json::parse(json);
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, ...": without the library's number.
    const std::string text = error.what();
    const std::size_t bracket = text.find("] ");
    throw UsageError("this is no JSON: " +
                     text.substr(bracket == std::string::npos ? 0 : bracket + 2));
  }
  check_object(document, "the document",
               {"units", "groups", "program", "dtype", "hold", "block_quantised"});
  if (const Json* own = member(document, "dtype")) dtype = dtype_of(*own, "dtype");
  ModelSpec spec;
  const Json& units = array(required(document, "units", "the document"), "units");
  for (std::size_t u = 0; u < units.size(); ++u) {
    const std::string where = "units[" + std::to_string(u) + "]";
    check_object(units[u], where, {"name", "parameters"});
    UnitBuilder unit = spec.unit(text(required(units[u], "name", where), where + ".name"));
    const Json& parameters = array(required(units[u], "parameters", where), where + ".parameters");
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      read_parameter(unit, parameters[p], dtype, where + ".parameters[" + std::to_string(p) + "]");
    }
  }
  if (const Json* groups = member(document, "groups")) read_groups(spec, *groups, "groups");
  if (const Json* program = member(document, "program")) spec.program(read_program(spec, *program));
  if (const Json* hold = member(document, "hold")) {
    const std::int64_t positions = whole(*hold, "hold");
    if (positions < 1 || positions > kMostHold) {
      wrong("hold",
            "it is " + std::to_string(positions) + ", must be 1 to " + std::to_string(kMostHold));
    }
    spec.hold(static_cast<int>(positions));
  }
  bool quantised = false;
  set(quantised, document, "block_quantised", "the document");
  spec.block_quantised(quantised);
  check_groups(spec);
  check_not_empty(spec);
  return spec;
}

std::string read_text(const std::string& path) {
  const auto fail = [&](const std::string& what, std::size_t offset, int error) {
    throw IoError("cannot " + what + " " + path + " at offset " + std::to_string(offset) + ": " +
                  std::generic_category().message(error));
  };
  if (path.find('\0') != std::string::npos || path.empty()) {
    throw UsageError("the path " + base::quoted(path) + " names no file");
  }
  const base::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) fail("open", 0, errno);
  std::string content;
  std::vector<char> buffer(std::size_t{1} << 16);
  while (true) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", content.size(), errno);
    if (got == 0) return content;
    content.append(buffer.data(), static_cast<std::size_t>(got));
    if (content.size() > kMostFileBytes) {
      throw UsageError(path + " holds more than 256 MiB: no file that this tool reads is so long");
    }
  }
}

ModelSpec read_spec(const std::string& path, DType dtype) {
  const std::string content = read_text(path);
  try {
    return parse_spec(content, dtype);
  } catch (const UsageError& error) {
    throw UsageError(path + ": " + error.what());
  }
}

}  // namespace zshard::cli
