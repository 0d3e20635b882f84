#!/usr/bin/env bash
# Checks that each public header compiles alone, and twice, under a user's strict C++20 flags, and
# that none drags in a header of CUDA, NCCL, MPI, JSON, logging or hashing, at any depth.
#
#   headers.sh [ROOT]     ROOT: a directory with include/zshard, in the repository or installed
set -euo pipefail
root=$(cd "${1:-$(dirname "$0")/../..}" && pwd)
compiler=${CXX:-g++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

count=0
failed=0
for path in "$root"/include/zshard/*.hpp; do
  header=zshard/$(basename "$path")
  count=$((count + 1))
  printf '#include "%s"\n#include "%s"\n' "$header" "$header" > "$scratch/use.cpp"
  if ! timeout -k 5 120 "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow \
    -Wconversion -Werror -I "$root/include" -MD -MF "$scratch/use.d" "$scratch/use.cpp"; then
    echo "headers: $header does not compile alone"
    failed=$((failed + 1))
    continue
  fi
  heavy=$(tr -s ' \\' '\n' < "$scratch/use.d" |
    grep -E '/(cuda[^/]*|nccl|mpi|xxhash|liburing)\.h$|/(nlohmann|fmt|spdlog|CLI)/' || true)
  if [ -n "$heavy" ]; then
    echo "headers: $header includes" $heavy
    failed=$((failed + 1))
  fi
done
[ "$count" -gt 0 ] || { echo "headers: none in $root/include/zshard"; exit 1; }
[ "$failed" -eq 0 ] || { echo "headers: $failed of $count failed"; exit 1; }
echo "headers: $count compile alone"
