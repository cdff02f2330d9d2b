//! Interop tier: our server and agent against the upstream server, agent and client library, as separate processes.
//!
//! Each test is named after what it proves and runs
//! once per row: a combination of server, agent and client dialect. The row `go_go` is the baseline (upstream against
//! upstream) and shows that the test itself is right; rows with `adit` run our binary.
//! Without a Go toolchain every test is skipped loudly, and fails when `CI` is set.

#[macro_use]
mod support;

mod cases;
