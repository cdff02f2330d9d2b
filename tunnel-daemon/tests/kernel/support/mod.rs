//! Shared by the cases.

pub(crate) mod accounting;
pub(crate) mod bpffs;
pub(crate) mod cgroup;
pub(crate) mod client;
// The loopback tier confines processes in the same way.
#[path = "../../loopback/support/confined.rs"]
pub(crate) mod confined;
pub(crate) mod daemon;
pub(crate) mod forward_proxy;
pub(crate) mod listening;
pub(crate) mod name_server;
pub(crate) mod named;
pub(crate) mod namespace;
pub(crate) mod privilege;
/// `confined` starts processes by this name.
pub(crate) mod process {
    pub(crate) use super::daemon::Daemon as Process;
}
pub(crate) mod role;
pub(crate) mod stranger;
pub(crate) mod target;
pub(crate) mod wait;
pub(crate) mod world;
