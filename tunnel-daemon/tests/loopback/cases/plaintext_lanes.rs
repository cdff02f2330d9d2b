//! Plaintext lanes, and raw lanes: tunnels on them without frames.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use adit::agent::RunningAgent;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinSet;

use super::gone_behind_bytes::fill;
use crate::support::clients::Kind;
use crate::support::connect::hears;
use crate::support::lanes::{BUSY, COPIED, HITS, IDLE, SPLICED, ended, value, warm};
use crate::support::wait::{until, within};
use crate::support::ways::engine_is_possible;
use crate::support::world::{World, echo, endpoints_left, sample, scraped};
use crate::support::{connect, targets};

const PLAINTEXT: &str = "--lane-security=plaintext";
const RAW: &str = "adit_tunnels_opened_total{path=\"raw-lane\"}";
const USED: &str = "adit_lanes_closed_total{reason=\"used\"}";

/// A server and an agent that both have plaintext lanes.
async fn plain(flags: &[&str]) -> (World, RunningAgent) {
    let flags = [&[PLAINTEXT], flags].concat();
    World::warm(&flags, &flags).await
}

/// Waits until this many lanes are used up and no lane is busy.
pub(super) async fn over(world: &World, tunnels: f64) {
    world.server_metric(USED, tunnels).await;
    world.server_metric(BUSY, 0.0).await;
}

/// A reset of the target ends the only tunnel.
pub(super) async fn is_reset_by_its_target(world: &World) {
    let (port, _target) = targets::resetting().await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    connect::say(&mut stream, b"go").await;
    let _end = connect::end(&mut stream).await;
    over(world, 1.0).await;
    world.ended("target_reset", 1.0).await;
}

/// A client leaves during its dial.
pub(super) async fn cancels_a_dial(world: &World) {
    let target = targets::silent_host();
    let mut stream = world.client().await;
    connect::say(&mut stream, &connect::head(&target.address)).await;
    world.server_metric(BUSY, 1.0).await;
    drop(stream);
    over(world, 1.0).await;
}

