#!/usr/bin/env bash
# Builds the benchmarks and prints one table: what zshard does, the limit measured beside it in the
# same run, their ratio, and the target. Ratios count; absolute figures of a shared machine do not.
#
#   bash bench/run.sh [--kernels] [--collectives] [--io] [--step] [--overhead] [--quick]
#                     [--filter REGEX] [--build DIR] [--out DIR] [--nvme-dir DIR]
#
# Without a choice of rows all are measured, which takes about twenty minutes; --quick shows in two
# that everything runs. JSON of each program lies in --out (default: bench in --build). --nvme-dir
# is on the disk that --io measures (default: bench in --build) and has 8 GB free; nothing stays
# there. Peers' figures are those of perf.md, measured on this class of machine with the scripts
# that it names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  sed -n '2,13s/^# \{0,1\}//p' bench/run.sh
}

programs=()
options=()
build=build/release
out=
nvme_dir=
while [ $# -gt 0 ]; do
  case "$1" in
    --kernels | --collectives | --io | --step | --overhead)
      programs+=("${1#--}")
      shift
      ;;
    --quick)
      options+=(--quick)
      shift
      ;;
    --filter | --build | --out | --nvme-dir)
      if [ $# -lt 2 ]; then
        echo "run.sh: $1 needs a value" >&2
        exit 2
      fi
      case "$1" in
        --filter) options+=("--benchmark_filter=$2") ;;
        --build) build=$2 ;;
        --out) out=$2 ;;
        --nvme-dir) nvme_dir=$2 ;;
      esac
      shift 2
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "run.sh: unknown argument '$1'" >&2
      usage >&2
      exit 2
      ;;
  esac
done
[ ${#programs[@]} -gt 0 ] || programs=(kernels collectives overhead io step)
out=${out:-$build/bench}
nvme_dir=${nvme_dir:-$build/bench}
mkdir -p "$build" "$out" "$nvme_dir"

targets=(bench_table)
for program in "${programs[@]}"; do targets+=("bench_$program"); done
cmake --preset release -B "$build" >"$build/configure.log" 2>&1 || {
  cat "$build/configure.log" >&2
  exit 1
}
cmake --build "$build" --target "${targets[@]}" --parallel "$(nproc)" >"$build/build.log" 2>&1 || {
  tail -n 40 "$build/build.log" >&2
  exit 1
}

echo "$(date -u +%FT%TZ), $(git rev-parse --short HEAD 2>/dev/null || echo "no git"), \
$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores, \
load $(cut -d ' ' -f 1-3 /proc/loadavg)"
files=()
failed=0
for program in "${programs[@]}"; do
  echo
  echo "== $program"
  file="$out/$program.json"
  rm -f "$file"
  more=()
  [ "$program" != io ] || more=(--nvme-dir "$nvme_dir")
  timeout 1200 "$build/bin/bench_$program" "${options[@]}" "${more[@]}" \
    --benchmark_out="$file" --benchmark_out_format=json || failed=1
  [ ! -s "$file" ] || files+=("$file")
done
echo
echo "load $(cut -d ' ' -f 1-3 /proc/loadavg)"
echo
[ ${#files[@]} -eq 0 ] || "$build/bin/bench_table" "${files[@]}" | tee "$out/table.txt"
exit "$failed"
