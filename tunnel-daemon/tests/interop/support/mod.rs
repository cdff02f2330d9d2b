//! Support for the interop tests: Go builds, certificates, ports, processes, and running stacks.

#[macro_use]
pub(crate) mod combo;
mod built;
pub(crate) mod certs;
pub(crate) mod metrics;
pub(crate) mod namespace;
pub(crate) mod peer;
pub(crate) mod stack;

pub(crate) use adit_testkit::{blocking as wait, go, ports, process, skip};
