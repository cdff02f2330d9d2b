//! Lanes that are reset or whose path is lost, and half-closed silent tunnels on lanes.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use adit_core::lane::LaneEvent;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Notify;

use crate::support::lanes::{BUSY, HITS, IDLE, value};
use crate::support::raw::Connection;
use crate::support::skip::skip_unprivileged;
use crate::support::stub_lane::{self, Stub, one_idle};
use crate::support::wait::{until, within, within_for};
use crate::support::wire::Wire;
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

/// Sends `bytes` through a tunnel whose agent echoes them.
async fn echo_on(lane: &mut Stub, client: &mut UnixStream, bytes: &[u8]) {
    let (mut read, mut write) = client.split();
    let there = async { write.write_all(bytes).await.expect("the tunnel lives") };
    let agent = async {
        let mut seen = 0;
        while seen < bytes.len() {
            match lane.event().await.expect("the lane lives") {
                LaneEvent::Data(piece) => {
                    seen += piece.len();
                    lane.end.send(piece);
                }
                LaneEvent::Want(_) => (),
                other => panic!("instead of bytes: {other:?}"),
            }
        }
        lane.flush().await;
    };
    let back = async {
        let mut back = vec![0; bytes.len()];
        let whole = read.read_exact(&mut back).await;
        whole.map(|_count| back).expect("the tunnel lives")
    };
    let ((), (), back) = within("an echo", async { tokio::join!(there, agent, back) }).await;
    assert!(back == bytes, "other bytes came back");
}

/// The tunnel on another lane of the same link continues, and so does the link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_reset_ends_only_its_own_tunnel() {
    let world = World::start(&[]).await;
    let (_connection, mut call, grant) = stub_lane::agent(&world).await;
    let mut tunnels = Vec::new();
    for _tunnel in 0..2 {
        let mut lane = Stub::granted(&world, &grant).await;
        one_idle(&world).await;
        let socket = world.connect();
        let (client, ()) = tokio::join!(connect::open(&socket, "10.0.0.1:80"), lane.accept());
        tunnels.push((lane, client));
    }
    let bytes = targets::pattern(0, 2_000_000);
    let (before, after) = bytes.split_at(1_000_000);
    for (lane, client) in &mut tunnels {
        echo_on(lane, client, before).await;
    }
    let (cut, mut cut_off) = tunnels.pop().expect("two of them");
    let (tcp, _session) = cut.stream.get_ref();
    adit_net::socket::set_reset_on_close(tcp).expect("it lives");
    drop(cut);
    let end = within("its tunnel's end", cut_off.read(&mut [0])).await;
    assert!(!matches!(end, Ok(1)), "{end:?}");
    let lost = [
        "adit_tunnels_closed_total{reason=\"lane_lost\"}",
        "adit_lanes_closed_total{reason=\"lost\"}",
    ];
    until("both are counted", || {
        lost.map(|series| value(&world, series)) == [1.0, 1.0]
    })
    .await;
    assert_eq!([BUSY, IDLE].map(|series| value(&world, series)), [1.0, 0.0]);
    let (mut lane, mut client) = tunnels.pop().expect("the other");
    echo_on(&mut lane, &mut client, after).await;

    // Without an idle lane the dial uses the link.
    assert_eq!(world.server().links(), 1);
    let (_dialer, mut dial) = Connection::proxied(&world).await;
    dial.dial(1, "10.0.0.1:80");
    call.dialed().await;
    assert_eq!(lost.map(|series| value(&world, series)), [1.0, 1.0]);
}

/// As when a balancer has cut idle connections: it answers the OPEN with a reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_whose_lane_is_lost_goes_over_the_link() {
    let world = World::start(&[]).await;
    let (_connection, mut call, grant) = stub_lane::agent(&world).await;
    let mut tunnels = Vec::new();
    for is_reset in [false, true] {
        let mut lane = Stub::granted(&world, &grant).await;
        one_idle(&world).await;
        let socket = world.connect();
        let agent = async {
            while !matches!(lane.event().await, Some(LaneEvent::Open(_))) {}
            if is_reset {
                let (tcp, _session) = lane.stream.get_ref();
                adit_net::socket::set_reset_on_close(tcp).expect("it lives");
            }
            drop(lane);
            call.answer(if is_reset { 2 } else { 1 }).await;
        };
        let dial = connect::open(&socket, "10.0.0.1:80");
        let (tunnel, ()) = within("a tunnel", async { tokio::join!(dial, agent) }).await;
        tunnels.push(tunnel);
    }
}

