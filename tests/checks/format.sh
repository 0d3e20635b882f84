#!/usr/bin/env bash
# Checks the format of every C++ source with clang-format; changes nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v clang-format > /dev/null || { echo "format: clang-format is missing"; exit 1; }
directories=()
for d in include runtime optimizers offload examples bench tests; do
  [ -d "$d" ] && directories+=("$d")
done
mapfile -d '' files < <(find "${directories[@]}" -type f \
  \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0)
[ ${#files[@]} -gt 0 ] || { echo "format: no sources found"; exit 1; }
timeout -k 5 300 clang-format --dry-run -Werror "${files[@]}"
echo "format: ${#files[@]} files"
