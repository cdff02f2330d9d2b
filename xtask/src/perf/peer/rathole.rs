//! rathole with TLS: a reverse tunnel in Rust whose client opens a connection for each tunnel.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::haproxy::ports;
use super::{Peer, Place, Route, TARGETS, wait_for_echo};
use crate::perf::process::{Inside, Site, Targets, free_port};
use crate::perf::programs::Programs;
use crate::perf::scenario::Way;

/// Guards the throw-away key file, whose format wants a password.
const PASSWORD: &str = "throw-away";

/// See the module.
pub(super) struct Rathole {
    program: PathBuf,
}

impl Rathole {
    /// Builds it, once, from its public package.
    ///
    /// # Errors
    /// It could not be built.
    pub(super) fn find(programs: &Programs) -> anyhow::Result<Self> {
        Ok(Self {
            program: programs.rathole()?,
        })
    }
}

impl Peer for Rathole {
    fn name(&self) -> &str {
        "rathole"
    }

    fn version(&self) -> String {
        "rathole 0.5.0, built from its package, TLS of the server alone and a token".to_owned()
    }

    fn ways(&self, _asked: &[Way]) -> Vec<Way> {
        vec![Way::Tcp]
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let (target, mut targets) = site.targets(Inside::Host, "127.0.0.1")?;
        key_file(site)?;
        let (link, front) = (free_port()?, ports("127.0.0.1")?);
        let server = [
            format!("[server]\nbind_addr = \"127.0.0.1:{link}\"\n"),
            common("server"),
            format!(
                "[server.transport.tls]\npkcs12 = \"{}\"\npkcs12_password = \"{PASSWORD}\"\n",
                site.at("server.p12")
            ),
            services("server", "bind_addr", &front),
        ];
        let client = [
            format!("[client]\nremote_addr = \"localhost:{link}\"\n"),
            common("client"),
            format!(
                "[client.transport.tls]\ntrusted_root = \"{}\"\nhostname = \"localhost\"\n",
                site.at("ca.pem")
            ),
            services("client", "local_addr", &targets),
        ];
        let mut running = vec![target];
        let mut processes = Vec::new();
        for (role, flag, text) in [
            ("server", "--server", server.concat()),
            ("agent", "--client", client.concat()),
        ] {
            let file = site.path(&format!("{role}.toml"));
            fs::write(&file, text)?;
            let args = [flag.to_owned(), file.display().to_string()];
            let process = site.spawn(role, Inside::Host, &self.program, &args)?;
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
            place: Place::Here,
        };
        wait_for_echo(site, &route)?;
        Ok(route)
    }
}

fn common(side: &str) -> String {
    format!(
        "default_token = \"throw-away\"\n[{side}.transport]\ntype = \"tls\"\n\
         [{side}.transport.tcp]\nnodelay = true\n"
    )
}

fn services(side: &str, key: &str, addresses: &Targets) -> String {
    TARGETS
        .iter()
        .map(|name| {
            let address = &addresses[*name];
            format!("[{side}.services.{name}]\n{key} = \"{address}\"\n")
        })
        .collect()
}

/// The server's pair in the only format it takes.
fn key_file(site: &Site) -> anyhow::Result<()> {
    let output = Command::new("openssl")
        .args(["pkcs12", "-export", "-passout"])
        .arg(format!("pass:{PASSWORD}"))
        .args([
            "-in",
            &site.at("server.pem"),
            "-inkey",
            &site.at("server.key"),
        ])
        .args([
            "-certfile",
            &site.at("ca.pem"),
            "-out",
            &site.at("server.p12"),
        ])
        .output()
        .context("openssl is not installed, and rathole wants its key as PKCS #12")?;
    ensure!(
        output.status.success(),
        "openssl pkcs12: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
