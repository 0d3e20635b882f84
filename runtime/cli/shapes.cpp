#include "runtime/cli/shapes.hpp"

#include <utility>

#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

/// a * b, with overflow caught where the product becomes a shape's extent.
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw UsageError("an extent of the model passes 2^63 - 1; make it smaller");
  }
  return product;
}

void add(UnitBuilder& unit, const std::string& name, zshard::Shape shape, DType dtype) {
  // GPT-2's rule: gains and biases are not decayed.
  const bool decay = shape.size() >= 2;
  unit.parameter(name, std::move(shape), {.dtype = dtype, .decay = decay});
}

void add_gpt_block(ModelSpec& spec, const std::string& name, const Shape& s, DType dtype) {
  UnitBuilder unit = spec.unit(name);
  const std::int64_t w = s.width;
  add(unit, name + ".ln_1.weight", {w}, dtype);
  add(unit, name + ".ln_1.bias", {w}, dtype);
  add(unit, name + ".attn.c_attn.weight", {w, times(3, w)}, dtype);
  add(unit, name + ".attn.c_attn.bias", {times(3, w)}, dtype);
  add(unit, name + ".attn.c_proj.weight", {w, w}, dtype);
  add(unit, name + ".attn.c_proj.bias", {w}, dtype);
  add(unit, name + ".ln_2.weight", {w}, dtype);
  add(unit, name + ".ln_2.bias", {w}, dtype);
  add(unit, name + ".mlp.c_fc.weight", {w, s.ffn}, dtype);
  add(unit, name + ".mlp.c_fc.bias", {s.ffn}, dtype);
  add(unit, name + ".mlp.c_proj.weight", {s.ffn, w}, dtype);
  add(unit, name + ".mlp.c_proj.bias", {w}, dtype);
}

ModelSpec gpt(const Shape& s, DType dtype) {
  ModelSpec spec;
  UnitBuilder embedding = spec.unit("embedding");
  add(embedding, "wte.weight", {s.vocab, s.width}, dtype);
  add(embedding, "wpe.weight", {s.context, s.width}, dtype);
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    add_gpt_block(spec, "h." + std::to_string(layer), s, dtype);
  }
  UnitBuilder last = spec.unit("ln_f");
  add(last, "ln_f.weight", {s.width}, dtype);
  add(last, "ln_f.bias", {s.width}, dtype);

  // The token table is used again as the output matrix.
  const auto units = static_cast<std::int32_t>(spec.units().size());
  std::vector<Position> program;
  for (std::int32_t u = 0; u < units; ++u) program.push_back({UnitId{u}, Pass::forward});
  program.push_back({embedding.id(), Pass::forward});
  program.push_back({embedding.id(), Pass::backward});
  for (std::int32_t u = units; u-- > 0;) program.push_back({UnitId{u}, Pass::backward});
  spec.program(std::move(program));
  return spec;
}

ModelSpec llama(const Shape& s, DType dtype) {
  ModelSpec spec;
  const std::int64_t w = s.width;
  const std::int64_t keys = times(w / s.heads, s.kv_heads);
  UnitBuilder embedding = spec.unit("embedding");
  add(embedding, "tok_embeddings.weight", {s.vocab, w}, dtype);
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    UnitBuilder unit = spec.unit(name);
    add(unit, name + ".attention_norm.weight", {w}, dtype);
    add(unit, name + ".attention.wq.weight", {w, w}, dtype);
    add(unit, name + ".attention.wk.weight", {keys, w}, dtype);
    add(unit, name + ".attention.wv.weight", {keys, w}, dtype);
    add(unit, name + ".attention.wo.weight", {w, w}, dtype);
    add(unit, name + ".ffn_norm.weight", {w}, dtype);
    add(unit, name + ".feed_forward.w1.weight", {s.ffn, w}, dtype);
    add(unit, name + ".feed_forward.w2.weight", {w, s.ffn}, dtype);
    add(unit, name + ".feed_forward.w3.weight", {s.ffn, w}, dtype);
  }
  UnitBuilder last = spec.unit("output");
  add(last, "norm.weight", {w}, dtype);
  add(last, "output.weight", {s.vocab, w}, dtype);
  return spec;
}

std::int64_t count(const ModelSpec& spec, bool frozen) {
  std::int64_t sum = 0;
  for (const UnitSpec& unit : spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      if (!p.options.alias.empty() || (p.options.frozen && !frozen)) continue;
      if (__builtin_add_overflow(sum, p.count(), &sum)) {
        throw UsageError("the model has more than 2^63 - 1 parameters");
      }
    }
  }
  return sum;
}

}  // namespace

std::string to_string(Family family) {
  return family == Family::gpt ? "gpt" : "llama";
}

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = [] {
    const auto gpt = [](std::string name, std::int64_t layers, std::int64_t width,
                        std::int64_t heads, std::int64_t vocab, std::int64_t context) {
      return Preset{std::move(name),
                    {Family::gpt, layers, width, heads, heads, 4 * width, vocab, context}};
    };
    const auto llama = [](std::string name, std::int64_t layers, std::int64_t width,
                          std::int64_t heads, std::int64_t kv_heads, std::int64_t ffn,
                          std::int64_t vocab) {
      return Preset{std::move(name),
                    {Family::llama, layers, width, heads, kv_heads, ffn, vocab, 0}};
    };
    return std::vector<Preset>{
        gpt("gpt2", 12, 768, 12, 50257, 1024),
        gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
        llama("llama-7b", 32, 4096, 32, 32, 11008, 32000),
        llama("llama-70b", 80, 8192, 64, 8, 28672, 32000),
        gpt("gpt3-175b", 96, 12288, 96, 50257, 2048),
        gpt("mt-nlg-530b", 105, 20480, 128, 51200, 2048),
    };
  }();
  return all;
}

std::int64_t default_ffn(Family family, std::int64_t width) {
  if (family == Family::gpt) return times(4, width);
  // Two thirds of four times the width, in whole blocks of 256: Llama's rule.
  const std::int64_t least = times(8, width) / 3;
  return (least + 255) / 256 * 256;
}

std::int64_t default_heads(std::int64_t width) {
  return width % 64 == 0 ? width / 64 : 1;
}

void check(const Shape& s) {
  const auto positive = [](const char* name, std::int64_t value) {
    if (value < 1) {
      throw UsageError(std::string("the model's ") + name + " is " + std::to_string(value) +
                       ", must be at least 1");
    }
  };
  positive("layers", s.layers);
  positive("width", s.width);
  positive("heads", s.heads);
  positive("ffn", s.ffn);
  positive("vocab", s.vocab);
  if (s.width % s.heads != 0) {
    throw UsageError("the model's width is " + std::to_string(s.width) +
                     ", must be a multiple of its heads, " + std::to_string(s.heads));
  }
  if (s.family == Family::gpt) {
    positive("context", s.context);
    return;
  }
  positive("kv heads", s.kv_heads);
  if (s.heads % s.kv_heads != 0) {
    throw UsageError("the model's heads are " + std::to_string(s.heads) +
                     ", must be a multiple of its kv heads, " + std::to_string(s.kv_heads));
  }
}

ModelSpec make_spec(const Shape& shape, DType dtype) {
  check(shape);
  return shape.family == Family::gpt ? gpt(shape, dtype) : llama(shape, dtype);
}

std::int64_t parameter_count(const ModelSpec& spec) {
  return count(spec, true);
}

std::int64_t trained_count(const ModelSpec& spec) {
  return count(spec, false);
}

}  // namespace zshard::cli
