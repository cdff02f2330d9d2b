//! Connections that fail to become lanes, and agents that break the lane protocol. The server refuses and counts them.
//! Others are not affected.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use adit_core::ids::{LinkId, ServerId};
use adit_core::lane::{ALPN, FrameType, LaneEvent, Piece, Proof};
use adit_core::wire::metadata::LaneGrant;
use tokio::io::AsyncReadExt as _;
use tokio::task::JoinSet;

use super::hostile_agents::turned_away;
use crate::support::lanes::{BUSY, ended, value};
use crate::support::raw::Connection;
use crate::support::stub_lane::{self, Stub, bind, bound, frame, one_idle};
use crate::support::wait::{until, until_still, within};
use crate::support::world::World;
use crate::support::{connect, tls};

async fn refused(world: &World, reason: &str, count: f64) {
    let series = format!("adit_lanes_refused_total{{reason=\"{reason}\"}}");
    world.server_metric(&series, count).await;
}

/// Whether the server accepts this proof for a link on a lane that it has greeted.
async fn accepts(lane: &mut Stub, link: LinkId, proof: Proof) -> bool {
    lane.send(&bind(link, proof).to_frame()).await;
    lane.is_ready().await
}

/// A lane needs a proof made from the secret of its own link. Failures are counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_without_proof_are_refused() {
    let world = World::start(&[]).await;
    let (_connection, _call, grant) = stub_lane::agent(&world).await;

    // The right proof, to check the stub itself.
    assert!(Stub::connect(&world, "agent").await.bind(&grant).await);

    // A guessed secret.
    let guess = LaneGrant {
        secret: [7; 32].into(),
        ..grant.clone()
    };
    assert!(!Stub::connect(&world, "agent").await.bind(&guess).await);
    refused(&world, "proof", 1.0).await;

    // A proof that is valid on another connection, for another nonce.
    let mut first = Stub::connect(&world, "agent").await;
    let hello = first.hello().await;
    let link_id = grant.link;
    let proof = first.proof(&hello, link_id, &grant.secret[..]);
    let mut second = Stub::connect(&world, "agent").await;
    second.hello().await;
    assert!(!accepts(&mut second, link_id, proof).await);
    refused(&world, "proof", 2.0).await;

    // The right nonce, but a proof for another TLS session, as a man in the middle would have.
    let mut third = Stub::connect(&world, "agent").await;
    let hello = third.hello().await;
    let proof = first.proof(&hello, link_id, &grant.secret[..]);
    assert!(!accepts(&mut third, link_id, proof).await);
    refused(&world, "proof", 3.0).await;

    // Another server's id in the proof.
    let mut fourth = Stub::connect(&world, "agent").await;
    let mut hello = fourth.hello().await;
    hello.server = ServerId::new("another");
    let proof = fourth.proof(&hello, link_id, &grant.secret[..]);
    assert!(!accepts(&mut fourth, link_id, proof).await);
    refused(&world, "proof", 4.0).await;
}

