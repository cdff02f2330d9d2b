//! The peers: paths to a target, which are compared.
//!
//! A peer can start itself for one measurement. If it cannot be measured here, the reason becomes a row of the report, and the
//! run goes on.

mod forwarders;
mod konnectivity;
mod redirect;
mod vpn;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};

pub(crate) use self::konnectivity::Konnectivity;
pub(crate) use self::vpn::Namespaces;
use super::process::{Place, Site, Targets, free_port};
use super::programs::Programs;
use super::scenario::{Address, Dialect, Scenario};
use crate::steps::Running;

/// Names of the three targets that the load dials.
const TARGETS: [&str; 3] = ["echo", "source", "sink"];
/// Time limit of each read of a response.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A path to targets that can be started.
pub(crate) struct Peer {
    /// Column of the report.
    pub(crate) name: String,
    /// The measured version, as the program reports it.
    pub(crate) version: String,
    dialects: Dialects,
    /// Whether its two halves may be at the ends of a [long path](super::long_path).
    pub(crate) may_span: bool,
    start: Box<Start>,
}

type Start = dyn Fn(&Site, Dialect) -> anyhow::Result<Route>;

/// Dialects in which a peer is measured.
#[derive(Clone, Copy, Debug)]
enum Dialects {
    /// None: the peer forwards ports.
    Ports,
    /// All requested dialects.
    Asked,
    /// This dialect, if it is requested.
    Only(Dialect),
}

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
            dialects: Dialects::Ports,
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
        match self.dialects {
            Dialects::Ports => vec![Dialect::Tcp],
            Dialects::Asked => asked.to_vec(),
            Dialects::Only(dialect) => asked
                .iter()
                .copied()
                .filter(|one| *one == dialect)
                .collect(),
        }
    }

    /// Starts the peer with targets behind it, and waits until it carries bytes.
    ///
    /// # Errors
    /// Why the peer cannot be measured.
    pub(crate) fn start(&self, site: &Site, dialect: Dialect) -> anyhow::Result<Route> {
        (self.start)(site, dialect)
    }

    /// A plain connection to the targets.
    fn direct() -> Self {
        let version = "no tunnel: the target itself".to_owned();
        Self::of_ports("direct", version, |site| {
            Route::to(site, site.far(), site.far_host(), site.near().clone())
        })
        .spanning()
    }

    /// A bare forwarding loop: adit-relay's by `relay` or `relay-ENGINE-MOVER`, such as `relay-epoll-splice`; other loops, with
    /// one mover each, by `relay-tokio`, `relay-tokio-uring`, `relay-ring-splice`.
    ///
    /// # Errors
    /// The name has another form.
    pub(crate) fn relay(name: &str) -> anyhow::Result<Self> {
        let options = match name.strip_prefix("relay-") {
            None => Vec::new(),
            Some(engine @ ("tokio" | "tokio-uring" | "ring-splice")) => {
                vec![format!("--engine={engine}")]
            }
            Some(rest) => match rest.rsplit_once('-') {
                Some((engine @ ("epoll" | "io-uring"), mover @ ("copy" | "splice"))) => {
                    vec![format!("--engine={engine}"), format!("--mover={mover}")]
                }
                _ => bail!(
                    "engines are epoll and io-uring, with copy and splice; tokio, tokio-uring and ring-splice"
                ),
            },
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

    /// A running path that a user's scenario describes.
    fn of_user(address: &Address) -> Self {
        let address = address.clone();
        Self {
            name: address.name.clone(),
            version: "already running".to_owned(),
            dialects: match address.dialect {
                Dialect::Tcp => Dialects::Ports,
                dialect => Dialects::Only(dialect),
            },
            may_span: false,
            start: Box::new(move |site, dialect| {
                let mut route = Route::to(site, &Place::Host, "127.0.0.1", Place::Host)?;
                route.dialect = dialect;
                route.frontend.clone_from(&address.frontend);
                route.processes = address.processes.clone().into_iter().collect();
                if let (Some(targets), Some(control)) = (&address.targets, &address.control) {
                    route.targets.clone_from(targets);
                    route.targets.insert("control".to_owned(), control.clone());
                }
                if dialect == Dialect::Tcp {
                    site.wait_for_echo(&route.place, &route.targets)?;
                }
                Ok(route)
            }),
        }
    }
}

/// A started path. Dropping it ends its processes.
pub(crate) struct Route {
    /// The load's dialect.
    pub(crate) dialect: Dialect,
    /// The frontend's socket; `None` if each target has a port.
    pub(crate) frontend: Option<PathBuf>,
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

    /// A new cgroup that lives as long as the path.
    ///
    /// # Errors
    /// There is no cgroup2, or no permission to create a cgroup.
    fn cgroup(&mut self) -> anyhow::Result<Place> {
        let cgroup = Cgroup::new()?;
        let place = Place::Cgroup(cgroup.0.clone());
        self.cgroups.push(cgroup);
        Ok(place)
    }
}

/// Finds a peer by name.
///
/// # Errors
/// Why the peer cannot be measured here, as text for the report.
pub(crate) fn find(
    name: &str,
    programs: &Programs,
    scenario: Option<&Scenario>,
) -> anyhow::Result<Peer> {
    if let Some(scenario) = scenario {
        if let Some(binary) = scenario.binary.iter().find(|binary| binary.name == name) {
            return Ok(Konnectivity::of_user(binary).into_peer());
        }
        if let Some(address) = scenario.address.iter().find(|address| address.name == name) {
            return Ok(Peer::of_user(address));
        }
    }
    let adit = || -> anyhow::Result<Konnectivity> {
        Ok(Konnectivity::adit(
            programs.adit_version(),
            programs.adit()?,
        ))
    };
    let upstream = || Konnectivity::upstream(programs);
    let konnectivity = match name {
        "direct" => return Ok(Peer::direct()),
        "adit-redirect" => return redirect::to_agents(programs),
        "adit-node" => return redirect::from_node(programs, redirect::Entry::Listeners),
        "adit-node-redirect" => return redirect::from_node(programs, redirect::Entry::Captured),
        "haproxy" => return forwarders::haproxy(forwarders::Between::Tls),
        "haproxy-plaintext" => return forwarders::haproxy(forwarders::Between::Plaintext),
        "rathole" => return forwarders::rathole(programs),
        "openvpn" => return vpn::openvpn(),
        "wireguard" => return vpn::wireguard(),
        relay if relay == "relay" || relay.starts_with("relay-") => return Peer::relay(relay),
        "upstream" => upstream()?,
        "upstream-tokens" => upstream()?.with_tokens(),
        "adit" => adit()?,
        "adit-tokens" => adit()?.with_tokens(),
        "adit-plaintext" => adit()?.plaintext(),
        "adit-link" => adit()?.without_lanes(),
        "adit-account" => adit()?.accounted(),
        "adit-again" => adit()?.again(),
        "adit-server" => Konnectivity::fleet(name, &adit()?, &upstream()?),
        "adit-agent" => Konnectivity::fleet(name, &upstream()?, &adit()?),
        "adit-cgroups" => adit()?.in_cgroups(),
        "adit-account-cgroups" => adit()?.accounted().in_cgroups(),
        "adit-again-cgroups" => adit()?.again().in_cgroups(),
        _ => bail!(
            "no such peer: there are direct, relay, relay-ENGINE-MOVER, relay-tokio, relay-tokio-uring, relay-ring-splice, \
             upstream, upstream-tokens, adit, adit-tokens, adit-plaintext, adit-link, adit-account, adit-redirect, adit-node, \
             adit-node-redirect, adit-server, adit-agent, adit-again, adit-cgroups, adit-account-cgroups, adit-again-cgroups, \
             haproxy, haproxy-plaintext, rathole, openvpn, wireguard, and those the scenario describes"
        ),
    };
    Ok(konnectivity.into_peer())
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

/// An HTTP server's response to a GET of `path`.
///
/// # Errors
/// The server does not answer.
pub(crate) fn http_get(address: &str, path: &str) -> anyhow::Result<String> {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    ask().with_context(|| format!("asking {address} for {path}"))
}

/// Path and version of a program of the distribution.
///
/// # Errors
/// The program is not installed; names its package.
fn installed(program: &str, flag: &str, package: &str) -> anyhow::Result<(PathBuf, String)> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    // Distributions put administration programs into folders that may not be in PATH.
    let folders = std::env::split_paths(&paths).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = folders
        .map(|folder: PathBuf| folder.join(program))
        .find(|path| path.is_file());
    let missing = || anyhow!("{program} is not installed: `apt-get install {package}`");
    let path = found.ok_or_else(missing)?;
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
