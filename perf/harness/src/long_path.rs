//! A long path in a stack: server and load in one network namespace, agent and targets in another, with a delay, a rate and
//! losses between them.

use adit_perf_plan::Shape;
use anyhow::Context as _;

use super::peer::Namespace;
use super::process::{Place, Site};
use crate::steps::Running;

/// Address of the server, also in its certificate.
pub(crate) const SERVER_END: &str = "10.97.0.1";
/// Address of the agent.
pub(crate) const AGENT_END: &str = "10.97.0.2";
const NETWORK: &str = "10.97.0.0/24";
/// Length of the device's queue: the path alone decides which packets to drop, even if it gets no processor for a moment.
const QUEUE_PACKETS: &str = "10000";

/// A running long path; dropping it removes the path.
pub(crate) struct LongPath {
    pub(crate) namespaces: [Namespace; 2],
    _path: Running,
}

impl LongPath {
    /// Creates the path.
    ///
    /// # Errors
    /// This host allows no namespaces or no tunnel devices.
    pub(crate) fn new(site: &Site, shape: &Shape) -> anyhow::Result<Self> {
        let namespaces = Namespace::pair(site)?;
        let [near, far] = &namespaces;
        let args = [
            "long-path".to_owned(),
            format!("--near={}", near.file()),
            format!("--far={}", far.file()),
            format!("--shape={}", serde_json::to_string(shape)?),
        ];
        let (path, named) = site.serve(&Place::Host, &args)?;
        let device = named.get("device").context("the path names its device")?;
        for (namespace, own) in [(near, SERVER_END), (far, AGENT_END)] {
            namespace.run(&format!("ip address add {own}/24 dev {device}"))?;
            namespace.run(&format!(
                "ip link set {device} txqueuelen {QUEUE_PACKETS} up"
            ))?;
            namespace.run("ip link set lo up")?;
            if let Some(name) = &shape.congestion {
                // Set on the route: a namespace may not select an algorithm that its host restricts.
                namespace.run(&format!(
                    "ip route replace {NETWORK} dev {device} src {own} congctl {name}"
                ))?;
            }
        }
        Ok(Self {
            namespaces,
            _path: path,
        })
    }
}
