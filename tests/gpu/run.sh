#!/usr/bin/env bash
# Proves on a GPU what the simulated device cannot: builds what is needed and runs it, in under ten
# minutes on one GPU. Needs the repository, the CUDA toolkit (13), NCCL and the Debian packages of
# install-dependencies.sh, or binaries that were built elsewhere.
#
#   bash tests/gpu/run.sh [--prebuilt DIR] [--out DIR] [--only PART,...] [--skip PART,...]
#                         [--nvme-dir DIR] [--list]
#
#   --prebuilt DIR   a build tree (bin/, lib/): nothing is built. Libraries that the machine lacks
#                    may lie in DIR/lib, too
#   --out DIR        for results.json, results.md and a log of each part; default $OUT, else
#                    ./gpu-results
#   --nvme-dir DIR   on the drive that the nvme tier uses; default: one under --out
#   --list           the parts, with their time limits
#
# Parts do not stop each other; together with the build they take at most 580 s
# (ZSHARD_GPU_SECONDS), and what is left without time counts as failed. Exit code 0: all passed, or
# were skipped for a reason that the table gives; 1: some failed; 77: no GPU here, but everything
# builds and starts; 2: wrong arguments.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
root=$PWD

# name, seconds it may take, what it shows
parts=(
  "machine 30 GPU, driver, CUDA and NCCL that the program finds"
  "kernels 60 kernels and optimizers give the CPU's bits on the GPU"
  "engine 120 stages 0 to 3 give the oracle's bits: one rank, and more where there are GPUs"
  "stages 90 gpt: the same digests at stages 0 to 3"
  "offload 90 gpt: the same digests with what can leave the GPU in pinned host memory and on nvme"
  "two_ranks 60 two ranks on one GPU, where NCCL allows it (2.30 and later)"
  "bandwidth 120 copies, kernels against the device's copy speed, copies and update at once"
  "tokens 60 gpt: tokens a second of a 124 M model, f32 and bf16"
  "memcheck 60 compute-sanitizer memcheck: kernels, and a short training"
  "racecheck 60 compute-sanitizer racecheck: kernels, and a short training"
  "largest 120 gpt: the largest model that trained a step with GPU, host and nvme"
)

usage() { sed -n '2,22s/^# \{0,1\}//p' tests/gpu/run.sh; }
die() {
  echo "gpu/run.sh: $*" >&2
  exit 2
}

prebuilt=
out=${OUT:-$root/gpu-results}
only=
skip=
nvme=
while [ $# -gt 0 ]; do
  case $1 in
    --prebuilt | --out | --only | --skip | --nvme-dir)
      [ $# -ge 2 ] || die "$1 needs a value"
      case $1 in
        --prebuilt) prebuilt=$2 ;;
        --out) out=$2 ;;
        --only) only=$2 ;;
        --skip) skip=$2 ;;
        --nvme-dir) nvme=$2 ;;
      esac
      shift 2
      ;;
    --list)
      printf '%s\n' "${parts[@]}"
      exit 0
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) die "unknown argument '$1'" ;;
  esac
