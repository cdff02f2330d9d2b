//! Clients that break the protocol. Other clients are not affected.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use adit_core::wire::packets as wire;
use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::support::connect::say;
use crate::support::raw::{self, Connection, close_response, data, dial_request, encoded, framed};
use crate::support::wait::{stands_still, within};
use crate::support::world::{World, echo, endpoints_left, sample};
use crate::support::{connect, targets};

/// Invalid messages: no packet at all, or an unknown or inconsistent type, payload or id.
pub(super) fn malformed() -> Vec<Vec<u8>> {
    vec![
        Vec::new(),
        vec![0xff; 40],
        vec![0x08],
        encoded(PacketType::Data.into(), None),
        encoded(PacketType::DialReq.into(), None),
        encoded(PacketType::DialReq.into(), Some(data(1, "x"))),
        encoded(PacketType::DialRsp.into(), Some(data(1, "x"))),
        encoded(PacketType::Data.into(), Some(dial_request(1, "a:1"))),
        encoded(PacketType::CloseReq.into(), Some(dial_request(1, "a:1"))),
        encoded(PacketType::Data.into(), Some(data(0, "no id"))),
        encoded(PacketType::Window.into(), Some(window(u64::MAX))),
        encoded(PacketType::Window.into(), Some(window(0))),
        encoded(PacketType::Fin.into(), Some(fin(99))),
        encoded(42, Some(data(1, "x"))),
        encoded(-1, None),
        encoded(i32::MAX, None),
    ]
}

fn window(bytes: u64) -> Payload {
    Payload::Window(wire::Window {
        connect_id: 1,
        bytes,
    })
}

fn fin(side: i32) -> Payload {
    Payload::Fin(wire::Fin {
        connect_id: 1,
        side,
    })
}

/// Upstream (packets): The end of a client's stream ends only that stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_packets_of_a_client_affect_no_other_tunnel() {
    let (world, agent, target, _echo) = World::with_echo().await;
    let mut witness = world.tunnel(&target).await;
    let (connection, mut sibling) = Connection::proxied(&world).await;
    let sibling_conn = sibling.open(1, &target).await;
    for body in malformed() {
        // Before a dial, on a stream of its own, and in the middle of an open tunnel.
        let mut early = connection.proxy().await;
        early.message(&body);
        early.finish();
        while early.next().await.is_some() {}
        let mut late = connection.proxy().await;
        late.open(2, &target).await;
        late.message(&body);
        late.finish();
        while late.next().await.is_some() {}
        echo(&mut witness, b"unharmed").await;
        sibling.echo(sibling_conn, b"unharmed").await;
    }
    endpoints_left(&agent, 2).await;
    assert_eq!(world.of_agents().links(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_types_and_empty_packets_leave_the_tunnel_open() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let (_connection, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &target).await;
    for body in [
        Vec::new(),
        encoded(42, None),
        encoded(PacketType::Data.into(), Some(data(0, "x"))),
    ] {
        call.message(&body);
        call.echo(conn, b"still open").await;
    }
}

/// The server refuses the larger message without buffering it.
///
/// Upstream (packets): Packets of 4 MiB pass; a larger one ends its own tunnel only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_mebibyte_message_passes_and_a_larger_one_ends_only_its_own_tunnel() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let (connection, mut sibling) = Connection::proxied(&world).await;
    let sibling_conn = sibling.open(1, &target).await;

    let mut call = connection.proxy().await;
    let conn = call.open(2, &target).await;
    let overhead =
        encoded(PacketType::Data.into(), Some(data(conn, vec![0; 4 << 20]))).len() - (4 << 20);
    let largest = targets::pattern(0, (4 << 20) - overhead - 1);
    let message = encoded(PacketType::Data.into(), Some(data(conn, largest.clone())));
    assert!(message.len() <= 4 << 20);
    call.message(&message);
    call.echo_arrives(conn, &largest).await;

    call.data(conn, vec![0; (4 << 20) + 1]);
    let end = call.payload().await;
    assert!(
        matches!(&end, Some(Payload::CloseResponse(close)) if close.error.contains("4 MiB")),
        "{end:?}"
    );

    // A length prefix of 4 GiB.
    let mut liar = connection.proxy().await;
    liar.open(3, &target).await;
    liar.bytes(&b"\x00\xff\xff\xff\xffand so on"[..]);
    liar.finish();
    while liar.next().await.is_some() {}
    sibling.echo(sibling_conn, b"unharmed").await;
}