/// The secret alone does not suffice: the certificate must be the link's, and the link must be open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_of_another_principal_or_a_dead_link_are_refused() {
    let world = World::start(&[]).await;
    let (_connection, mut call, grant) = stub_lane::agent(&world).await;
    assert!(!Stub::connect(&world, "client").await.bind(&grant).await);
    refused(&world, "no_link", 1.0).await;
    let wrong = LaneGrant {
        link: LinkId(999),
        ..grant.clone()
    };
    assert!(!Stub::connect(&world, "agent").await.bind(&wrong).await);
    refused(&world, "no_link", 2.0).await;

    let mut lane = Stub::granted(&world, &grant).await;
    call.finish();
    world.links(0).await;
    // The lane ends with its link, and the secret is no longer valid.
    assert_eq!(lane.event().await, None);
    assert!(!Stub::connect(&world, "agent").await.bind(&grant).await);
    refused(&world, "no_link", 3.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_require_a_request_and_a_certificate() {
    let world = World::start(&[]).await;
    let connection = Connection::agent(&world).await;
    for headers in [
        &[("agentid", "a"), ("adit-lanes", "1")][..],
        &[("agentid", "a"), ("adit-link", "1")],
        &[("agentid", "a"), ("adit-link", "1"), ("adit-lanes", "2")],
    ] {
        let mut call = connection.call("/AgentService/Connect", headers).await;
        let answer = call.headers().await.expect("an answer");
        let offered = answer.keys().any(|name| name.as_str().contains("lane"));
        assert!(!offered, "{answer:?}");
    }
    // The server refuses a client without a certificate before its greeting.
    let nobody = tls::dial_to(&world, ALPN.as_bytes(), world.server().agents, None).await;
    assert!(turned_away(nobody).await, "no certificate");
}

/// Invalid frames close the connection at once.
///
/// Limit (times): Binding of a new lane | 5 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_do_not_bind_are_closed() {
    let world = World::start(&[]).await;
    let mut silent = Stub::connect(&world, "agent").await;
    silent.hello().await;
    for nonsense in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\x04\0\0\0\0\0\0\x05hello",
        b"\x11\0\0\0\0\0\0\x03abc",
        b"\x12\0\0\0\0\0\0\0",
        &[0xff; 64],
    ] {
        let mut stub = Stub::connect(&world, "agent").await;
        stub.hello().await;
        stub.bytes(nonsense).await;
        assert!(!stub.is_ready().await);
    }
    refused(&world, "handshake", 5.0).await;
    assert!(!silent.is_ready().await);
    refused(&world, "handshake", 6.0).await;
}

/// An invalid answer to OPEN costs the agent only that lane and its tunnel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_breaks_the_protocol_loses_its_lane() {
    let world = World::start(&[]).await;
    let (_connection, _call, grant) = stub_lane::agent(&world).await;
    let offences = [
        frame(FrameType::Data, 1, b"before it is open"),
        frame(FrameType::Opened, 2, b""),
        frame(FrameType::Open, 3, b"\0\x03tcpa:1"),
        frame(FrameType::Want, 0, b"\0\0\0\x01"),
        frame(FrameType::Ready, 0, b""),
        frame(FrameType::Ping, 0, b"not eight bytes"),
        vec![4, 0, 0, 1, 0xff, 0xff, 0xff, 0xff],
    ];
    let closed = "adit_lanes_closed_total{reason=\"violation\"}";
    for (count, offence) in (1..).zip(&offences) {
        let mut lane = Stub::granted(&world, &grant).await;
        one_idle(&world).await;
        let socket = world.connect();
        let head = connect::head("10.0.0.1:80");
        let dial = connect::refused(&socket, &head);
        let answer = async {
            assert!(matches!(
                lane.event().await,
                Some(LaneEvent::Want(_) | LaneEvent::Open(_))
            ));
            lane.bytes(offence).await;
            while lane.event().await.is_some() {}
        };
        let ((status, _text), ()) = within("a refusal", async { tokio::join!(dial, answer) }).await;
        assert_eq!(status, 502);
        assert_eq!(value(&world, closed), f64::from(count), "{offence:?}");
    }
}

/// Reads the rest of a lane's connection. Returns an error if the server resets it.
async fn last_word(lane: Stub) -> io::Result<()> {
    let (mut tcp, _session) = lane.stream.into_inner();
    let mut block = vec![0; 64 * 1024];
    within("the end of the connection", async {
        while tcp.read(&mut block).await? > 0 {}
        Ok(())
    })
    .await
}

/// Asserts RST, with which the server's kernel drops unsent data. FIN would follow all queued data.
async fn assert_reset(lane: Stub) {
    let end = last_word(lane).await.expect_err("an end in order");
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset, "{end}");
}