done
for name in ${only//,/ } ${skip//,/ }; do
  grep -q "^$name " <<< "$(printf '%s\n' "${parts[@]}")" || die "there is no part '$name'; see --list"
done

total=${ZSHARD_GPU_SECONDS:-580}
# Options of the caller's shell must not leak into what is measured.
for variable in $(compgen -e | grep '^ZSHARD_' || true); do unset "$variable"; done
export OPENBLAS_NUM_THREADS=1
# nvcc and compute-sanitizer often lie there and on no path.
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
mkdir -p "$out" || exit 1
out=$(realpath "$out")
if [ -z "$nvme" ]; then
  nvme=$out/nvme
  mkdir -p -m 700 "$nvme" || exit 1
fi
nvme=$(realpath "$nvme") || exit 1

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# -- results: one JSON object a line, put together at the end --

lines=$out/parts.jsonl
: > "$lines"
failed=0
figures=()
text_json() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=$(printf '%s' "$text" | tr '\n\t\r' '   ' | tr -d '\000-\037')
  printf '"%s"' "$text"
}
# figure NAME VALUE UNIT: of the part that runs.
figure() { figures+=("{\"name\": $(text_json "$1"), \"value\": $2, \"unit\": $(text_json "$3")}"); }
# record PART STATE SECONDS NOTE
record() {
  local all
  all=$(IFS=,; printf '%s' "${figures[*]-}")
  printf '{"part": "%s", "state": "%s", "seconds": %d, "note": %s, "figures": [%s]}\n' \
    "$1" "$2" "$3" "$(text_json "$4")" "$all" >> "$lines"
  figures=()
  [ "$2" != failed ] || failed=$((failed + 1))
  say "$1: $2${4:+: $4}"
  write_results
}
# What is known so far, as JSON and as tables: written after each part, so that whoever ends this
# script early still finds them.
write_results() {
  {
    printf '{"when": "%s", "commit": %s, "gpu": %s, "gpus": %d, "seconds": %d, "failed": %d, "parts": [\n' \
      "$(date -u +%FT%TZ)" "$(text_json "$(git rev-parse --short HEAD 2> /dev/null || echo unknown)")" \
      "$(text_json "$gpu")" "$gpus" "$SECONDS" "$failed"
    sed '$!s/$/,/' "$lines"
    printf ']}\n'
  } > "$out/results.json"
  {
    printf '# zshard on a GPU\n\n%s, commit %s, %s\n\n' "$(date -u +%FT%TZ)" \
      "$(git rev-parse --short HEAD 2> /dev/null || echo unknown)" "$gpu"
    printf '| part | state | s | note |\n|---|---|---|---|\n'
    sed -n 's/^{"part": "\([^"]*\)", "state": "\([^"]*\)", "seconds": \([0-9]*\), "note": "\(.*\)", "figures": .*/\1\t\2\t\3\t\4/p' "$lines" |
      while IFS=$'\t' read -r name state seconds note; do
        printf '| %s | %s | %s | %s |\n' "$name" "$state" "$seconds" "${note//|/\\|}"
      done
    printf '\n| figure | value | unit |\n|---|---|---|\n'
    grep -o '{"name": "[^"]*", "value": [^,]*, "unit": "[^"]*"}' "$lines" |
      sed 's/{"name": "\([^"]*\)", "value": \([^,]*\), "unit": "\([^"]*\)"}/| \1 | \2 | \3 |/'
  } > "$out/results.md"
}

# -- binaries --

gpus=0
gpu=none
if command -v nvidia-smi > /dev/null; then
  if found=$(timeout 20 nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap \
    --format=csv,noheader 2> "$out/nvidia-smi.log"); then
    gpus=$(printf '%s\n' "$found" | grep -c . || true)
    gpu=$(printf '%s\n' "$found" | head -n 1)
  fi
fi
say "GPUs: $gpus ($gpu)"

# The targets are those of this list that the build has.
wanted="gpt gpt_cuda zshard_cuda test_device_kernels_gpu test_device_engine_gpu bench_device zshard_cli"
if [ -n "$prebuilt" ]; then
  [ -d "$prebuilt/bin" ] || die "--prebuilt $prebuilt has no bin/"
  build=$(realpath "$prebuilt")
else
  build=$root/build/gpu
  start=$SECONDS
  architecture=$(printf '%s' "$gpu" | sed -n 's/.*, *\([0-9]*\)\.\([0-9]*\)$/\1\2/p')
  mkdir -p "$build"
  say "configure and build $build (sm_${architecture:-90})"
  # Warnings of another compiler are no reason to measure nothing, nor is a missing NCCL, which one
  # rank does not need.
  configure() {
    timeout 120 cmake --preset release -B "$build" -DZSHARD_CUDA="$1" \
      -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF -DZSHARD_CUDA_ARCHITECTURES="${architecture:-90}" < /dev/null
  }
  if ! configure ON > "$out/build.log" 2>&1 && ! configure AUTO >> "$out/build.log" 2>&1; then
    tail -n 30 "$out/build.log"
    record build failed $((SECONDS - start)) "configure: see build.log"
  else
    known=$(timeout 60 cmake --build "$build" --target help 2> /dev/null | sed -n 's/^\([A-Za-z_0-9]*\): .*/\1/p')
    targets=()
    for target in $wanted; do
      if grep -qx "$target" <<< "$known"; then targets+=("$target"); fi
    done
    if timeout -k 10 $((total > 160 ? total - 160 : 1)) cmake --build "$build" -j"$(nproc)" \
      --target "${targets[@]}" -- -k 0 < /dev/null >> "$out/build.log" 2>&1; then
      record build passed $((SECONDS - start)) \
        "${targets[*]}; $(sed -n 's/^ *\(CUDA\|NCCL\)  *\(yes\|no\) */\1: \2 /p' "$out/build.log" | tail -n 2 | paste -sd ';')"
    else
      grep -E -A8 'error|FAILED' "$out/build.log" | head -n 40
      record build failed $((SECONDS - start)) "see build.log"
    fi
  fi
