//! What the cases share.

pub(crate) mod accounting;
pub(crate) mod bpffs;
pub(crate) mod cgroup;
pub(crate) mod client;
pub(crate) mod daemon;
pub(crate) mod namespace;
pub(crate) mod privilege;
pub(crate) mod role;
pub(crate) mod sockmap;
pub(crate) mod target;
pub(crate) mod wait;
pub(crate) mod world;
