//! Node to control plane: connections that are not allowed or cannot be opened are reset, and counted by reason at both ends.

use std::time::{Duration, Instant};

use adit::agent::RunningAgent;
use adit_net::socket::set_reset_on_close;

use crate::support::lanes::{IDLE, value as at_server};
use crate::support::node::{
    self, OPEN, assert_quiet, assert_reset, connect, echo, refusals, refused,
};
use crate::support::ports;
use crate::support::process::{ask, raise_descriptor_limit};
use crate::support::stub_server::StubServer;
use crate::support::targets;
use crate::support::wait::{until, within};
use crate::support::world::{World, agent_metric};

/// Opens one more connection, and asserts that it is reset and that both ends count this reason and no other.
async fn assert_refused(world: &World, agent: &RunningAgent, listener: usize, reason: &str) {
    let series = refusals(reason);
    let before = (
        node::value(agent, &series),
        at_server(world, &series),
        refused(agent),
    );
    assert_reset(agent.target_listeners[listener]).await;
    until("it is counted", || refused(agent) == before.2 + 1.0).await;
    let told = agent.metrics.scrape().text();
    let told: Vec<&str> = told
        .lines()
        .filter(|line| line.contains("refusals"))
        .collect();
    let counted = node::value(agent, &series);
    assert_eq!(counted, before.0 + 1.0, "listener {listener}: {told:#?}");
    world.server_metric(&series, before.1 + 1.0).await;
    assert_quiet(world, agent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlisted_destinations_are_refused_and_listed_ones_served() {
    let (port, _target) = targets::echo().await;
    let (other, _other) = targets::echo().await;
    let (_held, closed) = targets::closed_port();
    let closed = closed.port();
    let allowed = [
        format!("127.0.0.1:{port}"),
        format!("127.0.0.1:{closed}"),
        // A listed name does not allow loopback, whatever the name resolves to.
        format!("localhost:{other}"),
        // A network that contains loopback does not allow it, either.
        format!("0.0.0.0/0:{other}"),
        // Other names on this port are refused without a lookup.
        "nowhere.invalid:9".to_owned(),
    ];
    let targets = [
        format!("127.0.0.1:{port}"),
        format!("127.0.0.1:{closed}"),
        format!("127.0.0.1:{other}"),
        format!("127.0.0.2:{port}"),
        format!("localhost:{other}"),
        format!("[::ffff:127.0.0.1]:{other}"),
        format!("169.254.169.254:{other}"),
        format!("[fd00:ec2::254]:{other}"),
        "other.invalid:9".to_owned(),
        "nowhere.invalid:9".to_owned(),
    ];
    let allowed: Vec<&str> = allowed.iter().map(String::as_str).collect();
    let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
    let (world, agent) = node::world(&allowed, &targets).await;
    assert_refused(&world, &agent, 1, "refused").await;
    for listener in 2..=8 {
        assert_refused(&world, &agent, listener, "not_allowed").await;
    }
    // The reason of this failure depends on the host's name servers.
    assert_reset(agent.target_listeners[9]).await;
    let denied = node::value(&agent, &refusals("not_allowed"));
    assert_eq!((denied, refused(&agent)), (7.0, 9.0));
    let mut stream = connect(agent.target_listeners[0]).await;
    echo(&mut stream, b"still served").await;
    for reason in ["lost", "violation"] {
        let series = format!("adit_lanes_closed_total{{reason=\"{reason}\"}}");
        assert_eq!(at_server(&world, &series), 0.0, "no lane is lost over it");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_list_every_tunnel_is_refused() {
    let (target, _echo) = targets::local_echo().await;
    let (world, agent) = node::world(&[], &[&target]).await;
    for count in 1..=3 {
        assert_reset(agent.target_listeners[0]).await;
        let series = refusals("not_allowed");
        agent_metric(&agent, &series, f64::from(count)).await;
    }
    assert_eq!(at_server(&world, "adit_node_tunnels_opened_total"), 0.0);
}

/// An `--allowed-destination` that covers the listeners does not allow them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_own_listeners_are_never_dialled() {
    let own = ports::free();
    let flags = [
        format!("--frontend=http-connect=tcp:0.0.0.0:{own}"),
        "--insecure-plaintext-frontend".to_owned(),
        format!("--allowed-destination=127.0.0.0/8:{own}"),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let world = World::start(&flags).await;
    assert_eq!(world.server().frontends.len(), 1);
    let names = ["127.0.0.1", "127.5.5.5", "0.0.0.0"].map(|ip| format!("{ip}:{own}"));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let agent = node::agent(&world, &names).await;
    world.links(1).await;
    for listener in 0..names.len() {
        assert_refused(&world, &agent, listener, "not_allowed").await;
    }
}

/// Limit (times): Connecting to a destination of a node | 5 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unresponsive_destination_times_out_and_can_be_cancelled() {
    let silent = targets::silent_host();
    let (world, agent) = node::world(&[&silent.address], &[&silent.address]).await;
    assert_refused(&world, &agent, 0, "timed_out").await;
    // The server stops dialling when the client resets its connection.
    let stream = connect(agent.target_listeners[0]).await;
    world.server_metric("adit_node_waiting", 1.0).await;
    set_reset_on_close(&stream).expect("a flag");
    let left = Instant::now();
    drop(stream);
    assert_quiet(&world, &agent).await;
    assert!(
        left.elapsed() < Duration::from_secs(4),
        "not at the timeout"
    );
    assert_eq!(node::value(&agent, &refusals("given_up")), 1.0);
    assert_eq!(at_server(&world, &refusals("given_up")), 1.0);
}

/// Limit (times): A node's connection without a free lane or server | reset after 5 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_waits_at_most_five_seconds_for_a_lane() {
    let (destination, _echo) = targets::local_echo().await;
    let allowed = format!("--allowed-destination={destination}");
    let world = World::start(&[&allowed, "--lanes-per-link=1"]).await;
    let agent = node::agent(&world, &[&destination]).await;
    world.server_metric(IDLE, 1.0).await;
    let mut first = connect(agent.target_listeners[0]).await;
    echo(&mut first, b"the only lane").await;
    let since = Instant::now();
    assert_reset(agent.target_listeners[0]).await;
    let held = since.elapsed();
    assert!(held >= Duration::from_millis(4900), "{held:?}");
    assert!(held < Duration::from_secs(8), "{held:?}");
    assert_eq!(node::value(&agent, &refusals("no_lane")), 1.0);
    // A held connection gets a lane that becomes free in time.
    let mut second = connect(agent.target_listeners[0]).await;
    agent_metric(&agent, "adit_node_waiting", 1.0).await;
    drop(first);
    echo(&mut second, b"in time").await;
    assert_eq!(refused(&agent), 1.0);
}

/// An upstream server takes no lanes. The agent distinguishes it from a missing server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_go_server_connections_are_reset_at_once_and_readyz_says_why() {
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let target = "--target=0:10.96.0.1:443";
    let agent = world.agent_of(server.port(), "a", &[target]).await;
    let health = agent.health.expect("a health port");
    let caller = server.accept().await;
    let _link = caller.greet(&[]);
    let servers = "konnectivity_network_proxy_agent_open_server_connections";
    agent_metric(&agent, servers, 1.0).await;
    let since = Instant::now();
    for count in 1..=2 {
        assert_reset(agent.target_listeners[0]).await;
        agent_metric(&agent, &refusals("no_lanes"), f64::from(count)).await;
    }
    assert!(since.elapsed() < Duration::from_secs(4), "not held");
    let told = ask(health, "/readyz?verbose").await;
    assert!(
        told.contains("[-]node-to-control-plane no connected server takes lanes"),
        "{told}"
    );
}

/// The next connection is reset at once, and the waiting connections are unaffected.
///
/// Limit (peers): Connections of an agent's node listeners
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_most_1024_connections_wait_for_a_tunnel() {
    const WAITING: u16 = 1024;
    // Each connection takes two descriptors of this process.
    raise_descriptor_limit();
    let (_world, agent) = node::without_server("127.0.0.1:9").await;
    let count = |reason: &str| node::value(&agent, &refusals(reason));
    let waiting = || node::value(&agent, "adit_node_waiting");
    // Connections wait for five seconds. A machine that needs longer to open all of them tries again.
    for _attempt in 0..5 {
        let given_up = count("no_server");
        let mut held = Vec::new();
        for _connection in 0..WAITING {
            held.push(connect(agent.target_listeners[0]).await);
        }
        until("all of them wait, or no longer", || {
            waiting() == f64::from(WAITING) || count("no_server") > given_up
        })
        .await;
        let refused = count("limit");
        assert_reset(agent.target_listeners[0]).await;
        if count("no_server") == given_up {
            assert_eq!(count("limit"), refused + 1.0);
            return;
        }
        drop(held);
        until("none waits", || waiting() == 0.0).await;
    }
    panic!("this machine is too slow to have so many connections wait at once");
}

/// Limit (times): A node's connection without a free lane or server
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_any_server_a_connection_is_reset_after_five_seconds() {
    let (_world, agent) = node::without_server("10.96.0.1:443").await;
    assert_reset(agent.target_listeners[0]).await;
    assert_eq!(node::value(&agent, &refusals("no_server")), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_agent_closes_its_listeners_and_serves_on() {
    let (destination, _echo) = targets::local_echo().await;
    let (_world, agent) = node::world(&[&destination], &[&destination]).await;
    let address = agent.target_listeners[0];
    let mut stream = connect(address).await;
    echo(&mut stream, b"before").await;
    agent.drain();
    let refused = async {
        while tokio::net::TcpStream::connect(address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    within("its listener is closed", refused).await;
    echo(&mut stream, b"behind").await;
    // The listener may have accepted a last probe just before it closed; its connection ends soon.
    agent_metric(&agent, OPEN, 1.0).await;
    drop(stream);
    within("nothing is left", agent.idle(Duration::from_secs(20))).await;
    assert_eq!(node::value(&agent, OPEN), 0.0);
}
