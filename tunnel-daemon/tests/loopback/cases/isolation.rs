//! Isolation of tunnels: stalled readers, stalled targets, and many streams on one connection.

use std::time::{Duration, Instant};

use tokio::net::UnixStream;

use crate::support::lanes::ended;
use crate::support::raw::{Call, Connection};
use crate::support::wait::{until, within};
use crate::support::world::{World, echo, endpoints_left, sample};
use crate::support::{connect, targets};

/// Allowed slowdown of an echo beside stalled readers. Generous, because other tests run concurrently.
const RATIO_MAX: f64 = 3.0;
/// Durations below this are noise.
const NOISE: Duration = Duration::from_millis(3);
const ECHOES: usize = 200;

async fn medians(world: &World, target: &str) -> (Duration, Duration) {
    let mut grpc = world.tunnel(target).await;
    let mut http = connect::open(&world.connect(), target).await;
    let (mut grpc_times, mut http_times) = (Vec::new(), Vec::new());
    for _echo in 0..ECHOES {
        let start = Instant::now();
        echo(&mut grpc, b"how long does this take?").await;
        grpc_times.push(start.elapsed());
        let start = Instant::now();
        connect::echo(&mut http, b"how long does this take?").await;
        http_times.push(start.elapsed());
    }
    grpc_times.sort();
    http_times.sort();
    (grpc_times[ECHOES / 2], http_times[ECHOES / 2])
}

/// Clients that opened an endless download and read nothing of it.
struct Stalled {
    _calls: Vec<(Connection, Call)>,
    _sockets: Vec<UnixStream>,
}

async fn stalled(world: &World, target: &str) -> Stalled {
    let (mut calls, mut sockets) = (Vec::new(), Vec::new());
    for random in 1..=4 {
        let (connection, mut call) = Connection::proxied(world).await;
        call.open(random, target).await;
        calls.push((connection, call));
        sockets.push(connect::open(&world.connect(), target).await);
    }
    Stalled {
        _calls: calls,
        _sockets: sockets,
    }
}

/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_readers_do_not_slow_the_others_down() {
    let (source, _source) = targets::source(u64::MAX).await;
    let (world, agent, target, _echo) = World::with_echo().await;
    let before = medians(&world, &target).await;
    let stalled = stalled(&world, &format!("127.0.0.1:{source}")).await;
    until("eight downloads are open", || {
        agent.metrics.open_endpoint_connections() >= 8
    })
    .await;
    let mut after = medians(&world, &target).await;
    let slow = |before: Duration, after: Duration| {
        after > NOISE && after.as_secs_f64() > RATIO_MAX * before.as_secs_f64()
    };
    for _retry in 0..2 {
        if slow(before.0, after.0) || slow(before.1, after.1) {
            after = medians(&world, &target).await;
        }
    }
    assert!(
        !slow(before.0, after.0),
        "gRPC: {:?} became {:?}",
        before.0,
        after.0
    );
    assert!(
        !slow(before.1, after.1),
        "CONNECT: {:?} became {:?}",
        before.1,
        after.1
    );
    // The stalled tunnels are still open.
    assert!(agent.metrics.open_endpoint_connections() >= 8);
    let text = world.server().metrics.scrape().text();
    for reason in ["budget", "stalled"] {
        assert_eq!(sample(&text, &ended(reason)), Some(0.0));
    }
    drop(stalled);
    endpoints_left(&agent, 0).await;
    world.server_metric("adit_held_bytes", 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_targets_do_not_stop_new_dials() {
    let (deaf, _deaf) = targets::deaf().await;
    let (world, _agent, target, _echo) = World::with_echo().await;
    let mut senders = Vec::new();
    for _sender in 0..4 {
        let stream = connect::open(&world.connect(), &format!("127.0.0.1:{deaf}")).await;
        let block = vec![0; 64 * 1024];
        // Writes until the socket buffer stays full.
        within("back-pressure", async {
            let mut full = 0;
            while full < 20 {
                match stream.try_write(&block) {
                    Ok(_) => full = 0,
                    Err(_would_block) => {
                        full += 1;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            }
        })
        .await;
        senders.push(stream);
    }
    for _dial in 0..10 {
        world.assert_serves(&target).await;
    }
    drop(senders);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_proxy_streams_share_one_connection() {
    let (world, agent, target, _echo) = World::with_echo().await;
    let connection = Connection::client(&world).await;
    let mut calls = Vec::new();
    for random in 0..1000 {
        let mut call = connection.proxy().await;
        call.dial(random, &target);
        calls.push(call);
    }
    let mut open = Vec::new();
    for mut call in calls {
        match call.payload().await {
            Some(adit_core::wire::packets::packet::Payload::DialResponse(answer)) => {
                assert_eq!(answer.error, "");
                open.push((answer.connect_id, call));
            }
            other => panic!("{other:?}"),
        }
    }
    endpoints_left(&agent, 1000).await;
    for (conn, call) in &mut open {
        call.data(*conn, "all at once");
    }
    for (conn, call) in &mut open {
        call.echo_arrives(*conn, b"all at once").await;
    }
    drop((open, connection));
    endpoints_left(&agent, 0).await;
}

/// Paused streams delay neither siblings nor new dials on their connection.
///
/// Upstream (tunnels): Stalled clients and targets do not slow other tunnels of their agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_streams_do_not_stop_their_siblings_on_the_connection() {
    let (source, _source) = targets::source(u64::MAX).await;
    let (world, agent, target, _echo) = World::with_echo().await;
    let connection = Connection::client(&world).await;
    let mut paused = Vec::new();
    for random in 0..16 {
        let mut call = connection.proxy().await;
        call.open(random, &format!("127.0.0.1:{source}")).await;
        paused.push(call);
    }
    for random in 100..120 {
        let mut call = connection.proxy().await;
        let conn = call.open(random, &target).await;
        call.echo(conn, b"not held up").await;
    }
    drop((paused, connection));
    endpoints_left(&agent, 0).await;
}

/// All streams of a Go client's connection share a window of 64 KiB at first. The paused stream leaves about 5 KiB of it. If
/// each idle stream kept 44 bytes that it reserved and did not use, 125 streams would exhaust the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_streams_reserve_nothing_of_their_connections_window() {
    const KEPT: usize = 60_000;
    let (source, _source) = targets::source(KEPT as u64).await;
    let (world, _agent, target, _echo) = World::with_echo().await;
    let connection = Connection::go_client(&world).await;
    let mut paused = connection.proxy().await;
    paused.open(0, &format!("127.0.0.1:{source}")).await;
    paused.keep(KEPT).await;
    let mut idle = Vec::new();
    for random in 1..=200 {
        let mut call = connection.proxy().await;
        let conn = call.open(random, &target).await;
        call.echo(conn, b"not held up").await;
        idle.push(call);
    }
}
