// Cases, and rows of the covering array, on a group that is already there.
#pragma once

#include <xxhash.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/engine/cases.hpp"

namespace zshard::lab {

inline int world_of(const std::vector<int>& row) {
  std::vector<int> alone = row;
  return make_case(alone, 1).world;
}

inline std::uint64_t digest(const Tensors& t) {
  std::uint64_t hash = XXH3_64bits(t.norms.data(), t.norms.size() * sizeof(double));
  for (const auto& [name, values] : t.values) {
    hash = XXH3_64bits_withSeed(name.data(), name.size(), hash);
    hash = XXH3_64bits_withSeed(values.data(), values.size() * sizeof(float), hash);
  }
  for (const std::string& text : t.offenders) {
    hash = XXH3_64bits_withSeed(text.data(), text.size(), hash);
  }
  return hash;
}

/// Trains the case on this rank. "" if all ranks ended with the same bits, and rank 0 finds nothing
/// wrong with them.
inline std::string run_case(const ProcessGroup& group, const Case& c,
                            const std::function<std::string(const Tensors&)>& problem_of) {
  if (c.world != group.size()) return "a case of another world size";
  Tensors got = Loop(c, group).run();
  got.forward_hash = 0;
  const std::uint64_t mine = digest(got);
  std::vector<std::uint64_t> all(static_cast<std::size_t>(group.size()));
  group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  if (group.rank() == 0) {
    std::string problem = problem_of(got);
    if (!problem.empty()) return problem;
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] != all[0]) {
      return "ranks 0 and " + std::to_string(r) + " ended with different bits";
    }
  }
  return "";
}

/// Trains a row's case on this rank and compares with the oracle.
inline std::string run_row(const ProcessGroup& group, const std::vector<int>& row,
                           std::uint64_t seed) {
  const Case c = make_case(row, seed);
  return run_case(group, c, [&](const Tensors& got) { return difference(oracle(c), got); });
}

}  // namespace zshard::lab
