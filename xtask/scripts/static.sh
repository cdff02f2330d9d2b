#!/usr/bin/env bash
# Builds `adit` without shared libraries, and runs the demo with it. Naming a target applies the flags to the program alone, so build
# scripts and macros are reused. Dependencies are built again: without optimisation and debug information that takes half as long.
. "$(dirname "$0")/common.sh"
host=$(uname -m)-unknown-linux-gnu
RUSTFLAGS='-C target-feature=+crt-static' cargo build --quiet --package adit --bin adit --target "$host" \
  --config 'profile.dev.package."*".opt-level=0' --config profile.dev.debug=false
program=$target/$host/debug/adit
said=$(ldd "$program" 2>&1 || true)
[[ $said == *"statically linked"* || $said == *"not a dynamic executable"* ]] || fail "$program needs libraries: $said"
timeout 5m "$program" demo --once --plain
echo "static: $program"
