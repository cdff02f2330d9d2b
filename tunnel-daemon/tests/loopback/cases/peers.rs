//! Servers that know each other: an agent that is linked to one of them is reached through all.

use std::path::PathBuf;
use std::time::Duration;

use adit::agent::RunningAgent;
use adit::server::RunningServer;
use adit_testkit::certificates::{self, ThrowawayFiles};
use adit_tls::pki::Authority;
use adit_tls::selfsigned::Usage;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::deny::replace;
use crate::support::balancer::Balancer;
use crate::support::lanes::ended;
use crate::support::peers::{PeerFiles, asker, holder, linked};
use crate::support::wait::{until, within};
use crate::support::world::{World, channel, echo, open, sample, scraped};
use crate::support::{connect, ports, targets};

/// A server with an agent, and another one without agents that asks it.
struct Pair {
    world: World,
    front: RunningServer,
    files: PeerFiles,
    _agent: RunningAgent,
}

impl Pair {
    async fn start(flags: &[&str]) -> Self {
        let files = PeerFiles::new();
        let world = holder(&files, flags).await;
        let agent = world.agent("agent-1", &[]).await;
        world.links(1).await;
        let address = world.server().peers.expect("it serves peers");
        let front = asker(&world, &files, "front", &[address], &[]).await;
        linked(&front, 1).await;
        Self {
            world,
            front,
            files,
            _agent: agent,
        }
    }

    fn socket(&self, dialect: &str) -> PathBuf {
        socket(&self.world, dialect, "front")
    }
}

/// The socket of an asker.
fn socket(world: &World, dialect: &str, name: &str) -> PathBuf {
    world.dir.path().join(format!("{dialect}.{name}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_of_one_server_is_reached_through_another() {
    let pair = Pair::start(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    for _round in 0..5 {
        let mut stream = connect::open(&pair.socket("connect"), &target).await;
        connect::echo(&mut stream, b"by another server").await;
        connect::echo_to_the_end(&mut stream, &vec![b'x'; 3 << 20]).await;
        let mut tunnel = open(channel(&pair.socket("grpc")).await, &target).await;
        echo(&mut tunnel, b"and by gRPC").await;
        tunnel.close().await.expect("a clean close");
    }
    assert_eq!(pair.front.links(), 0);
    // Only the server that the client called counts dials and tunnels of clients.
    let dials = "konnectivity_network_proxy_server_dial_duration_seconds_count";
    scraped(&pair.front.metrics.scrape(), dials, 10.0).await;
    let linked = "adit_peer_addresses{state=\"linked\"}";
    scraped(&pair.front.metrics.scrape(), linked, 1.0).await;
    let there = pair.world.server().metrics.scrape().text();
    assert!(matches!(sample(&there, dials), None | Some(0.0)), "{there}");
}

/// A failure has the agent's own words, at both dialects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_refuses_is_told_in_the_agents_words_through_a_peer() {
    let pair = Pair::start(&[]).await;
    let (_kept, closed) = targets::closed_port();
    let request = format!("CONNECT {closed} HTTP/1.1\r\nHost: {closed}\r\n\r\n");
    let here = connect::refused(&pair.world.connect(), request.as_bytes()).await;
    let there = connect::refused(&pair.socket("connect"), request.as_bytes()).await;
    assert_eq!(here, there);
    assert!(there.1.contains("connection refused"), "{there:?}");
}

/// The last bytes, a half-close and a reset arrive as they would without the peer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_tunnels_pass_through_a_peer() {
    let pair = Pair::start(&[]).await;
    let (port, _summing, mut sums) = targets::summing().await;
    let mut stream = connect::open(&pair.socket("connect"), &format!("127.0.0.1:{port}")).await;
    let bytes = vec![7; 5 << 20];
    stream.write_all(&bytes).await.expect("it is sent");
    stream.shutdown().await.expect("a half-close");
    let sum = within("the target's sum", sums.recv())
        .await
        .expect("a sum");
    assert_eq!(sum.bytes, bytes.len() as u64);
    let (port, _resetting) = targets::resetting().await;
    let mut stream = connect::open(&pair.socket("connect"), &format!("127.0.0.1:{port}")).await;
    connect::say(&mut stream, b"?").await;
    let _bytes_and_end = connect::end(&mut stream).await;
    scraped(&pair.front.metrics.scrape(), &ended("target_reset"), 1.0).await;
}

/// An agent that comes is found at once, one that goes is "No agent available" soon after, and its return is found again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_that_come_and_go_at_one_server_do_so_at_its_peers() {
    let files = PeerFiles::new();
    let world = holder(&files, &[]).await;
    let address = world.server().peers.expect("it serves peers");
    let front = asker(&world, &files, "front", &[address], &[]).await;
    linked(&front, 1).await;
    let (target, _echo) = targets::local_echo().await;
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    let socket = socket(&world, "connect", "front");
    for _round in 0..3 {
        let (status, text) = connect::refused(&socket, request.as_bytes()).await;
        assert!(text.contains("No agent available"), "{status} {text}");
        let agent = world.agent("agent-1", &[]).await;
        world.links(1).await;
        until("the key is known", || front.reachable_keys() == 1).await;
        let mut stream = connect::open(&socket, &target).await;
        connect::echo(&mut stream, b"found").await;
        drop(stream);
        agent.stop().await;
        world.links(0).await;
        until("the key is gone", || front.reachable_keys() == 0).await;
    }
}

