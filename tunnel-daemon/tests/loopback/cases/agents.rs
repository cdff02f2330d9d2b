//! Agents that connect, disconnect, drain and reconnect.

use std::time::{Duration, Instant};

use adit::agent::RunningAgent;
use adit::demo::grpc_client::{ClientError, GrpcTunnel};
use adit_core::wire::packets::packet::Payload;
use adit_core::wire::packets::{Drain, PacketType};

use crate::support::raw::{Connection, close_request};
use crate::support::wait::{within, within_for};
use crate::support::world::{World, echo, endpoints_left, sample};
use crate::support::{connect, targets};

/// Tolerance for "at once" on a busy machine, below the dial timeout of 25 s.
const AT_ONCE: Duration = Duration::from_secs(10);
const PENDING: &str = "konnectivity_network_proxy_server_pending_backend_dials";
const READY: &str = "konnectivity_network_proxy_server_ready_backends{proxy_strategy=\"default\"}";

/// Upstream leaves the gRPC dial pending.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dial_fails_at_once_when_its_agent_is_lost() {
    let world = World::start(&[]).await;
    let (agent, mut link) = Connection::linked(&world, "silent", "").await;
    let channel = world.channel().await;
    let grpc = GrpcTunnel::open(channel, "127.0.0.1:9");
    let request = connect::head("127.0.0.1:9");
    let socket = world.connect();
    let http = connect::refused(&socket, &request);
    let lose = async {
        for _dial in 0..2 {
            link.dialed().await;
        }
        drop(agent);
        Instant::now()
    };
    let (grpc, http, lost) = within("both dials to fail", async {
        tokio::join!(grpc, http, lose)
    })
    .await;
    assert!(lost.elapsed() < AT_ONCE, "took {:?}", lost.elapsed());
    match grpc {
        Err(ClientError::Dial(error)) => assert_eq!(error, "agent connection lost during dial"),
        other => panic!("{:?}", other.err()),
    }
    let body = "Backend context error: context canceled\r\n".to_owned();
    assert_eq!(http, (502, body));
    world.server_metric(PENDING, 0.0).await;
}

/// Upstream (agents): When an agent stops, the next request on an open connection fails at once.
/// Upstream (agents): The end of a link ends its own dials and tunnels and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_agent_ends_its_own_tunnels_at_once_and_no_others() {
    let (port, _target) = targets::echo().await;
    let world = World::start(&["--proxy-strategies=destHost"]).await;
    let lost = world.agent_for("lost", "ipv4=127.0.0.1").await;
    let kept = world.agent_for("kept", "ipv4=127.0.0.2").await;
    world.links(2).await;
    let (on_lost, on_kept) = (format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}"));
    let mut grpc = world.tunnel(&on_lost).await;
    let mut http = connect::open(&world.connect(), &on_lost).await;
    let mut grpc_kept = world.tunnel(&on_kept).await;
    let mut http_kept = connect::open(&world.connect(), &on_kept).await;
    echo(&mut grpc, b"before").await;
    connect::echo(&mut http, b"before").await;

    lost.stop().await;
    within_for(AT_ONCE, "the gRPC tunnel's end", async {
        while let Ok(Some(_)) = grpc.read().await {}
    })
    .await;
    // EOF and an error are both fine. The client must not wait.
    let end = connect::end(&mut http);
    let _end = within_for(AT_ONCE, "the CONNECT tunnel's end", end).await;

    echo(&mut grpc_kept, b"untouched").await;
    connect::echo(&mut http_kept, b"untouched").await;
    world.assert_serves(&on_kept).await;
    drop(kept);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_reconnects_to_a_server_that_restarts_on_the_same_port() {
    let (mut world, agent, target, _echo) = World::with_echo().await;
    let mut tunnel = world.tunnel(&target).await;
    echo(&mut tunnel, b"before").await;
    world.restart_server().await;
    world.links(1).await;
    world.assert_serves(&target).await;
    drop(tunnel);
    endpoints_left(&agent, 0).await;
}

/// Of several matching agents, those in the server's zone get all dials while at least one of them is connected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_in_the_zone_of_the_server_get_the_dials() {
    const DIALS: i64 = 8;
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&["--zone=east"]).await;
    let elsewhere = world.agent_for("elsewhere", "zone=west").await;
    let nowhere = world.agent("nowhere", &[]).await;
    let near = world.agent_for("near", "zone=east").await;
    world.links(3).await;
    let mut tunnels = Vec::new();
    for _dial in 0..DIALS {
        tunnels.push(connect::open(&world.connect(), &target).await);
    }
    let open = [&near, &elsewhere, &nowhere].map(|agent| agent.metrics.open_endpoint_connections());
    assert_eq!(open, [DIALS, 0, 0]);
    near.stop().await;
    world.links(2).await;
    world.assert_serves(&target).await;
}

