//! Limits as a peer sees them.

use adit_core::wire::packets::packet::Payload;
use adit_core::wire::packets::{self as wire, PacketType};

use crate::support::lanes::warm;
use crate::support::raw::{Call, Connection};
use crate::support::stub_lane::{bound, one_idle};
use crate::support::stub_server::StubServer;
use crate::support::targets;
use crate::support::wait::{until, within};
use crate::support::world::World;

const KIB: usize = 1024;

/// Sizes of DATA payloads, until this many bytes have arrived.
async fn sizes(call: &mut Call, bytes: usize) -> Vec<usize> {
    let (mut sizes, mut got) = (Vec::new(), 0);
    while got < bytes {
        match call.payload().await {
            Some(Payload::Data(data)) => {
                got += data.data.len();
                sizes.push(data.data.len());
            }
            Some(Payload::Window(_)) => (),
            other => panic!("instead of data: {other:?}"),
        }
    }
    assert_eq!(got, bytes);
    sizes
}

fn largest(sizes: &[usize]) -> usize {
    sizes.iter().copied().max().unwrap_or(0)
}

/// A link of an agent with or without Adit's extensions.
async fn raw_link(world: &World, extensions: &[(&str, &str)]) -> (Connection, Call) {
    let agent = Connection::agent(world).await;
    let headers = [&[("agentid", "raw")], extensions].concat();
    let mut link = agent.call("/AgentService/Connect", &headers).await;
    link.headers().await.expect("an answer");
    (agent, link)
}

/// The agent's connection id of the tunnel of a [`Raw`].
const RAW_CONN: i64 = 5;

/// A tunnel between a client and an agent that are both made of packets. The agent has Adit's extensions or not.
struct Raw {
    link: Call,
    call: Call,
    /// The client's connection id of the tunnel.
    conn: i64,
    /// The agent's initial credit in bytes; 0 for an agent without credit.
    credit: u64,
    _connections: [Connection; 2],
}

impl Raw {
    async fn open(world: &World, extensions: &[(&str, &str)]) -> Self {
        let (agent, mut link) = raw_link(world, extensions).await;
        world.links(1).await;
        let (client, mut call) = Connection::proxied(world).await;
        call.dial(1, "a:1");
        let dial = link.dialed().await;
        let answer = wire::DialResponse {
            error: String::new(),
            connect_id: RAW_CONN,
            random: dial.random,
            window: 16 << 20,
        };
        link.packet(PacketType::DialRsp, Payload::DialResponse(answer));
        let Some(Payload::DialResponse(open)) = call.payload().await else {
            panic!("no answer");
        };
        Self {
            link,
            call,
            conn: open.connect_id,
            credit: dial.window,
            _connections: [agent, client],
        }
    }
}

/// DATA payload sizes that an agent receives for an upload, with or without Adit's extensions.
async fn towards_an_agent(extensions: &[(&str, &str)]) -> Vec<usize> {
    const BYTES: usize = 2 << 20;
    let world = World::start(&[]).await;
    let mut tunnel = Raw::open(&world, extensions).await;
    tunnel.call.data(tunnel.conn, vec![1; BYTES]);
    sizes(&mut tunnel.link, BYTES).await
}