/// Three servers, each with one agent of its own host: each reaches all three, and no dial lands on another host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_is_asked_for_at_the_server_that_has_its_agent() {
    let files = PeerFiles::new();
    let strategies = "--proxy-strategies=destHost,default";
    let world = holder(&files, &[strategies]).await;
    let (target, _echo) = targets::local_echo().await;
    let port = target.rsplit(':').next().expect("a port").to_owned();
    let address = world.server().peers.expect("it serves peers");
    let front = asker(&world, &files, "front", &[address], &[]).await;
    linked(&front, 1).await;
    // Here an agent for any destination, which may dial nothing; there the one of the host.
    let nothing = ["--allow-target=none"];
    let _any = world.agent_of(front.agents.port(), "any", &nothing).await;
    until("a link", || front.links() == 1).await;
    let _host = world.agent_for("host", "host=localhost").await;
    world.links(1).await;
    until("both keys", || front.reachable_keys() == 2).await;
    let mut stream = connect::open(
        &socket(&world, "connect", "front"),
        &format!("localhost:{port}"),
    )
    .await;
    connect::echo(&mut stream, b"the host's own agent").await;
    // Another host is no business of the agent there, and the agent here comes before it.
    let other = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    let (_status, text) =
        connect::refused(&socket(&world, "connect", "front"), other.as_bytes()).await;
    assert!(text.contains("allow"), "{text}");
}

/// A server that is gone takes its keys with it at once, and comes back by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_restarts_is_found_again() {
    let mut pair = Pair::start(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    let address = pair.world.server().peers.expect("it serves peers");
    let mut open = connect::open(&pair.socket("connect"), &target).await;
    connect::echo(&mut open, b"before").await;
    pair.world.stop_server(Duration::ZERO).await;
    let _bytes_and_end = connect::end(&mut open).await;
    scraped(&pair.front.metrics.scrape(), &ended("target_reset"), 1.0).await;
    until("its keys are gone", || pair.front.reachable_keys() == 0).await;
    // On a port of its own this time: the front has a second address.
    pair.world.start_server(0).await;
    let again = pair.world.server().peers.expect("it serves peers");
    assert_ne!(again, address);
    let front = asker(&pair.world, &pair.files, "second", &[address, again], &[]).await;
    let _agent = pair.world.agent("agent-1", &[]).await;
    linked(&front, 1).await;
    until("its key is back", || front.reachable_keys() == 1).await;
    let mut stream = connect::open(&socket(&pair.world, "connect", "second"), &target).await;
    connect::echo(&mut stream, b"after").await;
}

/// A certificate of agents or clients is refused at the port for servers, and a peer's certificate at the agent port.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_peers_are_peers() {
    let files = PeerFiles::new();
    let world = holder(&files, &[]).await;
    let address = world.server().peers.expect("it serves peers");
    for authority in [Authority::Agents, Authority::Clients] {
        let name = format!("{authority:?}").to_lowercase();
        let mut args = world.other_args("0", &format!(".{name}"));
        args.retain(|arg| !arg.starts_with("--peer-") && !arg.starts_with("--server-id"));
        args.extend(files.flags_of(&name, authority, Usage::Peer));
        args.push(format!("--peer={address}"));
        let plan = crate::support::world::server_plan(&args).expect("flags are right");
        let front = adit::server::start(&plan).await.expect("it starts");
        until("it was refused", || !front.peer_failures().is_empty()).await;
        assert_eq!(front.linked_peers(), 0);
    }
    let since = Instant::now();
    let front = asker(&world, &files, "front", &[address], &[]).await;
    linked(&front, 1).await;
    assert!(since.elapsed() < Duration::from_secs(5));
}

