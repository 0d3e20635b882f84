#!/usr/bin/env bash
# Compiles every complete program (a ```cpp block with `int main`) of README.md and docs/*.md
# against an installed zshard by way of pkg-config, and runs it.
#
#   readme.sh PREFIX SCRATCH     PREFIX: installed tree; SCRATCH: where to build
set -euo pipefail
prefix=$1
scratch=$2
cd "$(dirname "$0")/../.."
pc=$(find "$prefix" -name zshard.pc -print -quit)
[ -n "$pc" ] || { echo "readme: no zshard.pc in $prefix"; exit 1; }
export PKG_CONFIG_PATH="$(dirname "$pc")"
flags=$(pkg-config --cflags --libs --static zshard)
rm -rf "$scratch"
mkdir -p "$scratch"

for text in README.md docs/*.md; do
  [ -f "$text" ] || continue
  awk -v stem="$scratch/$(basename "$text" .md)" '
    /^```cpp/ { inside = 1; body = ""; next }
    /^```/ && inside {
      inside = 0
      if (body ~ /int main\(/) { file = stem "_" ++n ".cpp"; printf "%s", body > file; close(file) }
      next
    }
    inside { body = body $0 "\n" }' "$text"
done
count=0
for source in "$scratch"/*.cpp; do
  [ -f "$source" ] || continue
  program=${source%.cpp}
  # shellcheck disable=SC2086  # pkg-config's flags are words
  timeout -k 5 300 "${CXX:-g++}" -std=c++20 -O1 -Wall -Wextra -Wpedantic -Werror "$source" \
    -o "$program" $flags
  timeout -k 5 120 "$program" < /dev/null > "$program.txt" ||
    { echo "readme: $(basename "$program") failed"; cat "$program.txt"; exit 1; }
  count=$((count + 1))
done
[ "$count" -gt 0 ] || { echo "readme: no complete program in README.md or docs"; exit 1; }
echo "readme: $count program(s) of the documents compile and run"
