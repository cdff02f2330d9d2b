//! Adit for clients without proxy settings: the load is captured by its cgroup, or calls listeners of an agent on its node.

use anyhow::{Context as _, ensure};
use xtask_kit::net::{free_port, http_get};

use super::{Peer, Route, TARGETS};
use crate::process::{Place, Site};
use crate::programs::Programs;

/// Addresses that a captured load calls, in the order of [`TARGETS`]: from a documentation network, so that no other host
/// answers.
const SERVICES: [&str; TARGETS.len()] =
    ["198.51.100.1:443", "198.51.100.2:443", "198.51.100.3:443"];

/// An Adit server with redirect: calls of the load are captured by its cgroup.
///
/// # Errors
/// The binary cannot be built.
pub(super) fn to_agents(programs: &Programs) -> anyhow::Result<Peer> {
    peer(
        programs,
        "adit-redirect",
        "clients captured by their cgroup",
        |site| {
            let mut route = Route::to_far(site)?;
            let mut server = vec![capture(&mut route)?];
            for name in TARGETS {
                server.push(format!("--redirect={}", target(&route, name)?));
            }
            Ok((route, server, Vec::new()))
        },
    )
}

/// Node to control plane: the load's calls reach its node's agent by a listener for each target, or by capture of a Service
/// address for each, and the server dials the targets.
///
/// # Errors
/// The binary cannot be built.
pub(super) fn from_node(programs: &Programs, name: &str) -> anyhow::Result<Peer> {
    let is_captured = name == "adit-node-redirect";
    let version = if is_captured {
        "node to control plane, clients captured by their cgroup"
    } else {
        "node to control plane by listeners of the agent"
    };
    peer(programs, name, version, move |site| {
        // Targets are beside the server, in the control plane.
        let mut route = Route::to(site, &site.near, site.near_host, Place::Host)?;
        // Unused frontend: a server does not start without one.
        let frontend = site.at("s.sock");
        let mut server = vec![format!("--frontend=http-connect=unix:{frontend}")];
        let mut agent = Vec::new();
        if is_captured {
            agent.push(capture(&mut route)?);
        }
        for (name, service) in TARGETS.into_iter().zip(SERVICES) {
            let at = target(&route, name)?;
            // Exact address and port: a wider entry does not allow loopback.
            server.push(format!("--allowed-destination={at}"));
            let called = if is_captured {
                agent.push(format!("--redirect-apiserver={service}={at}"));
                service.to_owned()
            } else {
                let port = free_port()?;
                agent.push(format!("--target={port}:{at}"));
                format!("127.0.0.1:{port}")
            };
            route.targets.insert(name.to_owned(), called);
        }
        Ok((route, server, agent))
    })
}

/// A route, and flags of server and agent.
type Flags = (Route, Vec<String>, Vec<String>);

/// A peer whose load is captured if one of the flags captures.
fn peer(
    programs: &Programs,
    name: &str,
    version: &str,
    flags: impl Fn(&Site) -> anyhow::Result<Flags> + 'static,
) -> anyhow::Result<Peer> {
    let adit = programs.adit()?;
    let version = format!("{}, {version}", programs.adit_version());
    Ok(Peer::of_ports(name, version, move |site| {
        let (mut route, server, agent) = flags(site)?;
        let named = |role: &str, flags: Vec<String>, admin: &str| {
            [vec![role.to_owned(), admin.to_owned()], flags].concat()
        };
        let places = [site.near.clone(), site.far.clone()];
        let flags = [
            named("server", server, "--admin-port=off"),
            named("agent", agent, "--admin-server-port=off"),
        ];
        let [_agents, health @ ..] = route.start_pair(site, [&adit, &adit], &places, flags)?;
        // An agent links during its start, and reports ready after it.
        for port in health {
            site.wait_until_ready(port)?;
        }
        if let Place::Cgroup(_) = route.place {
            ensure_active(health)?;
        }
        Ok(route)
    }))
}

fn target(route: &Route, name: &str) -> anyhow::Result<String> {
    let at = route.targets.get(name);
    at.cloned().with_context(|| format!("no target {name}"))
}

/// Puts the load into a cgroup; returns the flag that captures it.
fn capture(route: &mut Route) -> anyhow::Result<String> {
    let cgroup = route.cgroup()?;
    let flag = format!("--redirect-cgroup={}", cgroup.display());
    route.place = Place::Cgroup(cgroup);
    Ok(flag)
}

/// Checks on the health ports that a redirect is active. Otherwise the load would reach its targets directly and be measured as
/// if redirected.
///
/// # Errors
/// Why nothing is captured.
fn ensure_active(health: [u16; 2]) -> anyhow::Result<()> {
    let mut states = String::new();
    for port in health {
        states += &http_get(&format!("127.0.0.1:{port}"), "/readyz?verbose")?;
    }
    let line = states.lines().find(|line| line.contains("redirect"));
    ensure!(
        states.contains("[+]redirect active"),
        "nothing is captured here: {}",
        line.unwrap_or(&states)
    );
    Ok(())
}
