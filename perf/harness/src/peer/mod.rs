//! The peers: paths to a target, which are compared.
//!
//! A peer can start itself for one measurement. If it cannot be measured here, the reason becomes a row of the report, and the
//! run goes on.

mod forward;
mod forwarders;
mod konnectivity;
mod proxies;
mod redirect;
mod vpn;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use adit_perf_plan::Dialect;
use anyhow::{Context as _, bail};
use xtask_kit::net::free_port;

pub(crate) use self::konnectivity::Konnectivity;
pub(crate) use self::vpn::Namespace;
use super::measurement::{AGENTS, REVIEWS};
use super::process::{Place, Site, Targets};
use super::programs::Programs;
use crate::steps::{self, Running};

/// Names of the peers, for people who write another one.
const NAMES: &str = "direct, relay, relay-ENGINE-MOVER, relay-tokio-uring, upstream, upstream-tokens, adit, adit-tokens, adit-plaintext, adit-link, \
                     adit-redirect, adit-node, adit-node-redirect, adit-server, adit-agent, adit-cgroups, \
                     adit-account-cgroups, adit-again-cgroups, adit-forward, haproxy, haproxy-plaintext, rathole, openvpn, \
                     adit-proxy, hypershift-proxy, microsocks, tinyproxy";
/// Names of the three targets that the load dials.
const TARGETS: [&str; 3] = ["echo", "source", "sink"];

/// A path to targets that can be started.
pub(crate) struct Peer {
    /// Column of the report.
    pub(crate) name: String,
    /// The measured version, as the program reports it.
    pub(crate) version: String,
    /// Dialects in which it can be measured: [`Dialect::Tcp`] alone, or those that are requested too.
    dialects: &'static [Dialect],
    /// Whether its two halves may be at the ends of a [long path](super::long_path).
    pub(crate) may_span: bool,
    /// Starts it with targets behind it, and waits until it carries bytes. Fails with why it cannot be measured.
    pub(crate) start: Box<Start>,
}

type Start = dyn Fn(&Site, Dialect) -> anyhow::Result<Route>;

impl Peer {
    /// A peer that forwards ports.
    fn of_ports(
        name: &str,
        version: String,
        start: impl Fn(&Site) -> anyhow::Result<Route> + 'static,
    ) -> Self {
        Self {
            name: name.to_owned(),
            version,
            dialects: &[Dialect::Tcp],
            may_span: false,
            start: Box::new(move |site, _way| {
                let route = start(site)?;
                site.wait_for_echo(&route.place, &route.targets)?;
                Ok(route)
            }),
        }
    }

    fn spanning(mut self) -> Self {
        self.may_span = true;
        self
    }

    /// The dialects in which this peer is measured, given the scenario's dialects.
    pub(crate) fn dialects(&self, asked: &[Dialect]) -> Vec<Dialect> {
        let possible = asked.iter().filter(|one| self.dialects.contains(one));
        match self.dialects {
            [Dialect::Tcp] => vec![Dialect::Tcp],
            _ => possible.copied().collect(),
        }
    }

    /// A plain connection to the targets.
    fn direct() -> Self {
        let version = "no tunnel: the target itself".to_owned();
        Self::of_ports("direct", version, Route::to_far).spanning()
    }

    /// A bare forwarding loop: `relay`, `relay-ENGINE-MOVER`, such as `relay-epoll-splice`, or `relay-tokio-uring`.
    ///
    /// # Errors
    /// The name has another form.
    pub(crate) fn relay(name: &str) -> anyhow::Result<Self> {
        let options = match name
            .strip_prefix("relay-")
            .map(|rest| rest.rsplit_once('-'))
        {
            None => Vec::new(),
            Some(Some((engine @ ("epoll" | "io-uring"), mover @ ("copy" | "splice")))) => {
                vec![format!("--engine={engine}"), format!("--mover={mover}")]
            }
            Some(Some(("tokio", "uring"))) => vec!["--engine=tokio-uring".to_owned()],
            Some(_) => bail!("engines are epoll and io-uring, with copy and splice; tokio-uring"),
        };
        let version = "a forwarding loop alone: no protocol, no TLS".to_owned();
        Ok(Self::of_ports(name, version, move |site| {
            let mut route = Route::to(site, &Place::Host, "127.0.0.1", Place::Host)?;
            let targets = format!("--targets={}", serde_json::to_string(&route.targets)?);
            let args = [vec!["relay".to_owned(), targets], options.clone()].concat();
            let (relay, ports) = site.serve(&Place::Host, &args)?;
            route.processes.push(("server".to_owned(), relay.id()));
            route.running.push(relay);
            route.targets.extend(ports);
            Ok(route)
        }))
    }
}

