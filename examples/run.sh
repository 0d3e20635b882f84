#!/usr/bin/env bash
# From nothing to a trained language model: installs what is missing, builds (minutes, the first time),
# trains a GPT on real text at stage 3 on two ranks with parameters and optimizer state on NVMe,
# about a minute, trains the same in memory at stages 3 and 0, and shows what zshard did. Runs any
# number of times; needs no network once everything is installed.
#
#   bash examples/run.sh [--steps N] [--data FILE...]
#
# Without --data it reads the licence texts that every Debian system carries. State on NVMe lies in a
# directory under build/release, or in ZSHARD_NVME_DIR, a directory of yours on the drive to use;
# nothing stays there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  sed -n '2,11s/^# \{0,1\}//p' "$root/examples/run.sh"
}

say() {
  printf '\n== %s\n' "$*"
}

steps=800
data=()
while [ $# -gt 0 ]; do
  case "$1" in
    --steps)
      if ! [[ "${2:-}" =~ ^[1-9][0-9]{0,8}$ ]]; then
        echo "run.sh: --steps needs a whole number from 1; got '${2:-nothing}'" >&2
        exit 2
      fi
      steps=$2
      shift 2
      ;;
    --data)
      shift
      while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do
        if ! [ -r "$1" ]; then
          echo "run.sh: cannot read '$1'" >&2
          exit 2
        fi
        data+=("$(realpath -- "$1")")
        shift
      done
      if [ ${#data[@]} -eq 0 ]; then
        echo "run.sh: --data needs at least one file" >&2
        exit 2
      fi
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

if [ ${#data[@]} -eq 0 ]; then
  # Files that are links to others would be read twice.
  mapfile -t data < <(find /usr/share/common-licenses -maxdepth 1 -type f 2>/dev/null | LC_ALL=C sort)
  if [ ${#data[@]} -eq 0 ]; then
    echo "run.sh: /usr/share/common-licenses has no files; give a text with --data FILE" >&2
    exit 2
  fi
fi

nvme=${ZSHARD_NVME_DIR:-}
unset ZSHARD_NVME_DIR # the engine takes the variables of that prefix for its options
if [ -n "$nvme" ]; then
  if ! [ -d "$nvme" ]; then
    echo "run.sh: ZSHARD_NVME_DIR is no directory: '$nvme'" >&2
    exit 2
  fi
  nvme=$(realpath -- "$nvme")
fi

cd "$root"
say "Installing what is missing (Debian packages)"
./install-dependencies.sh

say "Building build/release/bin/gpt"
mkdir -p build
cmake --preset release >build/configure.log 2>&1 || {
  cat build/configure.log >&2
  exit 1
}
cmake --build --preset release --target gpt zshard_cli --parallel "$(nproc)"

out=build/release/example
mkdir -p "$out"
gpt=build/release/bin/gpt
model=(--layers 4 --heads 4 --width 128 --context 64 --batch 12 --seed 1
  --lr 1e-3 --min-lr 1e-4 --warmup 100 --beta2 0.99)
common=(--data "${data[@]}" --ranks 2 --steps "$steps" --digest "${model[@]}")
if [ -z "$nvme" ]; then
  nvme=$root/$out/nvme
  [ -d "$nvme" ] || mkdir -m 700 "$nvme"
fi

say "Training at stage 3 on two ranks, parameters and optimizer state on NVMe ($steps steps)"
"$gpt" "${common[@]}" --stage 3 --gather-budget 2MiB --parameter-tier nvme --optimizer-tier nvme \
  --nvme-dir "$nvme" --log "$out/nvme.jsonl" |
  tee "$out/nvme.txt"

say "Training the same in memory, to compare: at stage 3, and at stage 0, where nothing is partitioned"
for stage in 3 0; do
  "$gpt" "${common[@]}" --stage "$stage" --eval-interval 0 --log "$out/stage$stage.jsonl" \
    >"$out/stage$stage.txt"
  grep "^step.*$steps/$steps" "$out/stage$stage.txt"
done

say "What each stage takes in memory"
sed -n '/^bytes of one rank/,/^$/p' "$out/stage3.txt"

say "Memory and time with NVMe"
sed -n '/^memory of a rank/,/^$/p; /^time of a step/p; /^disk a step/p; /^peak/p' "$out/nvme.txt"

say "Loss"
awk '
  match($0, /"loss":[-+.0-9eE]+/) { loss[n++] = substr($0, RSTART + 7, RLENGTH - 7) + 0 }
  END {
    rows = n < 24 ? n : 24
    for (r = 0; r < rows; ++r) {
      first = int(n * r / rows); last = int(n * (r + 1) / rows) - 1; sum = 0
      for (i = first; i <= last; ++i) sum += loss[i]
      mean[r] = sum / (last - first + 1); end[r] = last
      if (mean[r] > top) top = mean[r]
    }
    for (r = 0; r < rows; ++r) {
      bar = ""; width = int(60 * mean[r] / top + 0.5)
      for (i = 0; i < width; ++i) bar = bar "#"
      printf "to step %6d  %7.4f  %s\n", end[r] + 1, mean[r], bar
    }
  }' "$out/nvme.jsonl"
grep 'validation loss' "$out/nvme.txt" | tail -n 1

say "NVMe against memory"
for run in nvme stage3 stage0; do
  grep '^digest' "$out/$run.txt" >"$out/$run.digest"
done
for run in stage3 stage0; do
  if ! diff "$out/$run.digest" "$out/nvme.digest"; then
    echo "run.sh: the digests of $out/$run.txt and $out/nvme.txt differ" >&2
    exit 1
  fi
done
cat "$out/nvme.digest"
echo "Equal: after $steps steps parameters and optimizer state are the same to the last bit on NVMe and" \
  "in memory, at stage 3 and at stage 0."
echo "Logs, one JSON object a step: $out/nvme.jsonl, $out/stage3.jsonl, $out/stage0.jsonl"
