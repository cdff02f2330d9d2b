#!/usr/bin/env bash
# Runs the relay's unit tests that need no kernel in Miri, which detects undefined behaviour and leaks.
. "$(dirname "$0")/common.sh"
nightly cargo miri --version >/dev/null 2>&1 ||
  skip 'no nightly toolchain with miri: `rustup component add miri rust-src --toolchain nightly`'
export MIRIFLAGS=-Zmiri-strict-provenance
nightly cargo miri test --quiet --package adit-relay --lib
