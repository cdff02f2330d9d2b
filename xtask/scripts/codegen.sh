#!/usr/bin/env bash
# codegen.sh [--check]: generates the protobuf messages and the client glue from the .proto file, or fails when committed ones differ.
. "$(dirname "$0")/common.sh"
cargo run --quiet --package codegen -- "$@"