/// The dial fails in time, and the lane is not used again.
///
/// Limit (times): RESET of a tunnel on a lane without acknowledgement | the lane is cut after 5 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_whose_agent_never_answers_is_cut() {
    let world = World::start(&["--dial-timeout=1s"]).await;
    let (_connection, _call, lane) = bound(&world).await;
    one_idle(&world).await;
    let socket = world.connect();
    let (status, text) = connect::refused(&socket, &connect::head("10.0.0.1:80")).await;
    assert_eq!(
        (status, text.trim()),
        (
            504,
            "Backend dial timeout: timed out waiting for backend dial"
        )
    );
    // The agent does not acknowledge RESET either.
    let cut = "adit_lanes_closed_total{reason=\"silent\"}";
    world.server_metric(cut, 1.0).await;
    assert_reset(lane).await;
}

/// The TCP window of the lane is 0, so not even RESET of its tunnel reaches the agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_whose_agent_reads_nothing_is_cut_when_its_client_leaves() {
    const BLOCKS: usize = 256;
    let world = World::start(&[]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let (client, mut call) = Connection::proxied(&world).await;
    let (conn, ()) = tokio::join!(call.open(1, "10.0.0.1:80"), lane.accept());
    // More than all buffers on the path hold.
    call.upload(conn, BLOCKS);
    let (tcp, _session) = lane.stream.get_ref();
    let unread = || rustix::io::ioctl_fionread(tcp).expect("it lives");
    until("bytes in front of the agent", || unread() > 0).await;
    until_still("its window is shut", unread).await;
    let left = Instant::now();
    drop((call, client));
    let cut = "adit_lanes_closed_total{reason=\"silent\"}";
    world.server_metric(cut, 1.0).await;
    let waited = left.elapsed();
    assert!(waited >= Duration::from_secs(5), "{waited:?}");
    world.server_metric(BUSY, 0.0).await;
    assert_eq!(value(&world, &ended("client_gone")), 1.0);
    assert_reset(lane).await;
}

/// Unit tests of `adit_core` cover servers that break the protocol. Here a correct stub serves tunnels one after another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conforming_stub_serves_a_tunnel() {
    let world = World::start(&[]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    for round in 0..3 {
        // The lane is idle again after the previous round.
        one_idle(&world).await;
        let socket = world.connect();
        let client = async {
            let mut stream = connect::open(&socket, "10.0.0.1:80").await;
            connect::echo(&mut stream, b"over a lane").await;
        };
        let agent = async {
            loop {
                match lane.event().await.expect("the lane lives") {
                    LaneEvent::Open(open) => {
                        assert_eq!((&*open.protocol, &*open.address), ("tcp", "10.0.0.1:80"));
                        lane.end.accept();
                    }
                    LaneEvent::Data(bytes) => lane.end.send(bytes),
                    LaneEvent::PeerFin => lane.end.fin(),
                    LaneEvent::Idle => return,
                    LaneEvent::Want(_) | LaneEvent::PeerClosed { .. } => (),
                    other => panic!("round {round}: {other:?}"),
                }
            }
        };
        within("a tunnel", async { tokio::join!(client, agent) }).await;
    }
    assert_eq!(value(&world, "adit_lane_dials_total{result=\"hit\"}"), 3.0);
}

/// The client does not read, so the server does not read the lane. RST of the agent still ends the tunnel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_client_does_not_hide_the_loss_of_its_agent() {
    let world = World::start(&[]).await;
    let (_connection, _call, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let socket = world.connect();
    let (_client, ()) = tokio::join!(connect::open(&socket, "10.0.0.1:80"), lane.accept());
    // Fills all buffers on the path, until a flush blocks for 2 s.
    within("nobody reads", async {
        loop {
            lane.end.send(vec![7; 100_000].into());
            let taken = tokio::time::timeout(Duration::from_secs(2), lane.flush()).await;
            if taken.is_err() {
                return;
            }
        }
    })
    .await;
    let (tcp, _session) = lane.stream.get_ref();
    adit_net::socket::set_reset_on_close(tcp).expect("it lives");
    drop(lane);
    world.ended("lane_lost", 1.0).await;
}

