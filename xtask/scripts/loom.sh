#!/usr/bin/env bash
# Explores the interleavings of the relay's hand-over, each model up to a number of preemptions. Without optimisation that takes minutes.
. "$(dirname "$0")/common.sh"
RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" cargo test --quiet --package adit-relay --release --lib loom
