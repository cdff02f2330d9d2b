//! Shared parts of the loopback tests: running servers and agents, targets, and clients of all kinds.

/// The fake Kubernetes API of the tests of `adit-kube`.
#[path = "../../../kube/tests/support/mod.rs"]
pub(crate) mod api;
pub(crate) mod balancer;
pub(crate) mod clients;
pub(crate) mod connect;
pub(crate) mod lanes;
pub(crate) mod long_path;
pub(crate) mod memory_cgroup;
pub(crate) mod node;
pub(crate) mod patterned;
pub(crate) mod peers;
pub(crate) mod raw;
pub(crate) mod routers;
pub(crate) mod seeded;
pub(crate) mod server_lane;
pub(crate) mod socks5;
pub(crate) mod stub_lane;
pub(crate) mod stub_server;
pub(crate) mod targets;
pub(crate) mod tls;
pub(crate) mod ways;
pub(crate) mod wire;
pub(crate) mod world;

pub(crate) use adit_testkit::{blocking, confined, ports, process, skip, wait};
