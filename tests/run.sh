#!/usr/bin/env bash
# Builds zshard and runs all its tests. The last line is "N passed, N failed[, N skipped]"; the exit
# status is 0 if nothing failed. Every GoogleTest case counts as one, and so does each check.
#
#   --quick        the release build only, no sanitizers, short fuzzing
#   --exhaustive   sets ZSHARD_EXHAUSTIVE=1: tests with a larger space of cases walk all of it
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
repository=$PWD

quick=0
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    --exhaustive) export ZSHARD_EXHAUSTIVE=1 ;;
    --help | -h) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "tests/run.sh: unknown argument $argument; it takes --quick and --exhaustive" >&2; exit 2 ;;
  esac
done

# One thread in BLAS: ranks are threads already, and the number of threads changes sums.
export OPENBLAS_NUM_THREADS=1
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:abort_on_error=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
# Options of the caller's shell must not leak into the tests.
for variable in $(compgen -e | grep '^ZSHARD_' || true); do
  [ "$variable" = ZSHARD_EXHAUSTIVE ] || unset "$variable"
done

passed=0
failed=0
skipped=0
failures=()

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
pass() { passed=$((passed + $1)); }
fail() {
  failed=$((failed + 1))
  failures+=("$1")
  say "FAILED: $1"
}

# check SECONDS NAME COMMAND...: one pass or one failure; its output is shown if it fails.
check() {
  local limit=$1 name=$2 output
  shift 2
  if output=$(timeout -k 10 "$limit" "$@" < /dev/null 2>&1); then
    pass 1
    say "ok: $name${output:+: ${output##*$'\n'}}"
  else
    local status=$?
    printf '%s\n' "$output" | tail -n 60
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || name="$name (stopped after $limit s)"
    fail "$name"
    return 1
  fi
}

# build PRESET TARGET...: configures and builds; a failure counts as one and is shown.
build() {
  local preset=$1
  shift
  mkdir -p "build/$preset"
  say "configure and build $preset"
  if ! timeout -k 10 200 cmake --preset "$preset" < /dev/null > "build/$preset/configure.log" 2>&1; then
    tail -n 40 "build/$preset/configure.log"
    fail "configure $preset"
    return 1
  fi
  grep -E -A5 'optional back ends|left out' "build/$preset/configure.log" | grep -E '^ {4}|left out' || true
  if ! timeout -k 10 1500 cmake --build "build/$preset" -j"$(nproc)" --target "$@" -- -k 0 \
    < /dev/null > "build/$preset/build.log" 2>&1; then
    grep -E -A12 'error|FAILED|undefined reference' "build/$preset/build.log" | head -n 80
    tail -n 5 "build/$preset/build.log"
    fail "build $preset (build/$preset/build.log)"
    return 1
  fi
}

