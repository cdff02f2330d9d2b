//! Other projects' port forwarders: HAProxy and rathole.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use anyhow::Context as _;
use xtask_kit::net::free_port;

use super::{Peer, Route, TARGETS, free_ports, installed};
use crate::process::{Place, Site, Targets};
use crate::programs::{Programs, RATHOLE};
use crate::steps::{MINUTES_5, output_of};

/// Connection limit of each HAProxy: a connection takes two descriptors, and 20,000 is a common hard limit.
const CONNECTIONS_MAX: usize = 9_500;
/// Password of rathole's throw-away key file, whose format requires one.
const PASSWORD: &str = "throw-away";

/// Line of rathole's configuration with the token of both sides.
const TOKEN: &str = "default_token = \"throw-away\"\n";

/// Two HAProxies: one accepts plain connections beside the client, the other connects to the target. People build this by hand
/// if they want no tunnel program.
///
/// # Errors
/// HAProxy is not installed.
pub(super) fn haproxy(name: &str) -> anyhow::Result<Peer> {
    let (program, version) = installed("haproxy", "-v", "haproxy")?;
    let is_plaintext = name.ends_with("-plaintext");
    let words = if is_plaintext {
        "clear text"
    } else {
        "mutual TLS"
    };
    let version = format!("{version}, two processes, {words} between");
    let peer = Peer::of_ports(name, version, move |site| {
        let mut route = Route::to_far(site)?;
        let (middle, front) = (free_ports(site.far_host)?, free_ports("127.0.0.1")?);
        let (mut accept, mut connect) = (String::new(), String::new());
        if !is_plaintext {
            let ca = site.at("ca.pem");
            accept = format!(
                "ssl crt {} ca-file {ca} verify required",
                site.at("server.both.pem")
            );
            connect = format!(
                "ssl crt {} ca-file {ca} verify required verifyhost localhost sni str(localhost)",
                site.at("agent.both.pem")
            );
        }
        let agent = forward(&middle, &accept, &route.targets, "");
        let server = forward(&front, "", &middle, &connect);
        for (role, place, configuration) in
            [("agent", &site.far, agent), ("server", &site.near, server)]
        {
            let file = site.at(&format!("{role}.cfg"));
            fs::write(&file, configuration)?;
            let args = ["-db".to_owned(), "-f".to_owned(), file];
            route.start(site, role, place, &program, &args)?;
        }
        route.targets.extend(front);
        Ok(route)
    });
    Ok(peer.spanning())
}

/// Configuration of a HAProxy, with options of its listeners and of its connections.
fn forward(listen: &Targets, accept: &str, to: &Targets, connect: &str) -> String {
    let mut text = format!(
        "global\n  maxconn {CONNECTIONS_MAX}\ndefaults\n  mode tcp\n  maxconn {CONNECTIONS_MAX}\n  \
         timeout connect 10s\n  timeout client 1h\n  timeout server 1h\n"
    );
    for name in TARGETS {
        let (listen, to) = (&listen[name], &to[name]);
        write!(
            text,
            "frontend {name}-in\n  bind {listen} {accept}\n  default_backend {name}-out\n\
             backend {name}-out\n  server {name} {to} {connect}\n"
        )
        .ok();
    }
    text
}

/// rathole with TLS: a reverse tunnel in Rust; its client opens a connection per tunnel.
///
/// # Errors
/// rathole cannot be built from its public package.
pub(super) fn rathole(programs: &Programs) -> anyhow::Result<Peer> {
    let program = programs.rathole()?;
    let version =
        format!("rathole {RATHOLE}, built from its package, TLS of the server alone and a token");
    Ok(Peer::of_ports("rathole", version, move |site| {
        let mut route = Route::to(site, &Place::Host, "127.0.0.1", Place::Host)?;
        key_file(site)?;
        let (link, front) = (free_port()?, free_ports("127.0.0.1")?);
        let (key, ca) = (site.at("server.p12"), site.at("ca.pem"));
        let server = format!(
            "[server]\nbind_addr = \"127.0.0.1:{link}\"\n{TOKEN}[server.transport.tls]\npkcs12 = \"{key}\"\n\
             pkcs12_password = \"{PASSWORD}\"\n"
        );
        let client = format!(
            "[client]\nremote_addr = \"localhost:{link}\"\n{TOKEN}[client.transport.tls]\ntrusted_root = \"{ca}\"\n\
             hostname = \"localhost\"\n"
        );
        let targets = route.targets.clone();
        for (role, side, mut text, key, addresses) in [
            ("server", "server", server, "bind_addr", &front),
            ("agent", "client", client, "local_addr", &targets),
        ] {
            text += &format!(
                "[{side}.transport]\ntype = \"tls\"\n[{side}.transport.tcp]\nnodelay = true\n"
            );
            for name in TARGETS {
                let address = &addresses[name];
                text += &format!("[{side}.services.{name}]\n{key} = \"{address}\"\n");
            }
            let file = site.at(&format!("{role}.toml"));
            fs::write(&file, text)?;
            let args = [format!("--{side}"), file];
            route.start(site, role, &Place::Host, &program, &args)?;
        }
        route.targets.extend(front);
        Ok(route)
    }))
}

/// The server's certificate and key in rathole's only format.
fn key_file(site: &Site) -> anyhow::Result<()> {
    let [cert, key, ca, to] =
        ["server.pem", "server.key", "ca.pem", "server.p12"].map(|name| site.at(name));
    let mut command = Command::new("openssl");
    command
        .args(["pkcs12", "-export", "-passout", &format!("pass:{PASSWORD}")])
        .args(["-in", &cert, "-inkey", &key, "-certfile", &ca, "-out", &to]);
    output_of(&mut command, MINUTES_5)
        .map(drop)
        .context("rathole wants its key as PKCS #12, which `openssl` writes")
}