/// Upstream (packets): The end of a client's stream ends only that stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_packets_end_their_own_stream_only() {
    let (world, agent, target, _echo) = World::with_echo().await;
    let (connection, mut sibling) = Connection::proxied(&world).await;
    let sibling_conn = sibling.open(1, &target).await;
    let message = framed(&encoded(
        PacketType::DialReq.into(),
        Some(dial_request(2, &target)),
    ));
    for length in 0..message.len() {
        let mut call = connection.proxy().await;
        call.bytes(message.slice(..length));
        call.finish();
        while call.next().await.is_some() {}
    }
    sibling.echo(sibling_conn, b"unharmed").await;
    assert_eq!(agent.metrics.open_endpoint_connections(), 1);
}

/// A part of the message has already been forwarded, so the target must see RST, not FIN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_ends_inside_a_message_resets_its_target() {
    let (port, _target, mut seen) = targets::summing().await;
    let (world, _agent) = World::with_agent().await;
    let (_connection, mut call) = Connection::proxied(&world).await;
    let conn = call.open(1, &format!("127.0.0.1:{port}")).await;
    let message = framed(&encoded(
        PacketType::Data.into(),
        Some(data(conn, vec![7; 1000])),
    ));
    call.bytes(message.slice(..message.len() - 1));
    call.finish();
    let sum = within("what the target saw", seen.recv()).await;
    let sum = sum.expect("the target runs");
    assert!(!sum.clean, "{} of 1000 bytes look whole", sum.bytes);
}

/// Otherwise its last message would stay queued in HTTP/2, outside every budget, until the connection ends.
///
/// Limit (memory): Answers and trailers queued for a gRPC client
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_ends_a_call_without_room_for_its_last_message_is_reset() {
    /// HTTP/2 window for the dial response and the beginning of the next message.
    const WINDOW: u32 = 100;
    let (port, _target) = targets::source(u64::MAX).await;
    let (world, _agent) = World::with_agent().await;
    let connection = Connection::small_window_client(&world, WINDOW).await;
    let mut call = connection.proxy().await;
    call.open(1, &format!("127.0.0.1:{port}")).await;
    call.keep(1).await;
    call.finish();
    assert_eq!(call.reset().await, Some(h2::Reason::CANCEL));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_out_of_order_get_upstreams_answers() {
    let (world, agent, target, _echo) = World::with_echo().await;
    let connection = Connection::client(&world).await;
    let closed = |id: i64, text: &str| Some(close_response(id, text));
    let mut call = connection.proxy().await;
    call.data(5, "early");
    assert_eq!(call.payload().await, closed(5, "backend not initialized"));

    let mut call = connection.proxy().await;
    let conn = call.open(1, &target).await;
    call.data(conn + 1000, "not mine");
    for conn in [conn + 1000, conn] {
        let text = "mismatched connection IDs";
        assert_eq!(call.payload().await, closed(conn, text));
    }
    endpoints_left(&agent, 0).await;
}

/// Clients disconnect during a dial, after its answer, and during an upload.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_vanish_leave_nothing_behind() {
    let (world, agent, target, _echo) = World::with_echo().await;
    for round in 0..30 {
        let (connection, mut call) = Connection::proxied(&world).await;
        call.dial(round, &target);
        if round % 3 > 0 {
            call.next().await;
        }
        if round % 3 == 2 {
            call.data(1, vec![7; 200_000]);
        }
        drop((call, connection));
        let mut stream = world.client().await;
        say(&mut stream, &connect::head(&target)).await;
        drop(stream);
    }
    endpoints_left(&agent, 0).await;
    for gauge in [
        "pending_backend_dials",
        "established_connections",
        "http_connections",
    ] {
        world
            .server_metric(&format!("konnectivity_network_proxy_server_{gauge}"), 0.0)
            .await;
    }
    world.server_metric("adit_held_bytes", 0.0).await;
    world.assert_serves(&target).await;
}