/// Upstream (choice): A draining agent takes new tunnels when it is the only one.
/// Upstream (choice): A draining agent is picked only when all agents for the destination are draining.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_agent_gets_new_dials_only_when_it_is_alone() {
    let (world, draining, target, _echo) = World::with_echo().await;
    draining.drain();
    let drained = "konnectivity_network_proxy_server_stream_packets_total{packet_type=\"DRAIN\",segment=\"from_agent\"}";
    world.server_metric(drained, 1.0).await;
    world.assert_serves(&target).await;
    endpoints_left(&draining, 0).await;
    let open = |agent: &RunningAgent| agent.metrics.open_endpoint_connections();

    let fresh = world.agent("fresh", &[]).await;
    world.links(2).await;
    let mut tunnels = Vec::new();
    for _dial in 0..20 {
        tunnels.push(connect::open(&world.connect(), &target).await);
    }
    assert_eq!((open(&draining), open(&fresh)), (0, 20));
    drop(tunnels);
}

/// A stub agent makes the order of DRAIN and dial certain. The answer to the packet after DRAIN proves that the server has
/// read DRAIN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_takes_effect_for_the_next_dial() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let connection = Connection::agent(&world).await;
    let mut stub = connection.link("stub", "").await;
    stub.packet(PacketType::Drain, Payload::Drain(Drain {}));
    stub.data(77, "unknown");
    assert_eq!(stub.payload().await, Some(close_request(77)));
    let _agent = world.agent("fresh", &[]).await;
    world.links(2).await;
    for _dial in 0..10 {
        world.assert_serves(&target).await;
    }
}

/// The old stream may be on a dead TCP connection that the server has not detected.
///
/// Upstream (choice): A new link of an agent id replaces a dead one, and takes new dials.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newest_stream_of_an_id_takes_new_dials() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let connection = Connection::agent(&world).await;
    let _half_open = connection.link("same", "").await;
    world.links(1).await;
    let _agent = world.agent("same", &[]).await;
    world.links(2).await;
    for _dial in 0..10 {
        world.assert_serves(&target).await;
    }
}

/// Both agents may use equal connIDs. The end of the first stream does not disturb tunnels of the second.
///
/// Upstream (agents): The end of a link ends its own dials and tunnels and no others.
/// Upstream (agents): Two links with one agent id do not mix their tunnels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_stream_of_an_id_leaves_tunnels_of_the_first_alone() {
    let (target, _echo) = targets::local_echo().await;
    for flags in [&["--lanes-per-link=0"][..], &[]] {
        let world = World::start(flags).await;
        let first = world.agent("same", &[]).await;
        world.links(1).await;
        let mut old = world.tunnel(&target).await;
        echo(&mut old, b"first").await;
        let second = world.agent("same", &[]).await;
        world.links(2).await;
        // The first link takes dials while the second one is provisional.
        let mut new = within("a tunnel of the second", async {
            loop {
                let tunnel = world.tunnel(&target).await;
                if second.metrics.open_endpoint_connections() == 1 {
                    return tunnel;
                }
            }
        })
        .await;
        for _round in 0..10 {
            echo(&mut old, b"through the first").await;
            echo(&mut new, b"by the second").await;
        }
        world.server_metric(READY, 1.0).await;

        first.stop().await;
        within_for(AT_ONCE, "the end of the first one's tunnel", async {
            while let Ok(Some(_)) = old.read().await {}
        })
        .await;
        world.links(1).await;
        echo(&mut new, b"without the first").await;
        world.server_metric(READY, 1.0).await;
    }
}

