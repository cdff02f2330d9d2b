//! Programs that shut down: all work in progress completes within the grace period.

use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use adit::agent::RunningAgent;
use adit_config::limits::GREETING_TIMEOUT;
use adit_core::lane::LaneEvent;
use adit_core::wire::packets::packet::Payload;
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::support::connect::say;
use crate::support::lanes::{ended, warm};
use crate::support::raw::Connection;
use crate::support::server_lane::{ServerLane, request};
use crate::support::stub_lane::{self, Stub, one_idle};
use crate::support::stub_server::StubServer;
use crate::support::targets::Sum;
use crate::support::wait::{until, within};
use crate::support::world::{World, agent_metric, sample};
use crate::support::{connect, targets};

/// Exceeds the limit of every test step, so a program that waits for all of it fails the test.
const GRACE: Duration = Duration::from_secs(60);
/// Exceeds the exit time of a program that has nothing to wait for.
const STAYS: Duration = Duration::from_millis(1500);
/// A write without progress for this long counts as blocked.
const STUCK: Duration = Duration::from_secs(1);
const PIECE_BYTES: usize = 16 * 1024;
/// Bytes that a program takes into its queue for a lane whose peer does not read. The queue has room for 256 KiB. The
/// connection of the lane holds less than this.
const QUEUE_TAKES: usize = 240 * 1024;

/// Fails if `leaving` is over before `work` is.
async fn outlasts<T>(
    leaving: Pin<&mut impl Future<Output = ()>>,
    what: &str,
    work: impl Future<Output = T>,
) -> T {
    tokio::select! {
        biased;
        () = leaving => panic!("it left before {what}"),
        outcome = work => outcome,
    }
}

/// Fails if `leaving` ends within `STAYS`.
async fn stays(leaving: Pin<&mut impl Future<Output = ()>>, why: &str) {
    let left = tokio::time::timeout(STAYS, leaving).await;
    assert!(left.is_err(), "it left, though there is {why}");
}

async fn linked(agent: &RunningAgent) {
    const SERVERS: &str = "konnectivity_network_proxy_agent_open_server_connections";
    agent_metric(agent, SERVERS, 1.0).await;
}

/// The server sends the dial before it has read DRAIN.
///
/// Limit (times): Dials in progress when an agent gets SIGTERM | served within the grace period
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_that_crosses_the_drain_of_an_idle_agent_is_served() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let agent = world.agent_of(server.port(), "a", &[]).await;
    let mut link = server.accept().await.greet(&[]);
    linked(&agent).await;
    agent.drain();
    link.dial(1, &target);
    let mut leaving = pin!(agent.idle(GRACE));
    let served = async {
        let conn = loop {
            match link.payload().await {
                Some(Payload::Drain(_)) => (),
                Some(Payload::DialResponse(answer)) if answer.error.is_empty() => {
                    break answer.connect_id;
                }
                other => panic!("instead of a tunnel: {other:?}"),
            }
        };
        link.echo(conn, b"asked before it was known").await;
        conn
    };
    let conn = outlasts(leaving.as_mut(), "a dial on its way was answered", served).await;
    stays(leaving.as_mut(), "a tunnel").await;
    link.echo(conn, b"and served on").await;
    link.close(conn);
    within("its end without a tunnel", leaving).await;
}

/// On a lane and on the link. The target is slow, and the dial is the agent's only work.
///
/// Limit (times): Dials in progress when an agent gets SIGTERM
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_that_waits_for_its_target_when_the_agent_drains_is_served() {
    const DIAL_TIMEOUT: &str = "--dial-timeout=60s";
    for lanes in [true, false] {
        let way: &[&str] = if lanes { &[] } else { &["--lanes-per-link=0"] };
        let (world, agent) = World::linked(&[&[DIAL_TIMEOUT], way].concat(), &[DIAL_TIMEOUT]).await;
        if lanes {
            warm(&world).await;
        }
        let slow = targets::silent_host();
        let mut client = world.client().await;
        say(&mut client, &connect::head(&slow.address)).await;
        until("a dial", || slow.dials() == 1).await;
        agent.drain();
        let mut leaving = pin!(agent.idle(GRACE));
        stays(leaving.as_mut(), "a dial").await;
        let _target = targets::echo_on(slow.revive());
        let served = async {
            let head = connect::read_head(&mut client).await;
            assert!(head.contains(" 200 "), "{head}");
            connect::echo(&mut client, b"dialled before").await;
        };
        outlasts(leaving.as_mut(), "a dial under way was answered", served).await;
        drop(client);
        within("its end without a tunnel", leaving).await;
    }
}

