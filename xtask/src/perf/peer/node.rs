//! Node to control plane: the load calls what its node's agent listens on or captures, and the server dials the targets.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::captured::{Cgroup, cgroups, ensure_active};
use super::pair::{Linked, Pair};
use super::{Peer, Place, Route, TARGETS, wait_for_echo};
use crate::perf::process::{Site, Targets, free_port};
use crate::perf::programs::Programs;
use crate::perf::scenario::Way;

/// What the load calls where it is captured, in the order of [`TARGETS`]: of a network for examples, so nobody else answers there.
const SERVICES: [&str; TARGETS.len()] =
    ["198.51.100.1:443", "198.51.100.2:443", "198.51.100.3:443"];

/// See the module.
pub(super) struct Node {
    pair: Pair,
    door: Door,
}

/// How connections come to the agent.
enum Door {
    /// Each target has a listener.
    Listeners,
    /// Each target has the address of a Service, which is captured.
    Services {
        /// Where cgroup2 is mounted.
        cgroups: PathBuf,
    },
}

impl Node {
    /// An agent with listeners.
    ///
    /// # Errors
    /// The binary could not be built.
    pub(super) fn listening(programs: &Programs) -> anyhow::Result<Self> {
        Ok(Self {
            pair: Pair::find(programs)?,
            door: Door::Listeners,
        })
    }

    /// An agent with a redirect.
    ///
    /// # Errors
    /// The binary could not be built, or there is no cgroup2.
    pub(super) fn capturing(programs: &Programs) -> anyhow::Result<Self> {
        Ok(Self {
            pair: Pair::find(programs)?,
            door: Door::Services {
                cgroups: cgroups()?,
            },
        })
    }
}

impl Peer for Node {
    fn name(&self) -> &str {
        match self.door {
            Door::Listeners => "adit-node",
            Door::Services { .. } => "adit-node-redirect",
        }
    }

    fn version(&self) -> String {
        let how = match self.door {
            Door::Listeners => "node to control plane by listeners of the agent",
            Door::Services { .. } => "node to control plane, clients captured by their cgroup",
        };
        format!("{}, {how}", self.pair.version())
    }

    fn ways(&self, _asked: &[Way]) -> Vec<Way> {
        vec![Way::Tcp]
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        // Beside the server, in the control plane.
        let (target, targets) = site.targets(site.near(), site.near_host())?;
        let cgroup = match &self.door {
            Door::Listeners => None,
            Door::Services { cgroups } => Some(Cgroup::new(cgroups)?),
        };
        let mut flags = Flags::new(&targets, cgroup.as_ref().map(Cgroup::path))?;
        // Nobody calls it: a server does not start without one.
        let frontend = site.at("s.sock");
        flags
            .of_server
            .push(format!("--frontend=http-connect=unix:{frontend}"));
        let Linked {
            server,
            agent,
            agent_health,
            ..
        } = self.pair.start(site, &flags.of_server, &flags.of_agent)?;
        if cgroup.is_some() {
            ensure_active(agent_health)?;
        }
        let route = Route {
            way,
            frontend: None,
            targets: flags.called,
            processes: vec![
                ("server".to_owned(), server.id()),
                ("agent".to_owned(), agent.id()),
            ],
            running: vec![agent, server, target],
            place: cgroup.map_or(Place::Here, Place::Cgroup),
        };
        wait_for_echo(site, &route)?;
        Ok(route)
    }
}

/// What makes both lead to the targets.
struct Flags {
    of_server: Vec<String>,
    of_agent: Vec<String>,
    /// What the load calls in place of the targets; all else it reaches directly.
    called: Targets,
}

impl Flags {
    /// With a cgroup whose processes are captured, or with listeners.
    ///
    /// # Errors
    /// A target is missing, or no port is free.
    fn new(targets: &Targets, cgroup: Option<&Path>) -> anyhow::Result<Self> {
        let mut flags = Self {
            of_server: Vec::new(),
            of_agent: Vec::new(),
            called: targets.clone(),
        };
        if let Some(path) = cgroup {
            flags
                .of_agent
                .push(format!("--redirect-cgroup={}", path.display()));
        }
        for (name, service) in TARGETS.into_iter().zip(SERVICES) {
            let at = targets.get(name).context("the targets have this one")?;
            // With its port, and the address itself: loopback is what a wider entry does not allow.
            flags.of_server.push(format!("--allowed-destination={at}"));
            let (flag, called) = match cgroup {
                Some(_) => (
                    format!("--redirect-apiserver={service}={at}"),
                    service.to_owned(),
                ),
                None => {
                    let port = free_port()?;
                    (format!("--target={port}:{at}"), format!("127.0.0.1:{port}"))
                }
            };
            flags.of_agent.push(flag);
            flags.called.insert(name.to_owned(), called);
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_but_the_control_address_is_called_at_the_agent_and_may_be_dialled() {
        let names = ["echo", "source", "sink", "control"].into_iter();
        let targets: Targets = names
            .zip(1..)
            .map(|(name, port)| (name.to_owned(), format!("127.0.0.1:{port}")))
            .collect();
        for cgroup in [None, Some(Path::new("/cg"))] {
            let flags = Flags::new(&targets, cgroup).unwrap();
            assert_eq!(flags.called["control"], targets["control"]);
            for name in TARGETS {
                let (called, at) = (&flags.called[name], &targets[name]);
                let leads = match cgroup {
                    Some(_) => format!("--redirect-apiserver={called}={at}"),
                    None => {
                        let port = called.trim_start_matches("127.0.0.1:");
                        format!("--target={port}:{at}")
                    }
                };
                assert!(flags.of_agent.contains(&leads), "{leads}");
                let allows = format!("--allowed-destination={at}");
                assert!(flags.of_server.contains(&allows), "{allows}");
            }
        }
    }
}