/// Go sends the socket's path as `:authority`, which HTTP libraries refuse.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn socket_path_as_authority_is_accepted_raw_and_encoded() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let path = world.grpc();
    let path = path.to_str().expect("a text path");
    for authority in [
        path.to_owned(),
        path.replace('/', "%2F"),
        "localhost".to_owned(),
    ] {
        let mut stream = world.grpc_socket().await;
        let dial = encoded(
            PacketType::DialReq.into(),
            Some(dial_request(4242, &target)),
        );
        let dial = framed(&dial);
        say(&mut stream, &call_by_hand(&authority, &dial)).await;
        let mut data = BytesMut::new();
        let packet = within("the answer to a dial", async {
            loop {
                let (kind, flags, body) = frame(&mut stream).await;
                assert!(
                    kind != 3 && kind != 7,
                    "{authority}: frame {kind}, flags {flags}: {body:?}"
                );
                if kind == 0 {
                    data.put(body);
                }
                if let Some(packet) = raw::take(&mut data) {
                    return packet;
                }
            }
        })
        .await;
        let answer = packet.payload;
        assert!(
            matches!(&answer, Some(Payload::DialResponse(answer)) if answer.random == 4242 && answer.error.is_empty()),
            "{authority}: {answer:?}"
        );
    }
}

/// Preface, SETTINGS, HEADERS (literals, no Huffman) and one DATA frame.
fn call_by_hand(authority: &str, data: &[u8]) -> Bytes {
    let mut block = BytesMut::new();
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/ProxyService/Proxy"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    for (name, value) in headers {
        block.put_u8(0);
        for text in [name, value] {
            block.put_u8(u8::try_from(text.len()).expect("below 127: one byte of length"));
            block.put_slice(text.as_bytes());
        }
    }
    let mut out = BytesMut::from(&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..]);
    for (kind, flags, stream, body) in [(4, 0, 0, &[][..]), (1, 4, 1, &block), (0, 0, 1, data)] {
        out.put_uint(body.len() as u64, 3);
        out.put_slice(&[kind, flags]);
        out.put_u32(stream);
        out.put_slice(body);
    }
    out.freeze()
}

