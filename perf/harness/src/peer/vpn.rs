//! A peer that forwards packets between two network namespaces joined by a veth pair. A namespace lives as long as the process
//! that holds it, so none remains afterwards.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::{Peer, Route, installed};
use crate::process::{Place, Site};
use crate::steps::{MINUTES_5, Running, output_of};

/// Addresses at the ends of the veth pair: client, server.
const CABLE: [&str; 2] = ["10.98.0.1", "10.98.0.2"];
/// Addresses at the ends of the tunnel: client, server.
const TUNNEL: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

/// A network namespace, held by a process.
pub(crate) struct Namespace {
    /// The place of processes in this namespace.
    pub(crate) place: Place,
    holder: Running,
}

impl Namespace {
    /// Creates those of client and server, unconnected.
    ///
    /// # Errors
    /// A tool is not installed, or the kernel refuses.
    pub(crate) fn pair(site: &Site) -> anyhow::Result<[Self; 2]> {
        ensure_available()?;
        Ok([
            Self::new(site, "client-namespace")?,
            Self::new(site, "server-namespace")?,
        ])
    }

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
    let words: Vec<&str> = version.split_whitespace().take(2).collect();
    let version = format!(
        "{}, UDP, AES-256-GCM, between two namespaces",
        words.join(" ")
    );
    Ok(Peer::of_ports("openvpn", version, move |site| {
        let [near, far] = Namespace::pair(site)?;
        let holder = far.holder.id();
        near.run(&format!(
            "ip link add cable type veth peer name cable netns {holder}"
        ))?;
        for (namespace, address) in [(&near, CABLE[0]), (&far, CABLE[1])] {
            namespace.run(&format!("ip address add {address}/24 dev cable"))?;
            namespace.run("ip link set cable up")?;
            namespace.run("ip link set lo up")?;
        }
        let [server, client] = [
            format!("--tls-server --dh none --port 1194 --local {}", CABLE[1]),
            format!("--tls-client --nobind --remote {} 1194", CABLE[1]),
        ];
        let mut ends = Vec::new();
        for (role, namespace, side, own) in
            [("server", &far, server, 1), ("agent", &near, client, 0)]
        {
            let [cert, key] = ["pem", "key"].map(|kind| site.at(&format!("{role}.{kind}")));
            let line = format!(
                "--dev tun0 --dev-type tun --proto udp --data-ciphers AES-256-GCM --cipher AES-256-GCM --persist-tun \
                 --ca {} --cert {cert} --key {key} {side} --ifconfig {} {} --verb 1 --ping 10 --ping-restart 60",
                site.at("ca.pem"),
                TUNNEL[own],
                TUNNEL[1 - own]
            );
            let args: Vec<String> = line.split(' ').map(str::to_owned).collect();
            ends.push((role, site.spawn(role, &namespace.place, &program, &args)?));
        }
        let [client, server] = TUNNEL;
        site.wait_for("the tunnel device", || {
            let line = format!("ip -o route get {client} from {server}");
            far.run(&line).is_ok()
        })?;
        let mut route = Route::to(site, &far.place, TUNNEL[1], near.place)?;
        for (role, process) in ends {
            route.processes.push((role.to_owned(), process.id()));
            route.running.push(process);
        }
        // The namespaces live as long as the path.
        route.running.extend([near.holder, far.holder]);
        Ok(route)
    }))
}