/// Servers of another installation, another server with the id of this one, and this server itself are no peers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_installation_and_itself_are_no_peers() {
    let files = PeerFiles::new();
    let world = holder(&files, &["--peer-group=one"]).await;
    let address = world.server().peers.expect("it serves peers");
    let front = asker(&world, &files, "front", &[address], &["--peer-group=two"]).await;
    until("it was refused", || {
        let failures = front.peer_failures();
        failures
            .iter()
            .any(|text| text.contains("--peer-group must be the same"))
    })
    .await;
    let same = ["--peer-group=one", "--server-id=holder"];
    let twin = asker(&world, &files, "twin", &[address], &same).await;
    until("it was refused", || {
        let failures = twin.peer_failures();
        failures
            .iter()
            .any(|text| text.contains("has the id of this one"))
    })
    .await;
    // A name of all servers leads to this one, too.
    let port = ports::free();
    let bind = format!("--peer-bind=127.0.0.1:{port}");
    let flags = ["--peer-group=one", bind.as_str()];
    let address = ([127, 0, 0, 1], port).into();
    let own = asker(&world, &files, "own", &[address], &flags).await;
    until("it knows itself", || own.peer_failures() == ["this server"]).await;
    let addresses = |state: &str| format!("adit_peer_addresses{{state=\"{state}\"}}");
    scraped(&own.metrics.scrape(), &addresses("own"), 1.0).await;
    scraped(&front.metrics.scrape(), &addresses("failed"), 1.0).await;
    let linked = [&front, &twin, &own].map(RunningServer::linked_peers);
    assert_eq!(linked, [0; 3]);
}

/// The small server beside an API server: a unix socket, peers, and no port for agents.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_agents_serves_through_its_peers() {
    let files = PeerFiles::new();
    let world = holder(&files, &[]).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let address = world.server().peers.expect("it serves peers");
    let mut args = world.other_args("0", ".small");
    let of_agents = [
        "--peer-",
        "--server-id",
        "--cluster-",
        "--agent-",
        "--keepalive",
    ];
    args.retain(|arg| !of_agents.iter().any(|flag| arg.starts_with(flag)));
    args.extend(files.flags("small"));
    args.extend([format!("--peer={address}"), "--no-agents".to_owned()]);
    let plan = crate::support::world::server_plan(&args).expect("flags are right");
    let small = adit::server::start(&plan).await.expect("it starts");
    assert_eq!(small.agents, adit::server::NO_PORT);
    // No wait for the peer: the first dial does that.
    let (target, _echo) = targets::local_echo().await;
    let mut stream = connect::open(&socket(&world, "connect", "small"), &target).await;
    connect::echo(&mut stream, b"without agents").await;
}

/// A dial that comes before the first peer waits for it, and no longer than three seconds; later ones do not wait at all.
///
/// Limit (times): A dial without an agent at a server that has just started and has peers | waits 3 s for their keys, in the first
/// 10 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_just_started_waits_for_its_first_peer() {
    let files = PeerFiles::new();
    let world = holder(&files, &[]).await;
    let address = ([127, 0, 0, 1], ports::free()).into();
    let _front = asker(&world, &files, "front", &[address], &[]).await;
    let (target, _echo) = targets::local_echo().await;
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    let path = socket(&world, "connect", "front");
    let since = Instant::now();
    let (_status, text) = connect::refused(&path, request.as_bytes()).await;
    assert!(text.contains("No agent available"), "{text}");
    let waited = since.elapsed();
    assert!(waited >= Duration::from_secs(3), "{waited:?}");
}

/// A server that has just started waits for each of its peers, and not for the first one alone: the other may have the agent, or one
/// that comes earlier in the order of strategies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_just_started_waits_for_all_of_its_peers() {
    let files = PeerFiles::new();
    let world = holder(&files, &["--proxy-strategies=destHost,default"]).await;
    // For any destination, and it may dial nothing.
    let _any = world.agent("any", &["--allow-target=none"]).await;
    world.links(1).await;
    let bind = ["--peer-bind=127.0.0.1:0"];
    let second = asker(&world, &files, "second", &[], &bind).await;
    let host = ["--agent-identifiers=host=localhost"];
    let _host = world.agent_of(second.agents.port(), "host", &host).await;
    until("a link", || second.links() == 1).await;
    // Its keys come late.
    let path = Balancer::to(&[second.peers.expect("a port")]).await;
    path.swallow();
    let peers = [world.server().peers.expect("a port"), path.address];
    let front = asker(&world, &files, "front", &peers, &[]).await;
    linked(&front, 1).await;
    let (port, _echo) = targets::echo().await;
    let (socket, target) = (
        socket(&world, "connect", "front"),
        format!("localhost:{port}"),
    );
    let opening = connect::open(&socket, &target);
    let thawing = async {
        tokio::task::yield_now().await;
        path.thaw();
    };
    let (mut stream, ()) = tokio::join!(opening, thawing);
    connect::echo(&mut stream, b"by the host's own agent").await;
}

