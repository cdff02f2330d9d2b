//! A pair of HAProxy with mutual TLS between: one takes plain connections beside the client, the other gives them to
//! the target. What people build by hand when they want no tunnel program.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;

use super::{Peer, Route, TARGETS, on_path, version_of, wait_for_echo};
use crate::perf::process::{Site, Targets, free_port};
use crate::perf::scenario::Way;

/// Connections each process takes: two descriptors for one, and 20,000 is a common hard limit.
const CONNECTIONS_MAX: usize = 9_500;

/// What is between the two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Middle {
    Tls,
    /// For comparison with what does without encryption, too.
    Clear,
}

/// See the module.
pub(super) struct HaProxy {
    program: PathBuf,
    middle: Middle,
    version: String,
}

impl HaProxy {
    /// The distribution's.
    ///
    /// # Errors
    /// It is not installed.
    pub(super) fn find(middle: Middle) -> anyhow::Result<Self> {
        let program =
            on_path("haproxy").context("haproxy is not installed: `apt-get install haproxy`")?;
        let version = version_of(&program.display().to_string(), "-v")?;
        Ok(Self {
            program,
            middle,
            version,
        })
    }
}

/// Which side of the TLS connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Front,
    Back,
}

impl Peer for HaProxy {
    fn name(&self) -> &str {
        match self.middle {
            Middle::Tls => "haproxy",
            Middle::Clear => "haproxy-plaintext",
        }
    }

    fn version(&self) -> String {
        let between = match self.middle {
            Middle::Tls => "mutual TLS",
            Middle::Clear => "clear text",
        };
        format!("{}, two processes, {between} between", self.version)
    }

    fn ways(&self, _asked: &[Way]) -> Vec<Way> {
        vec![Way::Tcp]
    }

    fn spans(&self) -> bool {
        true
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let (target, mut targets) = site.targets(site.far(), site.far_host())?;
        let middle = ports(site.far_host())?;
        let front = ports("127.0.0.1")?;
        let mut running = vec![target];
        let mut processes = Vec::new();
        for (end, role, inside, listen, to) in [
            (End::Back, "agent", site.far(), &middle, &targets),
            (End::Front, "server", site.near(), &front, &middle),
        ] {
            let file = site.path(&format!("{role}.cfg"));
            fs::write(&file, self.configuration(site, end, listen, to))?;
            let args = [
                "-db".to_owned(),
                "-f".to_owned(),
                file.display().to_string(),
            ];
            let process = site.spawn(role, inside, &self.program, &args)?;
            processes.push((role.to_owned(), process.id()));
            running.push(process);
        }
        targets.extend(front);
        let route = Route {
            running,
            way,
            frontend: None,
            targets,
            processes,
            place: site.load_namespace().into(),
        };
        wait_for_echo(site, &route)?;
        Ok(route)
    }
}

/// A free port for each target.
pub(super) fn ports(host: &str) -> anyhow::Result<Targets> {
    TARGETS
        .iter()
        .map(|name| Ok(((*name).to_owned(), format!("{host}:{}", free_port()?))))
        .collect()
}

impl HaProxy {
    fn configuration(&self, site: &Site, end: End, listen: &Targets, to: &Targets) -> String {
        let ca = site.at("ca.pem");
        let (bind, server) = match end {
            _ if self.middle == Middle::Clear => (String::new(), String::new()),
            End::Front => (
                String::new(),
                format!(
                    "ssl crt {} ca-file {ca} verify required verifyhost localhost sni str(localhost)",
                    site.at("agent.both.pem")
                ),
            ),
            End::Back => (
                format!(
                    "ssl crt {} ca-file {ca} verify required",
                    site.at("server.both.pem")
                ),
                String::new(),
            ),
        };
        let mut text = format!(
            "global\n  maxconn {CONNECTIONS_MAX}\ndefaults\n  mode tcp\n  maxconn {CONNECTIONS_MAX}\n  \
         timeout connect 10s\n  timeout client 1h\n  timeout server 1h\n"
        );
        for name in TARGETS {
            let (from, to) = (&listen[name], &to[name]);
            write!(
                text,
                "frontend {name}-in\n  bind {from} {bind}\n  default_backend {name}-out\n\
             backend {name}-out\n  server {name} {to} {server}\n"
            )
            .ok();
        }
        text
    }
}
