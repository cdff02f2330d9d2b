//! Node to control plane: tunnels that an agent opens for connections to its listeners.

use std::time::{Duration, Instant};

use adit::agent::RunningAgent;
use adit_net::socket::set_reset_on_close;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::support::connect::{hears, say};
use crate::support::lanes::{IDLE, opened, value as at_server, warm};
use crate::support::node::{self, OPEN, OPENED, assert_is_reset, assert_quiet, connect, echo};
use crate::support::wait::{until, within};
use crate::support::world::{World, agent_metric};
use crate::support::{connect as frontend, targets};

/// A world with one allowed destination, and its agent's listener for it.
async fn world_to(port: u16, flags: &[&str]) -> (World, RunningAgent) {
    let destination = format!("127.0.0.1:{port}");
    let allowed = format!("--allowed-destination={destination}");
    let target = format!("--target=0:{destination}");
    let [of_server, of_agent] = [&*allowed, &target].map(|own| [&[own], flags].concat());
    World::linked(&of_server, &of_agent).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_reach_their_destination_through_the_server() {
    let (port, _target) = targets::echo().await;
    let (world, agent) = world_to(port, &[]).await;
    warm(&world).await;
    let since = Instant::now();
    for round in 1..=20 {
        let mut stream = connect(agent.target_listeners[0]).await;
        echo(&mut stream, b"from the node").await;
        drop(stream);
        world.server_metric(OPENED, f64::from(round)).await;
    }
    // The server must notice an OPEN on an idle lane as it arrives. A check of idle lanes once a second would take ten seconds.
    let elapsed = since.elapsed();
    assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
    assert_quiet(&world, &agent).await;
    assert_eq!(node::value(&agent, OPENED), 20.0);
    assert_eq!(node::refused(&agent), 0.0);
    for series in ["to_target", "to_client"] {
        let series = format!("adit_node_tunnel_bytes_total{{direction=\"{series}\"}}");
        assert_eq!(at_server(&world, &series), 20.0 * 13.0);
        assert_eq!(node::value(&agent, &series), 20.0 * 13.0);
    }
    // They do not count as tunnels of clients.
    let of_clients = at_server(&world, "adit_tunnels_opened_total{path=\"lane\"}");
    assert_eq!(of_clients, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_data_arrives_unchanged_in_both_directions() {
    let (port, _target) = targets::echo().await;
    for flags in [&[][..], &["--lane-security=plaintext"]] {
        let (world, agent) = world_to(port, flags).await;
        let sent = targets::pattern(0, 20_000_000);
        let mut stream = connect(agent.target_listeners[0]).await;
        frontend::echo_to_the_end(&mut stream, &sent).await;
        drop(stream);
        assert_quiet(&world, &agent).await;
        let clean = "adit_node_tunnels_closed_total{reason=\"clean\"}";
        let (server, agent) = (at_server(&world, clean), node::value(&agent, clean));
        // An agent of another test may have connected to this listener in search of its server.
        assert!(server >= 1.0 && agent >= 1.0, "{server}, {agent}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_side_may_half_close_first() {
    // The client closes first: the destination answers once it has read everything.
    let (port, _summing, mut seen) = targets::summing().await;
    let (world, agent) = world_to(port, &[]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    say(&mut stream, &targets::pattern(0, 300_000)).await;
    stream.shutdown().await.expect("a half-close");
    let sum = within("the sum", seen.recv()).await.expect("a sum");
    assert_eq!(sum, targets::Sum::of(&targets::pattern(0, 300_000)));
    let mut answer = String::new();
    within("the answer", stream.read_to_string(&mut answer))
        .await
        .expect("clean");
    assert_eq!(answer, format!("{}\n", sum.hash));
    assert_quiet(&world, &agent).await;

    // The destination closes first, and continues to read.
    let (done, mut read_all) = tokio::sync::mpsc::channel(1);
    let (port, _target) = targets::serve(move |mut stream| {
        let done = done.clone();
        async move {
            stream.write_all(b"that is all").await?;
            stream.shutdown().await?;
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await?;
            let _test_over = done.send(rest).await;
            Ok(())
        }
    })
    .await;
    let (world, agent) = world_to(port, &[]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    let mut heard = String::new();
    within("its half", stream.read_to_string(&mut heard))
        .await
        .expect("clean");
    assert_eq!(heard, "that is all");
    stream.write_all(b"and now this").await.expect("taken");
    stream.shutdown().await.expect("a half-close");
    let rest = within("the other half", read_all.recv()).await;
    assert_eq!(rest.as_deref(), Some(&b"and now this"[..]));
    assert_quiet(&world, &agent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resets_are_forwarded_as_resets_in_both_directions() {
    let (port, _target) = targets::resetting().await;
    let (world, agent) = world_to(port, &[]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    stream.write_all(b"x").await.expect("taken");
    assert_is_reset(&mut stream).await;
    assert_quiet(&world, &agent).await;
    let reset = "adit_node_tunnels_closed_total{reason=\"target_reset\"}";
    assert_eq!(
        (at_server(&world, reset), node::value(&agent, reset)),
        (1.0, 1.0)
    );

    let (port, _summing, mut seen) = targets::summing().await;
    let (world, agent) = world_to(port, &[]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    stream.write_all(b"cut off").await.expect("taken");
    world.server_metric(OPEN, 1.0).await;
    set_reset_on_close(&stream).expect("a flag");
    drop(stream);
    let sum = within("the destination's end", seen.recv()).await;
    assert!(!sum.expect("a sum").clean, "a reset, no close");
    assert_quiet(&world, &agent).await;
    let gone = "adit_node_tunnels_closed_total{reason=\"client_gone\"}";
    assert_eq!(
        (at_server(&world, gone), node::value(&agent, gone)),
        (1.0, 1.0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_server_first_destination_arrive() {
    let (port, _target) = targets::server_first(b"hello node\n").await;
    let (_world, agent) = world_to(port, &[]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    hears(&mut stream, b"hello node\n").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ipv6_works_at_both_ends() {
    let listener = TcpListener::bind("[::1]:0")
        .await
        .expect("IPv6 on loopback");
    let destination = listener.local_addr().expect("bound").to_string();
    let world = World::start(&[&format!("--allowed-destination={destination}")]).await;
    let target = format!("--target=0:{destination}");
    let agent = world
        .agent("agent-1", &[&target, "--bind-address=[::1]"])
        .await;
    let address = agent.target_listeners[0];
    assert!(address.is_ipv6());
    let mut stream = connect(address).await;
    let (mut accepted, _) = within("the destination", listener.accept())
        .await
        .expect("one");
    accepted.write_all(b"six").await.expect("taken");
    hears(&mut stream, b"six").await;
}

/// Limit (isolation): 200 simultaneous connections of a node | all served, nothing leaks
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_connections_at_once_are_all_served_and_leave_nothing() {
    const CONNECTIONS: usize = 200;
    let (port, _target) = targets::echo().await;
    let (world, agent) = world_to(port, &[]).await;
    warm(&world).await;
    let (address, mut opening) = (agent.target_listeners[0], JoinSet::new());
    for _connection in 0..CONNECTIONS {
        opening.spawn(async move {
            let mut stream = connect(address).await;
            echo(&mut stream, b"one of many").await;
            stream
        });
    }
    let streams: Vec<TcpStream> = within("all of them", opening.join_all()).await;
    assert_eq!(at_server(&world, OPEN), CONNECTIONS as f64);
    drop(streams);
    assert_quiet(&world, &agent).await;
    assert_eq!(node::refused(&agent), 0.0);
    assert_eq!(at_server(&world, OPENED), CONNECTIONS as f64);
}

/// Both ends want the same few lanes, so OPENs cross. The end that yields retries.
///
/// Limit (isolation): 300 simultaneous dials of each end over few lanes
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_ends_open_tunnels_at_once_on_few_lanes_and_all_succeed() {
    const EACH: usize = 300;
    let (port, _target) = targets::echo().await;
    let (world, agent) = world_to(port, &["--shutdown-grace=1s"]).await;
    warm(&world).await;
    let address = agent.target_listeners[0];
    let mut tasks = JoinSet::new();
    for _worker in 0..3 {
        let socket = world.connect();
        tasks.spawn(async move {
            let target = format!("127.0.0.1:{port}");
            for _dial in 0..EACH / 3 {
                let mut stream = frontend::open(&socket, &target).await;
                echo(&mut stream, b"to the node").await;
            }
        });
        tasks.spawn(async move {
            for _dial in 0..EACH / 3 {
                let mut stream = connect(address).await;
                echo(&mut stream, b"to the control plane").await;
            }
        });
    }
    within("all dials of both ends", tasks.join_all()).await;
    assert_quiet(&world, &agent).await;
    assert_eq!(at_server(&world, OPENED), EACH as f64);
    assert_eq!(node::refused(&agent), 0.0);
    for reason in ["lost", "violation", "silent"] {
        let series = format!("adit_lanes_closed_total{{reason=\"{reason}\"}}");
        assert_eq!(at_server(&world, &series), 0.0, "{reason}");
    }
    until("lanes wait again", || at_server(&world, IDLE) >= 4.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_of_both_ends_alternate_on_one_lane() {
    let (destination, _echo) = targets::local_echo().await;
    let allowed = format!("--allowed-destination={destination}");
    let world = World::start(&[&allowed, "--lanes-per-link=1"]).await;
    let agent = node::agent(&world, &[&destination]).await;
    world.server_metric(IDLE, 1.0).await;
    for _round in 0..50 {
        let mut stream = connect(agent.target_listeners[0]).await;
        echo(&mut stream, b"up").await;
        drop(stream);
        assert_quiet(&world, &agent).await;
        let mut stream = frontend::open(&world.connect(), &destination).await;
        echo(&mut stream, b"down").await;
        drop(stream);
        assert_quiet(&world, &agent).await;
    }
    assert_eq!(opened(&world.server().metrics.scrape().text()), 1.0);
}

/// A PROXY protocol v2 header carries the source address that the agent saw, and the agent's id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_gets_the_source_and_the_agent_in_a_proxy_header() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let destination = listener.local_addr().expect("bound").to_string();
    let allowed = format!("--allowed-destination={destination}");
    let world = World::start(&[&allowed, "--destination-proxy-header"]).await;
    let agent = node::agent(&world, &[&destination]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    stream.write_all(b"payload").await.expect("taken");
    let (mut accepted, _) = within("the destination", listener.accept())
        .await
        .expect("one");
    let source = stream.local_addr().expect("bound");
    let addresses = (source, agent.target_listeners[0]);
    let mut expected = adit_core::proxy_header::header_v2(Some(addresses), "agent-1").to_vec();
    expected.extend(b"payload");
    hears(&mut accepted, &expected).await;
}

/// A connection that comes before any server waits for one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_listens_before_any_server_starts() {
    let (port, _target) = targets::echo().await;
    let destination = format!("127.0.0.1:{port}");
    let mut world = World::start(&[&format!("--allowed-destination={destination}")]).await;
    let agents = world.server().agents.port();
    world.stop_server(Duration::ZERO).await;
    let target = format!("--target=0:{destination}");
    let agent = world.agent_of(agents, "agent-1", &[&target]).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    agent_metric(&agent, "adit_node_waiting", 1.0).await;
    world.start_server(agents).await;
    echo(&mut stream, b"at last").await;
}

/// An EOF would look like an end of the destination.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_reset_at_the_end_of_their_agents_grace() {
    let (port, _target) = targets::echo().await;
    let (world, agent) = world_to(port, &[]).await;
    warm(&world).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    echo(&mut stream, b"from the node").await;
    within("the agent's end", agent.stop()).await;
    assert_is_reset(&mut stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_connections_are_reset_when_their_agent_stops() {
    let (_world, agent) = node::without_server("127.0.0.1:9").await;
    let mut stream = connect(agent.target_listeners[0]).await;
    agent_metric(&agent, "adit_node_waiting", 1.0).await;
    within("the agent's end", agent.stop()).await;
    assert_is_reset(&mut stream).await;
}
