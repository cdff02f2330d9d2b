//! The peers: ways to reach a target that are measured side by side.
//!
//! A peer knows how to start itself for one measurement. Why one cannot be measured here is an answer, not an error of
//! the run: it becomes a row of the report.

mod captured;
mod haproxy;
mod konnectivity;
mod namespace;
mod node;
mod openvpn;
mod pair;
mod plain;
mod rathole;
mod wireguard;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::perf::process::{Inside, Running, Site, Targets};
use crate::perf::programs::Programs;
use crate::perf::scenario::{Scenario, Way};

use captured::{Captured, Cgroup};
use haproxy::Middle;
pub(crate) use konnectivity::Konnectivity;
pub(crate) use namespace::{Namespaces, available};
use node::Node;
pub(crate) use plain::Plain;

/// A path to targets that can be started.
pub(crate) trait Peer {
    /// Column of the report.
    fn name(&self) -> &str;

    /// What is measured, as it names its version.
    fn version(&self) -> String;

    /// The dialects it is measured in, of those the scenario asks for.
    fn ways(&self, asked: &[Way]) -> Vec<Way>;

    /// Whether its two halves may lie at the ends of a [long path](super::long_path).
    fn spans(&self) -> bool {
        false
    }

    /// Starts it with targets behind it, and waits until it carries bytes.
    ///
    /// # Errors
    /// Why it cannot be measured.
    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route>;
}

/// A started path. Its processes end with it.
pub(crate) struct Route {
    /// Everything that must live as long as the path does.
    pub(crate) running: Vec<Running>,
    /// How the load speaks to it.
    pub(crate) way: Way,
    /// Where, unless it is a port for each target.
    pub(crate) frontend: Option<PathBuf>,
    /// What the load dials.
    pub(crate) targets: Targets,
    /// Role and process id of those whose memory and CPU time count.
    pub(crate) processes: Vec<(String, u32)>,
    /// Where the load runs.
    pub(crate) place: Place,
}

/// Where the load of a path runs.
pub(crate) enum Place {
    /// With us.
    Here,
    /// In a network namespace: the argument of `nsenter` that names it.
    Namespace(String),
    /// In a cgroup.
    Cgroup(Cgroup),
    /// With us, but server and agent are in cgroups that end with the path.
    Outside { _cgroups: [Cgroup; 2] },
}

impl From<Option<String>> for Place {
    fn from(namespace: Option<String>) -> Self {
        namespace.map_or(Self::Here, Self::Namespace)
    }
}

impl Route {
    /// For the load tool.
    pub(crate) fn inside(&self) -> Inside<'_> {
        match &self.place {
            Place::Here | Place::Outside { .. } => Inside::Host,
            Place::Namespace(namespace) => Inside::Namespace(namespace),
            Place::Cgroup(cgroup) => Inside::Cgroup(cgroup.path()),
        }
    }
}

