//! Agents that break the protocol, with and without a valid certificate. Other agents and tunnels are not affected.

use std::io;
use std::net::SocketAddr;

use adit::agent::RunningAgent;
use adit::demo::grpc_client::{ClientError, GrpcTunnel};
use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;
use adit_net::tasks::Tasks;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::hostile_clients::malformed;
use crate::support::raw::{Call, Connection, close_request, close_response, data, grpc_status};
use crate::support::wait::{until, within};
use crate::support::world::{World, echo, sample};
use crate::support::{connect, targets, tls};

/// Two stub agents with these ids. Dials to `victim.test` go to the first.
async fn two_links(world: &World, ids: [&str; 2]) -> (Connection, Call, Connection, Call) {
    let (one, victim) = Connection::linked(world, ids[0], "host=victim.test").await;
    let two = Connection::agent(world).await;
    let thief = two.link(ids[1], "host=thief.test").await;
    world.links(2).await;
    (one, victim, two, thief)
}

/// A world with an agent for 127.0.0.1, an echo there, and a tunnel to it.
async fn with_witness() -> (World, RunningAgent, String, Tasks, GrpcTunnel) {
    let (target, tasks) = targets::local_echo().await;
    let identifiers = "--agent-identifiers=ipv4=127.0.0.1";
    let (world, agent) = World::linked(&["--proxy-strategies=destHost"], &[identifiers]).await;
    let witness = world.tunnel(&target).await;
    (world, agent, target, tasks, witness)
}

async fn foreign(world: &World) {
    let series = "adit_protocol_offences_total{kind=\"foreign\"}";
    let scrape = world.server().metrics.scrape();
    until(&format!("{series} >= 2"), || {
        sample(&scrape.text(), series).is_some_and(|count| count >= 2.0)
    })
    .await;
}

/// Upstream accepts the answer from any agent.
///
/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_agents_answer_to_a_dial_is_refused() {
    let world = World::start(&["--proxy-strategies=destHost"]).await;
    let (_one, mut victim, _two, mut thief) = two_links(&world, ["victim", "thief"]).await;
    let channel = world.channel().await;
    let dial = GrpcTunnel::open(channel, "victim.test:80");
    let answer = async {
        let random = victim.dialed().await.random;
        thief.dial_response(random, 666);
        // The server closes the forged connection id at the agent that sent it.
        assert_eq!(thief.payload().await, Some(close_request(666)));
        victim.dial_response(random, 5);
    };
    let (tunnel, ()) = within("the dial", async { tokio::join!(dial, answer) }).await;
    assert_eq!(tunnel.expect("the right answer opens it").conn(), 5);
}

/// Both links have the same agent id, so a table keyed by (id, connID) would confuse them.
///
/// Upstream (packets): An answer or data of an agent for a tunnel of another one is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_links_data_and_close_do_not_reach_the_tunnel() {
    let world = World::start(&["--proxy-strategies=destHost"]).await;
    let (_one, mut victim, _two, mut thief) = two_links(&world, ["same", "same"]).await;
    let (mut tunnel, _) = tokio::join!(world.tunnel("victim.test:80"), victim.answer(5));

    thief.packet(PacketType::CloseRsp, close_response(5, "forged"));
    thief.close(5);
    // Sent last: the server answers an unknown id once and does not count later packets for it.
    thief.data(5, "forged");
    foreign(&world).await;
    victim.data(5, "genuine");
    let bytes = within("bytes", tunnel.read())
        .await
        .expect("the tunnel lives");
    assert_eq!(bytes.expect("open"), "genuine");
    tunnel
        .write("up".into())
        .await
        .expect("the tunnel takes bytes");
    assert_eq!(victim.payload().await, Some(data(5, "up")));
}

