//! Interop tier: our server and agent against the upstream server, agent and client library, as separate processes.
//!
//! Each test is named after what it proves and runs once per row: a combination of server, agent and client dialect. The row
//! `go_go` (upstream against upstream) is the baseline and validates the test itself. Rows with `adit` run our binary.
//! Without a Go toolchain each test prints that it is skipped, and fails when `CI` is set.

#[macro_use]
mod support;

mod cases;
