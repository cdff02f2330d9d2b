//! Metrics that show problems between the two ends of a tunnel.

use std::time::Duration;

use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;
use bytes::Bytes;

use super::failover::balanced;
use crate::support::lanes::ended;
use crate::support::process::Process;
use crate::support::raw::{Call, Connection, data, encoded, framed};
use crate::support::targets::{Sum, pattern};
use crate::support::wait::until;
use crate::support::world::{World, echo, sample, scraped};
use crate::support::{connect, targets};

const PREFIX: &str = "konnectivity_network_proxy_server_";

/// Series of tunnels whose receive queue is full, for bytes that arrive by this service method.
pub(super) fn full(method: &str) -> String {
    format!("{PREFIX}full_receive_channels{{service_method=\"{method}\"}}")
}

/// Bytes from agent to client. In upstream such a client blocks the reader of the agent's stream.
///
/// Upstream (configuration): The gauge of full queues follows, and no bytes are lost or reordered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_clients_are_counted_until_they_read() {
    const BYTES: usize = 4 << 20;
    let (port, _target) = targets::source(BYTES as u64).await;
    let (world, _agent) = World::with_agent().await;
    let target = format!("127.0.0.1:{port}");
    let (_connection, mut call) = Connection::proxied(&world).await;
    call.open(1, &target).await;
    world.server_metric(&full("Connect"), 1.0).await;
    let mut stream = connect::open(&world.connect(), &target).await;
    world.server_metric(&full("Connect"), 2.0).await;

    let expected = Sum::of(&pattern(0, BYTES));
    let mut sum = Sum::default();
    while let Some(Payload::Data(data)) = call.payload().await {
        sum.add(&data.data);
    }
    assert_eq!(sum, expected, "gRPC");
    let (all, end) = connect::end(&mut stream).await;
    end.expect("a clean end");
    assert_eq!(Sum::of(&all), expected, "HTTP-CONNECT");
    world.server_metric(&full("Connect"), 0.0).await;

    let text = world.server().metrics.scrape().text();
    let of = |name: &str| {
        sample(
            &text,
            &format!("{PREFIX}frontend_write_duration_seconds_{name}"),
        )
    };
    assert!(of("count") > Some(2.0) && of("sum") > Some(0.0), "{text}");
}

/// Bytes from client to agent: the server stops reading the client's stream while its tunnel accepts no more.
///
/// Upstream (configuration): The gauge of full queues follows, and no bytes are lost or reordered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_of_a_stalled_agent_is_counted_and_loses_nothing() {
    const PIECE: usize = 64 * 1024;
    const PIECES: usize = 16;
    let world = World::start(&[]).await;
    let (_agent, mut link) = Connection::linked(&world, "slow", "").await;
    let (_client, mut call) = Connection::proxied(&world).await;
    tokio::join!(call.open(1, "a.test:1"), link.answer(5));
    for piece in 0..PIECES {
        call.data(5, pattern((piece * PIECE) as u64, PIECE));
    }
    world.server_metric(&full("Proxy"), 1.0).await;
    let mut sum = Sum::default();
    while sum.bytes < (PIECES * PIECE) as u64 {
        match link.payload().await {
            Some(Payload::Data(data)) => sum.add(&data.data),
            other => panic!("no data but {other:?}"),
        }
    }
    assert_eq!(sum, Sum::of(&pattern(0, PIECES * PIECE)));
    world.server_metric(&full("Proxy"), 0.0).await;
}

