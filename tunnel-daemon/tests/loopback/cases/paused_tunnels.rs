//! Many paused tunnels on one link and on one client connection: they do not block others.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::hostile_clients::frame;
use super::lane_processes::nightly;
use super::metrics::full;
use super::processes::Processes;
use crate::support::lanes::{TUNNELS, ended};
use crate::support::process::{metric, scrape};
use crate::support::raw::{Call, Connection};
use crate::support::wait::{until_still, within, within_for};
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

/// Tunnels of each dialect and direction: 1,000 in all at night.
fn each() -> u32 {
    nightly(250, 100)
}
/// More than all buffers hold between a client and a target that reads nothing: 256 KiB each in HTTP/2, the endpoint and the
/// agent, plus the kernel's buffers.
const UPLOAD_BLOCKS: usize = 64;
/// Limit on the bytes held for a link, plus the smallest window of a thousand tunnels.
const HELD_BYTES_MAX: f64 = 96.0 * 1024.0 * 1024.0;
/// Only success matters, not time: other tests run in parallel.
const DIALS: Duration = Duration::from_secs(60);

/// Tunnels that a client or a target pauses by not reading.
struct Paused {
    readers: Vec<UnixStream>,
    _calls: (Connection, Vec<Call>),
    _writers: JoinSet<()>,
    _uploads: (Connection, Vec<Call>),
}

/// Sends on a tunnel until it is cut.
async fn send(mut stream: UnixStream, sent: Arc<AtomicU64>) {
    let block = vec![7; 64 * 1024];
    while let Ok(count) = stream.write(&block).await {
        sent.fetch_add(count as u64, Relaxed);
    }
}

impl Paused {
    /// Opens [`each`] tunnels of each dialect and direction. `source` never stops sending, and `sink` never reads.
    async fn start(processes: &Processes, source: &str, sink: &str) -> Self {
        let (world, health) = (&processes.world, processes.health);
        let (down, up) = (
            Connection::client(world).await,
            Connection::client(world).await,
        );
        let (mut readers, mut calls, mut uploads) = (Vec::new(), Vec::new(), Vec::new());
        let (mut writers, sent) = (JoinSet::new(), Arc::new(AtomicU64::new(0)));
        for random in 0..i64::from(each()) {
            readers.push(connect::open(&world.connect(), source).await);
            let mut call = down.proxy().await;
            call.open(random, source).await;
            calls.push(call);
            let stream = connect::open(&world.connect(), sink).await;
            writers.spawn(send(stream, Arc::clone(&sent)));
            let mut call = up.proxy().await;
            let conn = call.open(random, sink).await;
            call.upload(conn, UPLOAD_BLOCKS);
            uploads.push(call);
        }
        metric(health, TUNNELS, f64::from(4 * each())).await;
        // The gauge counts each client that takes nothing and each call that is not read.
        metric(health, &full("Connect"), f64::from(2 * each())).await;
        metric(health, &full("Proxy"), f64::from(each())).await;
        until_still("no socket takes more", || sent.load(Relaxed)).await;
        Self {
            readers,
            _calls: (down, calls),
            _writers: writers,
            _uploads: (up, uploads),
        }
    }
}