fi
export LD_LIBRARY_PATH=$build/lib:/usr/local/cuda/lib64:/usr/local/cuda/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
plugin=$build/lib/libzshard_cuda.so
gpt=$build/bin/gpt

# A container may have the GPU without nvidia-smi: the driver's library says it all the same.
if [ "$gpus" -eq 0 ] && [ -x "$build/bin/zshard" ]; then
  found=$(timeout 60 "$build/bin/zshard" info --json 2> /dev/null | sed -n 's/.*"gpus":\[\(.*\)\],"no_gpu_because".*/\1/p')
  gpus=$(grep -o '"name":' <<< "$found" | wc -l)
  if [ "$gpus" -gt 0 ]; then
    gpu=$(sed 's/.*"name":"\([^"]*\)".*/\1/' <<< "${found%%\}*}")
    say "GPUs: $gpus ($gpu), by zshard info"
  fi
fi

# binary NAME: where it is. Programs that are linked to the simulated device do not count: it would
# answer in the GPU's place.
binary() {
  local program=$build/bin/$1
  [ -x "$program" ] || return 1
  if grep -q zshard_simulator <<< "$(ldd "$program" 2> /dev/null)"; then return 1; fi
  printf '%s' "$program"
}

# -- parts: each is a function; 0 passed, 1 failed, 77 skipped. Its last line of output is the note --

train=(--layers 4 --heads 4 --width 256 --context 128 --batch 8 --steps 6 --eval-interval 0 --seed 1
  --ranks 1 --device cuda --digest)