# count_binary PRESET NAME: reads the XML that a test binary left, and CTest's verdict on the process.
count_binary() {
  local preset=$1 name=$2
  local xml="build/$preset/results/$name.xml" junit="build/$preset/results/ctest.xml"
  if [ ! -s "$xml" ]; then
    fail "$preset $name ended without a result: it crashed, hung, or was not built"
    return
  fi
  local tests bad off skips
  tests=$(sed -n 's/.*<testsuites tests="\([0-9]*\)".*/\1/p' "$xml" | head -n 1)
  bad=$(sed -n 's/.*<testsuites .*failures="\([0-9]*\)".*/\1/p' "$xml" | head -n 1)
  off=$(sed -n 's/.*<testsuites .*disabled="\([0-9]*\)".*/\1/p' "$xml" | head -n 1)
  skips=$(grep -c '<testcase .*result="skipped"' "$xml" || true)
  pass $((tests - bad - off - skips))
  skipped=$((skipped + skips + off))
  if [ "$tests" -eq 0 ]; then fail "$preset $name has no tests"; fi
  if [ "$bad" -gt 0 ]; then
    failed=$((failed + bad))
    while read -r line; do failures+=("$preset $name $line"); done < <(
      awk '/<testcase /{ test = $0; sub(/.*<testcase name="/, "", test); sub(/".*/, "", test)
             suite = $0; sub(/.*classname="/, "", suite); sub(/".*/, "", suite); told = 0 }
           /<failure / && !told { print suite "." test; told = 1 }' "$xml")
  elif ! grep -qE "<testcase name=\"$name\".*status=\"run\"" "$junit" 2> /dev/null; then
    fail "$preset $name: the tests passed, but the process did not end well (sanitizer report or exit status)"
  fi
  awk -v where="$preset" '
    /<testcase /{ test = $0; sub(/.*<testcase name="/, "", test); sub(/".*/, "", test)
      suite = $0; sub(/.*classname="/, "", suite); sub(/".*/, "", suite)
      if ($0 ~ /status="notrun"/) print "skipped: " where " " suite "." test ": disabled" }
    /<skipped message="/{ reason = $0; sub(/.*<skipped message="/, "", reason); sub(/".*/, "", reason)
      sub(/^[^ ]*:[0-9]+&#x0A;/, "", reason); gsub(/&#x0A;/, " ", reason); gsub(/&quot;/, "\"", reason)
      gsub(/&apos;/, "\047", reason); gsub(/&lt;/, "<", reason); gsub(/&gt;/, ">", reason)
      gsub(/&amp;/, "\\&", reason)
      print "skipped: " where " " suite "." test ": " reason }' "$xml"
  say "$preset $name: $tests tests, $bad failed, $((skips + off)) skipped"
}

# g++ 12's thread sanitizer cannot place its shadow under more than 28 random bits.
tsan_launcher=()
if [ "$(cat /proc/sys/vm/mmap_rnd_bits 2> /dev/null || echo 28)" -gt 28 ]; then
  tsan_launcher=(setarch -R)
fi

# run_binaries SECONDS PRESET NAME...: runs test binaries under CTest and counts their cases.
run_binaries() {
  local limit=$1 preset=$2
  shift 2
  local launcher=() filter='*'
  if [ "$preset" = tsan ]; then
    launcher=(${tsan_launcher[@]+"${tsan_launcher[@]}"})
    # Arguments, variables and plans, which no second thread touches, take a quarter of its time.
    filter='-Launcher.*:Misuse.*:*ALimitOfMemoryOrDescriptors*:*TheLedgerIsThePlan*:*TheSplitFollowsFromTheBudget*'
  fi
  rm -rf "build/$preset/results"
  mkdir -p "build/$preset/results"
  local pattern name
  pattern=$(IFS='|'; echo "$*")
  say "run $preset: $*"
  # Beside each other, but for those that CMake says run alone.
  GTEST_OUTPUT="xml:$repository/build/$preset/results/" GTEST_COLOR=no GTEST_FILTER="$filter" \
    timeout -k 10 "$limit" ${launcher[@]+"${launcher[@]}"} ctest --test-dir "build/$preset" \
    --parallel "$(nproc)" -R "^($pattern)\$" --output-on-failure --no-tests=error \
    --output-junit "$repository/build/$preset/results/ctest.xml" < /dev/null \
    > "build/$preset/results/ctest.log" 2>&1 ||
    # Without the cases that passed: the last RUN line is where a crash was.
    awk '/^\[ RUN      \]/ { held = $0 "\n"; next } /^\[       OK \]/ { held = ""; next }
         { printf "%s", held; held = ""; print } END { printf "%s", held }' \
      "build/$preset/results/ctest.log" | tail -n 200
  for name in "$@"; do count_binary "$preset" "$name"; done
}

# binaries PRESET: the test binaries that this build has.
binaries() { grep -v '^$' "build/$1/test_binaries.txt" 2> /dev/null || true; }

# fuzz PRESET SECONDS: ranks as threads, then half as long as processes, and on the simulated device.
fuzz() {
  [ -x "build/$1/bin/fuzz" ] || return 0
  say "fuzz $1 for $2 + 2 x $(($2 / 2)) s"
  check $(($2 + 120)) "fuzz $1, $2 s" "build/$1/bin/fuzz" --seconds "$2"
  check $(($2 / 2 + 320)) "fuzz $1 with processes, $(($2 / 2)) s" \
    "build/$1/bin/fuzz" --processes --seconds $(($2 / 2))
  if grep -q '^test_device_engine$' "build/$1/test_binaries.txt"; then
    check $(($2 / 2 + 120)) "fuzz $1 on the simulated device, $(($2 / 2)) s" \
      "build/$1/bin/fuzz" --cuda --seconds $(($2 / 2))
  fi
}

