//! A long path under a stack: server and load in one network namespace, agent and targets in another, and a delay, a
//! rate and losses between them.

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::peer::{Namespaces, available};
use super::process::{Inside, Running, Site};

/// Addresses at the ends of the path: server, agent.
const ENDS: [&str; 2] = ["10.97.0.1", "10.97.0.2"];
/// Of both.
const NETWORK: &str = "10.97.0.0/24";
/// Of the device's queue: what waits is to be dropped by the path, not by a path that had no processor for a moment.
const QUEUE_PACKETS: &str = "10000";

/// What the path is like; see `adit-load long-path`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape {
    /// Milliseconds each way.
    pub(crate) delay_ms: u64,
    /// Megabits a second, each way.
    pub(crate) mbit_s: u32,
    /// Packets of a hundred that are lost, each way.
    #[serde(default)]
    pub(crate) loss_percent: f64,
    /// Milliseconds that packets may wait in front of the bottleneck.
    #[serde(default = "default_queue_ms")]
    pub(crate) queue_ms: u64,
    /// Congestion control of both ends; the kernel's own when left out.
    pub(crate) congestion: Option<String>,
}

fn default_queue_ms() -> u64 {
    100
}

impl Shape {
    /// Checks what the shape does not.
    ///
    /// # Errors
    /// The first thing that makes no sense, and what would.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.mbit_s > 0, "path.mbit_s: at least 1");
        ensure!(self.delay_ms <= 10_000, "path.delay_ms: at most 10000");
        ensure!(self.queue_ms <= 10_000, "path.queue_ms: at most 10000");
        ensure!(
            (0.0..=50.0).contains(&self.loss_percent),
            "path.loss_percent: between 0 and 50"
        );
        Ok(())
    }
}

/// See the module. It lives as long as the value.
pub(crate) struct LongPath {
    near: String,
    far: String,
    _running: Vec<Running>,
}

impl LongPath {
    /// Builds it.
    ///
    /// # Errors
    /// This host gives no namespaces or no tunnel devices.
    pub(crate) fn new(site: &Site, shape: &Shape) -> anyhow::Result<Self> {
        available()?;
        let apart = Namespaces::apart(site)?;
        let file = |namespace: &str| namespace.trim_start_matches("--net=").to_owned();
        let args = [
            "long-path".to_owned(),
            format!("--near={}", file(&apart.client)),
            format!("--far={}", file(&apart.server)),
            format!("--delay-ms={}", shape.delay_ms),
            format!("--mbit-s={}", shape.mbit_s),
            format!("--queue-ms={}", shape.queue_ms),
            format!("--loss-percent={}", shape.loss_percent),
        ];
        let (path, named) = site.serving(Inside::Host, &args)?;
        let device = named.get("device").context("the path names its device")?;
        for (namespace, own) in [(&apart.client, ENDS[0]), (&apart.server, ENDS[1])] {
            let run = |line: &str| {
                let words: Vec<&str> = line.split(' ').collect();
                apart.run(namespace, &words)
            };
            run(&format!("ip address add {own}/24 dev {device}"))?;
            run(&format!(
                "ip link set {device} txqueuelen {QUEUE_PACKETS} up"
            ))?;
            run("ip link set lo up")?;
            if let Some(name) = &shape.congestion {
                // On the route: a namespace may not choose what its host reserves for itself.
                run(&format!(
                    "ip route replace {NETWORK} dev {device} src {own} congctl {name}"
                ))?;
            }
        }
        let mut running = vec![path];
        running.extend(apart.running);
        Ok(Self {
            near: apart.client,
            far: apart.server,
            _running: running,
        })
    }
}

impl Site {
    /// Where the server and the load are.
    pub(crate) fn near(&self) -> Inside<'_> {
        self.long_path()
            .map_or(Inside::Host, |path| Inside::Namespace(&path.near))
    }

    /// Where the agent and the targets are.
    pub(crate) fn far(&self) -> Inside<'_> {
        self.long_path()
            .map_or(Inside::Host, |path| Inside::Namespace(&path.far))
    }

    /// The namespace of the load, if it is not ours.
    pub(crate) fn load_namespace(&self) -> Option<String> {
        self.long_path().map(|path| path.near.clone())
    }

    /// The address of the server as the agent sees it.
    pub(crate) fn near_host(&self) -> &'static str {
        self.long_path().map_or("127.0.0.1", |_| ENDS[0])
    }

    /// The address of whatever is at the far end, as seen from either.
    pub(crate) fn far_host(&self) -> &'static str {
        self.long_path().map_or("127.0.0.1", |_| ENDS[1])
    }
}

/// The name of the server, for its certificate.
pub(super) const NEAR: &str = ENDS[0];