/// As when the agent is killed: whichever end the server sees first, the agent may have dialled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_whose_lane_and_link_end_fails_as_one_that_was_sent() {
    for link_first in [false, true] {
        let world = World::start(&[]).await;
        let (connection, call, mut lane) = stub_lane::bound(&world).await;
        one_idle(&world).await;
        let agent = async {
            while !matches!(lane.event().await, Some(LaneEvent::Open(_))) {}
            let link = (connection, call);
            if link_first {
                drop(link);
                until("no link", || world.server().links() == 0).await;
                drop(lane);
            } else {
                drop(lane);
                drop(link);
            }
        };
        let (socket, head) = (world.connect(), connect::head("10.0.0.1:80"));
        let dial = connect::refused(&socket, &head);
        let (answer, ()) = within("an answer", async { tokio::join!(dial, agent) }).await;
        let lost = "Backend context error: context canceled\r\n".to_owned();
        assert_eq!(answer, (502, lost), "the link ends first: {link_first}");
    }
}

/// The target gets one dial only.
///
/// Limit (times): OPEN without acknowledgement by the agent's kernel | the lane is cut after 2 s and the dial uses the
/// link
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_that_is_not_acknowledged_goes_to_the_link_after_two_seconds() {
    let (world, _agent, wire) = Wire::between(&[]).await;
    let dialled = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&dialled);
    let (port, _target) = targets::serve(move |mut stream| {
        counted.fetch_add(1, Relaxed);
        async move {
            let (mut read, mut write) = stream.split();
            tokio::io::copy(&mut read, &mut write).await.map(drop)
        }
    })
    .await;
    if let Err(error) = wire.cut_lane_input() {
        skip_unprivileged("an OPEN that is not acknowledged", error);
        return;
    }
    let start = Instant::now();
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    let waited = start.elapsed();
    connect::echo(&mut stream, b"over the link").await;
    let in_time = Duration::from_secs(2)..Duration::from_secs(10);
    assert!(in_time.contains(&waited), "{waited:?}");
    let counts = [
        "adit_lane_dials_total{result=\"unacknowledged\"}",
        "adit_lanes_closed_total{reason=\"silent\"}",
        "adit_lanes_closed_total{reason=\"lost\"}",
        HITS,
        BUSY,
    ]
    .map(|series| value(&world, series));
    assert_eq!(counts, [1.0, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(dialled.load(Relaxed), 1);
}

/// The link and the path of its lanes are lost. Tunnels on those lanes live until TCP acknowledges nothing for 20 s, at
/// either end. A tunnel whose path is intact continues. The endpoints check framed lanes, and the relay checks raw lanes.
///
/// Limit (times): A tunnel on a lane whose link is gone | lives until nothing is acknowledged for 20 s; checked every 5
/// s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_without_a_link_live_until_nothing_is_acknowledged_for_twenty_seconds() {
    // Concurrent, because both mostly wait for timers of the kernel, which a test cannot advance.
    tokio::join!(
        without_link_and_path(&[]),
        without_link_and_path(&["--lane-security=plaintext"]),
    );
}