data=$out/text
# Licence texts that every Debian system carries, else these sources.
{ cat /usr/share/common-licenses/GPL-[23] 2> /dev/null || cat examples/gpt/*.cpp examples/gpt/*.hpp; } > "$data"

part_machine() {
  nvidia-smi || true
  nvcc --version 2> /dev/null | tail -n 2 || true
  local json
  if [ -x "$build/bin/zshard" ]; then
    "$build/bin/zshard" info || return 1
    json=$("$build/bin/zshard" info --json) || return 1
  fi
  # Behind "gpus" it is what was loaded, before it what the build had.
  echo "$gpu; $(grep -oE '"(cuda_driver|cuda_runtime|nccl)": ?("[^"]*"|null)' <<< "${json##*\"gpus\"}" | tr -d '"' | paste -sd ',')"
}

# gtest PROGRAM ARGUMENT...: 77 if all cases were skipped.
gtest() {
  local log status=0
  log=$("$@" 2>&1) || status=$?
  printf '%s\n' "$log"
  [ "$status" -eq 0 ] || return 1
  # Not behind a pipe: grep ends it early, and pipefail calls that a failure.
  if ! grep -q '^\[       OK \]' <<< "$log"; then
    grep -m 1 -iE 'no GPU|skip' <<< "$log" || echo "no case ran"
    return 77
  fi
  printf '%s\n' "$log" | sed -n 's/^\[  PASSED  \] //p' | tail -n 1
}

# device_test PROGRAM: with the real plug-in.
device_test() {
  local program
  program=$(binary "$1") || {
    echo "$1 is not built"
    return 1
  }
  ZSHARD_TEST_PLUGIN=$plugin gtest "$program"
}
part_kernels() { device_test test_device_kernels_gpu; }
part_engine() { device_test test_device_engine_gpu; }

nccl_version() {
  "$build/bin/zshard" info --json 2> /dev/null |
    grep -oE '"nccl": ?"[0-9.]+"' | tail -n 1 | grep -oE '[0-9.]+'
}

part_two_ranks() {
  local version one two
  if [ "$gpus" -lt 2 ]; then
    version=$(nccl_version)
    if [ -z "$version" ] || ! printf '2.30\n%s\n' "$version" | sort -V -C; then
      echo "one GPU, and NCCL ${version:-unknown} takes one rank on it; 2.30 takes more"
      return 77
    fi
    export NCCL_MULTI_RANK_GPU_ENABLE=1
  fi
  for stage in 0 1 2 3; do
    two=$("$gpt" --data "$data" "${train[@]}" --ranks 2 --stage "$stage" 2>&1) || {
      printf '%s\n' "$two"
      return 1
    }
    two=$(grep '^digest' <<< "$two") || {
      echo "no digests at stage $stage"
      return 1
    }
    printf 'stage %s\n%s\n' "$stage" "$two"
    [ "${one:=$two}" = "$two" ] || {
      echo "digests at stage $stage differ from those at stage 0"
      return 1
    }
  done
  echo "two ranks: the same digests at stages 0 to 3"
}

# digests LABEL ARGUMENT...: trains, and compares with the first digests of the part.
first_digest=
digests() {
  local label=$1 log digest
  shift
  log=$("$gpt" --data "$data" "${train[@]}" "$@" 2>&1) || {
    printf '%s\n' "$log"
    echo "$label: training failed"
    return 1
  }
  digest=$(printf '%s\n' "$log" | grep '^digest')
  printf '%s\n%s\n%s\n' "$label" "$digest" "$(printf '%s\n' "$log" | grep -i 'pageable' || true)"
  if [ -z "$digest" ] || [ "${first_digest:=$digest}" != "$digest" ]; then
    echo "$label: digests differ from the first ones"
    return 1
  fi
}

part_stages() {
  local stage dtype
  for dtype in f32 bf16; do
    first_digest=
    for stage in 0 1 2 3; do digests "$dtype stage $stage" --dtype "$dtype" --stage "$stage" || return 1; done
    digests "$dtype stage 3 again" --dtype "$dtype" --stage 3 || return 1
    digests "$dtype stage 3, small budget" --dtype "$dtype" --stage 3 --gather-budget 8MiB || return 1
  done
  echo "f32 and bf16: the same digests at stages 0 to 3, with a small budget, and twice"
}

part_offload() {
  local log
  digests "all on the device" --stage 3 || return 1
  digests "optimizer on the host, stage 2" --stage 2 --optimizer-tier host || return 1
  digests "optimizer on the host" --stage 3 --optimizer-tier host || return 1
  digests "optimizer and parameters on the host" --stage 3 --optimizer-tier host --parameter-tier host \
    --gather-budget 8MiB || return 1
  digests "gradients on the host, stage 2" --stage 2 --gradient-tier host || return 1
  digests "parameters on the host" --stage 3 --parameter-tier host --gather-budget 8MiB || return 1
  ZSHARD_UPDATE_ON=device digests "optimizer on the host, updated on the GPU" --stage 2 \
    --optimizer-tier host || return 1
  ZSHARD_UPDATE_ON=device digests "all on the host, updated on the GPU" --stage 3 \
    --optimizer-tier host --gradient-tier host --parameter-tier host --gather-budget 8MiB || return 1
  ZSHARD_UPDATE_ON=device digests "all on nvme, updated on the GPU" --stage 3 --optimizer-tier nvme \
    --gradient-tier nvme --parameter-tier nvme --nvme-dir "$nvme" --gather-budget 8MiB || return 1
  digests "optimizer on nvme" --stage 3 --optimizer-tier nvme --nvme-dir "$nvme" || return 1
  digests "optimizer and parameters on nvme" --stage 3 --optimizer-tier nvme --parameter-tier nvme \
    --nvme-dir "$nvme" --gather-budget 8MiB || return 1
  log=$(ZSHARD_LOG=debug "$gpt" --data "$data" "${train[@]}" --optimizer-tier host 2>&1)
  if grep -q 'pageable' <<< "$log"; then
    echo "the same digests on every tier, but host memory could not be pinned"
  else
    echo "the same digests on every tier, host memory pinned"
  fi
}

# sanitizer TOOL
sanitizer() {
  local tool=$1 program
  command -v compute-sanitizer > /dev/null || {
    echo "compute-sanitizer is not installed"
    return 77
  }
  local check=(compute-sanitizer --tool "$tool" --error-exitcode 9) start=$SECONDS status=0
  # Refusals of the runtime that the library expects, such as of pinning, are no errors of memory.
  [ "$tool" != memcheck ] || check+=(--report-api-errors no)
  "${check[@]}" "$gpt" --data "$data" --layers 2 --heads 2 --width 64 --context 33 --batch 3 \
    --vocab-units 2 --steps 2 --ranks 1 --device cuda --stage 3 --gather-budget 1MiB \
    --optimizer-tier host || return 1
  program=$(binary test_device_kernels_gpu) || {
    echo "training: no errors; test_device_kernels_gpu is not built"
    return 0
  }
  # In the foreground: the limit of the part must reach it.
  ZSHARD_TEST_PLUGIN=$plugin timeout --foreground $((limit - (SECONDS - start) - 5)) "${check[@]}" \
    "$program" --gtest_filter='*Update*:*Kernels*' || status=$?
  if [ "$status" -eq 124 ]; then
    echo "training: no errors; kernels: none until the time was up"
    return 0
  fi
  [ "$status" -eq 0 ] || return 1
  echo "training and kernels: no errors"
}
part_memcheck() { sanitizer memcheck; }
part_racecheck() { sanitizer racecheck; }

# bandwidth_rows LOG: NAME VALUE UNIT [limit L ratio R], the name may hold blanks.
bandwidth_rows() {
  sed -nE \
    's/^(.{44}) +([0-9.e+-]+) ([A-Za-z\/]+) *( limit +([0-9.e+-]+)  ratio ([0-9.]+))?$/\1|\2|\3|\6/p' \
    "$1" > "$out/bandwidth.rows"
}
part_bandwidth() {
  local program
  program=$(binary bench_device) || {
    echo "bench_device is not built (Google Benchmark is missing)"
    return 77
  }
  # Straight into the log: the rows that were measured count, whatever comes then.
  "$program" --plugin "$plugin" --benchmark_out="$out/bandwidth.json" \
    --benchmark_out_format=json || return 1
  bandwidth_rows "$out/bandwidth.log"
  [ -s "$out/bandwidth.rows" ] || {
    echo "no rows were measured"
    return 1
  }
  local overlap
  overlap=$(sed -n 's/^overlap.*|//p' "$out/bandwidth.rows")
  # Three things that take equally long, one after another, would be 3.
  awk -v ratio="${overlap:-9}" 'BEGIN { exit !(ratio < 1.5) }' || {
    echo "copies and update do not overlap: ${overlap:-?} times the longest alone"
    return 1
  }
  local host device
  host=$(sed -nE 's/^update of host state\/on the host *\|([^|]*)\|.*/\1/p' "$out/bandwidth.rows")
  device=$(sed -nE 's/^update of host state\/on the GPU *\|([^|]*)\|.*/\1/p' "$out/bandwidth.rows")
  echo "$(wc -l < "$out/bandwidth.rows") rows; update and copies at once take $overlap of the longest" \
    "alone; state on the host: ${host:-?} ns a parameter updated there, ${device:-?} on the GPU"
}