/// A started path. Dropping it ends its processes.
pub(crate) struct Route {
    /// The load's dialect.
    pub(crate) dialect: Dialect,
    /// Path of the frontend's socket, or its address and port; `None` if each target has a port.
    pub(crate) frontend: Option<String>,
    /// Addresses that the load dials.
    pub(crate) targets: Targets,
    /// Role and process id of processes whose memory and CPU time count.
    pub(crate) processes: Vec<(String, u32)>,
    /// Place of the load.
    pub(crate) place: Place,
    /// Processes that must live as long as the path.
    pub(crate) running: Vec<Running>,
    /// Last, so that it is dropped last: a cgroup can be removed once its processes have ended.
    cgroups: Vec<Cgroup>,
}

impl Route {
    /// Starts targets on `host` at `targets_at`, for a load that dials them directly from `place`.
    ///
    /// # Errors
    /// The targets cannot be started or cannot listen there.
    fn to(site: &Site, targets_at: &Place, host: &str, place: Place) -> anyhow::Result<Self> {
        let args = ["target".to_owned(), format!("--host={host}")];
        let (target, targets) = site.serve(targets_at, &args)?;
        Ok(Self {
            dialect: Dialect::Tcp,
            frontend: None,
            targets,
            processes: Vec::new(),
            place,
            running: vec![target],
            cgroups: Vec::new(),
        })
    }

    /// Starts targets at the far end, for a load at the near end.
    ///
    /// # Errors
    /// Like [`Self::to`].
    pub(crate) fn to_far(site: &Site) -> anyhow::Result<Self> {
        Self::to(site, &site.far, site.far_host, site.near.clone())
    }

    /// Address of the server's agent port, for the load's own agents: not every path has one, and the Go load tool has none.
    pub(crate) fn agent_port(&self) -> Option<&String> {
        let port = self.targets.get(AGENTS);
        port.filter(|_port| !self.dialect.is_go())
    }

    /// Starts a process whose memory and CPU time count.
    ///
    /// # Errors
    /// The process cannot be started.
    fn start(
        &mut self,
        site: &Site,
        role: &str,
        place: &Place,
        program: &Path,
        args: &[String],
    ) -> anyhow::Result<()> {
        let process = site.spawn(role, place, program, args)?;
        self.processes.push((role.to_owned(), process.id()));
        self.running.push(process);
        Ok(())
    }

    /// Starts a server and an agent with these flags, and with those that all programs spell alike. Returns the agent port, and
    /// the health ports of server and agent.
    ///
    /// # Errors
    /// A program cannot be started, or no port is free.
    pub(crate) fn start_pair(
        &mut self,
        site: &Site,
        programs: [&Path; 2],
        [near, far]: &[Place; 2],
        [mut server, mut agent]: [Vec<String>; 2],
    ) -> anyhow::Result<[u16; 3]> {
        let ports @ [agents, health, agent_health] = [free_port()?, free_port()?, free_port()?];
        server.extend([
            format!("--cluster-cert={}", site.at("server.pem")),
            format!("--cluster-key={}", site.at("server.key")),
            format!("--agent-port={agents}"),
            format!("--health-port={health}"),
        ]);
        agent.extend([
            format!("--proxy-server-host={}", site.near_host),
            format!("--proxy-server-port={agents}"),
            format!("--ca-cert={}", site.at("ca.pem")),
            format!("--health-server-port={agent_health}"),
        ]);
        // Else the agent authenticates by a token.
        if !self.targets.contains_key(REVIEWS) {
            server.push(format!("--cluster-ca-cert={}", site.at("ca.pem")));
            agent.push(format!("--agent-cert={}", site.at("agent.pem")));
            agent.push(format!("--agent-key={}", site.at("agent.key")));
        }
        self.start(site, "server", near, programs[0], &server)?;
        self.start(site, "agent", far, programs[1], &agent)?;
        Ok(ports)
    }

