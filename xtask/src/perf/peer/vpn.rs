//! Peers that forward packets between two network namespaces joined by a veth pair. A namespace lives as long as the process
//! that holds it, so none remains afterwards.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::{Peer, Route, installed};
use crate::perf::process::{Place, Site};
use crate::steps::{MINUTES_5, Running, output_of};

/// Addresses at the ends of the veth pair: client, server.
const CABLE: [&str; 2] = ["10.98.0.1", "10.98.0.2"];
/// Addresses at the ends of the tunnel: client, server.
const TUNNEL: [&str; 2] = ["10.99.0.1", "10.99.0.2"];
/// UDP port of WireGuard, free because the namespace is new.
const PORT: &str = "51820";

/// A network namespace, held by a process.
pub(crate) struct Namespace {
    place: Place,
    holder: Running,
}

impl Namespace {
    fn new(site: &Site, name: &str) -> anyhow::Result<Self> {
        let args = ["--net", "sleep", "86400"].map(str::to_owned);
        let holder = site.spawn(name, &Place::Host, Path::new("unshare"), &args)?;
        let place = Place::Host;
        let mut namespace = Self { place, holder };
        let ours = fs::read_link("/proc/self/ns/net")?;
        site.wait_for("a network namespace", || {
            fs::read_link(namespace.file()).is_ok_and(|theirs| theirs != ours)
        })?;
        namespace.place = Place::Namespace(format!("--net={}", namespace.file()));
        Ok(namespace)
    }

    /// The namespace's file.
    pub(crate) fn file(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    /// The place of processes in this namespace.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// Runs a command line, split at blanks, inside the namespace.
    ///
    /// # Errors
    /// The command fails; carries its output.
    pub(crate) fn run(&self, line: &str) -> anyhow::Result<()> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.file())).arg("--");
        output_of(command.args(line.split(' ')), MINUTES_5).map(drop)
    }
}

/// The namespaces of client and server.
pub(crate) struct Namespaces {
    pub(crate) client: Namespace,
    pub(crate) server: Namespace,
}

impl Namespaces {
    /// Creates both, unconnected.
    ///
    /// # Errors
    /// A tool is not installed, or the kernel refuses.
    pub(crate) fn apart(site: &Site) -> anyhow::Result<Self> {
        ensure_available()?;
        Ok(Self {
            client: Namespace::new(site, "client-namespace")?,
            server: Namespace::new(site, "server-namespace")?,
        })
    }

    /// Creates both and connects them.
    ///
    /// # Errors
    /// Like [`Self::apart`].
    fn connected(site: &Site) -> anyhow::Result<Self> {
        let both = Self::apart(site)?;
        let far = both.server.holder.id();
        both.client.run(&format!(
            "ip link add cable type veth peer name cable netns {far}"
        ))?;
        for (namespace, address) in [(&both.client, CABLE[0]), (&both.server, CABLE[1])] {
            namespace.run(&format!("ip address add {address}/24 dev cable"))?;
            namespace.run("ip link set cable up")?;
            namespace.run("ip link set lo up")?;
        }
        Ok(both)
    }

    /// Starts targets in the server's namespace, for a load in the client's.
    fn route(&self, site: &Site) -> anyhow::Result<Route> {
        Route::to(
            site,
            &self.server.place,
            TUNNEL[1],
            self.client.place.clone(),
        )
    }

    /// Keeps the namespaces alive as long as the path.
    fn held_by(self, mut route: Route) -> Route {
        route
            .running
            .extend([self.client.holder, self.server.holder]);
        route
    }
}

fn ensure_available() -> anyhow::Result<()> {
    for (tool, package) in [
        ("ip", "iproute2"),
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
    ] {
        installed(tool, "--version", package)?;
    }
    output_of(Command::new("unshare").args(["--net", "true"]), MINUTES_5)
        .map(drop)
        .context("network namespaces need root")
}

fn two_words(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(2).collect();
    words.join(" ")
}

