//! Ends of tunnels: sockets show the same on a lane and on the link.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use adit_net::tasks::Tasks;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;

use crate::support::clients::Kind;
use crate::support::connect::{hears, say};
use crate::support::lanes::{self, BUSY, HITS, value};
use crate::support::raw::Connection;
use crate::support::wait::{until, until_still, within};
use crate::support::world::{World, agent_metric};
use crate::support::{connect, targets};

/// More than one write takes and more than a lane has in flight.
const BYTES: usize = 3_000_000;
/// Bytes that a target sends before it resets.
const HALF: usize = 100_000;

/// A target that sends `HALF` bytes, resets when notified, and reads nothing.
async fn breaking_off() -> (u16, Tasks, Arc<Notify>) {
    let now = Arc::new(Notify::new());
    let told = Arc::clone(&now);
    let (port, tasks) = targets::serve(move |mut stream| {
        let told = Arc::clone(&told);
        async move {
            stream.write_all(&targets::pattern(0, HALF)).await?;
            told.notified().await;
            SockRef::from(&stream).set_linger(Some(Duration::ZERO))
        }
    })
    .await;
    (port, tasks, now)
}

/// Reads and checks `HALF` bytes.
async fn hear_half(stream: &mut (impl AsyncRead + Unpin)) {
    hears(stream, &targets::pattern(0, HALF)).await;
}

/// Asserts that a reset follows and no more bytes.
async fn assert_reset(stream: &mut (impl AsyncRead + Unpin), what: &str) {
    let (rest, seen) = connect::end(stream).await;
    assert_eq!(seen, Err(ErrorKind::ConnectionReset), "{what}");
    assert!(rest.is_empty(), "{} bytes", rest.len());
}

/// Asserts the tunnel's path and close reason, and that its lane is idle again.
async fn ended(world: &World, lanes: bool, reason: &str) {
    world.ended(reason, 1.0).await;
    world.server_metric(BUSY, 0.0).await;
    let lost = value(world, "adit_lanes_closed_total{reason=\"lost\"}");
    assert_eq!((value(world, HITS), lost), (f64::from(lanes), 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_half_closes_first_gets_the_rest() {
    for lanes in [true, false] {
        let (world, _agent) = Kind::Unix.world(lanes).await;
        let heard = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&heard);
        let (port, _target) = targets::serve(move |mut stream| {
            let counted = Arc::clone(&counted);
            async move {
                stream.write_all(&targets::pattern(0, BYTES)).await?;
                stream.shutdown().await?;
                let mut block = vec![0; 64 * 1024];
                loop {
                    match stream.read(&mut block).await? {
                        0 => return Ok(()),
                        count => counted.fetch_add(count, Relaxed),
                    };
                }
            }
        })
        .await;
        let target = format!("127.0.0.1:{port}");
        let mut stream = connect::open(&world.connect(), &target).await;
        let (all, end) = connect::end(&mut stream).await;
        end.expect("in order");
        assert!(all == targets::pattern(0, BYTES), "{} bytes", all.len());
        // The client's direction is still open.
        stream.write_all(&all).await.expect("it is taken");
        stream.shutdown().await.expect("a half-close");
        until("the target hears all of it", || {
            heard.load(Relaxed) == BYTES
        })
        .await;
        ended(&world, lanes, "clean").await;
    }
}

/// FIN or close_notify would make a truncated answer without a length look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_reset_midway_resets_the_client_of_its_tunnel() {
    for (kind, lanes) in [
        (Kind::Tcp, true),
        (Kind::Tcp, false),
        (Kind::Tls, true),
        (Kind::Tls, false),
    ] {
        let (world, _agent) = kind.world(lanes).await;
        let (port, _target, break_off) = breaking_off().await;
        let mut stream = kind.open(&world, &format!("127.0.0.1:{port}")).await;
        hear_half(&mut stream).await;
        break_off.notify_one();
        assert_reset(&mut stream, &format!("{kind:?}, lanes: {lanes}")).await;
        ended(&world, lanes, "target_reset").await;
    }
}

/// Unix sockets have no RST. The kernel reports a reset only to a client whose bytes were not read. Any other client sees
/// EOF.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_reset_resets_a_unix_socket_client_with_undelivered_bytes() {
    for lanes in [true, false] {
        let (world, _agent) = Kind::Unix.world(lanes).await;
        let (port, _target, break_off) = breaking_off().await;
        let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
        hear_half(&mut stream).await;
        let (block, mut said) = (vec![7; 64 * 1024], 0);
        until_still("the tunnel is full", || {
            while let Ok(count) = stream.try_write(&block) {
                said += count as u64;
            }
            said
        })
        .await;
        break_off.notify_one();
        assert_reset(&mut stream, &format!("lanes: {lanes}")).await;
        ended(&world, lanes, "target_reset").await;
    }
}

/// The loss of an agent must not look like the target's FIN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_is_lost_resets_the_clients_of_its_tunnels_on_the_link() {
    for kind in [Kind::Tcp, Kind::Tls] {
        let world = World::start(kind.flags()).await;
        let (connection, mut link) = Connection::linked(&world, "stub", "").await;
        let open = kind.open(&world, "target.test:80");
        let (mut stream, _) = tokio::join!(open, link.answer(5));
        link.data(5, targets::pattern(0, HALF));
        hear_half(&mut stream).await;
        drop((link, connection));
        assert_reset(&mut stream, &format!("{kind:?}")).await;
        world.ended("link_lost", 1.0).await;
    }
}

/// Otherwise a truncated upload would look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_disconnect_midway_resets_the_target_of_its_tunnel() {
    for lanes in [true, false] {
        let (world, agent) = Kind::Unix.world(lanes).await;
        let (port, _target, mut seen) = targets::summing().await;
        let (client, mut call) = Connection::proxied(&world).await;
        let conn = call.open(1, &format!("127.0.0.1:{port}")).await;
        call.data(conn, targets::pattern(0, HALF));
        drop((call, client));
        let sum = within("the target's report", seen.recv()).await;
        let cut = sum.is_some_and(|sum| !sum.clean);
        assert!(cut, "lanes: {lanes}: {sum:?}");
        ended(&world, lanes, "client_gone").await;
        // The agent knows, too.
        agent_metric(&agent, &lanes::ended("client_gone"), 1.0).await;
    }
}

/// The end of an agent must not look like the end of a client's upload.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_agent_resets_the_targets_of_its_tunnels() {
    for lanes in [true, false] {
        let (world, agent) = Kind::Unix.world(lanes).await;
        let (port, _target, mut seen) = targets::summing().await;
        let mut client = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
        say(&mut client, &targets::pattern(0, HALF)).await;
        within("the agent's end", agent.stop()).await;
        let sum = within("the target's report", seen.recv()).await;
        let cut = sum.is_some_and(|sum| !sum.clean);
        assert!(cut, "lanes: {lanes}: {sum:?}");
    }
}