/// After its grace period an agent refuses dials with a reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_refused_by_a_stopping_agent_has_that_reason() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let agent = world.agent_of(server.port(), "a", &[]).await;
    let mut link = server.accept().await.greet(&[]);
    linked(&agent).await;
    let refused = async {
        for dial in 1.. {
            link.dial(dial, &target);
            match link.payload().await {
                Some(Payload::DialResponse(answer)) if answer.error.is_empty() => (),
                Some(Payload::DialResponse(answer)) => return answer.error,
                other => panic!("instead of an answer: {other:?}"),
            }
        }
        unreachable!("it refuses sooner");
    };
    let ((), error) = tokio::join!(agent.stop(), refused);
    assert_eq!(error, "dial refused: this agent is stopping");
}

/// Writes the pattern until writes block, and more than [`QUEUE_TAKES`] bytes. Returns the number of bytes written.
async fn fill(stream: &mut (impl AsyncWrite + Unpin)) -> usize {
    within("the way is full", async {
        let mut sent: usize = 0;
        loop {
            let piece = targets::pattern(sent as u64, PIECE_BYTES);
            match tokio::time::timeout(STUCK, stream.write(&piece)).await {
                Ok(written) => sent += written.expect("the other end is there"),
                Err(_elapsed) if sent > QUEUE_TAKES => return sent,
                Err(_elapsed) => (),
            }
        }
    })
    .await
}

/// Waits until the program has probably filled the room that was freed. On a slow machine less is left to send, but never
/// less than [`QUEUE_TAKES`].
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// The client half-closes first, and the target closes after its last bytes. The server reads slowly, so only the lane's
/// queue holds those bytes.
///
/// Limit (times): Last bytes on a lane when a process gets SIGTERM | delivered within the grace period
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_agent_first_delivers_the_last_bytes_of_a_tunnel() {
    let world = World::start(&[]).await;
    let mut server = StubServer::start_on(targets::with_small_window().0, &world);
    let agent = world.agent_of(server.port(), "a", &[]).await;
    let _link = server.accept().await.greet_with_lane();
    let mut lane = ServerLane::bound(&mut server).await;
    let (listener, port) = targets::with_small_window();
    lane.end
        .open(&request(&format!("127.0.0.1:{port}")), 0)
        .expect("the lane is free");
    let (opened, accepted) = tokio::join!(lane.event(), listener.accept());
    assert_eq!(opened, Some(LaneEvent::Opened));
    let mut target = accepted.expect("a connection").0;
    lane.end.fin();
    lane.flush().await;
    let end = within("the client's end", target.read(&mut [0])).await;
    assert_eq!(end.expect("in order"), 0);
    let sent = fill(&mut target).await;
    target.shutdown().await.expect("its own end");

    let mut received: Vec<u8> = Vec::new();
    let has_all = || agent.metrics.open_endpoint_connections() == 0;
    while !has_all() && sent - received.len() > QUEUE_TAKES {
        match lane.event().await {
            Some(LaneEvent::Data(bytes)) => received.extend_from_slice(&bytes),
            other => panic!("instead of bytes: {other:?}"),
        }
        a_moment().await;
    }
    until("the agent has all of it", has_all).await;
    agent.drain();
    let mut leaving = pin!(agent.idle(GRACE));
    stays(leaving.as_mut(), "much to send").await;
    let rest = async {
        loop {
            match lane.event().await {
                Some(LaneEvent::Data(bytes)) => received.extend_from_slice(&bytes),
                Some(LaneEvent::PeerFin) => return,
                other => panic!("instead of the end: {other:?}"),
            }
        }
    };
    outlasts(leaving.as_mut(), "all was sent", rest).await;
    assert_eq!(Sum::of(&received), Sum::of(&targets::pattern(0, sent)));
    // Meanwhile the server goes on answering pings.
    let answering = async { while lane.event().await.is_some() {} };
    tokio::select! {
        () = within("its end without bytes", leaving) => (),
        () = answering => panic!("the agent has closed the lane"),
    }
}