/// Malformed packets crash upstream's server.
///
/// Upstream (packets): Empty, mismatched and unknown packets, and those with id 0, hurt no other tunnel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_packets_of_an_agent_affect_no_other_tunnel() {
    let (world, _honest, target, _echo, mut witness) = with_witness().await;
    for body in malformed() {
        let connection = Connection::agent(&world).await;
        let mut link = connection.link("stub", "host=stub.test").await;
        link.message(&body);
        link.data(9999, "is this link alive?");
        // The link may answer or end. Both are correct.
        link.next().await;
        echo(&mut witness, b"unharmed").await;
    }
    world.links(1).await;
    world.assert_serves(&target).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_and_truncated_packets_of_an_agent_spare_the_other_agent() {
    let (world, _honest, _target, _echo, mut witness) = with_witness().await;
    let bodies: [&[u8]; 3] = [
        b"\x00\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x09abc",
    ];
    for body in bodies {
        let connection = Connection::agent(&world).await;
        let mut link = connection.link("stub", "host=stub.test").await;
        link.bytes(body.to_vec());
        link.finish();
        while link.next().await.is_some() {}
        echo(&mut witness, b"unharmed").await;
    }
    let connection = Connection::agent(&world).await;
    let mut link = connection.link("stub", "host=big.test").await;
    world.links(2).await;
    let answer = async {
        link.answer(5).await;
        link.data(5, vec![0; (4 << 20) + 1]);
    };
    let (mut tunnel, ()) = tokio::join!(world.tunnel("big.test:80"), answer);
    let end = within("the tunnel's end", tunnel.read()).await;
    assert!(!matches!(end, Ok(Some(_))), "{end:?}");
    echo(&mut witness, b"unharmed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_answers_and_reused_ids_open_no_second_tunnel() {
    let world = World::start(&[]).await;
    let (_connection, mut link) = Connection::linked(&world, "stub", "").await;
    let mut open = Vec::new();
    for round in 0..2 {
        let dial = GrpcTunnel::open(world.channel().await, "a.test:1");
        let answer = async {
            // The second round claims the id of the first tunnel, which is open.
            let random = link.answer(5).await;
            link.dial_response(random, 6 + round);
        };
        let (tunnel, ()) = within("the dial", async { tokio::join!(dial, answer) }).await;
        match (round, tunnel) {
            (0, Ok(tunnel)) => open.push(tunnel),
            (1, Err(ClientError::Dial(error))) => assert!(!error.is_empty()),
            (round, other) => panic!("round {round}: {:?}", other.err()),
        }
        // The server closes the connection of the surplus answer.
        loop {
            match link.payload().await {
                Some(Payload::CloseRequest(close)) if close.connect_id == 6 + round => break,
                Some(Payload::CloseRequest(close)) => assert_eq!(close.connect_id, 5),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The refusal has a gRPC status, and no link is registered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_with_invalid_metadata_are_refused() {
    let world = World::start(&[]).await;
    let hellos: [&[(&str, &str)]; 4] = [
        &[],
        &[("agentid", "a"), ("agentid", "b")],
        &[
            ("agentid", "a"),
            ("agentidentifiers", "host=a"),
            ("agentidentifiers", "host=b"),
        ],
        &[("agentid", "a"), ("agentidentifiers", "host=a;host=b")],
    ];
    for hello in hellos {
        let connection = Connection::agent(&world).await;
        let mut call = connection.call("/AgentService/Connect", hello).await;
        let answer = call.headers().await.expect("an answer");
        let (status, _message) = grpc_status(&answer);
        assert!(!["", "0"].contains(&&*status), "{hello:?}: {answer:?}");
    }
    assert_eq!(world.server().links(), 0);
}

async fn speak(address: SocketAddr, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    within("the server to hang up", stream.read_to_end(&mut answer)).await?;
    Ok(answer)
}

/// Garbage, plain HTTP, and clients without a valid certificate. The connected agent is not affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_clients_of_the_agent_port_are_refused_and_disturb_no_agent() {
    let (world, _agent, target, _echo) = World::with_echo().await;
    let address = world.server().agents;
    let mut witness = connect::open(&world.connect(), &target).await;
    let words: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        b"\x16\x03\x01\xff\xff garbage that is no ClientHello at all",
        &[0; 1000],
    ];
    for bytes in words {
        // The server answers with a TLS alert or not at all, never with HTTP.
        if let Ok(answer) = speak(address, bytes).await {
            assert!(
                answer.len() < 32 && !answer.starts_with(b"HTTP"),
                "{answer:?}"
            );
        }
        connect::echo(&mut witness, b"unharmed").await;
    }

    // In TLS 1.3 the client learns of the refusal at its first read.
    let nobody = tls::dial_to(&world, b"h2", address, None).await;
    assert!(turned_away(nobody).await, "no certificate");
    let ca = world.files.ca_file();
    let others = adit_testkit::certificates::ThrowawayFiles::create(&[]).expect("certificates");
    let (cert, key) = (others.cert("agent"), others.key("agent"));
    let foreign = tls::dial(address, &ca, Some((&cert, &key))).await;
    assert!(turned_away(foreign).await, "another CA's certificate");
    connect::echo(&mut witness, b"unharmed").await;
    assert_eq!(world.server().links(), 1);
}

/// Whether the server closes the connection without sending HTTP/2.
pub(super) async fn turned_away(
    dialed: io::Result<tokio_rustls::client::TlsStream<TcpStream>>,
) -> bool {
    let Ok(mut stream) = dialed else {
        return true;
    };
    let mut byte = [0];
    !matches!(within("a verdict", stream.read(&mut byte)).await, Ok(1))
}