/// DATA payload sizes that a server receives for a download, with or without Adit's extensions.
async fn towards_a_server(extensions: &[(&'static str, &str)]) -> Vec<usize> {
    const BYTES: usize = 2 << 20;
    let (port, _target) = targets::source(BYTES as u64).await;
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let agent = world.agent_of(server.port(), "a", &[]).await;
    let mut link = server.accept().await.greet(extensions);
    link.open_with_window(1, &format!("127.0.0.1:{port}"), 16 << 20)
        .await;
    let sizes = sizes(&mut link, BYTES).await;
    agent.stop().await;
    sizes
}

/// With its headers a packet has at most 32 KiB. For each longer packet gRPC-Go clears a buffer of 1 MiB.
///
/// Limit (sizes): DATA payload to Go agents and servers
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn go_peers_get_packets_of_at_most_32_kibibytes() {
    const PAYLOAD: usize = 32 * KIB - 64;
    let agent = towards_an_agent(&[]).await;
    assert_eq!(largest(&agent), PAYLOAD, "towards an agent: {agent:?}");
    let server = towards_a_server(&[]).await;
    assert_eq!(largest(&server), PAYLOAD, "towards a server: {server:?}");
}

/// Limit (sizes): DATA payload between two Adit ends | 64 KiB
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adit_peers_get_packets_of_at_most_64_kibibytes() {
    let agent = towards_an_agent(&[("adit-link", "1")]).await;
    assert_eq!(largest(&agent), 64 * KIB, "towards an agent: {agent:?}");
    let server = towards_a_server(&[("adit-link", "1")]).await;
    assert_eq!(largest(&server), 64 * KIB, "towards a server: {server:?}");
}

/// The limit holds for every source, although plaintext lanes deliver up to 256 KiB at once. A Go client that reads slowly
/// loses its tunnel over a packet that takes it ten seconds.
///
/// Limit (sizes): DATA payload to gRPC clients
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_start_with_packets_of_at_most_32_kibibytes() {
    /// Fewer packets than the server needs to see that a client keeps up.
    const BYTES: usize = 12 * 32 * KIB;
    const PLAINTEXT: &[&str] = &["--lane-security=plaintext"];
    const LINK: &[&str] = &["--lanes-per-link=0"];
    const NONE: &[&str] = &[];
    for (flags, agent_flags) in [(PLAINTEXT, PLAINTEXT), (LINK, NONE)] {
        let (port, _target) = targets::source(BYTES as u64).await;
        let (world, _agent) = World::linked(flags, agent_flags).await;
        if flags == PLAINTEXT {
            warm(&world).await;
        }
        let (_client, mut call) = Connection::proxied(&world).await;
        call.open(1, &format!("127.0.0.1:{port}")).await;
        let sizes = sizes(&mut call, BYTES).await;
        assert!(largest(&sizes) <= 32 * KIB, "{flags:?}: {sizes:?}");
    }
}

/// Least size of a large packet.
const LARGE_BYTES: usize = 256 * KIB;

/// Repeats until a large packet arrives: the agent sends all it may, and then the client reads it.
async fn large_over_a_link(extensions: &[(&str, &str)]) {
    const PACKET_BYTES: usize = 32 * KIB;
    /// Far below what a server holds for a link without credit.
    const WITHOUT_CREDIT: u64 = 8 << 20;
    const READ: &str = "konnectivity_network_proxy_server_stream_packets_total{packet_type=\"DATA\",segment=\"from_agent\"}";
    let world = World::start(&[]).await;
    let mut tunnel = Raw::open(&world, extensions).await;
    let mut credit = if tunnel.credit == 0 {
        WITHOUT_CREDIT
    } else {
        tunnel.credit
    };
    let mut packets = 0_u32;
    within("a large packet", async {
        loop {
            let bytes = usize::try_from(credit).expect("a few MiB");
            let mut left = bytes;
            while left > 0 {
                let packet = left.min(PACKET_BYTES);
                tunnel.link.data(RAW_CONN, vec![0; packet]);
                left -= packet;
                packets += 1;
            }
            // The bytes wait at the server, except those that fit the client's window.
            world.server_metric(READ, f64::from(packets)).await;
            if largest(&sizes(&mut tunnel.call, bytes).await) >= LARGE_BYTES {
                return;
            }
            // The credit covers everything that the client took. It grows while the client reads everything.
            credit = match tunnel.link.payload().await {
                Some(Payload::Window(window)) => window.bytes,
                other => panic!("instead of credit: {other:?}"),
            };
        }
    })
    .await;
}

/// The same on a lane, where the kernel's buffers are the limit.
async fn large_over_a_lane() {
    /// Less than the kernel buffers for a lane.
    const BYTES: usize = 1 << 20;
    let world = World::start(&[]).await;
    let (_connection, _link, mut lane) = bound(&world).await;
    one_idle(&world).await;
    let (_client, mut call) = Connection::proxied(&world).await;
    tokio::join!(call.open(1, "10.0.0.1:80"), lane.accept());
    within("a large packet", async {
        loop {
            lane.end.send(vec![0; BYTES].into());
            lane.flush().await;
            if largest(&sizes(&mut call, BYTES).await) >= LARGE_BYTES {
                return;
            }
        }
    })
    .await;
}

/// The reverse: a client that keeps up gets fewer and larger packets, whatever the path and the chunks of its bytes. The Go
/// library's cost is per packet, not per byte.
///
/// Limit (sizes): DATA payload to gRPC clients
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_keeps_up_gets_packets_of_256_kibibytes_and_more() {
    large_over_a_lane().await;
    large_over_a_link(&[("adit-link", "1")]).await;
    large_over_a_link(&[]).await;
}

/// Sends 24 MiB for an unknown connection id, waits until the server has read them, and returns the send window.
async fn window_at_rest(extensions: &[(&str, &str)], enough: usize) -> usize {
    let world = World::start(&[]).await;
    let (_agent, mut link) = raw_link(&world, extensions).await;
    let sent = async {
        for _message in 0..24 * 32 {
            link.send.reserve_capacity(33 * KIB);
            while link.send.capacity() < 33 * KIB {
                std::future::poll_fn(|cx| link.send.poll_capacity(cx))
                    .await
                    .expect("the call lives")
                    .expect("the call lives");
            }
            link.data(1_000_000, vec![0; 32 * KIB]);
        }
    };
    within("24 MiB to be taken", sent).await;
    link.dial_response(4711, 1);
    let read =
        "konnectivity_network_proxy_server_dial_failure_count{reason=\"unrecognized_response\"}";
    world.server_metric(read, 1.0).await;
    link.send.reserve_capacity(16 << 20);
    until("the window comes back", || link.send.capacity() >= enough).await;
    link.send.capacity()
}

/// HTTP/2 libraries return a window in pieces of up to a third. At rest the window has between two thirds and all of its size.
///
/// Limit (memory): HTTP/2 stream window of a link to a Go agent | 2 MiB
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_are_2_mebibytes_for_a_go_agent_and_16_for_an_adit_agent() {
    let go = window_at_rest(&[], 1 << 20).await;
    assert!(go <= 2 << 20, "{go} bytes");
    let adit = window_at_rest(&[("adit-link", "1")], 10 << 20).await;
    assert!(adit <= 16 << 20, "{adit} bytes");
}

/// A client may use frames of any size, and its connection survives a refusal. An agent may use six frames: 96 KiB from a peer
/// that keeps to frames of 16 KiB, before or after it learns that the server accepts larger ones.
///
/// Limit (sizes): HTTP/2 header list | 256 KiB; 96 KiB from an agent that uses frames of 16 KiB
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn header_lists_of_256_kibibytes_are_accepted_and_longer_ones_refused() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let (fits, long) = ("a".repeat(255 * KIB), "a".repeat(257 * KIB));

    let client = Connection::client(&world).await;
    let mut call = client.call("/ProxyService/Proxy", &[("x", &fits)]).await;
    call.open(1, &target).await;
    let mut refused = client.call("/ProxyService/Proxy", &[("x", &long)]).await;
    refused.dial(2, &target);
    assert_eq!(refused.next().await, None);
    let mut again = client.proxy().await;
    let conn = again.open(3, &target).await;
    again.echo(conn, b"the connection lives").await;

    let agent = Connection::agent(&world).await;
    let fits = "a".repeat(95 * KIB);
    let mut link = agent
        .call("/AgentService/Connect", &[("agentid", "raw"), ("x", &fits)])
        .await;
    let answer = link.headers().await.expect("an answer");
    assert!(answer.contains_key("serverid"), "{answer:?}");
    let mut refused = agent
        .call("/AgentService/Connect", &[("agentid", "raw"), ("x", &long)])
        .await;
    let answer = refused.headers().await;
    assert!(
        answer.is_none_or(|headers| !headers.contains_key("serverid")),
        "it was taken"
    );
    assert_eq!(world.server().links(), 2);
}

/// Limit (peers): Pending dials
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_has_at_most_1024_pending_dials() {
    let world = World::start(&[]).await;
    let (_agent, mut link) = Connection::linked(&world, "silent", "").await;
    let client = Connection::client(&world).await;
    let mut waiting = Vec::new();
    for random in 1..=1024 {
        let mut call = client.proxy().await;
        call.dial(random, "a:1");
        waiting.push(call);
        link.dialed().await;
    }
    let mut call = client.proxy().await;
    call.dial(1025, "a:1");
    let error = call.dial_error().await;
    assert_eq!(error, "too many pending dials on this agent");
}
