//! The kernel tier: eBPF programs in the running kernel, with real cgroups, sockets and processes.
//!
//! One binary that needs neither cargo nor any other file, so it also runs in a virtual machine with another kernel. It runs
//! as root, with `/proc`, `/sys` and cgroup2 mounted, and loopback up. It starts itself for the processes that it needs (see
//! `support::role`). Without the privileges each test prints that it is skipped; as root in CI that is a failure.
#![expect(
    clippy::unwrap_used,
    reason = "helpers and roles of tests fail by a panic, as tests do"
)]

mod cases;
mod support;