/// On the link only credit and budgets hold bytes, so a paused tunnel blocks nothing else.
///
/// Limit (isolation): New dials beside 1,000 paused tunnels
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_paused_tunnels_on_one_link_do_not_stop_new_dials() {
    let (processes, agent) = Processes::linked(&["--lanes-per-link=0"], &["--lanes=0"]).await;
    let agent_health = agent.address("health");
    let ((source, source_port), (sink, sink_port)) =
        (targets::with_small_window(), targets::with_small_window());
    let source = targets::source_on(source, u64::MAX);
    let sink = targets::deaf_on(sink);
    let mut paused = Paused::start(
        &processes,
        &format!("127.0.0.1:{source_port}"),
        &format!("127.0.0.1:{sink_port}"),
    )
    .await;

    let (target, _echo) = targets::local_echo().await;
    within_for(DIALS, "new tunnels", async {
        for _dial in 0..10 {
            processes.world.assert_serves(&target).await;
        }
    })
    .await;
    // All tunnels are still open, none was cut, and the bytes held stay within the limit.
    let text = scrape(processes.health).await;
    assert!(
        sample(&text, TUNNELS) >= Some(f64::from(4 * each())),
        "{text}"
    );
    for reason in ["budget", "stalled", "credit_violation", "link_lost"] {
        assert_eq!(sample(&text, &ended(reason)), Some(0.0), "{reason}");
    }
    for health in [processes.health, agent_health] {
        let held = sample(&scrape(health).await, "adit_held_bytes").expect("a gauge");
        assert!(held <= HELD_BYTES_MAX, "{held} bytes");
    }
    // A reader that resumes gets every byte.
    for reader in paused.readers.iter_mut().take(5) {
        connect::hears(reader, &targets::pattern(0, 1_000_000)).await;
    }

    // Targets close first: bytes for a target that reads nothing linger for half a minute.
    for target in [&source, &sink] {
        let _cut = target.drain(Duration::ZERO).await;
    }
    drop(paused);
    metric(processes.health, TUNNELS, 0.0).await;
    for health in [processes.health, agent_health] {
        metric(health, "adit_held_bytes", 0.0).await;
    }
}

/// Stalled streams never fill the connection's window.
///
/// Limit (memory): HTTP/2 windows of a gRPC client | the largest there is for the connection; at most 1 MiB per call
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_stalled_uploads_do_not_stop_their_siblings_on_the_connection() {
    const STREAMS: u32 = 300;
    let (world, _agent) = World::linked(&["--lanes-per-link=0"], &[]).await;
    let (sink, sink_port) = targets::with_small_window();
    let sink = targets::deaf_on(sink);
    let (target, _echo) = targets::local_echo().await;
    let connection = Connection::client(&world).await;
    let mut uploads = Vec::new();
    for random in 0..i64::from(STREAMS) {
        let mut call = connection.proxy().await;
        let conn = call.open(random, &format!("127.0.0.1:{sink_port}")).await;
        call.upload(conn, UPLOAD_BLOCKS);
        uploads.push(call);
    }
    world
        .server_metric(&full("Proxy"), f64::from(STREAMS))
        .await;
    for random in 1000..1020 {
        let mut call = connection.proxy().await;
        let conn = call.open(random, &target).await;
        call.echo(conn, b"not held up").await;
    }
    let _cut = sink.drain(Duration::ZERO).await;
    drop((uploads, connection));
    world.server_metric(TUNNELS, 0.0).await;
}

/// Limit (memory): HTTP/2 windows of a gRPC client
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_connection_has_the_largest_window_and_its_streams_small_ones() {
    const INITIAL_WINDOW_SIZE: u16 = 4;
    const SETTINGS: u8 = 4;
    const WINDOW_UPDATE: u8 = 8;
    /// Initial size of both windows in HTTP/2.
    const DEFAULT: u32 = 65_535;
    const STREAM_MAX: u32 = 1 << 20;
    let world = World::start(&[]).await;
    let mut stream = world.grpc_socket().await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    stream.write_all(preface).await.expect("taken");
    let (mut of_stream, mut of_connection) = (DEFAULT, DEFAULT);
    // There is no stream, so each WINDOW_UPDATE is for the connection.
    while of_stream == DEFAULT || of_connection == DEFAULT {
        let (kind, _flags, body) = within("both windows", frame(&mut stream)).await;
        match kind {
            SETTINGS => {
                for setting in body.chunks_exact(6) {
                    let (id, value) = setting.split_at(2);
                    let id = u16::from_be_bytes(id.try_into().expect("two bytes"));
                    if id == INITIAL_WINDOW_SIZE {
                        of_stream = u32::from_be_bytes(value.try_into().expect("four bytes"));
                    }
                }
            }
            WINDOW_UPDATE => {
                let more = body[..].try_into().expect("four bytes");
                of_connection += u32::from_be_bytes(more);
            }
            _ => (),
        }
    }
    assert_eq!(of_connection, i32::MAX.unsigned_abs());
    assert!((DEFAULT..=STREAM_MAX).contains(&of_stream), "{of_stream}");
}
