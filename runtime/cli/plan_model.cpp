#include "runtime/cli/plan_model.hpp"

#include <utility>

#include "runtime/cli/arguments.hpp"
#include "runtime/cli/spec_file.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

// Far above any model, and far enough from overflow that most products are still told in bytes.
constexpr std::int64_t kMostWidth = std::int64_t{1} << 20;
constexpr std::int64_t kMostExtent = std::int64_t{1} << 31;
constexpr std::int64_t kGptVocab = 50257;
constexpr std::int64_t kGptContext = 1024;
constexpr std::int64_t kLlamaVocab = 32000;

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

void PlanModel::describe(CLI::App& command) {
  const std::string group = "Model (one of --preset, --layers with --width, --spec)";
  const auto add = [&](const std::string& name, const std::string& meta, const std::string& help,
                       std::function<void(const std::string&)> take) {
    add_text(command, name, meta, help, std::move(take))->group(group);
  };
  const auto add_number = [&](const std::string& name, const std::string& help,
                              std::optional<std::int64_t>& value, std::int64_t most) {
    add(name, "N", help,
        [&value, name, most](const std::string& text) { value = whole(name, text, 1, most); });
  };
  add("--preset", "NAME", joined(preset_names()), [this](const std::string& text) {
    one_of("--preset", text, preset_names());
    preset_ = text;
  });
  add("--spec", "FILE.json", "units and parameters from a file; docs/cli.md has the format",
      [this](const std::string& text) {
        if (text.empty()) throw UsageError("argument --spec: the path is empty");
        file_ = text;
      });
  add("--family", "NAME", "gpt (default) or llama, for --layers and --width",
      [this](const std::string& text) {
        family_ = one_of("--family", text, {"gpt", "llama"}) == 0 ? Family::gpt : Family::llama;
      });
  add_number("--layers", "blocks; with --preset instead of its own number, as all below", layers_,
             kMostLayers);
  add_number("--width", "of the residual stream", width_, kMostWidth);
  add_number("--heads", "attention heads; default width / 64", heads_, kMostWidth);
  add_number("--kv-heads", "llama: heads of keys and values; default all", kv_heads_, kMostWidth);
  add_number("--ffn", "inner width of the feed-forward; default 4 * width, llama 8/3 * width", ffn_,
             kMostExtent);
  add_number("--vocab", "rows of the token table; default 50257, llama 32000", vocab_, kMostExtent);
  add_number("--context", "gpt: rows of the position table; default 1024", context_, kMostExtent);
  add("--dtype", "NAME", "of parameters and gradients: f32 (default), bf16, f16",
      [this](const std::string& text) {
        constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
        dtype_ = kDTypes[one_of("--dtype", text, {"f32", "bf16", "f16"})];
      });
}

bool PlanModel::any_number() const {
  return layers_ || width_ || heads_ || kv_heads_ || ffn_ || vocab_ || context_;
}

void PlanModel::settle() {
  const int sources = (preset_.empty() ? 0 : 1) + (file_.empty() ? 0 : 1);
  if (sources == 0 && !layers_ && !width_) {
    throw UsageError("which model? Give --preset NAME, --layers N --width N, or --spec FILE.json");
  }
  if (sources == 2 || (!file_.empty() && (any_number() || family_))) {
    throw UsageError("--spec FILE.json describes the whole model: leave out " +
                     std::string(sources == 2 ? "--preset" : "--family and the numbers"));
  }
  if (!file_.empty()) {
    name_ = file_;
    return;
  }
  Shape shape;
  if (preset_.empty()) {
    if (!layers_ || !width_) {
      throw UsageError("a shape needs both --layers and --width");
    }
    shape.family = family_.value_or(Family::gpt);
    const bool gpt = shape.family == Family::gpt;
    shape.vocab = gpt ? kGptVocab : kLlamaVocab;
    shape.context = gpt ? kGptContext : 0;
    name_ = "a " + to_string(shape.family) + " shape";
  } else {
    for (const Preset& preset : presets()) {
      if (preset.name == preset_) shape = preset.shape;
    }
    if (family_ && *family_ != shape.family) {
      throw UsageError("--preset " + preset_ + " is of the family " + to_string(shape.family) +
                       ": leave out --family");
    }
    name_ = preset_ + (any_number() ? " with changes" : "");
  }
  if (shape.family == Family::gpt && kv_heads_) {
    throw UsageError("--kv-heads is of the family llama: add --family llama or leave it out");
  }
  if (shape.family == Family::llama && context_) {
    throw UsageError(
        "--context is of the family gpt: llama has no position table, so it changes nothing");
  }
  // What follows from the width follows from the new one.
  const bool other_width = preset_.empty() || (width_ && *width_ != shape.width);
  shape.layers = layers_.value_or(shape.layers);
  shape.width = width_.value_or(shape.width);
  const bool grouped_heads = shape.kv_heads != shape.heads;
  if (heads_ || other_width) shape.heads = heads_.value_or(default_heads(shape.width));
  if (kv_heads_ || !grouped_heads || preset_.empty()) {
    shape.kv_heads = kv_heads_.value_or(shape.heads);
  }
  if (ffn_ || other_width) shape.ffn = ffn_ ? *ffn_ : default_ffn(shape.family, shape.width);
  shape.vocab = vocab_.value_or(shape.vocab);
  shape.context = context_.value_or(shape.context);
  check(shape);
  shape_ = shape;
}

ModelSpec PlanModel::spec(std::optional<std::int64_t> layers) const {
  if (!shape_) return read_spec(file_, dtype_);
  Shape shape = *shape_;
  if (layers) shape.layers = *layers;
  return make_spec(shape, dtype_);
}

}  // namespace zshard::cli
