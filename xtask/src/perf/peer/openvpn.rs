//! OpenVPN over UDP with AES-256-GCM between two namespaces: what many hosted control planes ran before.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};

use super::namespace::{CABLE, Namespaces, TUNNEL, available};
use super::{Peer, Place, Route, on_path, version_of, wait_for_echo};
use crate::perf::process::{Inside, Site};
use crate::perf::scenario::Way;

/// See the module.
pub(super) struct OpenVpn {
    program: PathBuf,
    version: String,
}

impl OpenVpn {
    /// The distribution's.
    ///
    /// # Errors
    /// It is not installed, or this host gives no namespaces or no tunnel devices.
    pub(super) fn find() -> anyhow::Result<Self> {
        let program =
            on_path("openvpn").context("openvpn is not installed: `apt-get install openvpn`")?;
        available()?;
        ensure!(
            std::path::Path::new("/dev/net/tun").exists(),
            "there is no /dev/net/tun"
        );
        let version = version_of(&program.display().to_string(), "--version")?;
        let short: Vec<&str> = version.split_whitespace().take(2).collect();
        Ok(Self {
            program,
            version: short.join(" "),
        })
    }

    fn args(&self, site: &Site, role: &str, own: usize) -> Vec<String> {
        let other = 1 - own;
        let mut args = vec![
            "--dev=tun0".to_owned(),
            "--dev-type=tun".to_owned(),
            "--proto=udp".to_owned(),
            "--data-ciphers=AES-256-GCM".to_owned(),
            "--cipher=AES-256-GCM".to_owned(),
            "--persist-tun".to_owned(),
            format!("--ca={}", site.at("ca.pem")),
            format!("--cert={}", site.at(&format!("{role}.pem"))),
            format!("--key={}", site.at(&format!("{role}.key"))),
        ];
        // Options with several values follow each other as words.
        args = args
            .iter()
            .flat_map(|arg| match arg.split_once('=') {
                Some((name, value)) => vec![name.to_owned(), value.to_owned()],
                None => vec![arg.clone()],
            })
            .collect();
        let words = match role {
            "server" => format!("--tls-server --dh none --port 1194 --local {}", CABLE[own]),
            _ => format!("--tls-client --nobind --remote {} 1194", CABLE[other]),
        };
        let addresses = format!(
            "--ifconfig {} {} --verb 1 --ping 10 --ping-restart 60",
            TUNNEL[own], TUNNEL[other]
        );
        args.extend(words.split(' ').map(str::to_owned));
        args.extend(addresses.split(' ').map(str::to_owned));
        args
    }
}

impl Peer for OpenVpn {
    fn name(&self) -> &str {
        "openvpn"
    }

    fn version(&self) -> String {
        format!("{}, UDP, AES-256-GCM, between two namespaces", self.version)
    }

    fn ways(&self, _asked: &[Way]) -> Vec<Way> {
        vec![Way::Tcp]
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let namespaces = Namespaces::new(site)?;
        let mut processes = Vec::new();
        let mut running = Vec::new();
        for (role, namespace, own) in [
            ("server", &namespaces.server, 1),
            ("agent", &namespaces.client, 0),
        ] {
            let args = self.args(site, role, own);
            let process = site.spawn(role, Inside::Namespace(namespace), &self.program, &args)?;
            processes.push((role.to_owned(), process.id()));
            running.push(process);
        }
        let far = &namespaces.server;
        site.wait_for("the tunnel device", || {
            namespaces
                .run(
                    far,
                    &["ip", "-o", "route", "get", TUNNEL[0], "from", TUNNEL[1]],
                )
                .is_ok()
        })?;
        let (target, targets) = site.targets(Inside::Namespace(far), TUNNEL[1])?;
        running.push(target);
        let client = namespaces.client.clone();
        running.extend(namespaces.running);
        let route = Route {
            running,
            way,
            frontend: None,
            targets,
            processes,
            place: Place::Namespace(client),
        };
        wait_for_echo(site, &route)?;
        Ok(route)
    }
}
