#!/usr/bin/env bash
# A model several times larger than the memory it gets: trains a GPT of 537 million parameters in
# f32 on two ranks that have 3 GB together, with all state on NVMe, and shows that the same model is
# refused, with its table, where state must be in memory. Takes some minutes and 9 GB of disk.
#
#   bash examples/large.sh [--steps N] [--nvme-dir DIR]
#
# The limit is a cgroup v2 memory limit where one can be made, else RLIMIT_AS, which is stricter: it
# counts address space, so also what is reserved and never touched. DIR is a directory of yours on
# the drive to use; default: one under build/release.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "$root/examples/large.sh"
}

say() {
  printf '\n== %s\n' "$*"
}

die() {
  echo "large.sh: $*" >&2
  exit 1
}

steps=3
nvme=
while [ $# -gt 0 ]; do
  case "$1" in
    --steps)
      if ! [[ "${2:-}" =~ ^[1-9][0-9]{0,8}$ ]]; then
        echo "large.sh: --steps needs a whole number from 1; got '${2:-nothing}'" >&2
        exit 2
      fi
      steps=$2
      shift 2
      ;;
    --nvme-dir)
      if ! [ -d "${2:-}" ]; then
        echo "large.sh: --nvme-dir needs a directory; got '${2:-nothing}'" >&2
        exit 2
      fi
      nvme=$(realpath -- "$2")
      shift 2
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "large.sh: unknown argument '$1'" >&2
      usage >&2
      exit 2
      ;;
  esac
done

cd "$root"
say "Building build/release/bin/gpt"
mkdir -p build
cmake --preset release >build/configure.log 2>&1 || {
  cat build/configure.log >&2
  exit 1
}
cmake --build --preset release --target gpt --parallel "$(nproc)"
gpt=build/release/bin/gpt
out=build/release/example
mkdir -p "$out"
if [ -z "$nvme" ]; then
  nvme=$root/$out/nvme
  [ -d "$nvme" ] || mkdir -m 700 "$nvme"
fi
mapfile -t data < <(find /usr/share/common-licenses -maxdepth 1 -type f 2>/dev/null | LC_ALL=C sort)
[ ${#data[@]} -gt 0 ] || die "/usr/share/common-licenses has no files to train on"

limit=3000000000
group=
trap '[ -z "$group" ] || rmdir "$group" 2>/dev/null || true' EXIT

# Makes a control group with the limit, below or beside this shell's own, and sets `group`.
make_group() {
  local tree=/sys/fs/cgroup own parent
  [ -r "$tree/cgroup.controllers" ] || return 1
  own=$tree$(sed -n 's/^0:://p' /proc/self/cgroup)
  for parent in "$own" "$(dirname "$own")"; do
    grep -qsw memory "$parent/cgroup.subtree_control" || continue
    mkdir "$parent/zshard-large-$$" 2>/dev/null || continue
    group=$parent/zshard-large-$$
    # A process must be able to move there, which is not told by rights alone.
    if echo "$limit" 2>/dev/null >"$group/memory.max" &&
      sh -c 'echo $$ >"$1/cgroup.procs"' sh "$group" 2>/dev/null; then
      echo 0 2>/dev/null >"$group/memory.swap.max" || true
      return 0
    fi
    rmdir "$group"
    group=
  done
  return 1
}

# Runs a command under the limit.
limited() {
  if [ -n "$group" ]; then
    sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$group" "$@"
  else
    # An allocator's arena for each thread would reserve address space that nothing uses.
    (ulimit -v $((limit / 1024)) && MALLOC_ARENA_MAX=1 exec "$@")
  fi
}

if make_group; then
  holder="a cgroup v2 memory limit, $group"
else
  holder="RLIMIT_AS (no cgroup v2 group with a memory limit can be made here)"
fi

# Two ranks as threads of one process, so that one limit holds both. A rank gathers two blocks at a
# time; the token table is cut into pieces that are no larger. Budgets are bytes a rank.
run=("$gpt" --data "${data[@]}" --ranks 2 --stage 3
  --layers 24 --heads 20 --width 1280 --vocab 50304 --vocab-units 4 --context 64 --batch 2
  --steps "$steps" --warmup 0 --lr 2e-5 --min-lr 2e-5 --eval-interval 0
  --gather-budget 160MiB --device-budget 600MB --host-budget 600MB)

say "State in memory: refused, before anything is allocated"
code=0
limited "${run[@]}" --optimizer-tier host --gradient-tier host --parameter-tier host \
  >"$out/large-host.txt" 2>&1 || code=$?
cat "$out/large-host.txt"
[ "$code" -eq 2 ] || die "expected exit code 2, got $code"
grep -q '^category' "$out/large-host.txt" || die "the refusal shows no table"

say "State on NVMe in $nvme, held to $limit bytes by $holder"
# All optimizer state, not just what the budget has no room for.
limited timeout 1800 "${run[@]}" --optimizer-tier nvme --gradient-tier nvme --parameter-tier nvme \
  --offload-optimizer-nvme-bytes 1TiB --nvme-dir "$nvme" | tee "$out/large-nvme.txt"

say "Result"
awk -v limit="$limit" '
  /^peak of the engine/ { gsub(/,/, ""); arenas = $(NF - 3); planned = $NF; seen++ }
  /^peak of this process/ {
    match($0, /: [0-9.]+ MiB/); process = substr($0, RSTART + 2) * 1048576; seen++
  }
  END {
    if (seen != 2) { print "large.sh: gpt told no peak" > "/dev/stderr"; exit 1 }
    printf "arenas of a rank: %.0f bytes at the peak, %.0f planned\n", arenas, planned
    printf "the process with both ranks: %.0f bytes at the peak, limit %.0f\n", process, limit
    if (arenas > planned || process > limit) { print "large.sh: too much" > "/dev/stderr"; exit 1 }
  }' "$out/large-nvme.txt"
