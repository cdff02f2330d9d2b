//! What the loopback tests stand on: running servers and agents, targets, clients good and bad.

/// The Kubernetes API as the tests of `adit-kube` have it.
#[path = "../../../kube/tests/support/mod.rs"]
pub(crate) mod api;
pub(crate) mod balancer;
pub(crate) mod clients;
pub(crate) mod confined;
pub(crate) mod connect;
pub(crate) mod lanes;
pub(crate) mod long_path;
pub(crate) mod node;
pub(crate) mod patterned;
/// Those of all test binaries are told apart by the same files.
#[path = "../../interop/support/ports.rs"]
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod raw;
pub(crate) mod seeded;
pub(crate) mod server_lane;
pub(crate) mod skip;
pub(crate) mod stub_lane;
pub(crate) mod stub_server;
pub(crate) mod targets;
pub(crate) mod tls;
pub(crate) mod wait;
pub(crate) mod ways;
pub(crate) mod wire;
pub(crate) mod world;
