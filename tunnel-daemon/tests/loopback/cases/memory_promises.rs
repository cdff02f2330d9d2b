//! Tunnels that are open and idle, and then all send at once while nobody reads: a process has promised each of them memory,
//! refuses those beyond, and is not killed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use adit::demo::grpc_client::{ClientError, GrpcTunnel};
use adit_net::tasks::Tasks;
use bytes::Bytes;
use futures_util::future::join_all;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint, Uri};

use super::lane_processes::nightly;
use crate::support::lanes::LINKS;
use crate::support::memory_cgroup::MemoryCgroup;
use crate::support::process::{Process, metric, scrape, sum};
use crate::support::skip::skip;
use crate::support::wait::{stands_still, until_for, within_for};
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

const MIB: u64 = 1 << 20;
/// Tunnels that open at once.
const AT_ONCE: usize = 40;
/// Bytes that a tunnel carries in all: more than the buffers between its ends hold.
const CARRIED: usize = 160 << 10;
/// Tunnels whose bytes are read in the end, of all that were admitted.
const READ_BY: usize = 40;
/// Bytes of one write of a flood.
const PIECE: usize = 4096;
/// Limit of each step. Generous, because other tests run concurrently.
const PATIENCE: Duration = Duration::from_secs(240);

/// What has been allowed so far.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Stage {
    Idle,
    Flood,
    /// Targets read.
    Read,
}

/// Which end sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Senders {
    Targets,
    Clients,
}

/// What opens the tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Frontend {
    Connect,
    /// Each tunnel has its own connection, as with kube-apiserver.
    Grpc,
    /// Clients on the agent's host, whose destinations the server dials.
    Node,
}

/// A test: how many tunnels are to open in how much memory, and how many must be admitted.
struct Case {
    limit: u64,
    tunnels: usize,
    floor: usize,
    frontend: Frontend,
    senders: Senders,
    /// Flags at both ends.
    flags: &'static [&'static str],
    of_server: &'static [&'static str],
}

/// A target that greets with one byte, sends a pattern if it is to flood, and reads and checks [`CARRIED`] bytes if clients do.
async fn target(
    stages: watch::Receiver<Stage>,
    senders: Senders,
) -> (u16, Tasks, Arc<AtomicUsize>) {
    let intact = Arc::new(AtomicUsize::new(0));
    let (listener, port) = targets::with_small_window();
    let counted = Arc::clone(&intact);
    let tasks = targets::serve_on(listener, move |mut stream| {
        let (mut stages, counted) = (stages.clone(), Arc::clone(&counted));
        async move {
            stream.write_all(b"!").await?;
            let due = match senders {
                Senders::Targets => Stage::Flood,
                Senders::Clients => Stage::Read,
            };
            if stages.wait_for(|stage| *stage >= due).await.is_err() {
                return Ok(());
            }
            let mut at = 0;
            if senders == Senders::Targets {
                loop {
                    stream.write_all(&targets::pattern(at, PIECE)).await?;
                    at += PIECE as u64;
                }
            }
            let mut piece = vec![0; PIECE];
            while at < CARRIED as u64 {
                let count = stream.read(&mut piece).await?;
                if count == 0 || piece[..count] != targets::pattern(at, count) {
                    return Ok(());
                }
                at += count as u64;
            }
            counted.fetch_add(1, Relaxed);
            // The tunnel stays open until its client leaves.
            while stream.read(&mut piece).await? > 0 {}
            Ok(())
        }
    });
    (port, tasks, intact)
}

/// Cgroups of a server and of an agent. Without them the test is reported as skipped.
pub(super) fn cgroups(limit: u64) -> Option<[MemoryCgroup; 2]> {
    match ["server", "agent"].map(|name| MemoryCgroup::new(name, limit)) {
        [Ok(server), Ok(agent)] => Some([server, agent]),
        [Err(why), _] | [_, Err(why)] => {
            skip("memory cgroups", &why);
            None
        }
    }
}