/// A server that leaves says so: new dials go to another one, and its tunnels live on within the grace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_leaves_keeps_its_tunnels_and_gets_no_dials() {
    let files = PeerFiles::new();
    let mut world = holder(&files, &[]).await;
    let bind = ["--peer-bind=127.0.0.1:0"];
    let second = asker(&world, &files, "second", &[], &bind).await;
    let other = format!("--proxy-server-host={}", second.agents);
    let _agent = world.agent("agent-1", &[&other]).await;
    world.links(1).await;
    until("a second link", || second.links() == 1).await;
    let addresses = [world.server(), &second].map(|server| server.peers.expect("it has a port"));
    let front = asker(&world, &files, "front", &addresses, &[]).await;
    linked(&front, 2).await;
    let path = socket(&world, "connect", "front");
    let (target, _echo) = targets::local_echo().await;
    // Enough tunnels that some go each way.
    let mut streams = connect::open_many(&path, &target, 16).await;
    let to = |server: &str| format!("adit_peer_tunnels{{direction=\"to\",server=\"{server}\"}}");
    let tunnels = |server: &str| sample(&front.metrics.scrape().text(), &to(server)).unwrap_or(0.0);
    let before = [tunnels("holder"), tunnels("second")];
    assert_eq!(before.iter().sum::<f64>(), 16.0);
    assert!(before[0] > 0.0, "both have the agent: {before:?}");
    let leaving = world.take_server();
    let mut stopping = JoinSet::new();
    stopping.spawn(leaving.stop(Some(Duration::from_secs(60))));
    until("it is asked no more", || front.holders_of_any() == 1).await;
    let more = connect::open_many(&path, &target, 16).await;
    assert_eq!(
        [tunnels("holder"), tunnels("second")],
        [before[0], before[1] + 16.0]
    );
    for stream in &mut streams {
        connect::echo(stream, b"within the grace").await;
    }
    drop((streams, more));
    // As against one that is lost: it may be replaced.
    let has_left = |why: &String| why.contains("has left");
    let known = until("its leave is known", || {
        front.peer_failures().iter().any(has_left)
    });
    let end = async { tokio::join!(stopping.join_all(), known) };
    within("its end, with its last tunnel", end).await;
}

/// The other server's own rules hold for what this one forwards, by the names in this one's certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_holder_applies_its_own_client_rules() {
    let files = PeerFiles::new();
    let (target, _echo) = targets::local_echo().await;
    let (other, _other_echo) = targets::local_echo().await;
    let rules = [
        format!("--client-allow-target=peer=front,{target}"),
        format!("--client-allow-target=peer=else,{other}"),
    ];
    let rules = rules.each_ref().map(String::as_str);
    let world = holder(&files, &rules).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let address = world.server().peers.expect("it serves peers");
    let front = asker(&world, &files, "front", &[address], &[]).await;
    linked(&front, 1).await;
    let path = socket(&world, "connect", "front");
    let mut stream = connect::open(&path, &target).await;
    connect::echo(&mut stream, b"allowed").await;
    let request = format!("CONNECT {other} HTTP/1.1\r\nHost: {other}\r\n\r\n");
    let (_status, text) = connect::refused(&path, request.as_bytes()).await;
    assert!(
        text.contains("dials of the server client CN=front"),
        "{text}"
    );
}

