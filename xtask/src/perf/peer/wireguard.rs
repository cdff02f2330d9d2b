//! WireGuard between two namespaces. The kernel does the work, so its cost shows only in the machine's CPU time.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use super::namespace::{CABLE, Namespaces, TUNNEL, available};
use super::{Peer, Place, Route, on_path, version_of, wait_for_echo};
use crate::perf::process::{Inside, Site};
use crate::perf::scenario::Way;

/// UDP port, free in a namespace of its own.
const PORT: &str = "51820";

/// See the module.
pub(super) struct WireGuard {
    version: String,
}

impl WireGuard {
    /// The kernel's, with the distribution's tool.
    ///
    /// # Errors
    /// The tool is not installed, or the kernel has none.
    pub(super) fn find() -> anyhow::Result<Self> {
        let tool =
            on_path("wg").context("wg is not installed: `apt-get install wireguard-tools`")?;
        available()?;
        // Tried in a namespace that ends with the command.
        let tried = Command::new("unshare")
            .args(["--net", "ip", "link", "add", "wg0", "type", "wireguard"])
            .output()?;
        ensure!(
            tried.status.success(),
            "the kernel has no WireGuard: {}",
            String::from_utf8_lossy(&tried.stderr).trim()
        );
        let version = version_of(&tool.display().to_string(), "--version")?;
        let short: Vec<&str> = version.split_whitespace().take(2).collect();
        Ok(Self {
            version: short.join(" "),
        })
    }
}

impl Peer for WireGuard {
    fn name(&self) -> &str {
        "wireguard"
    }

    fn version(&self) -> String {
        format!(
            "WireGuard of the kernel, {}, between two namespaces",
            self.version
        )
    }

    fn ways(&self, _asked: &[Way]) -> Vec<Way> {
        vec![Way::Tcp]
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let namespaces = Namespaces::new(site)?;
        let (client, server) = (new_key(site, "client")?, new_key(site, "server")?);
        for (namespace, own, at, other) in [
            (&namespaces.client, "client", 0_usize, &server),
            (&namespaces.server, "server", 1, &client),
        ] {
            let endpoint = format!("{}:{PORT}", CABLE[1 - at]);
            let allowed = format!("{}/32", TUNNEL[1 - at]);
            let address = format!("{}/24", TUNNEL[at]);
            let key = site.at(&format!("{own}.wg"));
            namespaces.run(
                namespace,
                &["ip", "link", "add", "wg0", "type", "wireguard"],
            )?;
            namespaces.run(
                namespace,
                &[
                    "wg",
                    "set",
                    "wg0",
                    "listen-port",
                    PORT,
                    "private-key",
                    &key,
                    "peer",
                    other,
                    "endpoint",
                    &endpoint,
                    "allowed-ips",
                    &allowed,
                ],
            )?;
            namespaces.run(namespace, &["ip", "address", "add", &address, "dev", "wg0"])?;
            namespaces.run(namespace, &["ip", "link", "set", "wg0", "up"])?;
        }
        let (target, targets) = site.targets(Inside::Namespace(&namespaces.server), TUNNEL[1])?;
        let mut running = vec![target];
        running.extend(namespaces.running);
        let route = Route {
            running,
            way,
            frontend: None,
            targets,
            processes: Vec::new(),
            place: Place::Namespace(namespaces.client),
        };
        wait_for_echo(site, &route)?;
        Ok(route)
    }
}

/// Writes a private key to a file and returns the public one.
fn new_key(site: &Site, name: &str) -> anyhow::Result<String> {
    let private = Command::new("wg").arg("genkey").output()?.stdout;
    let file = site.path(&format!("{name}.wg"));
    fs::write(&file, private)?;
    let public = Command::new("wg")
        .arg("pubkey")
        .stdin(Stdio::from(fs::File::open(&file)?))
        .output()?;
    Ok(String::from_utf8(public.stdout)?.trim().to_owned())
}
