//! Peers of the agent port that send nothing, or a single byte, do not keep agents out.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use adit_config::limits::TLS_HANDSHAKE_TIMEOUT;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};

use crate::support::process::{Process, at_least, metric, raise_descriptor_limit};
use crate::support::targets;
use crate::support::world::World;

/// Descriptors of the server. Silent peers get an eighth of them.
const LIMIT: u32 = 1024;
const SILENT_MAX: u32 = LIMIT / 8;
/// Peers of each kind: more than the limit on concurrent handshakes.
const PEERS: u32 = 300;
/// Type of a TLS handshake record: the only byte that a slow peer sends.
const HANDSHAKE_RECORD: u8 = 22;

/// Addresses that no agent uses. Each can have half of the handshakes.
const STRANGERS: [u8; 2] = [2, 3];

async fn stranger(server: SocketAddr, last: u8) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    let address = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0));
    socket.bind(address).expect("an address of this host");
    socket.connect(server).await.expect("it listens")
}

/// Limit (times): A stalled TLS handshake while others wait for a slot
/// Limit (peers): TLS connections before their handshake
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_and_slow_peers_block_no_agent() {
    // Each peer takes a descriptor of this process.
    raise_descriptor_limit();
    let (target, _echo) = targets::local_echo().await;
    let mut world = World::start(&["--log-format=json"]).await;
    world.stop_server(Duration::ZERO).await;
    let args = world.server_args("0");
    let server = Process::start_limited("server", LIMIT, &args, world.dir.path());
    let (agents, health) = (server.address("agents"), server.address("health"));

    let began = Instant::now();
    let mut peers = Vec::new();
    for (_peer, last) in (0..PEERS).zip(STRANGERS.into_iter().cycle()) {
        let mut slow = stranger(agents, last).await;
        // The server may already have closed this connection as one too many.
        let _written = slow.write_all(&[HANDSHAKE_RECORD]).await;
        peers.push(slow);
    }
    for _peer in 0..PEERS {
        peers.push(stranger(agents, STRANGERS[0]).await);
    }
    let crowded_out = "adit_handshakes_failed_total{reason=\"crowded_out\"}";
    at_least(health, crowded_out, f64::from(PEERS - SILENT_MAX)).await;

    let _agent = world.agent_of(agents.port(), "agent-1", &[]).await;
    metric(health, "adit_links{peer=\"adit\"}", 1.0).await;
    // After this timeout the slow peers are cut off in any case.
    assert!(began.elapsed() < TLS_HANDSHAKE_TIMEOUT, "it had to wait");
    world.assert_serves(&target).await;
}