/// The agent's HTTP/2 window is 0, so the server cannot send the dial request.
///
/// Limit (times): A link that accepts no dial request | gets no more after the dial timeout
/// Upstream (dials): After 500 ms an unsent dial gets status 504. Its link gets no dials until it reads again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dial_that_cannot_be_sent_is_a_504_and_retires_the_link() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&["--dial-timeout=500ms"]).await;
    let (connection, window) = Connection::deaf_agent(&world).await;
    let mut deaf = connection.link("deaf", "").await;
    world.server_metric(READY, 1.0).await;

    let answer = connect::refused(&world.connect(), &connect::head("never.sent:1")).await;
    let text = "Failed to tunnel dial request: timed out waiting for backend dial\r\n";
    assert_eq!(answer, (504, text.to_owned()));
    let failed =
        "konnectivity_network_proxy_server_dial_failure_count{reason=\"backend_dial_timeout\"}";
    for (series, value) in [
        (PENDING, 0.0),
        (failed, 1.0),
        (READY, 0.0),
        ("adit_links_retired", 1.0),
    ] {
        world.server_metric(series, value).await;
    }
    // No dial picks the retired link. Without another agent a dial fails, and another agent gets every dial.
    let (status, _no_agent) = connect::refused(&world.connect(), &connect::head(&target)).await;
    assert_eq!((status, world.server().links()), (500, 1));
    let agent = world.agent("hears", &[]).await;
    world.server_metric(READY, 1.0).await;
    for _dial in 0..10 {
        world.assert_serves(&target).await;
    }
    agent.stop().await;
    world.server_metric(READY, 0.0).await;

    // Once the agent reads, its link gets dials again. The timed-out dial is never sent.
    window.send(65_535).expect("the connection lives");
    world.server_metric(READY, 1.0).await;
    world.server_metric("adit_links_retired", 0.0).await;
    let (_client, mut call) = Connection::proxied(&world).await;
    call.dial(1, "second.test:1");
    let dial = deaf.dialed().await;
    assert_eq!(dial.address, "second.test:1");
}

/// A dial queued behind an unsent dial is unsent too, so the server retries it at another agent.
///
/// Upstream (dials): After 500 ms an unsent dial gets status 504. Its link gets no dials until it reads again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dials_queued_behind_an_unsent_dial_go_to_another_agent() {
    let (target, _echo) = targets::local_echo().await;
    // Below the 2 s after which the server hedges a dial.
    let world = World::start(&["--dial-timeout=1900ms"]).await;
    let (connection, _window) = Connection::deaf_agent(&world).await;
    let _deaf = connection.link("deaf", "").await;
    world.links(1).await;
    let socket = world.connect();
    let request = connect::head("never.sent:1");
    let first = connect::refused(&socket, &request);
    let second = async {
        world.server_metric(PENDING, 1.0).await;
        let mut stream = world.client().await;
        connect::say(&mut stream, &connect::head(&target)).await;
        world.server_metric(PENDING, 2.0).await;
        let agent = world.agent("hears", &[]).await;
        world.links(2).await;
        let head = connect::read_head(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        connect::echo(&mut stream, b"by the other agent").await;
        agent
    };
    let ((status, _text), _agent) = tokio::join!(first, second);
    assert_eq!(status, 504);
    world
        .server_metric("adit_dial_retries_total{reason=\"not_sent\"}", 1.0)
        .await;
}

/// The first agent has dialled the target, so the server does not retry at another agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_refused_by_its_target_is_not_retried_at_another_agent() {
    const DIALS: u32 = 8;
    for flags in [&["--lanes-per-link=0"][..], &[]] {
        let world = World::start(flags).await;
        let agents = [
            world.agent("one", &[]).await,
            world.agent("other", &[]).await,
        ];
        world.links(2).await;
        let (_held, closed) = targets::closed_port();
        let closed = closed.to_string();
        for _dial in 0..DIALS {
            let (status, _text) = connect::refused(&world.connect(), &connect::head(&closed)).await;
            assert_eq!(status, 502);
        }
        let asked = |agent: &RunningAgent| {
            let series =
                "konnectivity_network_proxy_agent_endpoint_dial_failure_total{reason=\"unknown\"}";
            // An agent without a failed dial may not export the series.
            sample(&agent.metrics.scrape().text(), series).unwrap_or_default()
        };
        let asked: f64 = agents.iter().map(asked).sum();
        assert_eq!(asked, f64::from(DIALS), "{flags:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_that_restarts_under_another_id_serves() {
    let (world, agent, target, _echo) = World::with_echo().await;
    agent.stop().await;
    world.links(0).await;
    let _agent = world.agent("another", &[]).await;
    world.links(1).await;
    world.assert_serves(&target).await;
}

/// The host of one server is down: a connect to that server lasts until its timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unresponsive_server_does_not_block_links_to_other_servers() {
    /// Half the timeout of a connection attempt.
    const SOON: Duration = Duration::from_secs(10);
    let world = World::start(&[]).await;
    let silent = targets::silent_host();
    let (_host, port) = silent.address.rsplit_once(':').expect("host:port");
    let port = port.parse().expect("a port");
    let second = format!("--proxy-server-host={}", world.server().agents);
    let _agent = world.agent_of(port, "a", &[&second]).await;
    within_for(SOON, "a link to the one that answers", world.links(1)).await;
}
