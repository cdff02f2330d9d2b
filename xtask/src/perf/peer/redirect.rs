//! Adit for clients without proxy settings: the load is captured by its cgroup, or calls listeners of an agent on its node.

use std::path::Path;

use anyhow::{Context as _, ensure};

use super::{Peer, Route, TARGETS, http_get};
use crate::perf::process::{Place, Site, free_port};
use crate::perf::programs::Programs;

/// Addresses that a captured load calls, in the order of [`TARGETS`]: from a documentation network, so that no other host
/// answers.
const SERVICES: [&str; TARGETS.len()] =
    ["198.51.100.1:443", "198.51.100.2:443", "198.51.100.3:443"];

/// How a node's connections reach its agent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// Each target has a listener of the agent.
    Listeners,
    /// Each target has a Service address, which is captured.
    Captured,
}

/// An Adit server with redirect: calls of the load are captured by its cgroup.
///
/// # Errors
/// The binary cannot be built.
pub(super) fn to_agents(programs: &Programs) -> anyhow::Result<Peer> {
    let adit = programs.adit()?;
    let version = format!(
        "{}, clients captured by their cgroup",
        programs.adit_version()
    );
    Ok(Peer::of_ports("adit-redirect", version, move |site| {
        let mut route = Route::to(site, site.far(), site.far_host(), Place::Host)?;
        route.place = route.cgroup()?;
        let mut server = vec![captures(&route.place)];
        for name in TARGETS {
            server.push(format!("--redirect={}", target(&route, name)?));
        }
        let [health, _] = start(&mut route, site, &adit, server, Vec::new())?;
        ensure_active(health)?;
        Ok(route)
    }))
}

/// Node to control plane: the load's calls reach its node's agent by listener or by capture, and the server dials the targets.
///
/// # Errors
/// The binary cannot be built.
pub(super) fn from_node(programs: &Programs, entry: Entry) -> anyhow::Result<Peer> {
    let adit = programs.adit()?;
    let (name, how) = match entry {
        Entry::Listeners => (
            "adit-node",
            "node to control plane by listeners of the agent",
        ),
        Entry::Captured => (
            "adit-node-redirect",
            "node to control plane, clients captured by their cgroup",
        ),
    };
    let version = format!("{}, {how}", programs.adit_version());
    Ok(Peer::of_ports(name, version, move |site| {
        // Targets are beside the server, in the control plane.
        let mut route = Route::to(site, site.near(), site.near_host(), Place::Host)?;
        // Unused frontend: a server does not start without one.
        let frontend = site.at("s.sock");
        let mut server = vec![format!("--frontend=http-connect=unix:{frontend}")];
        let mut agent = Vec::new();
        if entry == Entry::Captured {
            route.place = route.cgroup()?;
            agent.push(captures(&route.place));
        }
        for (name, service) in TARGETS.into_iter().zip(SERVICES) {
            let at = target(&route, name)?;
            // Exact address and port: a wider entry does not allow loopback.
            server.push(format!("--allowed-destination={at}"));
            let called = match entry {
                Entry::Captured => {
                    agent.push(format!("--redirect-apiserver={service}={at}"));
                    service.to_owned()
                }
                Entry::Listeners => {
                    let port = free_port()?;
                    agent.push(format!("--target={port}:{at}"));
                    format!("127.0.0.1:{port}")
                }
            };
            route.targets.insert(name.to_owned(), called);
        }
        let [_, health] = start(&mut route, site, &adit, server, agent)?;
        if entry == Entry::Captured {
            ensure_active(health)?;
        }
        Ok(route)
    }))
}

fn target(route: &Route, name: &str) -> anyhow::Result<String> {
    let at = route.targets.get(name);
    at.cloned().with_context(|| format!("no target {name}"))
}

fn captures(place: &Place) -> String {
    match place {
        Place::Cgroup(cgroup) => format!("--redirect-cgroup={}", cgroup.display()),
        Place::Host | Place::Namespace(_) => String::new(),
    }
}

/// Starts server and agent with their flags, and waits until both are ready. Returns their health ports.
///
/// # Errors
/// A program cannot be started, or they do not link; the error contains the logs.
fn start(
    route: &mut Route,
    site: &Site,
    adit: &Path,
    server: Vec<String>,
    agent: Vec<String>,
) -> anyhow::Result<[u16; 2]> {
    let [agents, server_health, agent_health] = [free_port()?, free_port()?, free_port()?];
    let common = vec![
        "server".to_owned(),
        format!("--cluster-cert={}", site.at("server.pem")),
        format!("--cluster-key={}", site.at("server.key")),
        format!("--cluster-ca-cert={}", site.at("ca.pem")),
        format!("--agent-port={agents}"),
        format!("--health-port={server_health}"),
        "--admin-port=off".to_owned(),
    ];
    route.start(
        site,
        "server",
        site.near(),
        adit,
        &[common, server].concat(),
    )?;
    let common = vec![
        "agent".to_owned(),
        format!("--proxy-server-host={}:{agents}", site.near_host()),
        format!("--ca-cert={}", site.at("ca.pem")),
        format!("--agent-cert={}", site.at("agent.pem")),
        format!("--agent-key={}", site.at("agent.key")),
        format!("--health-server-port={agent_health}"),
        "--admin-server-port=off".to_owned(),
    ];
    route.start(site, "agent", site.far(), adit, &[common, agent].concat())?;
    // An agent links during its start, and reports ready after it.
    for port in [server_health, agent_health] {
        site.wait_until_ready(port)?;
    }
    Ok([server_health, agent_health])
}

/// Checks on a health port that the redirect is active. Otherwise the load would reach its targets directly and be measured as
/// if redirected.
///
/// # Errors
/// Why nothing is captured.
fn ensure_active(health: u16) -> anyhow::Result<()> {
    let state = http_get(&format!("127.0.0.1:{health}"), "/readyz?verbose")?;
    let line = state.lines().find(|line| line.contains("redirect"));
    ensure!(
        state.contains("[+]redirect active"),
        "nothing is captured here: {}",
        line.unwrap_or(&state)
    );
    Ok(())
}
