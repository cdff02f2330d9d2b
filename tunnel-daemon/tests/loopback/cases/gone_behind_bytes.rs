//! Clients and targets that disconnect while their bytes are stuck. FIN or RST is behind those bytes and is still detected.
//! A peer that only pauses keeps its tunnel.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use adit_net::tasks::Tasks;
use socket2::SockRef;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;

use super::metrics::full;
use crate::support::lanes::{BUSY, HITS, ended, value};
use crate::support::raw::Connection;
use crate::support::wait::{until, until_for, until_still, within};
use crate::support::world::{World, endpoints_left, sample};
use crate::support::{connect, targets};

/// A failed connection gets 30 s for its last bytes. The rest is for a busy machine.
const GIVEN_UP: Duration = Duration::from_secs(90);

async fn open(world: &World, port: u16) -> UnixStream {
    connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await
}

/// Writes until all buffers on the path are full.
pub(super) async fn fill(stream: &mut (impl AsyncWrite + Unpin)) {
    let (block, sent) = (vec![7; 64 * 1024], AtomicU64::new(0));
    let sending = async {
        while let Ok(count) = stream.write(&block).await {
            sent.fetch_add(count as u64, Relaxed);
        }
    };
    tokio::select! {
        () = sending => panic!("the tunnel is cut before its end"),
        () = until_still("nobody takes more", || sent.load(Relaxed)) => (),
    }
}

/// A target that reads nothing until `gate` opens, and then everything.
async fn gated(gate: Arc<Notify>) -> (u16, Tasks) {
    targets::serve(move |mut stream| {
        let gate = Arc::clone(&gate);
        async move {
            gate.notified().await;
            tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
            Ok(())
        }
    })
    .await
}

async fn flood(stream: &mut TcpStream, sent: &AtomicU64) -> io::Result<()> {
    let block = vec![7; 64 * 1024];
    loop {
        let count = stream.write(&block).await?;
        sent.fetch_add(count as u64, Relaxed);
    }
}

/// A target that sends until `gate` opens, and then resets the connection.
async fn breaking_off(gate: Arc<Notify>, sent: Arc<AtomicU64>) -> (u16, Tasks) {
    targets::serve(move |mut stream| {
        let (gate, sent) = (Arc::clone(&gate), Arc::clone(&sent));
        async move {
            tokio::select! {
                end = flood(&mut stream, &sent) => end?,
                () = gate.notified() => (),
            }
            SockRef::from(&stream).set_linger(Some(Duration::ZERO))
        }
    })
    .await
}

/// A client closes behind stuck bytes, and its tunnel ends. Two tunnels that only pause, one in each direction, survive the
/// same check.
async fn an_end_is_found(lanes: bool) {
    let (world, agent) = World::on(lanes, &["--half-closed-timeout=1s"]).await;
    let (port, _source) = targets::source(u64::MAX).await;
    let mut paused = open(&world, port).await;
    let gate = Arc::new(Notify::new());
    let (port, _gated) = gated(Arc::clone(&gate)).await;
    let mut waiting = open(&world, port).await;
    fill(&mut waiting).await;
    let (sink, port) = targets::with_small_window();
    let _sink = targets::deaf_on(sink);
    let mut stuck = open(&world, port).await;
    fill(&mut stuck).await;
    if lanes {
        assert_eq!(value(&world, HITS), 3.0);
    }
    drop(stuck);

    world.ended("half_closed_idle", 1.0).await;
    endpoints_left(&agent, 2).await;
    if lanes {
        world.server_metric(BUSY, 2.0).await;
    }
    let some = targets::pattern(0, 1_000_000);
    connect::hears(&mut paused, &some).await;
    gate.notify_one();
    connect::say(&mut waiting, &some).await;
}

/// Limit (times): A half-closed and silent tunnel
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_close_behind_stuck_bytes_is_detected() {
    let [lane, link] = [true, false].map(|lanes| Box::pin(an_end_is_found(lanes)));
    tokio::join!(lane, link);
}

async fn a_client_breaks_off(lanes: bool) {
    let (world, agent) = World::on(lanes, &[]).await;
    let (port, _target) = targets::serve(|mut stream| async move {
        stream.write_u8(7).await?;
        std::future::pending().await
    })
    .await;
    let mut stream = open(&world, port).await;
    fill(&mut stream).await;
    // Closing a unix socket with unread input resets it.
    within("the word", stream.readable())
        .await
        .expect("the tunnel lives");
    drop(stream);
    until_for(GIVEN_UP, "the client is given up", || {
        value(&world, &ended("client_gone")) == 1.0
    })
    .await;
    until_for(GIVEN_UP, "its target is let go", || {
        agent.metrics.open_endpoint_connections() == 0
    })
    .await;
    if lanes {
        until_for(GIVEN_UP, "so is its lane", || value(&world, BUSY) == 0.0).await;
    }
}

async fn a_target_breaks_off(lanes: bool) {
    let (world, agent) = World::on(lanes, &[]).await;
    let (gate, sent) = (Arc::new(Notify::new()), Arc::new(AtomicU64::new(0)));
    let (port, _target) = breaking_off(Arc::clone(&gate), Arc::clone(&sent)).await;
    let mut stream = open(&world, port).await;
    until("the target sends", || sent.load(Relaxed) > 0).await;
    until_still("the target is held", || sent.load(Relaxed)).await;
    gate.notify_one();
    until_for(GIVEN_UP, "the target is given up", || {
        let agents = agent.metrics.scrape().text();
        sample(&agents, &ended("target_reset")) == Some(1.0)
    })
    .await;
    endpoints_left(&agent, 0).await;
    // The client first gets the bytes that were read before the reset.
    let (rest, _end) = connect::end(&mut stream).await;
    assert!(!rest.is_empty());
    world.ended("target_reset", 1.0).await;
}

/// A peer that resumes reading within 30 s still gets the rest.
///
/// Limit (times): A client or target that broke off while its bytes are stuck
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_breaks_off_behind_stuck_bytes_times_out_on_a_lane() {
    a_client_breaks_off(true).await;
}

/// Limit (times): A client or target that broke off while its bytes are stuck
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_breaks_off_behind_stuck_bytes_times_out_on_the_link() {
    a_client_breaks_off(false).await;
}

/// Limit (times): A client or target that broke off while its bytes are stuck
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_breaks_off_behind_stuck_bytes_times_out_on_a_lane() {
    a_target_breaks_off(true).await;
}

/// Limit (times): A client or target that broke off while its bytes are stuck
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_breaks_off_behind_stuck_bytes_times_out_on_the_link() {
    a_target_breaks_off(false).await;
}

/// The server keeps reading the HTTP/2 connection while only the call is blocked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_client_that_disconnects_behind_stuck_bytes_is_detected_at_once() {
    /// More than all buffers on the path hold, as in `paused_tunnels`.
    const UPLOAD_BLOCKS: usize = 64;
    let (world, agent) = World::on(false, &[]).await;
    let (sink, port) = targets::with_small_window();
    let _sink = targets::deaf_on(sink);
    let (connection, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &format!("127.0.0.1:{port}")).await;
    call.upload(conn, UPLOAD_BLOCKS);
    world.server_metric(&full("Proxy"), 1.0).await;
    drop((call, connection));
    world.ended("client_gone", 1.0).await;
    endpoints_left(&agent, 0).await;
}
