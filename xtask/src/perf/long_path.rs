//! A long path in a stack: server and load in one network namespace, agent and targets in another, with a delay, a rate and
//! losses between them.

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::peer::Namespaces;
use super::process::{Place, Site};
use crate::steps::Running;

/// Address of the server, also in its certificate.
pub(crate) const SERVER_END: &str = "10.97.0.1";
const AGENT_END: &str = "10.97.0.2";
const NETWORK: &str = "10.97.0.0/24";
/// Length of the device's queue: the path alone decides which packets to drop, even if it gets no processor for a moment.
const QUEUE_PACKETS: &str = "10000";

/// Properties of the path; see `adit-load long-path`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape {
    /// Delay in milliseconds, each way.
    delay_ms: u64,
    /// Rate in megabits a second, each way.
    mbit_s: u32,
    /// Percentage of lost packets, each way.
    #[serde(default)]
    loss_percent: f64,
    /// Milliseconds that packets may queue before the bottleneck; 100 if unset.
    queue_ms: Option<u64>,
    /// Congestion control of both ends; the kernel's default if unset.
    congestion: Option<String>,
}

impl Shape {
    fn queue_ms(&self) -> u64 {
        self.queue_ms.unwrap_or(100)
    }

    /// Checks constraints that the types do not express.
    ///
    /// # Errors
    /// The first invalid value, and the valid ones.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.mbit_s > 0, "path.mbit_s: at least 1");
        ensure!(self.delay_ms <= 10_000, "path.delay_ms: at most 10000");
        ensure!(self.queue_ms() <= 10_000, "path.queue_ms: at most 10000");
        ensure!(
            (0.0..=50.0).contains(&self.loss_percent),
            "path.loss_percent: between 0 and 50"
        );
        Ok(())
    }
}

/// A running long path; dropping it removes the path.
pub(crate) struct LongPath {
    namespaces: Namespaces,
    _path: Running,
}

impl LongPath {
    /// Creates the path.
    ///
    /// # Errors
    /// This host allows no namespaces or no tunnel devices.
    pub(crate) fn new(site: &Site, shape: &Shape) -> anyhow::Result<Self> {
        let namespaces = Namespaces::apart(site)?;
        let args = [
            "long-path".to_owned(),
            format!("--near={}", namespaces.client.file()),
            format!("--far={}", namespaces.server.file()),
            format!("--delay-ms={}", shape.delay_ms),
            format!("--mbit-s={}", shape.mbit_s),
            format!("--queue-ms={}", shape.queue_ms()),
            format!("--loss-percent={}", shape.loss_percent),
        ];
        let (path, named) = site.serve(&Place::Host, &args)?;
        let device = named.get("device").context("the path names its device")?;
        for (namespace, own) in [
            (&namespaces.client, SERVER_END),
            (&namespaces.server, AGENT_END),
        ] {
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

impl Site {
    /// Place of the server and the load.
    pub(crate) fn near(&self) -> &Place {
        self.long_path()
            .map_or(&Place::Host, |path| path.namespaces.client.place())
    }

    /// Place of the agent and the targets.
    pub(crate) fn far(&self) -> &Place {
        self.long_path()
            .map_or(&Place::Host, |path| path.namespaces.server.place())
    }

    /// The server's address, as the agent sees it.
    pub(crate) fn near_host(&self) -> &'static str {
        self.long_path().map_or("127.0.0.1", |_| SERVER_END)
    }

    /// The address of the far end, from either end.
    pub(crate) fn far_host(&self) -> &'static str {
        self.long_path().map_or("127.0.0.1", |_| AGENT_END)
    }
}
