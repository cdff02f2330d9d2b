//! Servers that know each other, as processes: killed, stopped and continued while clients dial through a third.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tokio::time::Instant;

use super::processes::Processes;
use super::silent_agents::stop;
use crate::support::balancer::Balancer;
use crate::support::lanes::ended;
use crate::support::peers::{PeerFiles, asker, asker_args, holder, linked};
use crate::support::process::{Process, access_events};
use crate::support::wait::until;
use crate::support::world::{sample, scraped};
use crate::support::{connect, targets, tls};

/// Slowest dial while a path exists: a server counts as silent after four seconds, and dials are hedged long before.
const SLOWEST: Duration = Duration::from_secs(4);

/// Two servers with the same agent, and a third without, which asks both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_new_dial_fails_while_one_of_two_holders_is_frozen_or_killed() {
    let files = PeerFiles::new();
    let of_a = files.flags("a");
    let mut flags: Vec<&str> = of_a.iter().map(String::as_str).collect();
    flags.extend([
        "--peer-bind=127.0.0.1:0",
        "--server-id=a",
        "--server-count=2",
    ]);
    let a = Processes::start(&flags).await;
    let mut args = a.world.other_args("0", ".b");
    args.retain(|arg| !arg.starts_with("--peer-") && !arg.starts_with("--server-"));
    args.extend(files.flags("b"));
    args.extend(
        [
            "--peer-bind=127.0.0.1:0",
            "--server-id=b",
            "--server-count=2",
        ]
        .map(str::to_owned),
    );
    let mut b = Process::start("b", &args, a.world.dir.path());
    let other = format!("--proxy-server-host={}", b.address("agents"));
    let _agent = a.agent("agent-1", &[&other]);
    a.links(1.0).await;
    let peers = [a.server.address("peers"), b.address("peers")];
    let front = asker(&a.world, &files, "front", &peers, &["--server-count=1"]).await;
    linked(&front, 2).await;
    until("both have the agent", || front.holders_of_any() == 2).await;
    let (target, _echo) = targets::local_echo().await;
    let path = a.world.dir.path().join("connect.front");
    let dials = |count: usize| {
        let (path, target) = (path.clone(), target.clone());
        async move {
            let mut slowest = Duration::ZERO;
            for _dial in 0..count {
                let since = Instant::now();
                let mut stream = connect::open(&path, &target).await;
                connect::echo(&mut stream, b"there is a path").await;
                slowest = slowest.max(since.elapsed());
            }
            assert!(slowest <= SLOWEST, "{slowest:?}");
        }
    };
    dials(20).await;
    // A tunnel that it opened before it stood still would neither fail nor work.
    stop(&a.server).await;
    dials(40).await;
    a.server.signal(Signal::CONT);
    until("it answers again", || front.silent_peers() == 0).await;
    dials(20).await;
    b.kill();
    dials(40).await;
    until("its keys are gone", || front.holders_of_any() == 1).await;
}

/// A server that asks stands still and goes on: clients of the other server notice nothing, its own tunnels and dials work again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_asks_and_stood_still_works_again_and_disturbs_nobody() {
    let files = PeerFiles::new();
    let world = holder(&files, &[]).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let args = asker_args(
        &world,
        &files,
        "front",
        &[world.server().peers.expect("a port")],
    );
    let front = Process::start("front", &args, world.dir.path());
    let links = "adit_peer_links{direction=\"from\",server=\"front\"}";
    scraped(&world.server().metrics.scrape(), links, 1.0).await;
    let (target, _echo) = targets::local_echo().await;
    let path = world.dir.path().join("connect.front");
    let mut before = connect::open(&path, &target).await;
    connect::echo(&mut before, b"before").await;
    stop(&front).await;
    for _round in 0..3 {
        world.assert_serves(&target).await;
    }
    front.signal(Signal::CONT);
    connect::echo(&mut before, b"still there").await;
    let mut after = connect::open(&path, &target).await;
    connect::echo(&mut after, b"after").await;
}

