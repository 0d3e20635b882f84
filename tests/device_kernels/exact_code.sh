#!/usr/bin/env bash
# Checks that nvcc makes exact arithmetic of the element loops: in the PTX of each of them there is
# no fused multiplication and addition, no approximate division or root, and no flush to zero. What
# ptxas may fuse it may not fuse either: each operation states its rounding.
#
#   exact_code.sh NVCC FLAG...   FLAGs: those that the build compiles with; 0, or 1 with the lines
#   exact_code.sh --self-test    checks that it finds each of the four under relaxed flags
#
# Without nvcc: 77.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# inexact PTX: prints the lines.
inexact() {
  grep -nE '^[[:space:]]*(@!?%p[0-9]+ )?((fma|mad)\.[a-z.]*f(32|64)|(div|sqrt|rsqrt|rcp)\.(full|approx)[a-z0-9.]*|[a-z0-9.]*\.ftz\.f32|(add|sub|mul)\.f(32|64))[[:space:]]' "$1"
}

check() {
  local nvcc=$1
  shift
  command -v "$nvcc" > /dev/null || { echo "exact_code: skipped, $nvcc not found"; exit 77; }
  local scratch failures=0 source name
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' RETURN
  for source in "$root"/runtime/kernels/cuda_*.cu "$root"/optimizers/cuda_*.cu; do
    name=${source#"$root"/}
    "$nvcc" -ptx -std=c++20 -I"$root" -I"$root/include" "$@" "$source" -o "$scratch/out.ptx"
    # A compilation that left the loops out would pass everything.
    grep -qE '^[[:space:]]*mul\.rn\.f(32|64)' "$scratch/out.ptx" ||
      grep -qE 'fma\.rn' "$scratch/out.ptx" || { echo "$name: no arithmetic found"; failures=1; }
    if inexact "$scratch/out.ptx" > "$scratch/found"; then
      echo "$name: $(wc -l < "$scratch/found") inexact operations:"
      head -n 5 "$scratch/found"
      failures=1
    fi
  done
  return "$failures"
}

if [ "${1:-}" = --self-test ]; then
  nvcc=${2:-nvcc}
  exact=(--fmad=false -prec-div=true -prec-sqrt=true -ftz=false)
  code=0
  (check "$nvcc" "${exact[@]}") || code=$?
  [ "$code" -eq 0 ] || exit "$code"
  for relaxed in --fmad=true -prec-div=false -prec-sqrt=false -ftz=true; do
    # nvcc takes the last value of an option, with a warning.
    found=$( (check "$nvcc" "${exact[@]}" "$relaxed") 2> /dev/null || true)
    case $found in
      *"inexact operations"*) ;;
      *)
        echo "exact_code self-test: $relaxed was not found"
        exit 1
        ;;
    esac
  done
  echo "exact_code self-test: passed"
  exit 0
fi
[ $# -ge 1 ] || { echo "usage: exact_code.sh NVCC FLAG... | --self-test [NVCC]" >&2; exit 2; }
check "$@"
echo "exact_code: passed"