# tokens DTYPE: median tokens a second of the later steps.
tokens() {
  local log=$out/tokens-$1.jsonl
  "$gpt" --data "$data" --layers 12 --heads 12 --width 768 --context 512 --vocab 50304 --batch 16 \
    --steps 14 --eval-interval 0 --ranks 1 --device cuda --dtype "$1" --log "$log" || return 1
  sed -n '5,$s/.*"tokens_per_s":\([0-9.e+]*\).*/\1/p' "$log" | sort -g |
    awk -v dtype="$1" '{ v[NR] = $1 } END { if (NR == 0) exit 1; printf "figure 124M-%s %.0f tokens/s\n", dtype, v[int((NR + 1) / 2)] }'
}
part_tokens() {
  local f32 bf16
  speed() { tail -n 1 <<< "$1" | cut -d ' ' -f 3; }
  f32=$(tokens f32) || {
    printf '%s\n' "$f32"
    return 1
  }
  bf16=$(tokens bf16) || {
    printf '%s\n' "$bf16"
    return 1
  }
  printf '%s\n' "$f32" "$bf16" | tee "$out/tokens.txt"
  echo "12 layers, width 768, context 512, vocabulary 50304, 16 rows: f32 $(speed "$f32"), bf16 $(speed "$bf16") tokens/s"
}