/// The server forwards each piece of a packet as it arrives, but counts messages, as upstream does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_that_come_in_pieces_are_counted_once() {
    const BYTES: usize = 100_000;
    const PACKETS: usize = 3;
    const AGENTS: i64 = 5;
    fn say(call: &mut Call, conn: i64) {
        for _packet in 0..PACKETS {
            let payload = data(conn, vec![7; BYTES]);
            let message = framed(&encoded(PacketType::Data.into(), Some(payload)));
            for piece in message.chunks(BYTES / 4) {
                call.bytes(Bytes::copy_from_slice(piece));
            }
        }
    }
    async fn hear(call: &mut Call) {
        let mut heard = 0;
        while heard < PACKETS * BYTES {
            match call.payload().await {
                Some(Payload::Data(data)) => heard += data.data.len(),
                other => panic!("no data but {other:?}"),
            }
        }
    }
    let world = World::start(&[]).await;
    let (_agent, mut link) = Connection::linked(&world, "raw", "").await;
    let (_client, mut call) = Connection::proxied(&world).await;
    let (conn, _) = tokio::join!(call.open(1, "a.test:1"), link.answer(AGENTS));
    say(&mut call, conn);
    hear(&mut link).await;
    say(&mut link, AGENTS);
    hear(&mut call).await;
    let text = world.server().metrics.scrape().text();
    let counted = |segment: &str| {
        let labels = format!("{{packet_type=\"DATA\",segment=\"{segment}\"}}");
        sample(&text, &format!("{PREFIX}stream_packets_total{labels}"))
    };
    let expected = Some(PACKETS as f64);
    assert_eq!(["from_client", "from_agent"].map(counted), [expected; 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_streams_are_counted_and_clean_ends_are_not() {
    let (target, _echo) = targets::local_echo().await;
    let (world, balancer, agent) = balanced(&[]).await;
    let errors = |text: String, segment: &str| {
        let segment = format!("segment=\"{segment}\"");
        let lines = text
            .lines()
            .filter(|line| line.contains("_stream_errors_total{") && line.contains(&segment));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let scrape = world.server().metrics.scrape();
    let (connection, mut clean) = Connection::proxied(&world).await;
    let conn = clean.open(1, &target).await;
    clean.echo(conn, b"clean").await;
    clean.finish();
    while clean.next().await.is_some() {}
    assert_eq!(errors(scrape.text(), "from_client"), [""; 0]);

    let mut broken = connection.proxy().await;
    broken.open(2, &target).await;
    drop(broken);
    let series = format!(
        "{PREFIX}stream_errors_total{{code=\"Canceled\",packet_type=\"Unknown\",segment=\"from_client\"}}"
    );
    world.server_metric(&series, 1.0).await;

    let stub = Connection::agent(&world).await;
    let link = stub.link("stub", "").await;
    world.links(2).await;
    assert_eq!(errors(scrape.text(), "from_agent"), [""; 0]);
    drop((stub, link));
    world.links(1).await;
    until("the lost agent is counted", || {
        errors(scrape.text(), "from_agent").len() == 1
    })
    .await;

    let agent_scrape = agent.metrics.scrape();
    assert_eq!(errors(agent_scrape.text(), "to_agent"), [""; 0]);
    // Its connections end without a TLS close_notify.
    drop(balancer);
    until("the lost server is counted", || {
        errors(agent_scrape.text(), "to_agent").len() == 1
    })
    .await;
    let orderly = world.agent("agent-2", &[]).await;
    world.links(1).await;
    let orderly_scrape = orderly.metrics.scrape();
    let mut world = world;
    world.stop_server(Duration::ZERO).await;
    let links = "konnectivity_network_proxy_agent_open_server_connections";
    scraped(&orderly_scrape, links, 0.0).await;
    assert_eq!(errors(orderly_scrape.text(), "to_agent"), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_cut_at_shutdown_are_counted_as_shutdown() {
    let (mut world, _agent, target, _echo) = World::with_echo().await;
    let mut grpc = world.tunnel(&target).await;
    let mut http = connect::open(&world.connect(), &target).await;
    echo(&mut grpc, b"before").await;
    connect::echo(&mut http, b"before").await;
    let scrape = world.server().metrics.scrape();
    world.stop_server(Duration::ZERO).await;
    let text = scrape.text();
    let closed = |reason: &str| sample(&text, &ended(reason));
    let counts = ["shutdown", "link_lost", "client_gone"].map(closed);
    assert_eq!(counts, [2.0, 0.0, 0.0].map(Some));
}

/// Runs the real binary with `--warn-on-channel-limit`: a tunnel is warned about once, however often its queue is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agent_warns_of_a_stalled_target_with_warn_on_channel_limit() {
    const FULL: &str = "queue towards a target is full";
    let (port, _target) = targets::deaf().await;
    let world = World::start(&[]).await;
    let flags = ["--warn-on-channel-limit", "--log-format=json"];
    let args = world.agent_args("warns", world.server().agents.port(), &flags);
    let agent = Process::start("warns", &args, world.dir.path());
    world.links(1).await;
    let (_connection, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &format!("127.0.0.1:{port}")).await;
    let lines = || agent.log().matches(FULL).count();
    assert_eq!(lines(), 0);
    for _piece in 0..128 {
        call.data(conn, vec![7; 64 * 1024]);
    }
    until("the warning", || lines() > 0).await;
    assert_eq!(lines(), 1);
}

/// Metrics need no authentication, so they must contain no targets and no secrets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrape_names_no_target_and_no_secret() {
    let (world, agent, target, _echo) = World::with_echo().await;
    world.assert_serves(&target).await;
    let mut open = connect::open(&world.connect(), &target).await;
    connect::echo(&mut open, b"while it is open, too").await;
    let unknown = "nowhere.invalid:80";
    let (status, _body) = connect::refused(&world.connect(), &connect::head(unknown)).await;
    assert_eq!(status, 502);
    let failed = "konnectivity_network_proxy_server_dial_failure_count{reason=\"error_response\"}";
    world.server_metric(failed, 1.0).await;
    let server = world.server().metrics.scrape().text();
    let agent = agent.metrics.scrape().text();
    for (whose, text) in [("server", server), ("agent", agent)] {
        assert!(
            text.contains("konnectivity_network_proxy_"),
            "{whose}: {text}"
        );
        for word in [target.as_str(), "nowhere", "PRIVATE", "Bearer"] {
            assert!(!text.contains(word), "{whose}: {word} in {text}");
        }
    }
}