/// A peer by name.
///
/// # Errors
/// Why it cannot be measured here, in words for the report.
pub(crate) fn find(
    name: &str,
    programs: &Programs,
    scenario: &Scenario,
) -> anyhow::Result<Box<dyn Peer>> {
    if let Some(binary) = scenario.binary.iter().find(|binary| binary.name == name) {
        return Ok(Box::new(Konnectivity::of_user(binary)));
    }
    if let Some(address) = scenario.address.iter().find(|address| address.name == name) {
        return Ok(Box::new(Plain::of_user(address)));
    }
    match name {
        "direct" => Ok(Box::new(Plain::direct())),
        "upstream" => Ok(Box::new(Konnectivity::upstream(programs)?)),
        "upstream-tokens" => Ok(Box::new(Konnectivity::upstream(programs)?.with_tokens())),
        "adit-tokens" => Ok(Box::new(adit(programs)?.with_tokens())),
        "adit" => Ok(Box::new(adit(programs)?)),
        "adit-plaintext" => Ok(Box::new(adit(programs)?.in_clear())),
        "adit-link" => Ok(Box::new(adit(programs)?.without_lanes())),
        "adit-account" => Ok(Box::new(adit(programs)?.accounted())),
        "adit-redirect" => Ok(Box::new(Captured::find(programs)?)),
        "adit-node" => Ok(Box::new(Node::listening(programs)?)),
        "adit-node-redirect" => Ok(Box::new(Node::capturing(programs)?)),
        "adit-server" => {
            let (ours, upstream) = (adit(programs)?, Konnectivity::upstream(programs)?);
            Ok(Box::new(Konnectivity::fleet(name, &ours, &upstream)))
        }
        "adit-agent" => {
            let (ours, upstream) = (adit(programs)?, Konnectivity::upstream(programs)?);
            Ok(Box::new(Konnectivity::fleet(name, &upstream, &ours)))
        }
        "adit-again" => Ok(Box::new(adit(programs)?.again())),
        "adit-cgroups" => Ok(Box::new(adit(programs)?.in_cgroups()?)),
        "adit-account-cgroups" => Ok(Box::new(adit(programs)?.accounted().in_cgroups()?)),
        "adit-again-cgroups" => Ok(Box::new(adit(programs)?.again().in_cgroups()?)),
        "haproxy" => Ok(Box::new(haproxy::HaProxy::find(Middle::Tls)?)),
        "haproxy-plaintext" => Ok(Box::new(haproxy::HaProxy::find(Middle::Clear)?)),
        "rathole" => Ok(Box::new(rathole::Rathole::find(programs)?)),
        "openvpn" => Ok(Box::new(openvpn::OpenVpn::find()?)),
        "wireguard" => Ok(Box::new(wireguard::WireGuard::find()?)),
        relay if relay == "relay" || relay.starts_with("relay-") => {
            Ok(Box::new(Plain::relay(relay)?))
        }
        _ => anyhow::bail!(
            "no such peer: there are direct, relay, relay-ENGINE-MOVER, relay-tokio, relay-tokio-uring, relay-ring-splice, upstream, adit, adit-plaintext, \
             adit-link, adit-account, adit-redirect, adit-node, adit-node-redirect, adit-server, adit-agent, adit-again, adit-cgroups, adit-account-cgroups, adit-again-cgroups, haproxy, haproxy-plaintext, rathole, openvpn, wireguard, and those the scenario describes"
        ),
    }
}

/// Whether processes can be put into cgroups of their own here.
///
/// # Errors
/// There is no cgroup2, or we may not make any in it.
pub(crate) fn may_make_cgroups() -> anyhow::Result<()> {
    Cgroup::new(&captured::cgroups()?).map(drop)
}

fn adit(programs: &Programs) -> anyhow::Result<Konnectivity> {
    let binary = programs.adit()?;
    Ok(Konnectivity::adit(programs.adit_version(), binary))
}

/// The first line a program prints when asked for its version.
///
/// # Errors
/// It cannot be run, in words that say what to install.
fn version_of(program: &str, flag: &str) -> anyhow::Result<String> {
    let output = Command::new(program).arg(flag).output();
    let output = output.map_err(|_missing| anyhow::anyhow!("{program} is not installed"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Waits until an echo comes back over a path of plain ports.
///
/// # Errors
/// It does not; the error has the logs.
fn wait_for_echo(site: &Site, path: &Route) -> anyhow::Result<()> {
    let targets = serde_json::to_string(&path.targets)?;
    let mut probe = site.load(path.inside());
    probe.args(["probe".to_owned(), format!("--targets={targets}")]);
    let limit = crate::perf::process::START_LIMIT * 2;
    crate::perf::process::output_within(probe, site, limit)
        .map(drop)
        .map_err(|error| error.context(site.logs()))
}

/// The names of the three targets that are dialled.
const TARGETS: [&str; 3] = ["echo", "source", "sink"];

/// Where a program lies, if it is on `PATH`.
fn on_path(program: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let mut folders: Vec<PathBuf> = std::env::split_paths(&paths).collect();
    // Where distributions put programs for administrators, which not every PATH names.
    folders.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders
        .iter()
        .map(|folder| folder.join(program))
        .find(|path| Path::is_file(path))
}
