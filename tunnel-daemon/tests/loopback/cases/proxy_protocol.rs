//! Balancers before the agent port that say by a PROXY header whose connection it is.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

use adit::status::Socket;
use adit::status::model::Links;
use tokio::net::{TcpSocket, TcpStream};

use crate::support::connect::{end, say};
use crate::support::process::Process;
use crate::support::skip::finds_program;
use crate::support::world::World;
use crate::support::{ports, targets};

/// Address from which the balancer connects.
const BALANCER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const FLAGS: [&str; 2] = [
    "--proxy-protocol-from=127.0.0.2/32",
    "--admin-socket={certs}/admin.sock",
];

fn peers(world: &World) -> Vec<String> {
    let links: Links = Socket::new(&world.admin_socket())
        .ask("/v1/links")
        .expect("an answer");
    links.links.into_iter().map(|link| link.address).collect()
}

/// Links and lanes through HAProxy, by both versions; the agent's address is the one that HAProxy names. An agent that comes directly
/// needs no header.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_behind_haproxy_are_known_by_their_own_address() {
    if !finds_program(
        "haproxy",
        "agents_behind_haproxy_are_known_by_their_own_address",
    ) {
        return;
    }
    let (target, _echo) = targets::local_echo().await;
    for version in ["send-proxy", "send-proxy-v2"] {
        let world = World::start(&FLAGS).await;
        let (server, port) = (world.server().agents, ports::free());
        let config = format!(
            "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n\
             listen agents\n  bind 127.0.0.1:{port}\n  server s {server} {version} source {BALANCER}\n"
        );
        let file = world.dir.path().join("haproxy.cfg");
        fs::write(&file, config).expect("a file");
        let mut haproxy = Command::new("haproxy");
        haproxy.arg("-db").arg("-f").arg(&file);
        let _haproxy = Process::start_command("haproxy", haproxy, world.dir.path());
        let _agent = world.agent_of(port, "behind", &[]).await;
        world.links(1).await;
        world.assert_serves(&target).await;
        let known = peers(&world);
        assert!(
            known.iter().all(|peer| peer.starts_with("127.0.0.1:")),
            "{version}: {known:?}"
        );
        let _direct = world.agent("direct", &[]).await;
        world.links(2).await;
    }
}

/// Connects from this address.
async fn from(address: Ipv4Addr, server: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind((address, 0).into())
        .expect("the address is ours");
    socket.connect(server).await.expect("it listens")
}

/// A balancer must send a header, and nobody else may.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_header_is_required_of_balancers_and_refused_to_others() {
    const HELLO: &[u8] = b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\0\0\0\0\0";
    const HEADER: &[u8] = b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n";
    let world = World::start(&FLAGS).await;
    let server = world.server().agents;
    for (address, first) in [
        (BALANCER, HELLO),
        (BALANCER, b"PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n"),
        (BALANCER, b"PROXY UDP4 192.0.2.1 192.0.2.2 1 2\r\n"),
        (Ipv4Addr::LOCALHOST, HEADER),
    ] {
        let mut stream = from(address, server).await;
        say(&mut stream, first).await;
        let _alert_or_nothing = end(&mut stream).await;
    }
    world
        .server_metric("adit_handshakes_failed_total{reason=\"failed\"}", 4.0)
        .await;
}