/// The other direction, in the server: the target half-closes first, and the client closes after its last bytes.
///
/// Limit (times): Last bytes on a lane when a process gets SIGTERM
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_first_delivers_the_last_bytes_of_a_tunnel() {
    let mut world = World::start(&[]).await;
    let (_connection, _call, grant) = stub_lane::agent(&world).await;
    let tcp = targets::connect_with_small_window(world.server().agents);
    let mut lane = Stub::connect_over(tcp, &world, "agent").await;
    assert!(lane.bind(&grant).await);
    one_idle(&world).await;
    let socket = world.connect();
    let opened = async {
        lane.accept().await;
        lane.end.fin();
        lane.flush().await;
    };
    let (mut client, ()) = tokio::join!(connect::open(&socket, "10.0.0.1:80"), opened);
    let end = within("the target's end", client.read(&mut [0])).await;
    assert_eq!(end.expect("in order"), 0);
    let sent = fill(&mut client).await;
    client.shutdown().await.expect("a half-close");

    let (mut received, metrics) = (Vec::<u8>::new(), world.server().metrics.scrape());
    let over = ended("clean");
    let has_all = || sample(&metrics.text(), &over) == Some(1.0);
    while !has_all() && sent - received.len() > QUEUE_TAKES {
        let enough = received.len() + PIECE_BYTES;
        while received.len() < enough {
            match lane.event().await {
                Some(LaneEvent::Data(bytes)) => received.extend_from_slice(&bytes),
                other => panic!("instead of bytes: {other:?}"),
            }
        }
        a_moment().await;
    }
    until("the server has all of it", has_all).await;
    drop(client);
    let mut leaving = pin!(world.stop_server(GRACE));
    stays(leaving.as_mut(), "much to send").await;
    let mut has_fin = false;
    let rest = async {
        while let Some(event) = lane.event().await {
            match event {
                LaneEvent::Data(bytes) => received.extend_from_slice(&bytes),
                LaneEvent::PeerFin => has_fin = true,
                _ => (),
            }
        }
    };
    tokio::join!(leaving, rest);
    assert!(has_fin, "{} bytes of {sent}", received.len());
    assert_eq!(Sum::of(&received), Sum::of(&targets::pattern(0, sent)));
}

/// The same on a link to a slow agent. The client half-closes its call after its last bytes and disconnects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_first_delivers_the_last_bytes_on_a_link() {
    /// More than the agent's window, and less than a server takes from a client whose agent reads nothing.
    const BYTES: usize = 200 * 1024;
    const CONN: i64 = 5;
    let mut world = World::start(&[]).await;
    let (_connection, mut link) = Connection::linked(&world, "stub", "").await;
    let (client, mut call) = Connection::proxied(&world).await;
    let (conn, _) = tokio::join!(call.open(1, "10.0.0.1:80"), link.answer(CONN));
    call.data(conn, targets::pattern(0, BYTES));
    call.finish();
    assert_eq!(call.next().await, None, "the server has all of it");
    drop((call, client));

    let mut leaving = pin!(world.stop_server(GRACE));
    stays(leaving.as_mut(), "much to send").await;
    let rest = async {
        let mut received: Vec<u8> = Vec::new();
        loop {
            match link.payload().await {
                Some(Payload::Data(data)) => received.extend_from_slice(&data.data),
                Some(Payload::CloseRequest(_)) => return received,
                other => panic!("instead of the end: {other:?}"),
            }
        }
    };
    let received = outlasts(leaving.as_mut(), "all was sent", rest).await;
    assert_eq!(Sum::of(&received), Sum::of(&targets::pattern(0, BYTES)));
    link.confirm_close(CONN);
    leaving.await;
}

/// Connections without a request end too. Tunnels continue.
///
/// Limit (times): Clients without a tunnel when a server gets SIGTERM | HTTP/2 connections end after their last call,
/// CONNECT ones after 2 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_server_waits_for_no_client_without_a_tunnel() {
    const HTTP_CONNECTIONS: &str = "konnectivity_network_proxy_server_http_connections";
    let (mut world, _agent, target, _echo) = World::with_echo().await;
    let began = Instant::now();
    // The frontend accepts this connection before the later ones.
    let mute = world.grpc_socket().await;
    let idle = Connection::client(&world).await;
    let (busy, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &target).await;
    let silent = world.client().await;
    world.server_metric(HTTP_CONNECTIONS, 1.0).await;

    let mut leaving = pin!(world.stop_server(GRACE));
    stays(leaving.as_mut(), "a tunnel").await;
    call.echo(conn, b"within the grace").await;
    call.finish();
    within("its end without a tunnel", leaving).await;
    let elapsed = began.elapsed();
    assert!(elapsed < GREETING_TIMEOUT, "{elapsed:?}");
    drop((mute, idle, busy, silent));
}