/// A server and a linked agent, as processes in these cgroups.
pub(super) async fn limited(
    [of_server, of_agent]: &[MemoryCgroup; 2],
    flags: &[&str],
    agent_flags: &[&str],
) -> (World, Process, Process) {
    let mut world = World::start(&[&["--log-format=json"], flags].concat()).await;
    world.stop_server(Duration::ZERO).await;
    let dir = world.dir.path();
    let server = of_server.start("server", &world.server_args("0"), dir);
    let flags = [&["--log-format=json"], agent_flags].concat();
    let args = world.agent_args("agent", server.address("agents").port(), &flags);
    let agent = of_agent.start("agent", &args, dir);
    metric(server.address("health"), LINKS, 1.0).await;
    (world, server, agent)
}

/// Opens this many tunnels, some at once. Returns those that were admitted, and the number of refusals.
pub(super) async fn admit<T, F: Future<Output = Option<T>>>(
    count: usize,
    at_once: usize,
    open: impl Fn() -> F,
) -> (Vec<T>, usize) {
    let mut admitted = Vec::new();
    for begun in (0..count).step_by(at_once) {
        let dials = (begun..count.min(begun + at_once)).map(|_dial| open());
        admitted.extend(join_all(dials).await.into_iter().flatten());
    }
    let refused = count - admitted.len();
    (admitted, refused)
}

/// A CONNECT client's tunnel. `None` if the server refuses it for lack of memory, which must be typed.
pub(super) async fn admitted(world: &World, target: &str) -> Option<UnixStream> {
    let mut answer = connect::request(&world.connect(), &connect::head(target)).await;
    if answer.head.contains(" 200 ") {
        return Some(answer.stream);
    }
    let body = connect::rest(&mut answer.stream).await;
    let is_typed = answer.head.contains(" 503 ") && body.contains("short of memory");
    assert!(is_typed, "{}{body}", answer.head);
    None
}

/// A client whose tunnel is open.
enum Client {
    Unix(UnixStream),
    Tcp(TcpStream),
    Grpc(Box<GrpcTunnel>),
}

/// A connection with small HTTP/2 windows, so that a reader that pauses takes few bytes before.
async fn channel(world: &World) -> Channel {
    const WINDOW_BYTES: u32 = 65_535;
    let socket = world.grpc();
    let connector = tower::service_fn(move |_uri: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost")
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES);
    let connected = endpoint.connect_with_connector(connector).await;
    connected.expect("a server")
}

impl Client {
    /// `None` if the dial is refused for lack of memory, which must be typed.
    async fn open(
        world: &World,
        frontend: Frontend,
        node: Option<SocketAddr>,
        target: &str,
    ) -> Option<Self> {
        let mut client = match (frontend, node) {
            (Frontend::Grpc, _) => match GrpcTunnel::open(channel(world).await, target).await {
                Ok(tunnel) => Self::Grpc(Box::new(tunnel)),
                Err(ClientError::Dial(error)) if error.contains("short of memory") => return None,
                Err(error) => panic!("{error}"),
            },
            (Frontend::Node, Some(node)) => {
                // A refused client is reset, maybe before this call returns.
                Self::Tcp(TcpStream::connect(node).await.ok()?)
            }
            _ => Self::Unix(admitted(world, target).await?),
        };
        match client.read(1).await {
            Ok(greeting) => assert_eq!(&*greeting, b"!"),
            // A client of a node knows no other answer than a reset.
            Err(_reset) if frontend == Frontend::Node => return None,
            Err(error) => panic!("{error}"),
        }
        Some(client)
    }