    /// A new cgroup that lives as long as the path.
    ///
    /// # Errors
    /// There is no cgroup2, or no permission to create a cgroup.
    fn cgroup(&mut self) -> anyhow::Result<PathBuf> {
        let cgroup = Cgroup::new()?;
        let path = cgroup.0.clone();
        self.cgroups.push(cgroup);
        Ok(path)
    }
}

/// Finds a peer by name.
///
/// # Errors
/// Why the peer cannot be measured here, as text for the report.
pub(crate) fn find(name: &str, programs: &Programs) -> anyhow::Result<Peer> {
    let adit = || -> anyhow::Result<Konnectivity> {
        let binary = programs.adit()?;
        Ok(Konnectivity::adit("adit", programs.adit_version(), binary))
    };
    let upstream = || Konnectivity::upstream(programs);
    let fleet = |server, agent| Konnectivity::fleet(name, server, agent).into_peer();
    match name {
        "direct" => return Ok(Peer::direct()),
        "adit-forward" => return forward::adit(programs),
        "adit-proxy" => return proxies::adit(programs),
        "hypershift-proxy" => return proxies::hypershift(programs),
        "microsocks" => return proxies::microsocks(),
        "tinyproxy" => return proxies::tinyproxy(),
        "adit-redirect" => return redirect::to_agents(programs),
        "adit-node" | "adit-node-redirect" => return redirect::from_node(programs, name),
        "adit-server" => return Ok(fleet(adit()?, upstream()?)),
        "adit-agent" => return Ok(fleet(upstream()?, adit()?)),
        "haproxy" | "haproxy-plaintext" => return forwarders::haproxy(name),
        "rathole" => return forwarders::rathole(programs),
        "openvpn" => return vpn::openvpn(),
        _ => (),
    }
    let mut words = name.split('-');
    let mut pair = match words.next() {
        Some("relay") => return Peer::relay(name),
        Some("adit") => adit()?,
        Some("upstream") => upstream()?,
        _ => bail!("no such peer: there are {NAMES}"),
    };
    for variant in words {
        pair = pair.variant(variant)?;
    }
    Ok(pair.into_peer())
}

/// A cgroup of this process; removed on drop if it is empty.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// # Errors
    /// There is no cgroup2, or no permission to create a cgroup in it.
    pub(crate) fn new() -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mounts = procfs::mounts()?;
        let mount = mounts
            .into_iter()
            .find(|mount| mount.fs_vfstype == "cgroup2");
        let below = PathBuf::from(mount.context("no cgroup2 is mounted")?.fs_file);
        let number = NUMBER.fetch_add(1, Relaxed);
        let path = below.join(format!("adit-perf-{}-{number}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A cgroup with processes cannot be removed, and stays.
        fs::remove_dir(&self.0).ok();
    }
}

/// Path and version of a program of the distribution.
///
/// # Errors
/// The program is not installed; names its package.
fn installed(program: &str, flag: &str, package: &str) -> anyhow::Result<(PathBuf, String)> {
    let found = steps::installed(program);
    let missing = || format!("{program} is not installed: `apt-get install {package}`");
    let path = found.with_context(missing)?;
    // Some programs print their version and fail.
    let output = Command::new(&path).arg(flag).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().next().unwrap_or_default().trim().to_owned();
    Ok((path, version))
}

/// A free port for each target.
///
/// # Errors
/// No port is free.
fn free_ports(host: &str) -> anyhow::Result<Targets> {
    TARGETS
        .iter()
        .map(|name| Ok(((*name).to_owned(), format!("{host}:{}", free_port()?))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay_is_named_by_engine_and_mover() {
        for (name, is_right) in [
            ("relay", true),
            ("relay-epoll-copy", true),
            ("relay-io-uring-splice", true),
            ("relay-tokio-uring", true),
            ("relay-tokio-splice", false),
            ("relay-epoll", false),
        ] {
            assert_eq!(Peer::relay(name).is_ok(), is_right, "{name}");
        }
    }
}
