#!/usr/bin/env bash
# Compiles every .cu for the oldest and the newest GPU that the build serves; builds and tests
# compile for one only, to save time.
#
#   architectures.sh NVCC [ARCHITECTURE...]   default: 75 120; a release: 75 80 90 100 120
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -ge 1 ] || { echo "usage: architectures.sh NVCC [ARCHITECTURE...]" >&2; exit 2; }
nvcc=$1
shift
[ $# -gt 0 ] || set -- 75 120
code=()
for architecture in "$@"; do
  code+=("-gencode=arch=compute_$architecture,code=sm_$architecture")
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mapfile -t sources < <(git ls-files '*.cu' 2> /dev/null || find runtime optimizers examples -name '*.cu')
[ ${#sources[@]} -gt 0 ] || { echo "architectures: no sources found"; exit 1; }
for source in "${sources[@]}"; do
  "$nvcc" -std=c++20 --extended-lambda -O3 --fmad=false "${code[@]}" -Werror=all-warnings -I. \
    -Iinclude -Iexamples -Iexamples/gpt -c "$source" -o "$scratch/object.o"
  # The object holds code for each, not PTX for one of them.
  for architecture in "$@"; do
    grep -qa "sm_$architecture" "$scratch/object.o" ||
      { echo "architectures: $source has no code for sm_$architecture"; exit 1; }
  done
done
echo "architectures: ${#sources[@]} files for sm_$(sed "s/ /, sm_/g" <<< "$*")"