/// The path between two servers swallows everything, while another server has the same agent: no dial fails. What was on the
/// path ends, and the peer is found again once the path is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_new_dial_fails_while_the_path_to_one_of_two_holders_is_a_black_hole() {
    let files = PeerFiles::new();
    let world = holder(&files, &["--server-count=2"]).await;
    let bind = ["--peer-bind=127.0.0.1:0", "--server-count=2"];
    let second = asker(&world, &files, "second", &[], &bind).await;
    let other = format!("--proxy-server-host={}", second.agents);
    let _agent = world.agent("agent-1", &[&other]).await;
    world.links(1).await;
    until("a second link", || second.links() == 1).await;
    let path = Balancer::to(&[world.server().peers.expect("a port")]).await;
    let peers = [path.address, second.peers.expect("a port")];
    let front = asker(&world, &files, "front", &peers, &["--server-count=1"]).await;
    linked(&front, 2).await;
    until("both have the agent", || front.holders_of_any() == 2).await;
    let (target, _echo) = targets::local_echo().await;
    let socket = world.dir.path().join("connect.front");
    let there = "adit_peer_tunnels{direction=\"to\",server=\"holder\"}";
    let value = |series: &str| sample(&front.metrics.scrape().text(), series).unwrap_or(0.0);
    let mut open = Vec::new();
    while value(there) == 0.0 {
        open.push(connect::open(&socket, &target).await);
    }
    path.swallow();
    let mut slowest = Duration::ZERO;
    while front.linked_peers() == 2 {
        let since = Instant::now();
        let mut stream = connect::open(&socket, &target).await;
        connect::echo(&mut stream, b"there is a path").await;
        slowest = slowest.max(since.elapsed());
    }
    assert!(slowest <= SLOWEST, "{slowest:?}");
    let lost = ended("peer_lost");
    until("its tunnels are lost", || value(&lost) > 0.0).await;
    path.thaw();
    linked(&front, 2).await;
    drop(open);
}

/// The server that has the agent logs who has asked it, what that server says of its client, and which agent it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forwarded_tunnel_has_an_access_event_at_the_server_of_its_agent() {
    let files = PeerFiles::new();
    let of_holder = files.flags("holder");
    let mut flags: Vec<&str> = of_holder.iter().map(String::as_str).collect();
    flags.extend(["--peer-bind=127.0.0.1:0", "--server-id=holder"]);
    let holder = Processes::start(&flags).await;
    let _agent = holder.agent("agent-1", &[]);
    holder.links(1.0).await;
    let certs = holder.world.files.dir().display().to_string();
    let tcp = [
        "--frontend=http-connect=tcp:127.0.0.1:0".to_owned(),
        format!("--server-cert={certs}/server.crt"),
        format!("--server-key={certs}/server.key"),
        format!("--server-ca-cert={certs}/ca.crt"),
    ];
    let tcp = tcp.each_ref().map(String::as_str);
    let peers = [holder.server.address("peers")];
    let front = asker(&holder.world, &files, "front", &peers, &tcp).await;
    linked(&front, 1).await;
    let (target, _echo) = targets::local_echo().await;
    let address = front.frontends[0];
    let secured = tls::dial_to(&holder.world, b"http/1.1", address, Some("client"));
    let mut stream = secured.await.expect("welcome");
    connect::dial(&mut stream, &target).await;
    connect::echo(&mut stream, b"by name").await;
    drop(stream);
    let (_kept, closed) = targets::closed_port();
    let request = format!("CONNECT {closed} HTTP/1.1\r\nHost: {closed}\r\n\r\n");
    let path = holder.world.dir.path().join("connect.front");
    let _refused = connect::refused(&path, request.as_bytes()).await;
    let forwarded = |message: &str| {
        let events = access_events(&holder.server.log());
        let fits = |event: &Value| event["asked_by"] == "front" && event["message"] == message;
        events.into_iter().find(fits)
    };
    until("an event", || forwarded("tunnel ended").is_some()).await;
    let tunnel = forwarded("tunnel ended").expect("an event");
    let client = tunnel["claimed_client"].as_str().expect("a client");
    assert!(client.starts_with("CN=client"), "{tunnel}");
    let fields = ["agent", "opened_by", "client_dialect", "destination", "end"];
    let fields = fields.map(|field| tunnel[field].as_str().unwrap_or_default());
    let expected = ["agent-1", "peer", "peer", &target, "client_gone"];
    assert_eq!(fields, expected, "{tunnel}");
    assert_eq!(tunnel["bytes_to_target"], 7);
    until("an event", || forwarded("dial failed").is_some()).await;
    let dial = forwarded("dial failed").expect("an event");
    let fields = ["agent", "reason"].map(|field| dial[field].as_str().unwrap_or_default());
    assert_eq!(fields, ["agent-1", "refused"], "{dial}");
    assert_eq!(dial.get("claimed_client"), None, "by a unix socket");
}