/// OpenVPN over UDP with AES-256-GCM, which many hosted control planes used to run.
///
/// # Errors
/// OpenVPN is not installed, or this host allows no namespaces or no tunnel devices.
pub(super) fn openvpn() -> anyhow::Result<Peer> {
    let (program, version) = installed("openvpn", "--version", "openvpn")?;
    ensure_available()?;
    ensure!(
        Path::new("/dev/net/tun").exists(),
        "there is no /dev/net/tun"
    );
    let version = format!(
        "{}, UDP, AES-256-GCM, between two namespaces",
        two_words(&version)
    );
    Ok(Peer::of_ports("openvpn", version, move |site| {
        let both = Namespaces::connected(site)?;
        let [server, client] = [
            format!("--tls-server --dh none --port 1194 --local {}", CABLE[1]),
            format!("--tls-client --nobind --remote {} 1194", CABLE[1]),
        ];
        let mut ends = Vec::new();
        for (role, namespace, side, own) in [
            ("server", &both.server, server, 1),
            ("agent", &both.client, client, 0),
        ] {
            let [cert, key] = ["pem", "key"].map(|kind| site.at(&format!("{role}.{kind}")));
            let line = format!(
                "--dev tun0 --dev-type tun --proto udp --data-ciphers AES-256-GCM --cipher AES-256-GCM --persist-tun \
                 --ca {} --cert {cert} --key {key} {side} --ifconfig {} {} --verb 1 --ping 10 --ping-restart 60",
                site.at("ca.pem"),
                TUNNEL[own],
                TUNNEL[1 - own]
            );
            let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
            ends.push((
                role.to_owned(),
                site.spawn(role, &namespace.place, &program, &args)?,
            ));
        }
        let [client, server] = TUNNEL;
        site.wait_for("the tunnel device", || {
            let line = format!("ip -o route get {client} from {server}");
            both.server.run(&line).is_ok()
        })?;
        let mut route = both.route(site)?;
        for (role, process) in ends {
            route.processes.push((role, process.id()));
            route.running.push(process);
        }
        Ok(both.held_by(route))
    }))
}

/// WireGuard. The kernel does the work, so its cost shows only in the machine's CPU time.
///
/// # Errors
/// The tool is not installed, or the kernel has no WireGuard.
pub(super) fn wireguard() -> anyhow::Result<Peer> {
    let (_, version) = installed("wg", "--version", "wireguard-tools")?;
    ensure_available()?;
    // Tested in a namespace that ends with the command.
    let mut tried = Command::new("unshare");
    tried.args(["--net", "ip", "link", "add", "wg0", "type", "wireguard"]);
    output_of(&mut tried, MINUTES_5).context("the kernel has no WireGuard")?;
    let version = format!(
        "WireGuard of the kernel, {}, between two namespaces",
        two_words(&version)
    );
    Ok(Peer::of_ports("wireguard", version, |site| {
        let both = Namespaces::connected(site)?;
        let (client, server) = (new_key(site, "client")?, new_key(site, "server")?);
        for (namespace, own, at, other) in [
            (&both.client, "client", 0_usize, &server),
            (&both.server, "server", 1, &client),
        ] {
            let (key, far) = (site.at(&format!("{own}.wg")), 1 - at);
            namespace.run("ip link add wg0 type wireguard")?;
            namespace.run(&format!(
                "wg set wg0 listen-port {PORT} private-key {key} peer {other} endpoint {}:{PORT} allowed-ips {}/32",
                CABLE[far], TUNNEL[far]
            ))?;
            namespace.run(&format!("ip address add {}/24 dev wg0", TUNNEL[at]))?;
            namespace.run("ip link set wg0 up")?;
        }
        let route = both.route(site)?;
        Ok(both.held_by(route))
    }))
}

/// Writes a private key to a file and returns the public key.
fn new_key(site: &Site, name: &str) -> anyhow::Result<String> {
    let file = site.at(&format!("{name}.wg"));
    let mut generate = Command::new("sh");
    generate.args([
        "-c",
        "wg genkey > \"$1\" && wg pubkey < \"$1\"",
        "sh",
        &file,
    ]);
    Ok(output_of(&mut generate, MINUTES_5)?
        .stdout
        .trim()
        .to_owned())
}
