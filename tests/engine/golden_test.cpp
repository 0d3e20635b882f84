// Training of the specification's models gives golden.json's bits at every stage and budget.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdio>

#include "tests/engine/lab.hpp"
#include "tests/spec/golden.hpp"

namespace zshard {
namespace {

/// Bits of storage, as golden.json writes them.
template <class Word>
std::string hexes(const std::vector<Word>& words) {
  std::string text;
  for (const Word w : words) {
    char word[16];
    std::snprintf(word, sizeof word, "%0*x", static_cast<int>(2 * sizeof(Word)),
                  static_cast<unsigned>(w));
    text += (text.empty() ? "" : " ") + std::string(word);
  }
  return text;
}

/// golden.json hashes long tensors; coreutils has the hash.
std::string sha256(const void* data, std::size_t bytes) {
  const std::string path = testing::TempDir() + "zshard_golden_" + std::to_string(getpid());
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) throw std::runtime_error("cannot write " + path);
  std::fwrite(data, 1, bytes, file);
  std::fclose(file);
  std::FILE* pipe = popen(("timeout 10 sha256sum " + path + " < /dev/null").c_str(), "r");
  std::array<char, 65> text{};
  const bool read = pipe != nullptr && std::fread(text.data(), 1, 64, pipe) == 64;
  if (pipe != nullptr) pclose(pipe);
  std::remove(path.c_str());
  if (!read) throw std::runtime_error("sha256sum did not run");
  return std::string(text.data(), 64);
}

template <class Word>
std::string shown(const std::vector<Word>& words, bool hashed) {
  return hashed ? "sha256 " + sha256(words.data(), words.size() * sizeof(Word)) : hexes(words);
}

std::string stored(const std::vector<float>& values, DType dtype, bool hashed) {
  if (dtype == DType::f32) {
    std::vector<std::uint32_t> words;
    for (const float x : values) words.push_back(std::bit_cast<std::uint32_t>(x));
    return shown(words, hashed);
  }
  std::vector<std::uint16_t> words(values.size());
  kernels::narrow(values.data(), dtype, words.data(), static_cast<std::int64_t>(values.size()));
  return shown(words, hashed);
}

void compare(const nlohmann::json& expected, const lab::Case& c, const lab::Tensors& got) {
  const std::map<std::string, std::string> names = {
      {"m", "/exp_avg"}, {"v", "/exp_avg_sq"}, {"master", "/master"}};
  for (const UnitSpec& unit : c.spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      if (!p.options.alias.empty()) continue;
      const nlohmann::json& tensors = expected.at("final").at(p.name);
      for (const auto& [slot, text] : tensors.items()) {
        const bool parameter = slot == "parameter";
        const std::string want = text.get<std::string>();
        const auto& values = got.values.at(parameter ? p.name : p.name + names.at(slot));
        EXPECT_EQ(
            stored(values, parameter ? p.options.dtype : DType::f32, want.starts_with("sha256")),
            want)
            << p.name << " " << slot;
      }
    }
  }
  ASSERT_EQ(got.norms.size(), expected.at("norms").size());
  for (std::size_t i = 0; i < got.norms.size(); ++i) {
    char text[32];
    std::snprintf(text, sizeof text, "%016llx",
                  static_cast<unsigned long long>(std::bit_cast<std::uint64_t>(got.norms[i])));
    EXPECT_EQ(text, expected.at("norms")[i].get<std::string>()) << "norm of step " << i;
  }
}

TEST(Golden, TrainingGivesTheSpecificationsBits) {
  ZSHARD_NEED_GOLDEN();
  int runs = 0;
  for (const nlohmann::json& model : golden("adamw", "models")) {
    lab::Case c;
    c.spec = golden_model(model.at("model").get<std::string>());
    c.world = model.at("world").get<int>();
    const nlohmann::json& o = model.at("options");
    if (!o.at("clip").is_null()) c.clip = o.at("clip").get<double>();
    if (!o.at("wire").is_null()) c.options.wire = golden_dtype(o.at("wire").get<std::string>());
    if (!o.at("group").is_null()) c.options.reduction_group = o.at("group").get<int>();
    c.options.accumulation =
        o.at("accumulation") == "local" ? Accumulation::local : Accumulation::reduced;
    c.options.gradient_mode = GradientMode::overwrite;
    c.options.poison_slots = true;
    const auto positions = static_cast<int>(c.spec.program().size());
    for (int step = 0; step < model.at("steps").get<int>(); ++step) {
      auto& of_step = c.uses.emplace_back();
      for (int micro = 0; micro < model.at("micro_steps").get<int>(); ++micro) {
        auto& of_micro = of_step.emplace_back();
        for (int r = 0; r < c.world; ++r) {
          auto& used = of_micro.emplace_back();
          for (int p = 0; p < positions; ++p) {
            if (!(r == 1 && step == 1 && p % 3 == 0)) used.insert(p);
          }
        }
      }
    }
    for (int stage = 0; stage < 4; ++stage) {
      c.options.stage = static_cast<Stage>(stage);
      for (const auto& budget : lab::budgets(c.spec, c.world)) {
        c.options.gather_budget = budget;
        SCOPED_TRACE("model " + model.at("model").get<std::string>() + " world " +
                     std::to_string(c.world) + " stage " + std::to_string(stage));
        compare(model, c, lab::train(c));
        ++runs;
        if (stage < 3) break;
      }
    }
  }
  EXPECT_GE(runs, 25);
}

}  // namespace
}  // namespace zshard
