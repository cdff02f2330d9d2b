//! Servers that have a peer's certificate and break the rules of peers. Each is refused, counted and bounded; the peers beside
//! them are served.

use std::time::Duration;

use adit::server::RunningServer;
use adit_core::ids::DialId;
use adit_core::lane::{LaneEvent, OpenRequest, RefusalCode};
use adit_core::peer::{self, Forward};
use adit_core::registry::{Scope, Strategy};
use adit_core::wire::packets::packet::Payload;
use adit_core::wire::packets::{KeyChange, Keys, PacketType};
use futures_util::FutureExt as _;
use tokio::net::TcpListener;

use crate::support::peers::{PeerFiles, asker, holder, linked};
use crate::support::raw::{Call, Connection, encoded};
use crate::support::server_lane::{ServerLane, request};
use crate::support::stub_lane::{Stub, ask, grant};
use crate::support::stub_server::{PEER_HEADERS, StubServer};
use crate::support::wait::{until, within};
use crate::support::world::{World, sample};
use crate::support::{connect, targets, tls};

const OFFENCES: &str = "adit_protocol_offences_total{kind=\"forward\"}";

fn offences(server: &RunningServer) -> f64 {
    sample(&server.metrics.scrape().text(), OFFENCES).unwrap_or(0.0)
}

/// Waits until a server says so of a peer.
async fn says(server: &RunningServer, why: &str) {
    let says = |text: &String| text.contains(why);
    until(why, || server.peer_failures().iter().any(says)).await;
}

/// A KEYS packet with keys of hosts.
fn keys(hosts: impl Iterator<Item = String>, draining: bool) -> Payload {
    let changes = hosts.map(|key| KeyChange {
        strategy: 2,
        key,
        draining,
        ..KeyChange::default()
    });
    Payload::Keys(Keys {
        changes: changes.collect(),
        complete: true,
    })
}

/// A server that asks a stub, and the stub's end of the link.
async fn asked(files: &PeerFiles) -> (World, StubServer, Call) {
    let mut stub = StubServer::peer(files, "stub").await;
    let peer = format!("--peer={}", stub.address());
    let flags = files.flags("front");
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.extend(["--server-id=front", "--proxy-strategies=destHost", &peer]);
    let world = World::start(&flags).await;
    let mut call = stub.accept().await.greet_as_peer();
    call.packet(
        PacketType::Keys,
        keys(["host".to_owned()].into_iter(), false),
    );
    linked(world.server(), 1).await;
    (world, stub, call)
}

/// A server that is asked, and dials or opens a tunnel in turn, loses its link. Nobody is dialled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_asked_and_dials_back_loses_its_link() {
    let target = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = target.local_addr().expect("bound").to_string();
    for by_lane in [false, true] {
        let files = PeerFiles::new();
        let (world, mut stub, mut call) = asked(&files).await;
        let _lane = if by_lane {
            let mut lane = ServerLane::bound(&mut stub).await;
            lane.end.open(&request(&address), 0).expect("it is free");
            lane.flush().await;
            Some(lane)
        } else {
            call.dial(1, &address);
            None
        };
        until("an offence", || offences(world.server()) == 1.0).await;
        until("no link", || world.server().linked_peers() == 0).await;
        says(world.server(), "this server dials nothing for it").await;
        assert_eq!(world.server().reachable_keys(), 0);
    }
    assert!(target.accept().now_or_never().is_none(), "it was dialled");
}

/// Keys that never end, or are too long, cost the peer its link and nobody else anything.
///
/// Limit (peers): Changes of keys that another server may announce
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_whose_keys_change_for_ever_loses_its_link() {
    const CHANGES: usize = 1000;
    const PACKETS: usize = 600;
    let files = PeerFiles::new();
    let world = holder(&files, &["--proxy-strategies=destHost,default"]).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let mut stub = StubServer::peer(&files, "stub").await;
    let peers = [world.server().peers.expect("a port"), stub.address()];
    let front = asker(&world, &files, "front", &peers, &[]).await;
    let mut call = stub.accept().await.greet_as_peer();
    call.packet(
        PacketType::Keys,
        keys(["host".to_owned()].into_iter(), false),
    );
    linked(&front, 2).await;
    until("all keys", || front.reachable_keys() == 2).await;
    call.packet(
        PacketType::Keys,
        keys(["h".repeat(30_000)].into_iter(), false),
    );
    let packet = |draining| {
        let hosts = (0..CHANGES).map(|host| format!("host-{host}"));
        encoded(PacketType::Keys.into(), Some(keys(hosts, draining)))
    };
    let packets = [packet(false), packet(true)];
    for number in 0..PACKETS {
        call.message(&packets[number % 2]);
    }
    until("the link's end", || front.linked_peers() == 1).await;
    says(&front, "changes its keys too often").await;
    assert_eq!(front.reachable_keys(), 1, "those of the other peer");
    let (target, _echo) = targets::local_echo().await;
    let path = world.dir.path().join("connect.front");
    let mut stream = connect::open(&path, &target).await;
    connect::echo(&mut stream, b"by the other peer").await;
}

