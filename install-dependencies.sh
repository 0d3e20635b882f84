#!/usr/bin/env bash
# Installs the Debian packages that building and testing zshard needs; does nothing, and needs no
# network, where all are there. CUDA and NCCL are optional and not installed: CMake detects them.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache pkg-config git clang-format
  libfmt-dev libspdlog-dev nlohmann-json3-dev libxxhash-dev libcli11-dev
  libgtest-dev libbenchmark-dev
  libopenblas-dev liburing-dev libopenmpi-dev openmpi-bin libhwloc-dev
)

if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
  echo "install-dependencies: this is not a Debian system. Install what these packages hold:"
  printf '  %s\n' "${packages[@]}"
  exit 1
fi >&2

missing=()
for package in "${packages[@]}"; do
  # dpkg -s answers for virtual names (pkg-config) too; an unpacked or removed package is missing.
  if ! dpkg -s "$package" 2> /dev/null | grep -q '^Status: .* installed$'; then
    missing+=("$package")
  fi
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "install-dependencies: all ${#packages[@]} packages are installed"
  exit 0
fi

echo "install-dependencies: missing: ${missing[*]}"
run=()
if [ "$(id -u)" -ne 0 ]; then
  if command -v sudo > /dev/null && sudo -n true 2> /dev/null; then
    run=(sudo -n)
  else
    echo "install-dependencies: installing needs root. Run this as root, then start again:" >&2
    echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
fi
export DEBIAN_FRONTEND=noninteractive
"${run[@]}" timeout -k 10 300 apt-get update < /dev/null
"${run[@]}" timeout -k 10 1200 env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y --no-install-recommends "${missing[@]}" < /dev/null
echo "install-dependencies: installed ${#missing[@]} packages"
