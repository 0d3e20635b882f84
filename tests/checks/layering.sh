#!/usr/bin/env bash
# Checks the layers of the source tree: a file may include its own row and rows below, never a
# sibling or a row above; examples see only public headers and their own files, since they stand for a
# user's program; benchmarks measure any row and the examples;
# public headers name no header of CUDA, NCCL, MPI, JSON, logging, hashing or io_uring.
#
#   layering.sh [ROOT]     checks the tree at ROOT (default: this repository); 1 on a violation
#   layering.sh --self-test   checks that the check finds violations and passes a clean tree
set -euo pipefail

check() {
  local root=$1
  cd "$root" || return 2
  local directories=()
  local d
  for d in include runtime optimizers offload examples bench; do
    [ -d "$d" ] && directories+=("$d")
  done
  [ ${#directories[@]} -gt 0 ] || { echo "layering: no sources in $root" >&2; return 2; }
  { grep -rnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"]' "${directories[@]}" \
      --include='*.hpp' --include='*.cpp' --include='*.cu' --include='*.cuh' --include='*.in' ||
      true; } |
    awk '
      # The rows, lowest first. Same number, different name: siblings.
      BEGIN {
        n = 0
        add("include/zshard", 0); add("runtime/base", 1); add("runtime/device", 2)
        add("runtime/memory", 3); add("runtime/kernels", 4); add("offload/io", 4)
        add("runtime/comm", 5); add("runtime/shard", 6); add("optimizers", 6)
        add("offload/tiers", 6); add("runtime/engine", 7); add("runtime/checkpoint", 8)
        add("runtime/cli", 9); add("examples", 10); add("bench", 11)
      }
      function add(name, row) { names[n] = name; rows[n] = row; n++ }
      function layer(path,   i) {
        for (i = 0; i < n; i++) if (index(path, names[i] "/") == 1) return i
        return -1
      }
      function normalise(path,   parts, count, out, depth, i, result) {
        count = split(path, parts, "/")
        depth = 0
        for (i = 1; i <= count; i++) {
          if (parts[i] == "" || parts[i] == ".") continue
          if (parts[i] == "..") { if (depth > 0) depth--; continue }
          out[++depth] = parts[i]
        }
        result = ""
        for (i = 1; i <= depth; i++) result = result (i > 1 ? "/" : "") out[i]
        return result
      }
      function exists(path,   line, result) {
        result = (getline line < path) >= 0
        close(path)
        return result
      }
      function bad(reason) { print where ": includes " name ": " reason; failures++ }
      {
        split($0, field, ":")
        file = field[1]
        where = field[1] ":" field[2]
        line = $0
        sub(/^[^:]*:[^:]*:/, "", line)
        match(line, /[<"][^>"]*[>"]/)
        name = substr(line, RSTART, RLENGTH)
        quoted = substr(name, 1, 1) == "\""
        target = substr(name, 2, length(name) - 2)
        directory = file
        sub(/\/[^\/]*$/, "", directory)
        from = layer(file)
        checked++
        if (from < 0) { bad("the file lies in no layer"); next }
        if (rows[from] == 0 && target ~ /^(cuda|nccl|mpi|nlohmann|fmt|spdlog|xxhash|liburing|hwloc|CLI|nvtx|cblas)/) {
          bad("public headers show no third-party interface"); next
        }
        if (index(target, "zshard/") == 1) {
          path = "include/" target
        } else if (!quoted) {
          if (layer(target) < 0) next  # a system header
          path = target
        } else if (exists(normalise(directory "/" target))) {
          path = normalise(directory "/" target)
        } else if (rows[from] >= 10 && exists("examples/" target)) {
          path = "examples/" target
        } else {
          path = normalise(target)
        }
        to = layer(path)
        if (to < 0) { bad("it lies in no layer"); next }
        if (to == from) next
        if (rows[from] == 10) {
          if (rows[to] > 10) bad(names[to] " lies above " names[from])
          else if (rows[to] != 0) bad("examples use public headers only")
        } else if (rows[to] == rows[from]) {
          bad(names[from] " and " names[to] " are siblings")
        } else if (rows[to] > rows[from]) {
          bad(names[to] " lies above " names[from])
        }
      }
      END {
        if (failures > 0) { print "layering: " failures " violation(s)"; exit 1 }
        print "layering: " checked + 0 " includes, no violation"
      }'
}

self_test() {
  local tree
  tree=$(mktemp -d)
  trap 'rm -rf "$tree"' RETURN
  local wrong=0
  # put FILE INCLUDE: a tree of one file with one include line, and an empty header beside it.
  put() {
    rm -rf "${tree:?}"/*
    mkdir -p "$tree/$(dirname "$1")"
    printf '#pragma once\n' > "$tree/$(dirname "$1")/neighbour.hpp"
    printf '// text\n#include %s\n' "$2" > "$tree/$1"
  }
  expect() {  # expect pass|fail FILE INCLUDE
    put "$2" "$3"
    local outcome=pass
    (check "$tree") > /dev/null 2>&1 || outcome=fail
    if [ "$outcome" != "$1" ]; then
      echo "layering self-test: $2 with #include $3: expected $1, got $outcome"
      wrong=$((wrong + 1))
    fi
  }
  expect pass runtime/engine/a.cpp '"runtime/shard/layout.hpp"'
  expect pass runtime/engine/a.cpp '"optimizers/rule.hpp"'
  expect pass runtime/comm/a.cpp '"runtime/comm/b.hpp"'
  expect pass runtime/comm/a.cpp '"neighbour.hpp"'
  expect pass runtime/base/a.cpp '<spdlog/spdlog.h>'
  expect pass runtime/base/a.hpp '"zshard/error.hpp"'
  expect pass examples/gpt/a.cpp '<zshard/zshard.hpp>'
  expect pass examples/gpt/a.cpp '"gpt/neighbour.hpp"'
  expect pass include/zshard/a.hpp '<vector>'
  expect fail runtime/shard/a.cpp '"optimizers/rule.hpp"'
  expect fail optimizers/a.cpp '"runtime/shard/layout.hpp"'
  expect fail offload/tiers/a.cpp '"runtime/shard/layout.hpp"'
  expect fail offload/io/a.cpp '"runtime/kernels/kernels.hpp"'
  expect fail runtime/kernels/a.hpp '"runtime/comm/group.hpp"'
  expect fail runtime/base/a.cpp '<runtime/device/stream.hpp>'
  expect fail runtime/comm/a.cpp '"../engine/plan.hpp"'
  expect fail runtime/engine/a.cu '  "runtime/cli/main.hpp"'
  expect fail runtime/a.cpp '<vector>'
  expect fail runtime/engine/a.cpp '"tests/engine/helper.hpp"'
  expect fail include/zshard/a.hpp '"runtime/base/log.hpp"'
  expect fail include/zshard/a.hpp '<nlohmann/json.hpp>'
  expect fail include/zshard/a.hpp '<cuda_runtime.h>'
  expect fail examples/gpt/a.cpp '"runtime/engine/plan.hpp"'
  expect fail examples/gpt/a.cpp '"bench/common/row.hpp"'
  expect pass bench/a.cpp '"examples/gpt/model.hpp"'
  expect pass bench/a.cpp '"runtime/kernels/kernels.hpp"'
  (check "$tree/none") > /dev/null 2>&1 && { echo "layering self-test: an absent tree passes"; wrong=1; }
  [ "$wrong" -eq 0 ] || return 1
  echo "layering self-test: 27 trees judged rightly"
}

if [ "${1:-}" = "--self-test" ]; then
  self_test
else
  check "${1:-$(dirname "$0")/../..}"
fi