/// A revoked peer loses its link, and a server refuses a revoked one that it asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_peer_is_refused_on_either_side() {
    let names = ["127.0.0.1".to_owned()];
    let files = ThrowawayFiles::create(&names).expect("an authority");
    let revoke = |list: &str, revoked: &[&str]| {
        let pems = revoked
            .iter()
            .map(|name| std::fs::read_to_string(files.cert(name)));
        let pems: Vec<String> = pems.collect::<Result<_, _>>().expect("certificates");
        let pems: Vec<&str> = pems.iter().map(String::as_str).collect();
        let text = certificates::revoke(files.ca(), &pems).expect("a list");
        replace(&files.dir().join(list), &text);
    };
    for name in ["one", "two", "three"] {
        files.issue(name, Usage::Peer, &names).expect("a pair");
    }
    revoke("at-one.pem", &[]);
    revoke("at-others.pem", &[]);
    let flags = |name: &str, list: &str| {
        vec![
            format!("--peer-cert={}", files.cert(name).display()),
            format!("--peer-key={}", files.key(name).display()),
            format!("--peer-ca-cert={}", files.ca_file().display()),
            format!("--peer-crl={}", files.dir().join(list).display()),
            format!("--server-id={name}"),
        ]
    };
    let mut of_one = flags("one", "at-one.pem");
    of_one.push("--peer-bind=127.0.0.1:0".to_owned());
    let of_one: Vec<&str> = of_one.iter().map(String::as_str).collect();
    let world = World::start(&of_one).await;
    let address = world.server().peers.expect("it serves peers");
    let start = |name: &'static str| {
        let mut args = world.other_args("0", &format!(".{name}"));
        args.retain(|arg| !arg.starts_with("--peer-") && !arg.starts_with("--server-id"));
        args.extend(flags(name, "at-others.pem"));
        args.push(format!("--peer={address}"));
        async move {
            let plan = crate::support::world::server_plan(&args).expect("flags are right");
            adit::server::start(&plan).await.expect("it starts")
        }
    };
    let two = start("two").await;
    linked(&two, 1).await;
    revoke("at-one.pem", &["two"]);
    until("its link has ended", || two.linked_peers() == 0).await;
    revoke("at-one.pem", &[]);
    linked(&two, 1).await;
    revoke("at-others.pem", &["one"]);
    until("the link that it had has ended", || two.linked_peers() == 0).await;
    let three = start("three").await;
    until("it refuses", || {
        let failures = three.peer_failures();
        failures.iter().any(|text| text.contains("revoked"))
    })
    .await;
}

/// A new authority comes beside the old one, then new certificates come: open tunnels live on, and new links use what is new. When
/// the old authority goes, links are made again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_authority_of_peers_rotate_without_a_lost_tunnel() {
    let (old, new) = (PeerFiles::new(), PeerFiles::new());
    let dir = TempDir::new().expect("a directory");
    let read = |path: PathBuf| std::fs::read_to_string(path).expect("a file");
    let file = |name: &str| dir.path().join(name);
    let put = |files: &PeerFiles, name: &str| {
        let (cert, key) = files.pair(name);
        replace(&file(&format!("{name}.crt")), &read(cert));
        replace(&file(&format!("{name}.key")), &read(key));
    };
    let trust = |all: &[&PeerFiles]| {
        let all: String = all.iter().map(|files| read(files.ca())).collect();
        replace(&file("ca.crt"), &all);
    };
    let flags = |name: &str| {
        vec![
            format!("--peer-cert={}", file(&format!("{name}.crt")).display()),
            format!("--peer-key={}", file(&format!("{name}.key")).display()),
            format!("--peer-ca-cert={}", file("ca.crt").display()),
            format!("--server-id={name}"),
        ]
    };
    trust(&[&old]);
    for name in ["holder", "front"] {
        put(&old, name);
    }
    let of_holder = [flags("holder"), vec!["--peer-bind=127.0.0.1:0".to_owned()]].concat();
    let of_holder: Vec<&str> = of_holder.iter().map(String::as_str).collect();
    let world = World::start(&of_holder).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let address = world.server().peers.expect("it serves peers");
    let start = async |name: &str, flags: Vec<String>| {
        let mut args = world.other_args("0", &format!(".{name}"));
        args.retain(|arg| !arg.starts_with("--peer-") && !arg.starts_with("--server-id"));
        args.extend(flags);
        args.push(format!("--peer={address}"));
        let plan = crate::support::world::server_plan(&args).expect("flags are right");
        adit::server::start(&plan).await.expect("it starts")
    };
    let front = start("front", flags("front")).await;
    linked(&front, 1).await;
    let (target, _echo) = targets::local_echo().await;
    let path = socket(&world, "connect", "front");
    let mut stream = connect::open(&path, &target).await;
    trust(&[&old, &new]);
    for name in ["holder", "front"] {
        put(&new, name);
    }
    // It knows the new authority alone.
    let third = [new.flags("third"), vec!["--server-id=third".to_owned()]].concat();
    let third = start("third", third).await;
    linked(&third, 1).await;
    connect::echo(&mut stream, b"still there").await;
    assert_eq!(front.linked_peers(), 1);
    trust(&[&new]);
    // What the old authority alone has vouched for ends.
    let _bytes_and_end = connect::end(&mut stream).await;
    linked(&front, 1).await;
    let mut stream = connect::open(&path, &target).await;
    connect::echo(&mut stream, b"by new certificates").await;
}
