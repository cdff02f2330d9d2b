//! Other projects' port forwarders: HAProxy and rathole.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use anyhow::Context as _;

use super::{Peer, Route, TARGETS, free_ports, installed};
use crate::perf::process::{Place, Site, Targets, free_port};
use crate::perf::programs::{Programs, RATHOLE};
use crate::steps::{MINUTES_5, output_of};

/// Connection limit of each HAProxy: a connection takes two descriptors, and 20,000 is a common hard limit.
const CONNECTIONS_MAX: usize = 9_500;
/// Password of rathole's throw-away key file, whose format requires one.
const PASSWORD: &str = "throw-away";

/// The connection between two HAProxies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Between {
    Tls,
    /// For comparison with other peers without encryption.
    Plaintext,
}

/// Two HAProxies: one accepts plain connections beside the client, the other connects to the target. People build this by hand
/// if they want no tunnel program.
///
/// # Errors
/// HAProxy is not installed.
pub(super) fn haproxy(between: Between) -> anyhow::Result<Peer> {
    let (program, version) = installed("haproxy", "-v", "haproxy")?;
    let (name, words) = match between {
        Between::Tls => ("haproxy", "mutual TLS"),
        Between::Plaintext => ("haproxy-plaintext", "clear text"),
    };
    let version = format!("{version}, two processes, {words} between");
    let peer = Peer::of_ports(name, version, move |site| {
        let mut route = Route::to(site, site.far(), site.far_host(), site.near().clone())?;
        let (middle, front) = (free_ports(site.far_host())?, free_ports("127.0.0.1")?);
        let (mut accept, mut connect) = (String::new(), String::new());
        if between == Between::Tls {
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
        for (role, place, configuration) in [
            (
                "agent",
                site.far(),
                forward(&middle, &accept, &route.targets, ""),
            ),
            (
                "server",
                site.near(),
                forward(&front, "", &middle, &connect),
            ),
        ] {
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
        let server = format!("pkcs12 = \"{key}\"\npkcs12_password = \"{PASSWORD}\"");
        let client = format!("trusted_root = \"{ca}\"\nhostname = \"localhost\"");
        for (role, side, link, tls, key, addresses) in [
            (
                "server",
                "server",
                format!("bind_addr = \"127.0.0.1:{link}\""),
                server,
                "bind_addr",
                &front,
            ),
            (
                "agent",
                "client",
                format!("remote_addr = \"localhost:{link}\""),
                client,
                "local_addr",
                &route.targets.clone(),
            ),
        ] {
            let mut text = format!(
                "[{side}]\n{link}\ndefault_token = \"throw-away\"\n[{side}.transport]\ntype = \"tls\"\n\
                 [{side}.transport.tcp]\nnodelay = true\n[{side}.transport.tls]\n{tls}\n"
            );
            for name in TARGETS {
                let address = &addresses[name];
                write!(text, "[{side}.services.{name}]\n{key} = \"{address}\"\n").ok();
            }
            let file = site.at(&format!("{role}.toml"));
            fs::write(&file, text)?;
            route.start(
                site,
                role,
                &Place::Host,
                &program,
                &[format!("--{side}"), file],
            )?;
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
