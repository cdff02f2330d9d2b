//! Lanes between Adit server and agent: their limits, tunnels on them, and the end of a lane or of its link.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;

use super::lane_processes::nightly;
use crate::support::lanes::{BUSY, HITS, IDLE, MISSES, opened, value, warm};
use crate::support::raw::{Connection, close_response};
use crate::support::wait::{until, until_still};
use crate::support::wire::Wire;
use crate::support::world::{World, echo, sample};
use crate::support::{connect, targets};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_of_both_frontends_reuse_lanes() {
    let (world, _agent) = World::warm(&[], &[]).await;
    let (target, _echo) = targets::local_echo().await;
    for _round in 0..50 {
        world.assert_serves(&target).await;
    }
    // Most dials find a lane. On a busy machine some dials come before a lane has returned.
    assert_eq!(value(&world, HITS) + value(&world, MISSES), 100.0);
    // Each hit was answered within 2.5 s.
    let answers = ["_count", "_bucket{le=\"2.5\"}"]
        .map(|part| value(&world, &format!("adit_lane_answer_seconds{part}")));
    assert_eq!(answers, [value(&world, HITS), value(&world, HITS)]);
    assert!(value(&world, HITS) >= 90.0);
    assert!(opened(&world.server().metrics.scrape().text()) < 20.0);
    world.server_metric(BUSY, 0.0).await;
    world.assert_no_lane_lost();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_end_can_disable_lanes() {
    let (target, _echo) = targets::local_echo().await;
    for (server_flags, agent_flags) in [
        (&["--lanes-per-link=0"][..], &[][..]),
        (&[], &["--lanes=0"]),
    ] {
        let (world, _agent) = World::linked(server_flags, agent_flags).await;
        world.assert_serves(&target).await;
        let lanes = [IDLE, BUSY, HITS, MISSES].map(|series| value(&world, series));
        assert_eq!(lanes, [0.0; 4]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_uses_lanes_or_the_link_and_the_agent_opens_more_lanes() {
    const TUNNELS: usize = 300;
    let (mut world, agent) = World::warm(&[], &[]).await;
    let (target, _echo) = targets::local_echo().await;
    let streams = connect::burst(&world.connect(), &target, TUNNELS).await;
    let dials = value(&world, HITS) + value(&world, MISSES);
    assert_eq!(dials, TUNNELS as f64);
    assert!(value(&world, MISSES) > 0.0);
    // No dial waited for a lane. The agent opens lanes for the next burst.
    let wanted = || sample(&agent.metrics.scrape().text(), "adit_lanes_wanted");
    until("more lanes are wanted", || wanted() >= Some(8.0)).await;
    until("lanes for the next burst", || value(&world, IDLE) >= 8.0).await;
    drop(streams);
    world.server_metric(BUSY, 0.0).await;
    // Without a link the agent wants no lanes.
    world.stop_server(Duration::ZERO).await;
    until("no lane is wanted", || wanted() == Some(0.0)).await;
}

/// An agent has at most four unfinished handshakes with a server that does not answer, beside those for lanes that the server
/// asks for as idle ones run out. Dials do not wait for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_opens_four_lanes_at_once_and_those_that_its_server_asks_for() {
    /// The server asks for two when none is left.
    const ASKED: usize = 2;
    const TUNNELS: usize = 100;
    const MISSING: usize = 8;
    let (world, agent, wire) = Wire::between(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    let mut streams = connect::open_many(&world.connect(), &target, TUNNELS).await;
    let wanted = || sample(&agent.metrics.scrape().text(), "adit_lanes_wanted");
    let least = MISSING as f64;
    until("more lanes are wanted", || wanted() >= Some(least)).await;
    until("all of them", || Some(value(&world, IDLE)) == wanted()).await;

    wire.hold();
    while value(&world, IDLE) > 0.0 {
        streams.push(connect::open(&world.connect(), &target).await);
    }
    until("four of them", || wire.held().0 >= 4).await;
    assert!(wanted() >= Some(least));
    // Their misses raise the number of wanted lanes.
    for _dial in 0..MISSING {
        streams.push(connect::open(&world.connect(), &target).await);
    }
    for stream in &mut streams {
        connect::echo(stream, b"each of them works").await;
    }
    until_still("no more", || wire.held().1 as u64).await;
    let most = wire.held().1;
    assert!((4..=4 + ASKED).contains(&most), "{most} at once");
    wire.let_go();
    until("lanes again", || value(&world, IDLE) >= 1.0).await;
}

/// Limit (peers): Lanes of one link
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_are_capped_by_the_smaller_of_both_limits() {
    let (target, _echo) = targets::local_echo().await;
    for (server_flags, agent_flags) in [
        (&["--lanes-per-link=2"][..], &[][..]),
        (&[], &["--lanes=2"]),
    ] {
        let (world, _agent) = World::linked(server_flags, agent_flags).await;
        world.server_metric(IDLE, 2.0).await;
        let mut streams = Vec::new();
        for _tunnel in 0..5 {
            streams.push(connect::open(&world.connect(), &target).await);
        }
        for stream in &mut streams {
            connect::echo(stream, b"on a lane or not").await;
        }
        assert_eq!((value(&world, BUSY), value(&world, MISSES)), (2.0, 3.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_closes_resets_and_large_transfers_are_the_same_on_a_lane() {
    let (world, _agent) = World::warm(&[], &[]).await;
    let (target, _echo) = targets::local_echo().await;
    let mut stream = connect::open(&world.connect(), &target).await;
    let sent = targets::pattern(0, 8_000_000);
    connect::echo_to_the_end(&mut stream, &sent).await;
    world.server_metric(BUSY, 0.0).await;
    assert_eq!((value(&world, HITS), value(&world, MISSES)), (1.0, 0.0));

    // A client that disconnects with bytes in flight.
    let mut stream = connect::open(&world.connect(), &target).await;
    stream.write_all(&sent[..1_000_000]).await.expect("taken");
    drop(stream);
    world.server_metric(BUSY, 0.0).await;
    world.assert_no_lane_lost();
    world.assert_serves(&target).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_holds_up_only_itself() {
    let (world, _agent) = World::warm(&[], &[]).await;
    let (source, _flood) = targets::source(u64::MAX).await;
    let (port, _target) = targets::echo().await;
    let mut stalled = Vec::new();
    for _reader in 0..3 {
        let target = format!("127.0.0.1:{source}");
        stalled.push(connect::open(&world.connect(), &target).await);
    }
    let mut tunnel = world.tunnel(&format!("127.0.0.1:{port}")).await;
    for _round in 0..200 {
        echo(&mut tunnel, b"not held up").await;
    }
    // The server holds less than 1 MB of the stalled downloads.
    assert!(value(&world, "adit_held_bytes") < 1e6);
    // A download continues when its client reads.
    connect::take(&mut stalled[0], 4_000_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_on_lanes_outlive_their_link() {
    let (world, agent, wire) = Wire::between(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"before").await;
    let (source, _flood) = targets::source(u64::MAX).await;
    let mut paused = connect::open(&world.connect(), &format!("127.0.0.1:{source}")).await;
    let pool = world.server().lanes().remove(0);
    wire.cut_link();
    // The agent reconnects at once, with lanes of its new link.
    until("the link's end", || {
        let pools = world.server().lanes();
        pools.iter().all(|other| !Arc::ptr_eq(other, &pool))
    })
    .await;
    connect::echo(&mut stream, b"after").await;
    world.links(1).await;
    warm(&world).await;
    connect::echo(&mut stream, b"still").await;
    assert_eq!(value(&world, BUSY), 2.0);
    // Long enough for the periodic check of lanes without a link. Nightly runs also cover the backoff of the kernel's window
    // probes.
    tokio::time::sleep(Duration::from_secs(nightly(70, 7))).await;
    connect::take(&mut paused, 2_000_000).await;
    connect::echo(&mut stream, b"still").await;
    drop((stream, paused));
    world.server_metric(BUSY, 0.0).await;
    world.assert_serves(&target).await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_error_reads_the_same_on_a_lane() {
    let (world, _agent) = World::warm(&[], &[]).await;
    let (_held, target) = targets::closed_port();
    let target = target.to_string();
    let (status, text) = connect::refused(&world.connect(), &connect::head(&target)).await;
    assert!(text.contains("connection refused"), "{status} {text}");
    assert_eq!((value(&world, HITS), value(&world, MISSES)), (1.0, 0.0));
    world.server_metric(BUSY, 0.0).await;
}

/// As on a link, the client gets a close with a reason before its connection ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_closes_tunnels_on_lanes_with_a_reason() {
    let (mut world, _agent) = World::warm(&[], &[]).await;
    let (target, _echo) = targets::local_echo().await;
    let (_connection, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &target).await;
    call.echo(conn, b"before").await;
    assert_eq!((value(&world, HITS), value(&world, MISSES)), (1.0, 0.0));
    world.stop_server(Duration::ZERO).await;
    let text = "tunnel closed by the server: shutdown";
    assert_eq!(call.payload().await, Some(close_response(conn, text)));
}

/// One bound holds for all stalled readers together, and none is cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_tunnels_on_lanes_share_the_budget_of_the_process() {
    const READERS: usize = 20;
    let small = ["--process-budget=4MiB", "--agent-budget=4MiB"];
    let world = World::start_adjusted(&small, |isolation, _heads| {
        isolation.tunnel_share_bytes = 64 << 10;
    })
    .await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let (source, _flood) = targets::source(u64::MAX).await;
    let mut readers = Vec::new();
    for _reader in 0..READERS {
        until("an idle lane", || value(&world, IDLE) >= 1.0).await;
        let target = format!("127.0.0.1:{source}");
        readers.push(connect::open(&world.connect(), &target).await);
    }
    assert_eq!(value(&world, MISSES), 0.0);
    // Until half the budget is in use, kernel buffers included, each reader holds up to 256 KiB. Beyond that each may hold
    // only what arrived at once. Without a budget they would hold 5 MB.
    until("a part of the budget", || {
        value(&world, "adit_held_bytes") > 5e5
    })
    .await;
    // The gauge is updated once a second. These values are from after the last reader opened.
    for _second in 0..3 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let held = value(&world, "adit_held_bytes");
        assert!(held < 2.5e6, "{held} bytes");
    }
    for reader in &mut readers {
        connect::take(reader, 2_000_000).await;
    }
    drop(readers);
    world.server_metric("adit_held_bytes", 0.0).await;
}
