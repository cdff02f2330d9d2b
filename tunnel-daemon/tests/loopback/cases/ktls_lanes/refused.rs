//! A kernel that refuses TLS for one lane and accepts it for other lanes of the same link.
//!
//! The kernel attaches TLS to a socket once, and further requests get EEXIST. The test attaches TLS to one lane's socket
//! without keys, so the owner's request fails. The socket still carries the same bytes as before.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use adit::agent::RunningAgent;
use adit::status::Socket;
use adit::status::model::{Status, TunnelStatus, Tunnels};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use socket2::SockRef;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::{FRAMED, KTLS, PIPED, is_possible, over};
use crate::support::lanes::{IDLE, opened, value, warm};
use crate::support::wait::until;
use crate::support::world::World;
use crate::support::{connect, targets};

const LOST: &str = "adit_lanes_closed_total{reason=\"lost\"}";
/// Bytes echoed when a tunnel is open, and once all tunnels are.
const FIRST_BYTES: usize = 20_000;
const LATER_BYTES: usize = 3_000_000;

/// The end whose socket is refused.
#[derive(Clone, Copy, Debug)]
enum Refused {
    /// The agent's socket. The agent notices when it answers an OPEN for a raw lane.
    Agents,
    /// The server's socket. The server notices before its OPEN, and requests frames.
    Servers,
}

/// Duplicated descriptors of one end of each connection to the agent port, by the agent's address.
fn connections(world: &World, whose: Refused) -> HashMap<SocketAddr, OwnedFd> {
    let agents = world.server().agents;
    // Descriptors are duplicated by number, because their owner may close them at any time.
    let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process lives");
    let open = fs::read_dir("/proc/self/fd").expect("/proc is there");
    let numbers = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let connection = |number: i32| {
        let descriptor = pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).ok()?;
        let socket = SockRef::from(&descriptor);
        let local = socket.local_addr().ok()?.as_socket()?;
        let peer = socket.peer_addr().ok()?.as_socket()?;
        let (agent, server) = match whose {
            Refused::Agents => (local, peer),
            Refused::Servers => (peer, local),
        };
        (server == agents).then_some((agent, descriptor))
    };
    numbers.filter_map(connection).collect()
}

/// Server and agent that want kernel TLS, their admin sockets, and warm lanes.
async fn watched() -> (World, RunningAgent, [PathBuf; 2]) {
    let world = World::start(&[KTLS, "--admin-socket={certs}/admin.sock"]).await;
    let sockets = [
        world.admin_socket(),
        world.dir.path().join("agent-admin.sock"),
    ];
    let admin = format!("--admin-socket={}", sockets[1].display());
    let agent = world.agent("agent-1", &[KTLS, &admin]).await;
    world.links(1).await;
    warm(&world).await;
    (world, agent, sockets)
}

/// The status of the tunnel to `target` at one end.
fn told(socket: &Path, target: &str) -> TunnelStatus {
    let answer: Tunnels = Socket::new(socket)
        .ask("/v1/tunnels?sort=age")
        .expect("an answer");
    let mut found = answer.tunnels.into_iter();
    found
        .find(|tunnel| tunnel.destination == target)
        .unwrap_or_else(|| panic!("no tunnel to {target}"))
}

/// Opens a tunnel and echoes bytes. Returns it with the path that both ends report. No other tunnel may have this target.
async fn tunnel(world: &World, sockets: &[PathBuf; 2], target: &str) -> (UnixStream, String) {
    let mut stream = connect::open(&world.connect(), target).await;
    connect::echo(&mut stream, &targets::pattern(0, FIRST_BYTES)).await;
    let [here, there] = sockets.each_ref().map(|socket| told(socket, target).path);
    assert_eq!(here, there);
    (stream, here)
}

/// Limit (isolation): A tunnel whose TLS the kernel refuses, with `--lane-security=ktls` | uses frames and loses no
/// byte
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_whose_socket_the_kernel_refuses_uses_frames_beside_raw_lanes() {
    if !is_possible("a lane that the kernel refuses") {
        return;
    }
    let (port, _target) = targets::echo().await;
    let hosts = [1, 2, 3].map(|host| format!("127.0.0.{host}:{port}"));
    for whose in [Refused::Agents, Refused::Servers] {
        let (world, _agent, sockets) = watched().await;
        let bound = opened(&world.server().metrics.scrape().text());
        let before: HashSet<SocketAddr> = connections(&world, whose).into_keys().collect();
        let (mut streams, mut paths) = (Vec::new(), Vec::new());
        for (number, target) in hosts.iter().enumerate() {
            let (stream, path) = tunnel(&world, &sockets, target).await;
            streams.push(stream);
            paths.push(path);
            // Each tunnel takes a lane, the agent opens another one, and the newest lane is used first.
            let lanes = bound + streams.len() as f64;
            until("a lane in place of the one used", || {
                opened(&world.server().metrics.scrape().text()) >= lanes
                    && value(&world, IDLE) >= 4.0
            })
            .await;
            if number == 0 {
                let mut latest = connections(&world, whose);
                latest.retain(|address, _| !before.contains(address));
                assert_eq!(latest.len(), 1, "{whose:?}");
                for socket in latest.values() {
                    adit_relay::attach_kernel_tls(socket).expect("the first to ask");
                }
            }
        }
        assert_eq!(paths, ["ktls-lane", "lane", "ktls-lane"], "{whose:?}");
        let opened = [FRAMED, PIPED].map(|series| value(&world, series));
        assert_eq!(opened, [1.0, 2.0], "{whose:?}");
        for socket in &sockets {
            let status: Status = Socket::new(socket).ask("/v1/status").expect("an answer");
            let counts = status.tunnels;
            assert_eq!((counts.link, counts.lane, counts.ktls_lane), (0, 1, 2));
            assert_eq!(status.links.len(), 1);
        }

        let mut echoes = JoinSet::new();
        for (number, mut stream) in streams.into_iter().enumerate() {
            let sent = targets::pattern(number as u64, LATER_BYTES);
            echoes.spawn(async move { connect::echo_to_the_end(&mut stream, &sent).await });
        }
        echoes.join_all().await;
        let sum = 3.0 * (FIRST_BYTES + LATER_BYTES) as f64;
        for direction in ["to_target", "to_client"] {
            let series = format!("adit_tunnel_bytes_total{{direction=\"{direction}\"}}");
            world.server_metric(&series, sum).await;
        }
        world.ended("clean", 3.0).await;
        // Raw-lane tunnels use up their lanes. The refused lane is idle again.
        over(&world, 2.0).await;
        assert_eq!(value(&world, LOST), 0.0);
    }
}
