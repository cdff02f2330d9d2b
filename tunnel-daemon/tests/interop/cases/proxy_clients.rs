//! Go's own clients of SOCKS5 and HTTP proxies. Only the agent can resolve the name of their targets.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use adit_testkit::args;
use adit_testkit::certificates::ThrowawayFiles;
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::support::certs::Certs;
use crate::support::combo::Combo;
use crate::support::peer::Peer;
use crate::support::ports;
use crate::support::process::Process;
use crate::support::stack::{Agent, Server};
use crate::support::wait::{secs, until};

/// Runs a client of `peer proxied` through a frontend of this kind, which compat mode does not have.
fn run_through(frontend: &str, client: &str) {
    let dir = TempDir::new().expect("a temporary directory can be made");
    let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).expect("certificates");
    let mut flags = args::server(&files, "127.0.0.1", "0");
    flags.extend([
        format!("--frontend={frontend}=tcp:127.0.0.1:0"),
        "--insecure-plaintext-frontend".to_owned(),
        "--admin-socket=off".to_owned(),
    ]);
    let server = Process::start("server", &flags, dir.path());
    let agents = server.listener("agents").to_string();
    let proxy = address_of(frontend, &server.log());
    let mut flags = args::agent(&files, &agents, "agent-0");
    flags.push("--admin-socket=off".to_owned());
    let _agent = Process::start("agent", &flags, dir.path());
    until("the server sees the agent", secs(20), || {
        server.log().contains("agent connected").then_some(())
    });
    ask(proxy, client, dir.path());
}

/// Runs a client of `peer proxied`.
fn ask(proxy: SocketAddr, client: &str, dir: &Path) {
    let closed = bound_port();
    let report = Peer::new("proxied", dir)
        .flag("client", client)
        .flag("proxy", proxy)
        .flag("closed-port", port_of(&closed))
        .run();
    report.good();
}

/// The address of a frontend in the line with which the server says that it is up.
fn address_of(frontend: &str, log: &str) -> SocketAddr {
    let (_, rest) = log
        .split_once(&format!("{frontend}=tcp:"))
        .unwrap_or_else(|| panic!("no frontend {frontend}: {log}"));
    let address = rest.split([',', '"', ' ', '\n']).next();
    let address = address.and_then(|address| address.parse().ok());
    address.unwrap_or_else(|| panic!("no address of {frontend}: {log}"))
}

/// A socket whose port refuses connections as long as it lives.
fn bound_port() -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&any.into()).expect("a free port");
    socket
}

fn port_of(socket: &Socket) -> u16 {
    let address = socket.local_addr().expect("bound").as_socket();
    address.expect("IPv4").port()
}

/// Requests with a whole URL, and by CONNECT those with TLS, which agree on HTTP/2.
fn net_http_follows_http_proxy_and_https_proxy(_combo: Combo) {
    run_through("http-proxy", "net-http");
}
rows!(net_http_follows_http_proxy_and_https_proxy: adit_adit);

fn net_http_takes_a_socks5_url_for_its_proxy(_combo: Combo) {
    run_through("socks5", "net-http-socks5");
}
rows!(net_http_takes_a_socks5_url_for_its_proxy: adit_adit);

fn the_dialler_of_x_net_proxy_reaches_targets_by_socks5(_combo: Combo) {
    run_through("socks5", "socks5");
}
rows!(the_dialler_of_x_net_proxy_reaches_targets_by_socks5: adit_adit);

/// grpc-go leaves the name to the proxy, and asks for a tunnel with and without TLS.
fn grpc_go_follows_https_proxy(_combo: Combo) {
    run_through("http-proxy", "grpc");
}
rows!(grpc_go_follows_https_proxy: adit_adit);

/// Any server's frontend for HTTP CONNECT by mutual TLS will do, as HyperShift has it. Agents in Go do not resolve the targets' name.
fn adit_proxy_reaches_targets_through_a_server_and_tells_why_not(combo: Combo) {
    let dir = TempDir::new().expect("a temporary directory can be made");
    let certs = Certs::write(dir.path());
    let port = ports::free();
    let flags = [
        "--uds-name=".to_owned(),
        format!("--server-port={port}"),
        format!("--server-cert={}", certs.server_cert.display()),
        format!("--server-key={}", certs.server_key.display()),
        format!("--server-ca-cert={}", certs.ca.display()),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Server::start(combo, "server", dir.path(), &certs, &flags);
    let agent = Agent::start(
        combo.agent,
        "agent-0",
        "agent-0",
        server.agent_port,
        dir.path(),
        &certs,
        &[],
    );
    agent.await_ready();
    let argv = [
        "adit".to_owned(),
        "proxy".to_owned(),
        "--frontend=socks5=tcp:127.0.0.1:0".to_owned(),
        "--frontend=http-proxy=tcp:127.0.0.1:0".to_owned(),
        format!("--proxy-server-host=127.0.0.1:{port}"),
        format!("--ca-cert={}", certs.ca.display()),
        format!("--client-cert={}", certs.agent_cert.display()),
        format!("--client-key={}", certs.agent_key.display()),
        "--health-port=off".to_owned(),
        "--admin-socket=off".to_owned(),
    ];
    let proxy = Process::start("proxy", &argv, dir.path());
    until("the proxy is up", secs(20), || {
        proxy.log().contains("proxy is up").then_some(())
    });
    ask(address_of("socks5", &proxy.log()), "socks5", dir.path());
    ask(
        address_of("http-proxy", &proxy.log()),
        "net-http",
        dir.path(),
    );
}
rows!(adit_proxy_reaches_targets_through_a_server_and_tells_why_not: go_adit_connect adit_adit_connect);