# Doubles a model until a step fails or the time is up. The CPU draws the initial weights, one
# thread: that, not the memory, bounds what the limit allows; `zshard plan` says what would fit.
part_largest() {
  local layers best='' log start=$SECONDS
  for layers in 4 8 16 32 64 128; do
    local used=$((SECONDS - start))
    # The next one takes about twice as long as all before.
    [ $((used * 3)) -lt $((limit - 8)) ] || break
    if log=$(timeout --foreground $((limit - 8 - used)) "$gpt" --data "$data" --layers "$layers" --heads 32 --width 2048 \
      --context 256 --batch 2 --steps 1 --eval-interval 0 --ranks 1 --device cuda --dtype bf16 \
      --stage 3 --gather-budget 600MiB --parameter-tier host --optimizer-tier nvme \
      --nvme-dir "$nvme" 2>&1); then
      printf '%s\n' "$log" | tail -n 12
      best=$(printf '%s\n' "$log" | sed -n 's/^\([0-9]*\) parameters in .*/\1/p')
      echo "figure largest-model $best parameters"
    else
      printf '%s\n' "$log" | tail -n 20
      break
    fi
  done
  [ -n "$best" ] || return 1
  echo "$best parameters in bf16, parameters in pinned host memory, state on nvme: largest that was tried within the time"
}

# -- run --

if [ "$gpus" -eq 0 ]; then
  missing=
  for file in "$gpt" "$plugin" "$build/bin/libgpt_cuda.so" "$build"/bin/test_device_{kernels,engine}_gpu; do
    [ -e "$file" ] || missing="$missing $file"
  done
  if [ -n "$missing" ]; then
    record files failed 0 "missing:$missing"
  else
    # Both libraries load, and the program says why it cannot go on.
    if message=$(timeout 30 "$gpt" --data "$data" "${train[@]}" 2>&1); then
      record files failed 0 "gpt --device cuda went through without a GPU"
    elif printf '%s' "$message" | grep -q -- '--device cuda'; then
      record files passed 0 "$message"
    else
      record files failed 0 "$message"
    fi
  fi
fi
for part in "${parts[@]}"; do
  name=${part%% *}
  rest=${part#* }
  limit=${rest%% *}
  case ,$only, in
    ,, | *,"$name",*) ;;
    *) continue ;;
  esac
  case ,$skip, in *,"$name",*)
    record "$name" skipped 0 "by --skip"
    continue
    ;;
  esac
  if [ "$gpus" -eq 0 ]; then
    record "$name" skipped 0 "no GPU here"
    continue
  fi
  left=$((total - SECONDS))
  if [ "$left" -lt 5 ]; then
    record "$name" failed 0 "no time left of $total s"
    continue
  fi
  [ "$limit" -le "$left" ] || limit=$left
  say "$name: ${rest#* } (at most $limit s)"
  start=$SECONDS
  log=$out/$name.log
  # A process group of its own, so that the limit reaches everything that the part started.
  set -m
  ("part_$name") > "$log" 2>&1 &
  pid=$!
  set +m
  status=0
  while kill -0 "$pid" 2> /dev/null; do
    if [ $((SECONDS - start)) -ge "$limit" ]; then
      kill -TERM -- "-$pid" 2> /dev/null
      sleep 2
      kill -KILL -- "-$pid" 2> /dev/null
      status=124
      break
    fi
    sleep 0.2
  done
  if [ "$status" -eq 0 ]; then wait "$pid" || status=$?; else wait "$pid" 2> /dev/null || true; fi
  note=$(tail -n 1 "$log")
  # Of a name the last value counts.
  while read -r _ label value unit; do figure "$label" "$value" "$unit"; done < <(
    awk '$1 == "figure" { if (!($2 in last)) order[++n] = $2; last[$2] = $0 }
         END { for (i = 1; i <= n; ++i) print last[order[i]] }' "$log")
  if [ "$name" = bandwidth ]; then
    bandwidth_rows "$log"
    while IFS='|' read -r label value unit ratio; do
      figure "$(printf '%s' "$label" | sed 's/ *$//')" "$value" "$unit${ratio:+, $ratio of the limit}"
    done < "$out/bandwidth.rows"
  fi
  case $status in
    0) record "$name" passed $((SECONDS - start)) "$note" ;;
    77) record "$name" skipped $((SECONDS - start)) "$note" ;;
    124) record "$name" failed $((SECONDS - start)) "stopped after $limit s, at: $note" ;;
    *)
      tail -n 30 "$log"
      record "$name" failed $((SECONDS - start)) "exit code $status: $note"
      ;;
  esac
done

write_results
rm -f "$lines" "$data"
say "results: $out/results.md, $out/results.json"
cat "$out/results.md"
[ "$failed" -eq 0 ] || exit 1
[ "$gpus" -gt 0 ] || {
  echo "no GPU here: everything builds, nothing has run on a GPU"
  exit 77
}
