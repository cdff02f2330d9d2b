//! Several servers, also behind the address of one load balancer. Whichever server a connection reaches, each server gets
//! lanes of its own link. Links take the balancer's turns first.

use std::time::{Duration, Instant};

use adit::server::RunningServer;
use adit_core::lane::ALPN;
use adit_testkit::scrape;

use crate::support::balancer::{Balancer, Call};
use crate::support::lanes::{HITS, IDLE, MISSES, warm};
use crate::support::server_lane::ServerLane;
use crate::support::stub_server::StubServer;
use crate::support::wait::{until, within, within_for};
use crate::support::world::{World, agent_metric};
use crate::support::{connect, targets};

fn value(server: &RunningServer, series: &str) -> f64 {
    scrape::value(&server.metrics.scrape().text(), series)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_server_behind_one_address_has_lanes_and_uses_them() {
    let world = World::start(&["--server-count=2"]).await;
    let other = world.other_server(".other").await;
    let balancer = Balancer::to(&[world.server().agents, other.agents]).await;
    let port = balancer.address.port();
    let _agent = world.agent_of(port, "agent-1", &[]).await;
    for server in [world.server(), &other] {
        until("a link and its lanes", || {
            server.links() == 1 && value(server, IDLE) >= 4.0
        })
        .await;
    }
    let (target, _echo) = targets::local_echo().await;
    let sockets = [world.connect(), world.dir.path().join("connect.other")];
    for (server, socket) in [world.server(), &other].into_iter().zip(sockets) {
        let mut stream = connect::open(&socket, &target).await;
        connect::echo(&mut stream, b"on a lane").await;
        assert_eq!((value(server, HITS), value(server, MISSES)), (1.0, 0.0));
    }
    within("its end", other.stop(Some(Duration::ZERO))).await;
}

/// Without this order, lanes take the turns that lead to the missing servers: a search could take minutes.
///
/// Limit (times): Lanes while servers are searched for
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_servers_behind_a_balancer_are_linked_by_its_first_five_connections() {
    const SERVERS: usize = 5;
    let world = World::start(&["--server-count=5"]).await;
    let mut others = Vec::new();
    for number in 1..SERVERS {
        others.push(world.other_server(&format!(".other-{number}")).await);
    }
    let servers = || std::iter::once(world.server()).chain(&others);
    let addresses: Vec<_> = servers().map(|server| server.agents).collect();
    let balancer = Balancer::to(&addresses).await;
    let port = balancer.address.port();
    let _agent = world.agent_of(port, "agent-1", &[]).await;
    until("a link to each server, and lanes", || {
        let calls = balancer.calls();
        servers().all(|server| server.links() == 1) && calls.contains(&Call::Lane)
    })
    .await;
    assert_eq!(balancer.calls()[..SERVERS], [Call::Link; SERVERS]);
    for other in others {
        within("its end", other.stop(Some(Duration::ZERO))).await;
    }
}

/// Lanes wait for links to servers that do not exist, but not for ever.
///
/// Limit (times): Lanes while servers are searched for
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_of_one_server_that_announces_three_has_lanes() {
    let world = World::start(&["--server-count=3"]).await;
    let balancer = Balancer::to(&[world.server().agents]).await;
    let _agent = world.agent_of(balancer.address.port(), "a", &[]).await;
    warm(&world).await;
    let calls = balancer.calls();
    let links = calls.iter().take_while(|call| **call == Call::Link);
    // The link, and ten more attempts.
    assert!(links.count() >= 11, "{calls:?}");
}

/// The server accepts connections, but never answers those that should become lanes.
///
/// Limit (peers): Lanes that an agent opens at once
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_answers_no_lane_blocks_no_lanes_to_other_servers() {
    /// Below the handshake timeout of 10 s.
    const SOON: Duration = Duration::from_secs(7);
    let mut world = World::start(&[]).await;
    let address = world.server().agents;
    world.stop_server(Duration::ZERO).await;
    let mut silent = StubServer::start(&world).await;
    let second = format!("--proxy-server-host={address}");
    let _agent = world.agent_of(silent.port(), "a", &[&second]).await;
    let _link = silent.accept().await.greet_with_lanes("8");
    let _lanes = [
        silent.accept_in_silence().await,
        silent.accept_in_silence().await,
    ];
    world.start_server(address.port()).await;
    within_for(SOON, "lanes to the one that answers", warm(&world)).await;
}

/// After the link, all connections of the agent reach a server that knows only `protocols`. Later one connection finds the
/// protocol of lanes again. Dials use the link. Attempts keep to the backoff, even while dials want lanes.
async fn lanes_led_astray(protocols: &[&str]) {
    const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(2)];
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let mut server = StubServer::start(&world).await;
    let agent = world.agent_of(server.port(), "a", &[]).await;
    let caller = server.accept().await;
    server.speak_only(protocols);
    let mut link = caller.greet_with_lane();
    // Three attempts in a row, and one after the first backoff.
    let mut came = Vec::new();
    for dial in 1..=4 {
        came.push(server.turn_lane_away().await);
        let conn = link.open_with_window(dial, &target, 1 << 20).await;
        link.echo(conn, b"over the link").await;
    }
    server.speak_only(&["h2", ALPN]);
    let _lane = ServerLane::bound(&mut server).await;
    came.push(Instant::now());
    let paused = [came[3] - came[2], came[4] - came[3]];
    let in_time = paused.iter().zip(PAUSES).all(|(was, least)| *was >= least);
    assert!(in_time, "{paused:?}");
    agent_metric(&agent, IDLE, 1.0).await;
    agent.stop().await;
}

/// As a Go server does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_with_a_refused_handshake_are_retried_with_backoff() {
    lanes_led_astray(&["h2"]).await;
}

/// As behind a load balancer that terminates TLS without ALPN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_without_a_selected_protocol_are_retried_with_backoff() {
    lanes_led_astray(&[]).await;
}
