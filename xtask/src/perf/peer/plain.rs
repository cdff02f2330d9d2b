//! Peers without configuration: no tunnel at all, the bare relay, and what a user already runs.

use anyhow::{Context as _, bail};

use super::{Peer, Route, wait_for_echo};
use crate::perf::process::Site;
use crate::perf::scenario::{Address, Way};

/// See the module.
pub(crate) struct Plain {
    name: String,
    kind: Kind,
}

enum Kind {
    Direct,
    Relay(Vec<String>),
    Running(Address),
}

impl Plain {
    /// The targets themselves.
    pub(crate) fn direct() -> Self {
        Self {
            name: "direct".to_owned(),
            kind: Kind::Direct,
        }
    }

    /// The forwarding loop alone: `relay`, or `relay-ENGINE-MOVER` such as `relay-epoll-splice`; or that of others, which have
    /// one mover each: `relay-tokio`, `relay-tokio-uring`, `relay-ring-splice`.
    ///
    /// # Errors
    /// A name of another shape.
    pub(crate) fn relay(name: &str) -> anyhow::Result<Self> {
        let mut options = Vec::new();
        if let Some(rest) = name.strip_prefix("relay-") {
            if ["tokio", "tokio-uring", "ring-splice"].contains(&rest) {
                return Ok(Self {
                    name: name.to_owned(),
                    kind: Kind::Relay(vec![format!("--engine={rest}")]),
                });
            }
            let (engine, mover) = rest.rsplit_once('-').context("write relay-ENGINE-MOVER")?;
            if !["epoll", "io-uring"].contains(&engine) || !["copy", "splice"].contains(&mover) {
                bail!(
                    "engines are epoll and io-uring, with copy and splice; tokio, tokio-uring and ring-splice"
                );
            }
            options = vec![format!("--engine={engine}"), format!("--mover={mover}")];
        }
        Ok(Self {
            name: name.to_owned(),
            kind: Kind::Relay(options),
        })
    }

    /// What a user's scenario describes.
    pub(crate) fn of_user(address: &Address) -> Self {
        Self {
            name: address.name.clone(),
            kind: Kind::Running(address.clone()),
        }
    }
}

impl Peer for Plain {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> String {
        match &self.kind {
            Kind::Direct => "no tunnel: the target itself".to_owned(),
            Kind::Relay(_) => "a forwarding loop alone: no protocol, no TLS".to_owned(),
            Kind::Running(_) => "already running".to_owned(),
        }
    }

    fn ways(&self, asked: &[Way]) -> Vec<Way> {
        match &self.kind {
            Kind::Direct | Kind::Relay(_) => vec![Way::Tcp],
            Kind::Running(address) if address.way == Way::Tcp => vec![Way::Tcp],
            Kind::Running(address) => {
                let mut ways = asked.to_vec();
                ways.retain(|way| *way == address.way);
                ways
            }
        }
    }

    fn spans(&self) -> bool {
        matches!(self.kind, Kind::Direct)
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let (target, own) = site.targets(site.far(), site.far_host())?;
        let mut path = Route {
            running: vec![target],
            way,
            frontend: None,
            targets: own.clone(),
            processes: Vec::new(),
            place: site.load_namespace().into(),
        };
        match &self.kind {
            Kind::Direct => (),
            Kind::Relay(options) => {
                let (relay, ports) = site.relay(&own, options)?;
                path.processes.push(("server".to_owned(), relay.id()));
                path.running.push(relay);
                path.targets.extend(ports);
            }
            Kind::Running(address) => {
                path.frontend.clone_from(&address.frontend);
                let processes = address.processes.iter();
                path.processes = processes.map(|(role, id)| (role.clone(), *id)).collect();
                if let (Some(targets), Some(control)) = (&address.targets, &address.control) {
                    path.targets.clone_from(targets);
                    path.targets.insert("control".to_owned(), control.clone());
                }
            }
        }
        if way == Way::Tcp {
            wait_for_echo(site, &path)?;
        }
        Ok(path)
    }
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
            ("relay-tokio", true),
            ("relay-tokio-uring", true),
            ("relay-ring-splice", true),
            ("relay-tokio-splice", false),
            ("relay-kqueue-copy", false),
            ("relay-epoll", false),
        ] {
            assert_eq!(Plain::relay(name).is_ok(), is_right, "{name}");
        }
    }
}
