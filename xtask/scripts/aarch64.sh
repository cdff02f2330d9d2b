#!/usr/bin/env bash
# Whether the program compiles for the other processor of data centres, where rustup has or can fetch its library and there is a C
# compiler for its cryptography.
. "$(dirname "$0")/common.sh"
target=aarch64-unknown-linux-gnu
rustup --quiet target add "$target" || skip "no library of $target"
packages=(--package adit-core --package adit-relay --package adit-ebpf-abi)
if command -v aarch64-linux-gnu-gcc >/dev/null; then
  packages+=(--package adit)
else
  echo "check for aarch64: SKIPPED for adit itself: no aarch64-linux-gnu-gcc"
fi
cargo check --quiet --target "$target" "${packages[@]}"