/// `flags` are those of the server and of the agents.
async fn without_link_and_path(flags: &[&str]) {
    const SILENCE: Duration = Duration::from_secs(20);
    /// The check runs every 5 s. The rest is for a busy machine.
    const NOTICED: Duration = Duration::from_secs(60);
    const LOST: &str = "adit_tunnels_closed_total{reason=\"lane_lost\"}";
    let world = World::start(&[&["--proxy-strategies=destHost"], flags].concat()).await;
    let (wire, whole) = (
        Wire::to(world.server().agents).await,
        Wire::to(world.server().agents).await,
    );
    let agent = async |wire: &Wire, id: &str, identifiers: &str| {
        let flags = [&[identifiers], flags].concat();
        world.agent_of(wire.address.port(), id, &flags).await
    };
    let broken = agent(&wire, "broken", "--agent-identifiers=ipv4=127.0.0.1").await;
    let _other = agent(&whole, "whole", "--agent-identifiers=ipv4=127.0.0.2").await;
    world.links(2).await;
    until("warm lanes", || value(&world, IDLE) >= 32.0).await;
    // The target sends once when notified, so that the agent has bytes to send.
    let (speak, spoken) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let (told, count) = (Arc::clone(&speak), Arc::clone(&spoken));
    let (port, _target) = targets::serve(move |mut stream| {
        let (told, count) = (Arc::clone(&told), Arc::clone(&count));
        async move {
            told.notified().await;
            stream.write_all(b"a word").await?;
            count.fetch_add(1, Relaxed);
            std::future::pending().await
        }
    })
    .await;
    let (echo, _echo) = targets::echo().await;
    let acknowledged = Instant::now();
    let mut cut = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    let mut kept = connect::open(&world.connect(), &format!("127.0.0.2:{echo}")).await;
    connect::echo(&mut kept, b"before").await;
    if let Err(error) = wire.cut_lane_input_of_both() {
        skip_unprivileged("lanes whose path is gone", error);
        return;
    }
    wire.hold();
    whole.hold();
    wire.cut_link();
    whole.cut_link();
    world.links(0).await;
    cut.write_all(b"never acknowledged").await.expect("taken");
    speak.notify_one();
    until("the target has spoken", || spoken.load(Relaxed) == 1).await;
    let agents = || sample(&broken.metrics.scrape().text(), LOST);
    let mut lost = [None; 2];
    within_for(NOTICED, "both ends give the tunnel up", async {
        while lost.contains(&None) {
            let now = [value(&world, LOST) == 1.0, agents() == Some(1.0)];
            for (when, now) in lost.iter_mut().zip(now) {
                if now {
                    when.get_or_insert_with(|| acknowledged.elapsed());
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert!(
        lost.iter().flatten().all(|after| *after >= SILENCE),
        "{lost:?}"
    );
    within("the end", cut.read(&mut [0])).await.ok();
    // The tunnel whose path is intact survives without a link.
    connect::echo(&mut kept, b"after").await;
    assert_eq!(value(&world, LOST), 1.0);
}

/// A half-closed silent tunnel on a lane. The flags of one end shorten the timeout. The server counts `reason`.
async fn half_closed_and_silent(server_flags: &[&str], agent_flags: &[&str], reason: &str) {
    const BEATS: u8 = 12;
    let (world, _agent) = World::warm(server_flags, agent_flags).await;
    // The target sends at intervals for longer than the timeout, then sends nothing more and never closes.
    let (port, _target) = targets::serve(|mut stream| async move {
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await?;
        for beat in 0..BEATS {
            tokio::time::sleep(Duration::from_millis(250)).await;
            stream.write_u8(beat).await?;
        }
        std::future::pending().await
    })
    .await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    stream.write_all(b"all").await.expect("taken");
    stream.shutdown().await.expect("half-closed");
    for beat in 0..BEATS {
        let read = within("a beat", stream.read_u8()).await;
        assert_eq!(read.expect("while bytes move it lives"), beat);
    }
    let silent = Instant::now();
    let end = within("the end", stream.read_u8()).await;
    end.expect_err("it is cut");
    assert!(silent.elapsed() >= Duration::from_secs(1));
    world.ended(reason, 1.0).await;
    // Only the tunnel is reset. Its lane stays open.
    world.server_metric(BUSY, 0.0).await;
    let counts =
        [HITS, "adit_lanes_closed_total{reason=\"lost\"}"].map(|series| value(&world, series));
    assert_eq!(counts, [1.0, 0.0]);
    assert!(value(&world, IDLE) >= 4.0);
}

/// Limit (times): A half-closed and silent tunnel
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_closed_and_silent_tunnel_on_a_lane_is_reset_by_the_server() {
    half_closed_and_silent(&["--half-closed-timeout=2s"], &[], "half_closed_idle").await;
}

/// Limit (times): A half-closed and silent tunnel
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_closed_and_silent_tunnel_on_a_lane_is_reset_by_the_agent() {
    half_closed_and_silent(&[], &["--half-closed-timeout=2s"], "target_reset").await;
}
