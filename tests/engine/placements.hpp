// The specification's training runs as cases, and golden.json's word on what they must give. Shared
// by ranks as threads and ranks as processes.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/engine/lab.hpp"
#include "tests/spec/golden.hpp"

namespace zshard::lab {

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
inline std::string sha256(const void* data, std::size_t bytes) {
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

inline std::string stored(const std::vector<float>& values, DType dtype, bool hashed) {
  if (dtype == DType::f32) {
    std::vector<std::uint32_t> words;
    for (const float x : values) words.push_back(std::bit_cast<std::uint32_t>(x));
    return shown(words, hashed);
  }
  std::vector<std::uint16_t> words(values.size());
  kernels::narrow(values.data(), dtype, words.data(), static_cast<std::int64_t>(values.size()));
  return shown(words, hashed);
}

/// The first difference between golden.json's word on a run and its outcome; "" if there is none.
inline std::string golden_difference(const nlohmann::json& expected, const Case& c,
                                     const Tensors& got) {
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
        const std::string have =
            stored(values, parameter ? p.options.dtype : DType::f32, want.starts_with("sha256"));
        if (have != want) return p.name + " " + slot + ": " + have + ", not " + want;
      }
    }
  }
  const nlohmann::json& norms = expected.at("norms");
  if (got.norms.size() != norms.size()) return "another number of norms";
  for (std::size_t i = 0; i < got.norms.size(); ++i) {
    char text[32];
    std::snprintf(text, sizeof text, "%016llx",
                  static_cast<unsigned long long>(std::bit_cast<std::uint64_t>(got.norms[i])));
    if (text != norms[i].get<std::string>()) {
      return "norm of step " + std::to_string(i) + ": " + text + ", not " +
             norms[i].get<std::string>();
    }
  }
  return "";
}

/// One of golden.json's runs ("adamw", "models"); stage, budget and queues are free.
inline Case golden_case(const nlohmann::json& model) {
  Case c;
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
  return c;
}

/// How queues run: on threads, inline, and on threads with random pauses.
inline void set_queues(EngineOptions& options, int how) {
  options.inline_queues = how == 1;
  options.test_delay_microseconds = how == 2 ? 300 : 0;
}

inline std::string where(const Case& c) {
  return std::to_string(c.world) + " ranks, stage " +
         std::to_string(static_cast<int>(c.options.stage)) +
         (c.options.gather_budget ? ", budget " + std::to_string(*c.options.gather_budget) : "") +
         (c.options.inline_queues ? ", inline" : "") +
         (c.options.test_delay_microseconds != 0 ? ", with pauses" : "");
}

#ifdef ZSHARD_SANITIZER
inline constexpr int kFirstQueues = 1;  // pauses show what queues without them show
#else
inline constexpr int kFirstQueues = 0;
#endif

/// The case at every stage, at stage 3 with every budget, each with every kind of queue.
inline std::vector<Case> placements(Case c) {
  std::vector<Case> all;
  for (int stage = 0; stage < 4; ++stage) {
    c.options.stage = static_cast<Stage>(stage);
    for (const auto& budget : budgets(c.spec, c.world)) {
      c.options.gather_budget = budget;
      for (int how = kFirstQueues; how < 3; ++how) {
        set_queues(c.options, how);
        all.push_back(c);
      }
      if (stage < 3) break;
    }
  }
  return all;
}

/// A random model whose forward passes are watched.
inline Case watched_case(int model, int world) {
  std::mt19937_64 random(static_cast<std::uint64_t>(100 * model + world));
  Case c;
  c.spec = random_spec(random);
  c.world = world;
  c.uses = random_uses(random, c.spec, c.world, 2, 2, 100);
  c.options.poison_slots = true;
  c.evaluate = true;
  return c;
}

}  // namespace zshard::lab
