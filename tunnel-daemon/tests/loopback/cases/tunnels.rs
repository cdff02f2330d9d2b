//! Tunnels deliver every byte, in order, in both directions, to the end.

use adit::agent::RunningAgent;
use adit::demo::grpc_client::{ClientError, GrpcTunnel};
use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::client::TlsStream;

use super::hostile_agents::turned_away;

use crate::support::connect::{hears, say};
use crate::support::lanes::TUNNELS;
use crate::support::raw::Connection;
use crate::support::skip::has_v6;
use crate::support::targets::{Sum, pattern};
use crate::support::wait::within;
use crate::support::world::{World, echo};
use crate::support::{connect, targets, tls};

const BULK: usize = 8 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_frontends_carry_an_echo() {
    let (port, _target) = targets::echo().await;
    let (world, _agent) = World::with_agent().await;
    world.assert_serves(&format!("127.0.0.1:{port}")).await;
    world.assert_serves(&format!("localhost:{port}")).await;
    world.server_metric(TUNNELS, 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn downloads_arrive_whole_before_the_close() {
    let (port, _target) = targets::source(BULK as u64).await;
    let (world, _agent) = World::with_agent().await;
    let target = format!("127.0.0.1:{port}");
    let expected = Sum::of(&pattern(0, BULK));

    let mut tunnel = world.tunnel(&target).await;
    let mut sum = Sum::default();
    while let Some(bytes) = tunnel.read().await.expect("the tunnel lives") {
        assert!(!bytes.is_empty(), "no DATA is empty");
        sum.add(&bytes);
    }
    assert_eq!(sum, expected, "gRPC");

    let mut stream = connect::open(&world.connect(), &target).await;
    let (all, end) = connect::end(&mut stream).await;
    end.expect("a clean end");
    assert_eq!(Sum::of(&all), expected, "HTTP-CONNECT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_client_may_half_close_and_still_read() {
    let (port, _target, mut seen) = targets::summing().await;
    let (world, _agent) = World::with_agent().await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    let bytes = pattern(3, BULK);
    say(&mut stream, &bytes).await;
    stream.shutdown().await.expect("half-closed");
    let answer = connect::rest(&mut stream).await;
    let expected = Sum::of(&bytes);
    assert_eq!(answer, format!("{}\n", expected.hash));
    assert_eq!(seen.recv().await, Some(expected));
}

/// Count and hash of the bytes that a target reports.
async fn reported(seen: &mut mpsc::Receiver<Sum>) -> (u64, u64) {
    let sum = within("the target's report", seen.recv()).await;
    let sum = sum.expect("a report");
    (sum.bytes, sum.hash)
}

/// Upstream loses the last bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upload_then_immediate_close_delivers_all_bytes() {
    let (port, _target, mut seen) = targets::summing().await;
    let (world, _agent) = World::with_agent().await;
    let target = format!("127.0.0.1:{port}");
    let bytes = Bytes::from(pattern(7, BULK));
    let expected = Sum::of(&bytes);
    let whole = (expected.bytes, expected.hash);

    for _round in 0..3 {
        let mut tunnel = world.tunnel(&target).await;
        tunnel
            .write(bytes.clone())
            .await
            .expect("the tunnel takes bytes");
        tunnel.close().await.expect("a confirmed close");
        assert_eq!(reported(&mut seen).await, whole, "gRPC");

        let mut stream = connect::open(&world.connect(), &target).await;
        say(&mut stream, &bytes).await;
        drop(stream);
        assert_eq!(reported(&mut seen).await, whole, "CONNECT");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_echo_keeps_every_byte_both_ways_at_once() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo_to_the_end(&mut stream, &pattern(11, BULK)).await;
}

/// The client gets the agent's error text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_and_unknown_targets_fail_with_the_reason() {
    let (world, _agent) = World::with_agent().await;
    let (_held, closed) = targets::closed_port();
    let closed = closed.to_string();
    for (target, text) in [
        (closed.as_str(), "connection refused"),
        ("nowhere.invalid:80", "no such host"),
    ] {
        let (status, body) = connect::refused(&world.connect(), &connect::head(target)).await;
        assert_eq!(status, 502, "{target}: {body}");
        assert!(body.contains(text), "{target}: {body}");
        match GrpcTunnel::open(world.channel().await, target).await {
            Err(ClientError::Dial(error)) => assert!(error.contains(text), "{target}: {error}"),
            other => panic!("{target}: {:?}", other.err()),
        }
    }
    let series = "konnectivity_network_proxy_server_dial_failure_count{reason=\"error_response\"}";
    world.server_metric(series, 4.0).await;
}

/// A CONNECT client gets status 500.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dial_without_an_agent_fails_with_no_agent_available() {
    let world = World::start(&[]).await;
    match GrpcTunnel::open(world.channel().await, "127.0.0.1:1").await {
        Err(ClientError::Dial(error)) => assert_eq!(error, "No agent available"),
        other => panic!("{:?}", other.err()),
    }
    let refused = connect::refused(&world.connect(), &connect::head("127.0.0.1:1")).await;
    let body = "currently no tunnels available: No agent available".to_owned();
    assert_eq!(refused, (500, body));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_pipelined_behind_connect_arrive_first() {
    let (port, _target, mut seen) = targets::summing().await;
    let (world, _agent) = World::with_agent().await;
    let mut request = connect::head(&format!("127.0.0.1:{port}"));
    request.extend(pattern(0, 20_000));
    let mut answer = connect::request(&world.connect(), &request).await;
    assert_eq!(answer.head, "HTTP/1.1 200 Connection Established\r\n\r\n");
    let more = pattern(20_000, 50_000);
    answer
        .stream
        .write_all(&more)
        .await
        .expect("the tunnel takes bytes");
    answer.stream.shutdown().await.expect("half-closed");
    let sum = within("the target's report", seen.recv()).await;
    assert_eq!(sum, Some(Sum::of(&pattern(0, 70_000))));
}

/// Limit (times): A half-closed and silent tunnel
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_closed_and_silent_tunnel_on_the_link_is_reset() {
    let (world, _agent) =
        World::linked(&["--lanes-per-link=0", "--half-closed-timeout=1s"], &[]).await;
    // The target sends one byte after the client's EOF, then nothing, and never closes.
    let (port, _target) = targets::serve(|mut stream| async move {
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await?;
        stream.write_u8(7).await?;
        std::future::pending().await
    })
    .await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{port}")).await;
    stream.write_all(b"all").await.expect("taken");
    stream.shutdown().await.expect("half-closed");
    let word = within("the word", stream.read_u8()).await;
    assert_eq!(word.expect("half a tunnel lives"), 7);
    let end = within("the end", stream.read_u8()).await;
    end.expect_err("it is cut");
    world.ended("half_closed_idle", 1.0).await;
}

/// kube-apiserver fails when target bytes arrive in the same read as the 200.
///
/// Upstream (tunnels): The 200 of a CONNECT is complete before the first byte of the target.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_200_comes_whole_before_a_server_first_targets_bytes() {
    let (port, _target) = targets::server_first(b"220 ready\r\n").await;
    let (world, _agent) = World::with_agent().await;
    for _round in 0..50 {
        let mut stream = world.client().await;
        connect::dial(&mut stream, &format!("127.0.0.1:{port}")).await;
        hears(&mut stream, b"220 ready\r\n").await;
        connect::echo(&mut stream, b"EHLO").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_tunnels_at_once_each_get_their_own_bytes() {
    let (port, _target) = targets::echo().await;
    let world = World::start(&[]).await;
    let _agents = (world.agent("a", &[]).await, world.agent("b", &[]).await);
    world.links(2).await;
    let channel = world.channel().await;
    let mut jobs = tokio::task::JoinSet::new();
    for number in 0..100_u64 {
        let (channel, target) = (channel.clone(), format!("127.0.0.1:{port}"));
        jobs.spawn(async move {
            let mut tunnel = crate::support::world::open(channel, &target).await;
            for round in 0..5 {
                echo(&mut tunnel, &pattern(number * 1000 + round, 3000)).await;
            }
            tunnel.close().await.expect("a clean close");
        });
    }
    within("all tunnels", jobs.join_all()).await;
}

/// Listen addresses of TCP frontends.
pub(super) const V4: &str = "127.0.0.1:0";
const V6: &str = "[::1]:0";

/// A TCP frontend of this dialect with certificates, and an agent.
pub(super) async fn on_tcp(dialect: &str, at: &str) -> (World, RunningAgent) {
    let frontend = format!("--frontend={dialect}=tcp:{at}");
    let flags = [
        &*frontend,
        "--server-cert={certs}/server.crt",
        "--server-key={certs}/server.key",
        "--server-ca-cert={certs}/ca.crt",
    ];
    World::linked(&flags, &[]).await
}

/// A TCP frontend authenticates itself and its clients with certificates; a unix socket frontend need not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_over_tcp_requires_a_client_certificate_and_carries_an_echo() {
    grpc_over_tcp(V4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_over_tcp_of_ipv6_requires_a_client_certificate_and_carries_an_echo() {
    if has_v6("gRPC over TCP of IPv6") {
        grpc_over_tcp(V6).await;
    }
}

/// A client of the world's TCP frontend. Clients of another protocol and those without a certificate are refused.
async fn secured(world: &World, alpn: &[u8], other: &[u8]) -> TlsStream<TcpStream> {
    let address = world.server().frontends[0];
    let stream = tls::dial_to(world, alpn, address, Some("client")).await;
    let wrong = tls::dial_to(world, other, address, Some("client")).await;
    assert!(wrong.is_err(), "another protocol");
    let nobody = tls::dial_to(world, alpn, address, None).await;
    assert!(turned_away(nobody).await, "no certificate");
    stream.expect("welcome")
}

async fn grpc_over_tcp(at: &str) {
    let (target, _echo) = targets::local_echo().await;
    let (world, _agent) = on_tcp("grpc", at).await;
    assert_eq!(world.server().frontends[0].is_ipv6(), at == V6);
    let connection = Connection::over(secured(&world, b"h2", b"http/1.1").await).await;
    let mut call = connection.proxy().await;
    let conn = call.open(1, &target).await;
    call.echo(conn, b"over TLS").await;
}

/// HTTP-CONNECT over TCP asks for a client certificate and speaks HTTP/1.1 only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_over_tcp_requires_a_client_certificate_and_carries_an_echo() {
    connect_over_tcp(V4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_over_tcp_of_ipv6_requires_a_client_certificate_and_carries_an_echo() {
    if has_v6("HTTP-CONNECT over TCP of IPv6") {
        connect_over_tcp(V6).await;
    }
}

async fn connect_over_tcp(at: &str) {
    let (target, _echo) = targets::local_echo().await;
    let (world, _agent) = on_tcp("http-connect", at).await;
    assert_eq!(world.server().frontends[0].is_ipv6(), at == V6);
    let mut stream = secured(&world, b"http/1.1", b"h2").await;
    connect::dial(&mut stream, &target).await;
    connect::echo(&mut stream, b"over TLS").await;
}