say "zshard tests: checks of the sources, release build$([ $quick = 1 ] || echo ', address and thread sanitizers')"
check 1800 "dependencies" bash install-dependencies.sh
check 330 "format" bash tests/checks/format.sh
check 60 "layering" bash tests/checks/layering.sh
check 60 "layering self-test" bash tests/checks/layering.sh --self-test
check 300 "public headers compile alone" bash tests/checks/headers.sh

build release all
mapfile -t names < <(binaries release)
[ ${#names[@]} -eq 0 ] && fail "release: no test binaries" || run_binaries 1500 release "${names[@]}"

nvcc=$(sed -n 's/^CUDAToolkit_NVCC_EXECUTABLE:[A-Z]*=//p' build/release/CMakeCache.txt 2> /dev/null)
if [ -x "$nvcc" ]; then
  check 200 "GPU code has no fused or approximate arithmetic" bash tests/device_kernels/exact_code.sh \
    "$nvcc" -O3 --fmad=false -prec-div=true -prec-sqrt=true -ftz=false
  check 400 "GPU code compiles for the oldest and the newest GPU" \
    bash tests/checks/architectures.sh "$nvcc"
else
  skipped=$((skipped + 2))
  say "skipped: GPU code compiles for the oldest and the newest GPU, and has no fused or approximate arithmetic: there is no nvcc"
fi

rm -rf build/install build/consumer
if check 60 "install" cmake --install build/release --prefix build/install; then
  check 300 "installed headers compile alone" bash tests/checks/headers.sh build/install
  check 120 "consumer configures with find_package" cmake -S tests/consumer -B build/consumer -G Ninja \
    -DCMAKE_PREFIX_PATH="$repository/build/install" &&
    check 300 "consumer builds" cmake --build build/consumer &&
    check 120 "consumer trains" build/consumer/consumer
  check 400 "consumer builds and trains with pkg-config" bash -c '
    set -e
    export PKG_CONFIG_PATH=$(dirname "$(find build/install -name zshard.pc)")
    g++ -std=c++20 -O1 tests/consumer/main.cpp -o build/consumer_pc \
      $(pkg-config --cflags --libs --static zshard)
    timeout -k 5 120 build/consumer_pc'
  check 600 "programs in the documents" bash tests/checks/readme.sh build/install build/readme
fi

if [ $quick = 1 ]; then
  fuzz release 20
else
  fuzz release 40
  build asan all
  mapfile -t names < <(binaries asan)
  [ ${#names[@]} -eq 0 ] || run_binaries 2400 asan "${names[@]}"
  fuzz asan 20
  # The thread sanitizer sees only what threads do: the binaries that run ranks.
  mapfile -t names < <(binaries release | grep -E '^test_(engine|process|offload|simulator|device.*)$')
  [ ${#names[@]} -gt 0 ] || mapfile -t names < <(binaries release | head -n 1)
  if [ ${#names[@]} -gt 0 ]; then
    build tsan "${names[@]}" fuzz
    run_binaries 1500 tsan "${names[@]}"
    if grep -q '^test_device_engine$' build/tsan/test_binaries.txt; then
      check 200 "fuzz tsan on the simulated device, 15 s" \
        ${tsan_launcher[@]+"${tsan_launcher[@]}"} build/tsan/bin/fuzz --cuda --seconds 15
    fi
  fi
fi

if [ ${#failures[@]} -gt 0 ]; then
  echo "failed:"
  printf '  %s\n' "${failures[@]}"
fi
say "done"
summary="$passed passed, $failed failed"
[ "$skipped" -eq 0 ] || summary="$summary, $skipped skipped"
echo "$summary"
[ "$failed" -eq 0 ]
