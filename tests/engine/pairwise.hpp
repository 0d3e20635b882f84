// Rows in which every pair of values of any two factors occurs: greedy, deterministic.
#pragma once

#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace zshard::lab {

/// levels[f]: number of values of factor f. Returns rows of one value a factor.
inline std::vector<std::vector<int>> pairwise(const std::vector<int>& levels, std::uint64_t seed) {
  const auto factors = static_cast<int>(levels.size());
  std::set<std::tuple<int, int, int, int>> open;
  for (int f = 0; f < factors; ++f) {
    for (int g = f + 1; g < factors; ++g) {
      for (int a = 0; a < levels[static_cast<std::size_t>(f)]; ++a) {
        for (int b = 0; b < levels[static_cast<std::size_t>(g)]; ++b) open.insert({f, a, g, b});
      }
    }
  }
  std::mt19937_64 random(seed);
  const auto pairs_of = [&](const std::vector<int>& row) {
    std::vector<std::tuple<int, int, int, int>> found;
    for (int f = 0; f < factors; ++f) {
      for (int g = f + 1; g < factors; ++g) {
        const std::tuple<int, int, int, int> pair{f, row[static_cast<std::size_t>(f)], g,
                                                  row[static_cast<std::size_t>(g)]};
        if (open.count(pair) != 0) found.push_back(pair);
      }
    }
    return found;
  };
  std::vector<std::vector<int>> rows;
  while (!open.empty()) {
    std::vector<int> best;
    std::size_t most = 0;
    for (int attempt = 0; attempt < 40; ++attempt) {
      std::vector<int> row;
      for (const int n : levels)
        row.push_back(static_cast<int>(random() % static_cast<unsigned>(n)));
      const auto& [f, a, g, b] = *open.begin();  // each row covers at least one pair
      row[static_cast<std::size_t>(f)] = a;
      row[static_cast<std::size_t>(g)] = b;
      const std::size_t covered = pairs_of(row).size();
      if (covered > most) {
        most = covered;
        best = row;
      }
    }
    for (const auto& pair : pairs_of(best)) open.erase(pair);
    rows.push_back(best);
  }
  return rows;
}

}  // namespace zshard::lab
