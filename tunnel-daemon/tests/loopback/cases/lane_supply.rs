//! How many lanes an agent opens and when: enough for a burst, as many as its server asks for, none once it drains or stops.

use std::time::Duration;

use crate::support::lanes::{HITS, IDLE, MISSES, value};
use crate::support::raw::Connection;
use crate::support::stub_lane;
use crate::support::wait::{until, until_still, within};
use crate::support::wire::Wire;
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

const PLAINTEXT: &str = "--lane-security=plaintext";
/// Connections that found no place to wait until they are bound.
const UNBOUND: &str = "adit_lanes_refused_total{reason=\"unbound\"}";

/// The end of each tunnel and of each lane leaves a gap that the agent would fill, for raw lanes as well.
///
/// Limit (times): Lanes that an agent opens once it drains or stops | none
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_drains_or_stops_opens_no_lane() {
    const TUNNELS: usize = 20;
    /// Shorter than the open tunnel.
    const GRACE: Duration = Duration::from_millis(300);
    let (target, _echo) = targets::local_echo().await;
    for (flags, drains) in [
        (&[][..], true),
        (&[], false),
        (&[PLAINTEXT], true),
        (&[PLAINTEXT], false),
    ] {
        let (world, agent, wire) = Wire::between(flags).await;
        let mut streams = Vec::new();
        for _tunnel in 0..TUNNELS {
            until("idle lanes", || value(&world, IDLE) >= 3.0).await;
            streams.push(connect::open(&world.connect(), &target).await);
        }
        assert_eq!(value(&world, MISSES), 0.0);
        until_still("lanes", || wire.connections() as u64).await;
        let before = wire.connections();
        if drains {
            agent.drain();
            streams.truncate(TUNNELS / 2);
            // More dials than lanes are idle: some use the link.
            for _dial in 0..TUNNELS {
                streams.push(connect::open(&world.connect(), &target).await);
            }
            for stream in &mut streams {
                connect::echo(stream, b"within the grace").await;
            }
            agent.idle(GRACE).await;
        }
        within("the end of the agent", agent.stop()).await;
        until_still("connections", || wire.connections() as u64).await;
        let opened = wire.connections() - before;
        assert_eq!(opened, 0, "{flags:?}, after a drain: {drains}");
    }
}

/// Tunnels stay on the link for life when no lane is idle, so lanes have to be there before a burst.
///
/// Limit (peers): Idle lanes of an agent
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn most_of_a_first_burst_and_all_of_the_second_are_on_lanes() {
    let (target, _echo) = targets::local_echo().await;
    // Those of a small burst nearly all find a warm lane. Of a large one most miss, and the server asks for as many lanes.
    for (dials, least) in [(17, 11.0), (60, 16.0)] {
        let (world, _agent) = World::with_agent().await;
        until("warm lanes", || value(&world, IDLE) >= 16.0).await;
        let first = connect::burst(&world.connect(), &target, dials).await;
        let (hits, misses) = (value(&world, HITS), value(&world, MISSES));
        assert_eq!(hits + misses, dials as f64);
        assert!(hits >= least, "{hits} of {dials} on lanes");
        until("lanes for as many", || value(&world, IDLE) >= dials as f64).await;
        let second = connect::burst(&world.connect(), &target, dials).await;
        assert_eq!(value(&world, MISSES), misses, "of {dials} in the second");
        drop((first, second));
        assert_eq!(value(&world, UNBOUND), 0.0);
    }
}

/// They share an address and a certificate, so together they have 64 places for lanes that are not bound yet.
///
/// Limit (peers): Lanes that servers ask for at once
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_agents_of_one_address_and_certificate_leave_places_to_others() {
    const AGENTS: usize = 8;
    const DIALS: usize = 10;
    let (target, _echo) = targets::local_echo().await;
    let world = World::start(&[]).await;
    let mut agents = Vec::new();
    for number in 0..AGENTS {
        agents.push(world.agent(&format!("agent-{number}"), &[]).await);
    }
    world.links(AGENTS).await;
    for _burst in 0..3 {
        let streams = connect::burst(&world.connect(), &target, AGENTS * DIALS).await;
        until("lanes of all", || {
            let pools = world.server().lanes();
            pools.iter().all(|lanes| lanes.idle_lanes() >= 4)
        })
        .await;
        drop(streams);
    }
    assert_eq!(value(&world, UNBOUND), 0.0);
    for agent in agents {
        agent.stop().await;
    }
}

/// The others announce lanes, and open none.
///
/// Limit (peers): Idle lanes of an agent
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_keeps_fewer_idle_lanes_beside_many_agents() {
    const LINKS_OF_ONE: usize = 8;
    const OTHERS: usize = 64;
    let world = World::start(&[]).await;
    let (mut others, mut connections) = (Vec::new(), Vec::new());
    for connection in 0..OTHERS / LINKS_OF_ONE {
        let stub = Connection::agent(&world).await;
        for link in 0..LINKS_OF_ONE {
            let id = format!("other-{connection}-{link}");
            others.push(stub_lane::link(&world, &stub, &id).await);
        }
        connections.push(stub);
    }
    let agent = world.agent("agent-1", &[]).await;
    let wanted = || sample(&agent.metrics.scrape().text(), "adit_lanes_wanted");
    until("eight", || wanted() == Some(8.0)).await;
    world.server_metric(IDLE, 8.0).await;
    drop((others, connections));
    // The server says so within a second, on one of these lanes.
    world.links(1).await;
    until("sixteen", || wanted() == Some(16.0)).await;
}
