//! How many lanes an agent opens and when: none once it drains or stops.

use std::time::Duration;

use crate::support::lanes::{IDLE, MISSES, value};
use crate::support::wait::{until, until_still, within};
use crate::support::wire::Wire;
use crate::support::world::World;
use crate::support::{connect, targets};

const PLAINTEXT: &str = "--lane-security=plaintext";

/// The end of each tunnel and of each lane leaves a gap that the agent would fill, for raw lanes as well.
///
/// Limit (times): Lanes that an agent opens once it drains or stops | none
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_drains_or_stops_opens_no_lane() {
    const TUNNELS: usize = 20;
    /// Shorter than the open tunnel.
    const GRACE: Duration = Duration::from_millis(300);
    let (port, _target) = targets::echo().await;
    let target = format!("127.0.0.1:{port}");
    for (flags, drains) in [
        (&[][..], true),
        (&[], false),
        (&[PLAINTEXT], true),
        (&[PLAINTEXT], false),
    ] {
        let world = World::start(flags).await;
        let wire = Wire::to(world.server().agents).await;
        let agent = world.agent_of(wire.address.port(), "agent-1", flags).await;
        world.links(1).await;
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