    /// At least one byte; at most `most` from a socket.
    async fn read(&mut self, most: usize) -> Result<Bytes, String> {
        let mut piece = vec![0; most];
        let count = match self {
            Self::Unix(stream) => stream.read(&mut piece).await,
            Self::Tcp(stream) => stream.read(&mut piece).await,
            Self::Grpc(tunnel) => {
                let read = tunnel.read().await.map_err(|error| error.to_string())?;
                return read.ok_or_else(|| "the tunnel ended".to_owned());
            }
        };
        match count {
            Ok(0) => Err("the tunnel ended".to_owned()),
            Ok(count) => Ok(Bytes::copy_from_slice(&piece[..count])),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Reads bytes and compares them with what the target has sent.
    async fn take(&mut self) {
        let mut at = 0;
        while at < CARRIED {
            let piece = self.read(16 << 10).await.expect("an open tunnel");
            assert_eq!(piece, targets::pattern(at as u64, piece.len()), "at {at}");
            at += piece.len();
        }
    }

    /// Writes a pattern until the tunnel ends.
    async fn flood(mut self) {
        let mut at = 0;
        loop {
            let piece = targets::pattern(at, PIECE);
            at += PIECE as u64;
            let written = match &mut self {
                Self::Unix(stream) => stream.write_all(&piece).await.is_ok(),
                Self::Tcp(stream) => stream.write_all(&piece).await.is_ok(),
                Self::Grpc(tunnel) => tunnel.write(piece.into()).await.is_ok(),
            };
            if !written {
                return;
            }
        }
    }
}

/// Runs a case. No process is killed, at least the floor is admitted, tunnels beyond are refused by type and counted, an echo
/// beside them is answered, and what was admitted gets its bytes when its reader reads.
async fn flood(case: Case) {
    let Case {
        limit,
        tunnels,
        floor,
        frontend,
        senders,
        flags,
        of_server,
    } = case;
    let Some(groups) = cgroups(limit) else {
        return;
    };
    let (stage, stages) = watch::channel(Stage::Idle);
    let (port, _target, intact) = target(stages, senders).await;
    let target = format!("127.0.0.1:{port}");
    let allowed = format!("--allowed-destination={target}");
    let node_flags = [allowed.as_str()];
    let own = if frontend == Frontend::Node {
        &node_flags[..]
    } else {
        &[]
    };
    let listener = format!("--target=0:{target}");
    let [of_server, of_agent] = [
        [own, flags, of_server].concat(),
        [&[&*listener], flags].concat(),
    ];
    let (world, mut server, mut agent) = limited(&groups, &of_server, &of_agent).await;
    let (health, agent_health) = (server.address("health"), agent.address("health"));
    let node = (frontend == Frontend::Node).then(|| agent.address("address"));
    let (echo_port, _echo) = targets::echo().await;
    let mut echo = connect::open(&world.connect(), &format!("127.0.0.1:{echo_port}")).await;
    connect::echo(&mut echo, b"before").await;

    let open = || Client::open(&world, frontend, node, &target);
    let opening = admit(tunnels, AT_ONCE, open);
    let (mut clients, refused) = within_for(PATIENCE, "tunnels that open", opening).await;
    let admitted = clients.len();
    let idle = [&server, &agent].map(|process| process.resident_bytes() / MIB);
    stage.send(Stage::Flood).expect("targets");
    let mut writing = JoinSet::new();
    if senders == Senders::Clients {
        for client in clients.drain(..) {
            writing.spawn(client.flood());
        }
    }
    within_for(PATIENCE, "echoes beside the flood", async {
        for _echo in 0..20 {
            connect::echo(&mut echo, b"is there anybody").await;
        }
    })
    .await;
    let moved = async || sum(&scrape(agent_health).await, "adit_tunnel_bytes_total").to_bits();
    within_for(PATIENCE, "no byte moves", stands_still(moved)).await;
    println!(
        "MEASURED {tunnels} tunnels by {frontend:?}, {senders:?} send, in {} MiB {flags:?}: {admitted} admitted, {refused} refused; resident server and agent \
         {idle:?} MiB idle, {:?} MiB now; most in the cgroups {} and {} MiB",
        limit / MIB,
        [&server, &agent].map(|process| process.resident_bytes() / MIB),
        groups[0].most_bytes() / MIB,
        groups[1].most_bytes() / MIB,
    );
    assert!(
        server.ended().is_none() && agent.ended().is_none(),
        "killed"
    );
    assert!(admitted >= floor, "{admitted} of {floor} admitted");
    connect::echo(&mut echo, b"behind the flood").await;
    stage.send(Stage::Read).expect("targets");
    match senders {
        Senders::Targets => {
            let every = (admitted / READ_BY).max(1);
            within_for(PATIENCE, "readers that read later", async {
                for client in clients.iter_mut().step_by(every) {
                    client.take().await;
                }
            })
            .await;
        }
        Senders::Clients => {
            let what = "all targets to read what they were sent";
            until_for(PATIENCE, what, || intact.load(Relaxed) == admitted).await;
        }
    }
    if refused > 0 {
        let counted = if frontend == Frontend::Node {
            [
                (agent_health, "adit_node_refusals_total{reason=\"memory\"}"),
                (health, "adit_node_refusals_total{reason=\"memory\"}"),
            ]
        } else {
            [
                (health, "adit_dials_refused_total{cap=\"memory\"}"),
                (
                    agent_health,
                    "adit_dial_failures_total{reason=\"overload\"}",
                ),
            ]
        };
        let mut sum = 0.0;
        for (health, series) in counted {
            sum += sample(&scrape(health).await, series).unwrap_or(0.0);
        }
        assert!(sum >= 1.0, "{refused} refused, none counted");
    }
    assert!(
        server.ended().is_none() && agent.ended().is_none(),
        "killed"
    );
}

/// The base of all cases: what kills a server that has promised nothing.
const SMALL: Case = Case {
    limit: 64 * MIB,
    tunnels: 900,
    floor: 200,
    frontend: Frontend::Connect,
    senders: Senders::Targets,
    flags: &[],
    of_server: &[],
};

/// Limit (memory): Open tunnels
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_that_all_send_kill_nobody_in_64_mebibytes() {
    flood(SMALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_that_all_send_kill_nobody_in_64_mebibytes_without_lanes() {
    flood(Case {
        of_server: &["--lanes-per-link=0"],
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_that_all_send_on_raw_lanes_kill_nobody_in_64_mebibytes() {
    flood(Case {
        flags: &["--lane-security=plaintext"],
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_targets_that_all_send_kill_nobody_in_64_mebibytes() {
    flood(Case {
        frontend: Frontend::Grpc,
        tunnels: 500,
        ..SMALL
    })
    .await;
}

/// Limit (memory): Open tunnels
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_grpc_tunnels_whose_targets_all_send_fit_into_256_mebibytes() {
    let tunnels = nightly(2000, 1010);
    flood(Case {
        limit: 256 * MIB,
        tunnels,
        floor: 1000,
        frontend: Frontend::Grpc,
        ..SMALL
    })
    .await;
}

/// Limit (memory): Open tunnels
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_thousand_tunnels_whose_targets_all_send_fit_into_512_mebibytes() {
    let tunnels = nightly(7000, 4010);
    flood(Case {
        limit: 512 * MIB,
        tunnels,
        floor: 4000,
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_all_send_to_targets_that_do_not_read_kill_nobody_in_64_mebibytes() {
    flood(Case {
        senders: Senders::Clients,
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_all_send_on_links_kill_nobody_in_64_mebibytes() {
    flood(Case {
        senders: Senders::Clients,
        of_server: &["--lanes-per-link=0"],
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_clients_that_all_send_kill_nobody_in_64_mebibytes() {
    flood(Case {
        senders: Senders::Clients,
        frontend: Frontend::Grpc,
        tunnels: 500,
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_tunnels_whose_destinations_all_send_kill_nobody_in_64_mebibytes() {
    flood(Case {
        frontend: Frontend::Node,
        ..SMALL
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_clients_that_all_send_kill_nobody_in_64_mebibytes() {
    flood(Case {
        senders: Senders::Clients,
        frontend: Frontend::Node,
        ..SMALL
    })
    .await;
}