/// Dials that fail return their lane.
pub(super) async fn fails_dials(world: &World) {
    let (_held, closed) = targets::closed_port();
    let closed = closed.to_string();
    for _dial in 0..20 {
        let (status, text) = connect::refused(&world.connect(), &connect::head(&closed)).await;
        assert!(text.contains("connection refused"), "{status} {text}");
    }
    assert_eq!((value(world, HITS), value(world, USED)), (20.0, 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_arrive_whole_with_either_engine() {
    for engine in ["epoll", "io-uring"] {
        if !engine_is_possible(engine, "bytes_arrive_whole_with_either_engine") {
            continue;
        }
        let (world, agent) = plain(&[&format!("--relay-engine={engine}")]).await;
        let series = format!("adit_relay_tunnels{{driver=\"{engine}\"}}");
        assert_eq!(value(&world, &series), 0.0);
        let (target, _echo) = targets::local_echo().await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, b"small").await;
        let sent = targets::pattern(0, 16_000_000);
        connect::echo_to_the_end(&mut stream, &sent).await;
        over(&world, 1.0).await;
        assert_eq!(value(&world, HITS), 1.0);
        let moved = value(&world, COPIED) + value(&world, SPLICED);
        assert_eq!(moved, 2.0 * (sent.len() + 5) as f64);
        until("the agent has counted as much", || {
            let agents = agent.metrics.scrape().text();
            let agent_moved = [COPIED, SPLICED].map(|series| sample(&agents, series));
            agent_moved.iter().flatten().sum::<f64>() == moved
        })
        .await;
        // Client and target both sent EOF, so the server counts the tunnel as cleanly closed.
        world.ended("clean", 1.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_bytes_of_either_side_arrive() {
    let (world, _agent) = plain(&[]).await;
    let (port, _target) = targets::server_first(b"welcome").await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    hears(&mut stream, b"welcome").await;
    connect::echo(&mut stream, b"and back").await;

    until("enough lanes", || value(&world, IDLE) >= 3.0).await;
    let (port, _echo) = targets::echo().await;
    let mut request = connect::head(&format!("127.0.0.1:{port}"));
    request.extend_from_slice(b"early");
    let mut answer = connect::request(&world.connect(), &request).await;
    hears(&mut answer.stream, b"early").await;
    drop((stream, answer));
    over(&world, 2.0).await;
}

/// gRPC clients need frames. A lane that has carried frames may become a raw lane later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_frontends_share_plaintext_lanes() {
    let (world, _agent) = plain(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    for round in 1..=10 {
        let mut tunnel = world.tunnel(&target).await;
        echo(&mut tunnel, b"in frames").await;
        drop(tunnel);
        until("enough lanes", || value(&world, IDLE) >= 3.0).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, b"without frames").await;
        drop(stream);
        over(&world, f64::from(round)).await;
    }
    assert_eq!(value(&world, HITS), 20.0);
}

/// Dials in quick succession use lanes that come back instead of waiting for new ones. All dials succeed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_dials_succeeds() {
    const TUNNELS: usize = 300;
    let (world, _agent) = plain(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    let streams = connect::burst(&world.connect(), &target, TUNNELS).await;
    drop(streams);
    world.server_metric(BUSY, 0.0).await;
    // Not every tunnel used up its lane.
    for path in ["lane", "raw-lane"] {
        let series = format!("adit_tunnels_opened_total{{path=\"{path}\"}}");
        assert!(value(&world, &series) > 0.0, "{path}");
    }
    world.assert_no_lane_lost();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_stay_encrypted_unless_both_ends_set_plaintext() {
    const MARK: &[u8] = b"nobody on the way may read this";
    let (target, _echo) = targets::local_echo().await;
    for (server_flags, agent_flags, readable) in [
        (&[PLAINTEXT][..], &[][..], false),
        (&[], &[PLAINTEXT], false),
        (&[PLAINTEXT], &[PLAINTEXT], true),
    ] {
        let (world, _agent, tap) = tapped(server_flags, agent_flags).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, MARK).await;
        let mut tunnel = world.tunnel(&target).await;
        echo(&mut tunnel, MARK).await;
        assert_eq!(value(&world, HITS), 2.0);
        assert_eq!(tap.has_seen(MARK), readable);
        let insecure = "adit_insecure_flags{flag=\"lane-security=plaintext\"}";
        let text = world.server().metrics.scrape().text();
        let told = sample(&text, insecure);
        assert_eq!(told, (!server_flags.is_empty()).then_some(1.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_dial_keeps_its_lane() {
    let (world, _agent) = plain(&[]).await;
    fails_dials(&world).await;
}

/// A client leaves during its dial. The agent may already have switched to raw bytes, so the lane is closed. The core's
/// `lane::tests::raw` tests that no frame is sent on the lane meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_dial_closes_its_lane() {
    let (world, _agent) = plain(&[]).await;
    cancels_a_dial(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_reset_is_counted_as_target_reset() {
    let (world, _agent) = plain(&[]).await;
    is_reset_by_its_target(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_half_closed_and_silent_is_cut() {
    let (world, _agent) = World::warm(&[PLAINTEXT, "--half-closed-timeout=1s"], &[PLAINTEXT]).await;
    let (port, _target) = targets::deaf().await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    stream.shutdown().await.expect("a half-close");
    let _end = connect::end(&mut stream).await;
    over(&world, 1.0).await;
    world.ended("half_closed_idle", 1.0).await;
}

/// Opens a tunnel on a raw lane. A tunnel that leaves fewer than two lanes idle has frames instead.
async fn open_raw_tunnel(world: &World, target: &str) -> UnixStream {
    warm(world).await;
    connect::open(&world.connect(), target).await
}

/// The client of one tunnel closes behind bytes that its target never reads, so the EOF reaches no peer. Beside it, one tunnel
/// is half-closed and moves, and one is open in both directions and paused.
async fn a_stuck_half_close_is_cut(engine: &str) {
    const PACE: Duration = Duration::from_millis(50);
    if !engine_is_possible(engine, "a_half_close_behind_stuck_bytes_is_cut") {
        return;
    }
    let engine = format!("--relay-engine={engine}");
    let flags: [&str; 2] = [PLAINTEXT, &engine];
    let (world, agent) = World::linked(
        &[&flags[..], &["--half-closed-timeout=1s"]].concat(),
        &flags,
    )
    .await;
    let (port, _source) = targets::source(u64::MAX).await;
    let source = format!("127.0.0.1:{port}");
    let mut paused = open_raw_tunnel(&world, &source).await;
    let mut reading = open_raw_tunnel(&world, &source).await;
    let (sink, port) = targets::with_small_window();
    let _sink = targets::deaf_on(sink);
    let mut stuck = open_raw_tunnel(&world, &format!("127.0.0.1:{port}")).await;
    // On a lane with frames the EOF behind queued bytes would not be read.
    assert_eq!(value(&world, RAW), 3.0);
    fill(&mut stuck).await;
    drop(stuck);

    reading.shutdown().await.expect("a half-close");
    let mut block = vec![0; 64 * 1024];
    let slowly = async {
        while reading.read_exact(&mut block).await.is_ok() {
            tokio::time::sleep(PACE).await;
        }
    };
    tokio::select! {
        () = slowly => panic!("a tunnel that moves is cut"),
        () = world.ended("half_closed_idle", 1.0) => (),
    }
    endpoints_left(&agent, 2).await;
    assert_eq!(value(&world, BUSY), 2.0);
    hears(&mut paused, &targets::pattern(0, 1_000_000)).await;
}

/// Limit (times): A half-closed and silent tunnel
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_close_behind_stuck_bytes_is_cut() {
    tokio::join!(
        a_stuck_half_close_is_cut("epoll"),
        a_stuck_half_close_is_cut("io-uring")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_or_agent_that_stops_ends_its_tunnels() {
    let (target, _echo) = targets::local_echo().await;
    for server_stops in [true, false] {
        let (mut world, agent) = plain(&[]).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, b"before").await;
        let scrape = world.server().metrics.scrape();
        if server_stops {
            world.stop_server(Duration::ZERO).await;
        } else {
            agent.stop().await;
        }
        let _end = connect::end(&mut stream).await;
        let reason = if server_stops {
            "shutdown"
        } else {
            "target_reset"
        };
        scraped(&scrape, &ended(reason), 1.0).await;
    }
}

/// No byte has been sent yet: the server waits for the first one, and the relay does not know the tunnel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_ends_tunnels_without_any_bytes() {
    let (mut world, agent) = plain(&[]).await;
    let (port, _target) = targets::deaf().await;
    let target = format!("127.0.0.1:{port}");
    let mut stream = connect::open(&world.connect(), &target).await;
    let scrape = world.server().metrics.scrape();
    world.stop_server(Duration::ZERO).await;
    let _end = connect::end(&mut stream).await;
    scraped(&scrape, &ended("shutdown"), 1.0).await;
    // The tunnel is cut in both directions. A half-close would leave the connection to this target open.
    endpoints_left(&agent, 0).await;
}

/// As above, for a client that could mistake a FIN for the EOF of a silent target.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_resets_clients_of_tunnels_without_any_bytes() {
    let flags = [&[PLAINTEXT], Kind::Tcp.flags()].concat();
    let (mut world, _agent) = World::warm(&flags, &[PLAINTEXT]).await;
    let (port, _target) = targets::deaf().await;
    let mut stream = Kind::Tcp.open(&world, &format!("127.0.0.1:{port}")).await;
    let scrape = world.server().metrics.scrape();
    world.stop_server(Duration::ZERO).await;
    let end = within("the end", stream.read_u8()).await;
    let seen = end.map_err(|error| error.kind());
    assert_eq!(seen, Err(ErrorKind::ConnectionReset));
    // The tunnel had no frames.
    scraped(&scrape, USED, 1.0).await;
}

/// A server and an agent with warm lanes, and the bytes between them.
pub(super) async fn tapped(of_server: &[&str], of_agent: &[&str]) -> (World, RunningAgent, Tap) {
    let world = World::start(of_server).await;
    let tap = Tap::on(world.server().agents).await;
    let agent = world
        .agent_of(tap.address.port(), "agent-1", of_agent)
        .await;
    world.links(1).await;
    warm(&world).await;
    (world, agent, tap)
}

/// Records the bytes between an agent and its server.
pub(super) struct Tap {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
    _accepting: JoinSet<()>,
}

impl Tap {
    async fn on(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (notes, mut accepting) = (Arc::clone(&seen), JoinSet::new());
        accepting.spawn(async move {
            let mut copying = JoinSet::new();
            while let Ok((agent, _peer)) = listener.accept().await {
                let server = TcpStream::connect(server).await.expect("it listens");
                let (from_agent, to_agent) = agent.into_split();
                let (from_server, to_server) = server.into_split();
                copying.spawn(note(from_agent, to_server, Arc::clone(&notes)));
                copying.spawn(note(from_server, to_agent, Arc::clone(&notes)));
            }
        });
        Self {
            address,
            seen,
            _accepting: accepting,
        }
    }

    pub(super) fn has_seen(&self, mark: &[u8]) -> bool {
        let seen = self.seen.lock().expect("nothing panics");
        let holds = |bytes: &Vec<u8>| bytes.windows(mark.len()).any(|window| window == mark);
        seen.iter().any(holds)
    }
}

async fn note(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    notes: Arc<Mutex<Vec<Vec<u8>>>>,
) {
    let at = {
        let mut notes = notes.lock().expect("nothing panics");
        notes.push(Vec::new());
        notes.len() - 1
    };
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let bytes = &buffer[..count];
        if let Some(note) = notes.lock().expect("nothing panics").get_mut(at) {
            note.extend_from_slice(bytes);
        }
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
    let _gone = to.shutdown().await;
}
