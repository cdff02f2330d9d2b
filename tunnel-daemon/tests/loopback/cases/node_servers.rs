//! Node to control plane with two servers: which server gets a connection, and what happens when a server goes away.

use std::time::Duration;

use adit::agent::RunningAgent;
use adit::server::{self, RunningServer};
use adit_testkit::scrape;

use crate::support::lanes::{IDLE, value as at_server, warm};
use crate::support::node::{OPENED, connect, echo, refusals, refused};
use crate::support::targets;
use crate::support::wait::{until, within};
use crate::support::world::{World, sample, server_plan};

fn at(server: &RunningServer, series: &str) -> f64 {
    scrape::value(&server.metrics.scrape().text(), series)
}

/// Two servers that allow the destination, and an agent with warm lanes to both.
async fn two(destination: &str) -> (World, RunningServer, RunningAgent) {
    let allowed = format!("--allowed-destination={destination}");
    let world = World::start(&[&allowed]).await;
    let second = world.other_server(".second").await;
    let other = format!("--proxy-server-host={}", second.agents);
    let target = format!("--target=0:{destination}");
    let agent = world.agent("agent-1", &[&other, &target]).await;
    warm(&world).await;
    until("lanes to the second, too", || at(&second, IDLE) >= 4.0).await;
    (world, second, agent)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_spread_over_servers_at_random() {
    const CONNECTIONS: u32 = 60;
    let (target, _echo) = targets::local_echo().await;
    let (world, second, agent) = two(&target).await;
    for _connection in 0..CONNECTIONS {
        let mut stream = connect(agent.target_listeners[0]).await;
        echo(&mut stream, b"to either").await;
    }
    let shares = (at_server(&world, OPENED), at(&second, OPENED));
    assert_eq!(shares.0 + shares.1, f64::from(CONNECTIONS));
    // Fewer than five of sixty at one server: once in 10^12 runs.
    assert!(shares.0 >= 5.0 && shares.1 >= 5.0, "{shares:?}");
}

/// The server of the agent's zone gets every connection while it lives, and the other one gets the next connection once the zone
/// is gone: no connection fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_stay_in_the_zone_of_the_agent_until_its_servers_are_gone() {
    let (target, _echo) = targets::local_echo().await;
    let allowed = format!("--allowed-destination={target}");
    let mut world = World::start(&[&allowed, "--zone=east"]).await;
    let args = world.other_args("0", ".second").into_iter();
    let args: Vec<String> = args.map(|arg| arg.replace("=east", "=west")).collect();
    let plan = server_plan(&args).expect("flags are right");
    let second = server::start(&plan).await.expect("the server starts");
    let other = format!("--proxy-server-host={}", second.agents);
    let listen = format!("--target=0:{target}");
    let flags = [&*other, &*listen, "--agent-identifiers=zone=west"];
    let agent = world.agent("agent-1", &flags).await;
    warm(&world).await;
    until("lanes to the second, too", || at(&second, IDLE) >= 4.0).await;
    let connection = async || {
        let mut stream = connect(agent.target_listeners[0]).await;
        echo(&mut stream, b"to the zone").await;
    };
    for _connection in 0..30 {
        connection().await;
    }
    assert_eq!(
        (at_server(&world, OPENED), at(&second, OPENED)),
        (0.0, 30.0)
    );
    within("its end", second.stop(Some(Duration::ZERO))).await;
    let since = std::time::Instant::now();
    for _connection in 0..10 {
        connection().await;
    }
    println!("10 connections after the zone's end: {:?}", since.elapsed());
    assert_eq!((at_server(&world, OPENED), refused(&agent)), (10.0, 0.0));
    world.stop_server(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_before_its_answer_is_replaced_by_another() {
    let silent = targets::silent_host();
    let (mut world, second, agent) = two(&silent.address).await;
    let mut stream = connect(agent.target_listeners[0]).await;
    let waiting = "adit_node_waiting";
    until("one of them dials", || {
        at_server(&world, waiting) + at(&second, waiting) == 1.0
    })
    .await;
    let mut second = Some(second);
    let first_has_it = at_server(&world, waiting) == 1.0;
    if first_has_it {
        world.stop_server(Duration::ZERO).await;
    } else {
        let second = second.take().expect("it runs");
        within("its end", second.stop(Some(Duration::ZERO))).await;
    }
    // The destination accepts connections again, including that of the other server.
    let _serving = targets::echo_on(silent.revive());
    echo(&mut stream, b"by the other server").await;
    assert_eq!(refused(&agent), 0.0);
    let left = match &second {
        Some(second) => at(second, OPENED),
        None => at_server(&world, OPENED),
    };
    assert_eq!(left, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_drains_gets_no_more_connections() {
    let (target, _echo) = targets::local_echo().await;
    let (world, second, agent) = two(&target).await;
    // Opens connections until both servers have one.
    let mut held = Vec::new();
    while at_server(&world, OPENED) == 0.0 || at(&second, OPENED) == 0.0 {
        let mut stream = connect(agent.target_listeners[0]).await;
        echo(&mut stream, b"held").await;
        held.push(stream);
    }
    let (metrics, opened) = (second.metrics.clone(), at(&second, OPENED));
    let of_second = |series: &str| sample(&metrics.scrape().text(), series);
    let grace = Some(Duration::from_secs(60));
    let stopping = second.stop(grace);
    let before = at_server(&world, OPENED);
    let using = async {
        for _connection in 0..40 {
            let mut stream = connect(agent.target_listeners[0]).await;
            echo(&mut stream, b"to the one that stays").await;
        }
        for stream in &mut held {
            echo(stream, b"those that are open go on").await;
        }
        assert_eq!(of_second(OPENED), Some(opened));
        assert_eq!(at_server(&world, OPENED), before + 40.0);
        // The draining server refuses one OPEN, or two if the agent sent another before it knew.
        let told = of_second(&refusals("leaving")).unwrap_or_default();
        assert!((1.0..=2.0).contains(&told), "{told}");
        assert_eq!(refused(&agent), 0.0);
        drop(held);
    };
    within("the end of both", async { tokio::join!(stopping, using) }).await;
}