/// Each round of pings covers all lanes. A lane is not declared dead because others were checked before it.
///
/// Limit (times): PING on an idle lane
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_idle_lanes_survive_pings_and_silent_ones_do_not() {
    const LANES: usize = 300;
    let world = World::start(&[]).await;
    let (_connection, _call, grant) = stub_lane::agent(&world).await;
    let (answered, mut lanes) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
    for _lane in 0..LANES {
        let mut lane = Stub::granted(&world, &grant).await;
        // Answers pings until it is closed.
        let answered = Arc::clone(&answered);
        lanes.spawn(async move {
            while let Some(piece) = lane.piece().await {
                let asked =
                    matches!(&piece, Piece::Frame(header, _) if header.kind == FrameType::Ping);
                lane.end.handle(piece).expect("an honest server");
                lane.flush().await;
                // Waits for TCP's acknowledgement, so that the server's next ping round finds the answer even on a busy
                // machine.
                let (tcp, _session) = lane.stream.get_ref();
                until("the acknowledgement", || {
                    adit_relay::unacknowledged_bytes(tcp).is_ok_and(|bytes| bytes == 0)
                })
                .await;
                answered.fetch_add(usize::from(asked), Relaxed);
            }
        });
    }
    let _silent = Stub::granted(&world, &grant).await;
    let idle = "adit_lanes{state=\"idle\"}";
    world.server_metric(idle, 301.0).await;
    let pool = world.server().lanes().pop().expect("a pool");
    for sweep in 1..=3 {
        pool.ping_idle().await;
        let expected = if sweep == 1 { 301.0 } else { 300.0 };
        // A lane is briefly not counted as idle while the server reads its answer between two rounds.
        world.server_metric(idle, expected).await;
        until("all answers", || answered.load(Relaxed) == sweep * LANES).await;
    }
    let closed = "adit_lanes_closed_total{reason=\"silent\"}";
    assert_eq!(value(&world, closed), 1.0);
}

/// The server detects the end of an idle lane by itself, not only at the next dial.
///
/// Limit (times): An idle lane that its agent closed or lost | noticed within 1 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_lanes_drained_or_lost_by_their_agent_close_within_seconds() {
    let world = World::start(&[]).await;
    let (_connection, _call, grant) = stub_lane::agent(&world).await;
    let mut lanes = Vec::new();
    for _lane in 0..3 {
        lanes.push(Stub::granted(&world, &grant).await);
    }
    world.server_metric("adit_lanes{state=\"idle\"}", 3.0).await;
    let mut drained = lanes.pop().expect("three of them");
    drained.end.drain();
    drained.flush().await;
    assert_eq!(drained.event().await, None, "the server closes it");
    drop(lanes.pop());
    for reason in ["drained", "lost"] {
        let series = format!("adit_lanes_closed_total{{reason=\"{reason}\"}}");
        world.server_metric(&series, 1.0).await;
    }
    one_idle(&world).await;
}

/// The server refuses the lane before it is bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_beyond_the_limit_is_not_bound() {
    let world = World::start(&["--lanes-per-link=2"]).await;
    let (_connection, _call, grant) = stub_lane::agent(&world).await;
    assert_eq!(grant.lanes_max, 2);
    let mut lanes = Vec::new();
    for room in [true, true, false] {
        let mut lane = Stub::connect(&world, "agent").await;
        assert_eq!(lane.bind(&grant).await, room);
        lanes.push(lane);
    }
    refused(&world, "full", 1.0).await;
    // Closed lanes free their slots.
    drop(lanes);
    let pool = world.server().lanes().pop().expect("a pool");
    within("room again", async {
        while !Stub::connect(&world, "agent").await.bind(&grant).await {
            pool.ping_idle().await;
        }
    })
    .await;
}