/// The next frame of HTTP/2: its type, flags and payload.
pub(super) async fn frame(stream: &mut UnixStream) -> (u8, u8, Bytes) {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.expect("a frame");
    let length = (&head[..3]).get_uint(3);
    let mut body = vec![0; usize::try_from(length).expect("24 bits")];
    stream.read_exact(&mut body).await.expect("a whole frame");
    (head[3], head[4], body.into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_other_than_connect_are_refused_with_a_status() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let mut huge = connect::head("a:1");
    huge.truncate(huge.len() - 2);
    huge.extend(b"X-Filler: ");
    huge.extend(vec![b'a'; 2 << 20]);
    let body = "this proxy only supports CONNECT passthrough\n";
    let socket = world.connect();
    let get = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(connect::refused(&socket, get).await, (405, body.to_owned()));
    let post = b"POST http://a/ HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc";
    for (bad, status) in [
        (&post[..], 405),
        (b"CONNECT\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/3.0\r\n\r\n", 505),
    ] {
        assert_eq!(connect::refused(&socket, bad).await.0, status, "{bad:?}");
    }

    // The server may answer and close before it has read everything. Then a write may fail.
    let mut stream = world.client().await;
    if let Err(error) = stream.write_all(&huge).await {
        let kinds = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
    let head = connect::read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 431 "), "{head:?}");
    world.assert_serves(&target).await;
}

/// The limit applies only to the head, not to open tunnels.
///
/// Limit (times): CONNECT head
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_head_is_cut_at_its_timeout() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start_adjusted(&[], |_isolation, heads| {
        heads.head_timeout = Duration::from_millis(400);
    })
    .await;
    let _agent = world.agent("a", &[]).await;
    world.links(1).await;
    let mut tunnel = connect::open(&world.connect(), &target).await;
    for head in [&b""[..], b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost"] {
        let started = Instant::now();
        let mut slow = world.client().await;
        slow.write_all(head).await.expect("taken");
        let answer = connect::rest(&mut slow).await;
        assert_eq!(answer, "", "upstream says nothing");
        let kept = started.elapsed();
        assert!(kept >= Duration::from_millis(400), "cut after {kept:?}");
        // Well below the default of 60 s.
        assert!(kept < Duration::from_secs(30), "cut after {kept:?}");
    }
    connect::echo(&mut tunnel, b"older than the limit").await;
}

/// Limit (sizes): CONNECT head
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_head_is_refused_at_its_limit() {
    let (target, _echo) = targets::local_echo().await;
    let world = World::start_adjusted(&[], |_isolation, heads| heads.head_bytes_max = 1024).await;
    let _agent = world.agent("a", &[]).await;
    world.links(1).await;
    let head = |octets: usize| {
        let mut head = connect::head(&target);
        head.truncate(head.len() - 2);
        head.extend(b"X: ");
        head.resize(octets - 4, b'a');
        head.extend(b"\r\n\r\n");
        head
    };
    let fits = connect::request(&world.connect(), &head(1024)).await;
    assert!(fits.head.starts_with("HTTP/1.1 200 "), "{:?}", fits.head);
    let long = connect::request(&world.connect(), &head(1025)).await;
    assert!(long.head.starts_with("HTTP/1.1 431 "), "{:?}", long.head);
}

/// Slow-loris attack: clients never finish their heads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_heads_hold_only_their_own_connections() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let mut slow = Vec::new();
    for _client in 0..200 {
        let mut stream = world.client().await;
        say(&mut stream, b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost").await;
        slow.push(stream);
        let mut stream = world.grpc_socket().await;
        say(&mut stream, b"PRI * HTTP/2.0\r\n").await;
        slow.push(stream);
    }
    let gauge = "konnectivity_network_proxy_server_http_connections";
    world.server_metric(gauge, 200.0).await;
    world.assert_serves(&target).await;
    drop(slow);
    world.server_metric(gauge, 0.0).await;
}

/// Each close gets an answer, and answers to a client that does not read are queued in memory.
///
/// Limit (peers): Answers to packets without a tunnel before a client's call is reset
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closes_without_a_tunnel_are_answered_a_bounded_number_of_times() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let (_client, mut call) = Connection::proxied(&world).await;
    for _packet in 0..1000 {
        call.close(5);
    }
    let mut answers = 0;
    while call.next().await.is_some() {
        answers += 1;
    }
    assert!(answers <= 16, "{answers} answers");
    let mut tunnel = world.tunnel(&target).await;
    echo(&mut tunnel, b"others go on").await;
}

/// Bytes that fit the HTTP/2 window but not the socket would be queued in HTTP/2, outside every budget.
///
/// Limit (memory): Payload in HTTP/2 that a gRPC client has not read | 128 KiB per call; 16 KiB in 64 MiB of memory
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_a_large_window_that_reads_nothing_is_sent_little() {
    const WINDOW_BYTES: u32 = 64 << 20;
    let (world, _agent) = World::with_agent().await;
    let (listener, port) = targets::with_small_window();
    let (connection, stop) = Connection::client_that_stops(&world, WINDOW_BYTES).await;
    let mut call = connection.proxy().await;
    call.open(1, &format!("127.0.0.1:{port}")).await;
    stop.send(()).expect("it runs");
    let _source = targets::source_on(listener, u64::MAX);
    let sent = || {
        let text = world.server().metrics.scrape().text();
        sample(&text, "adit_tunnel_bytes_total{direction=\"to_client\"}").expect("a counter")
    };
    within("no byte moves", stands_still(async || sent().to_bits())).await;
    // Includes the socket buffers of 1 MiB.
    let bytes = sent();
    assert!((1.0..1_572_864.0).contains(&bytes), "{bytes} bytes");
}
