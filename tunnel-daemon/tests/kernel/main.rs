//! The kernel tier: eBPF programs in the running kernel, with real cgroups, sockets and processes.
//!
//! One binary that needs neither cargo nor any other file, so that it also runs in a virtual machine with another kernel:
//! as root, with `/proc`, `/sys` and cgroup2 mounted. Without the privileges each test skips, loudly; as root in CI that is a
//! failure.

mod cases;
mod support;
