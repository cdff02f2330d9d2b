//! The kernel tier: eBPF programs in the running kernel, with real cgroups, sockets and processes.
//!
//! One binary that needs neither cargo nor any other file, so that it also runs in a virtual machine with another kernel:
//! as root, with `/proc`, `/sys` and cgroup2 mounted, and loopback up. Without the privileges each test skips, loudly; as root
//! in CI that is a failure.
#![expect(
    clippy::unwrap_used,
    reason = "helpers and roles of tests fail by a panic, as tests do"
)]

mod cases;
mod support;
