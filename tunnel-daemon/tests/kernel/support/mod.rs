//! Shared by the cases.

pub(crate) mod accounting;
pub(crate) mod bpffs;
pub(crate) mod client;
pub(crate) mod daemon;
pub(crate) mod forward_proxy;
pub(crate) mod listening;
pub(crate) mod name_server;
pub(crate) mod named;
pub(crate) mod namespace;
pub(crate) mod privilege;
pub(crate) mod role;
pub(crate) mod stranger;
pub(crate) mod target;
pub(crate) mod wait;
pub(crate) mod world;

pub(crate) use adit_testkit::{blocking, cgroup, confined};
