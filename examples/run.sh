#!/usr/bin/env bash
# From nothing to a trained language model: installs what is missing, builds (minutes, the first time),
# trains a GPT on real text twice, at stage 3 and at stage 0, about a minute each, and shows what
# zshard did. Runs any number of times; needs no network once everything is installed.
#
#   bash examples/run.sh [--steps N] [--data FILE...]
#
# Without --data it reads the licence texts that every Debian system carries.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  sed -n '2,8s/^# \{0,1\}//p' "$root/examples/run.sh"
}

say() {
  printf '\n== %s\n' "$*"
}

steps=1200
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

cd "$root"
say "Installing what is missing (Debian packages)"
./install-dependencies.sh

say "Building build/release/bin/gpt"
mkdir -p build
cmake --preset release >build/configure.log 2>&1 || {
  cat build/configure.log >&2
  exit 1
}
cmake --build --preset release --target gpt --parallel "$(nproc)"

out=build/release/example
mkdir -p "$out"
gpt=build/release/bin/gpt
model=(--layers 4 --heads 4 --width 128 --context 64 --batch 12 --seed 1
  --lr 1e-3 --min-lr 1e-4 --warmup 100 --beta2 0.99)
common=(--data "${data[@]}" --ranks 2 --steps "$steps" --digest "${model[@]}")

say "Training at stage 3 on two ranks, optimizer state in the host tier ($steps steps)"
"$gpt" "${common[@]}" --stage 3 --optimizer-tier host --gather-budget 2MiB \
  --log "$out/stage3.jsonl" |
  tee "$out/stage3.txt"

say "Training the same at stage 0, nothing partitioned and nothing offloaded, to compare"
"$gpt" "${common[@]}" --stage 0 --eval-interval 0 --log "$out/stage0.jsonl" >"$out/stage0.txt"
grep '^step' "$out/stage0.txt"

say "What each stage takes (optimizer state in the host tier)"
sed -n '/^bytes of one rank/,/^$/p' "$out/stage3.txt"

say "Loss at stage 3"
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
  }' "$out/stage3.jsonl"
grep 'validation loss' "$out/stage3.txt" | tail -n 1

say "Stage 0 against stage 3"
grep '^digest' "$out/stage3.txt" >"$out/stage3.digest"
grep '^digest' "$out/stage0.txt" >"$out/stage0.digest"
if diff "$out/stage0.digest" "$out/stage3.digest"; then
  cat "$out/stage3.digest"
  echo "Equal: after $steps steps parameters and optimizer state are the same to the last bit."
else
  echo "run.sh: the digests differ" >&2
  exit 1
fi
echo "Logs, one JSON object a step: $out/stage3.jsonl, $out/stage0.jsonl"
