//! Go's own clients of SOCKS5 and HTTP proxies. Only the agent can resolve the name of their targets.

use std::net::{Ipv4Addr, SocketAddr};

use adit_testkit::args;
use adit_testkit::certificates::ThrowawayFiles;
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::support::combo::Combo;
use crate::support::peer::Peer;
use crate::support::process::Process;
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
    let closed = bound_port();
    let report = Peer::new("proxied", dir.path())
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