/// A claim to a key of an agent here is counted, whether it names another owner or none. The agent here gets the dials.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_claims_a_key_of_an_agent_here_is_counted_and_gets_no_dials() {
    const CONFLICTS: &str = "adit_peer_key_conflicts_total{server=\"stub\"}";
    let files = PeerFiles::new();
    let (world, _stub, mut call) = asked(&files).await;
    let _agent = world.agent_for("mine", "host=localhost").await;
    world.links(1).await;
    let claim = |owner, draining| {
        let change = KeyChange {
            strategy: 2,
            key: "localhost".to_owned(),
            owner,
            draining,
            ..KeyChange::default()
        };
        Payload::Keys(Keys {
            changes: vec![change],
            complete: true,
        })
    };
    // Its agents of this key are gone: no claim.
    call.packet(PacketType::Keys, claim(0, true));
    until("both keys", || world.server().reachable_keys() == 2).await;
    let counted = || sample(&world.server().metrics.scrape().text(), CONFLICTS).unwrap_or(0.0);
    assert_eq!(counted(), 0.0);
    for (owner, conflicts) in [(7, 1.0), (0, 2.0)] {
        call.packet(PacketType::Keys, claim(owner, false));
        until("a conflict", || counted() == conflicts).await;
    }
    let (port, _echo) = targets::echo().await;
    for _dial in 0..5 {
        let mut stream = connect::open(&world.connect(), &format!("localhost:{port}")).await;
        connect::echo(&mut stream, b"by the agent here").await;
    }
}

/// A link of a stub that asks, and its lane.
async fn asking(world: &World, files: &PeerFiles) -> (Connection, Call, Stub) {
    let address = world.server().peers.expect("it serves peers");
    let (cert, key) = files.pair("stub");
    let (ca, alpn) = (files.ca(), peer::ALPN.as_bytes());
    let secured = tls::dial_as(alpn, address, &ca, Some((&cert, &key)));
    let secured = within("a TLS handshake", secured).await.expect("welcome");
    let connection = Connection::over(secured).await;
    let mut call = ask(&connection, "stub", &PEER_HEADERS).await;
    let grant = grant(&mut call).await.expect("lanes");
    let mut lane = Stub::peer(address, files, "stub").await;
    assert!(lane.bind(&grant).await);
    (connection, call, lane)
}

/// On the port for servers each OPEN forwards a dial, and says so in order; a flood of them costs its lane at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opens_that_forward_nothing_are_refused_and_counted() {
    let files = PeerFiles::new();
    let world = holder(&files, &[]).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let (target, _echo) = targets::local_echo().await;
    let (_connection, _call, mut lane) = asking(&world, &files).await;
    let forward = Forward {
        scope: Scope::named(Strategy::Default, "").expect("a key"),
        time_left: Some(Duration::from_secs(30)),
        owner: None,
        dial: DialId(1),
        client: String::new(),
    };
    let context = forward.encode();
    let unknown = [&context[..], &[200, 0, 0]].concat();
    let refused = [
        request(&target),
        OpenRequest {
            raw: true,
            forward: Some(context.clone()),
            ..request(&target)
        },
        OpenRequest {
            forward: Some(b"no context".to_vec().into()),
            ..request(&target)
        },
        OpenRequest {
            forward: Some(unknown.into()),
            ..request(&target)
        },
    ];
    for (number, open) in refused.iter().enumerate() {
        lane.end.open(open, 0).expect("it is free");
        match lane.event().await {
            Some(LaneEvent::Failed { code, .. }) => assert_eq!(code, RefusalCode::Denied),
            other => panic!("{open:?}: {other:?}"),
        }
        assert_eq!(lane.event().await, Some(LaneEvent::Idle));
        let counted = u32::try_from(number + 1).expect("few");
        assert_eq!(offences(world.server()), f64::from(counted));
    }
    let good = OpenRequest {
        forward: Some(context),
        ..request(&target)
    };
    lane.end.open(&good, 0).expect("it is free");
    assert_eq!(lane.event().await, Some(LaneEvent::Opened));
}
