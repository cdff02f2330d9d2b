//! Simulation of links, lanes and peers: servers, agents, endpoints and faults in one thread, with simulated time.
//!
//! A seed determines a whole world. `ADIT_SIM_SEED=n` replays one seed, `ADIT_SIM_SEEDS=n` runs `n` seeds.
#![expect(
    clippy::unwrap_used,
    reason = "a test: a panic is its way to fail, helpers included"
)]

mod end;
mod endpoint;
mod failover;
mod lanes;
mod ledger;
mod peers;
mod pipe;
mod record;
mod rng;
mod world;

use std::ops::Range;
use std::time::Duration;

use failover::{FailoverWorld, Shown};
use lanes::{Coverage, LaneWorld};
use peers::{PeerWorld, Seen};
use record::Tally;
use world::World;

const SEEDS: u64 = 3_000;
const LANE_SEEDS: u64 = 1_000;
const FAILOVER_SEEDS: u64 = 120;
const PEER_SEEDS: u64 = 1_000;
/// Minimum of the simulated time of all seeds together.
const SIMULATED_LEAST: Duration = Duration::from_secs(24 * 60 * 60);

/// Prints the seed of a world that failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed; replay with ADIT_SIM_SEED={}", self.0);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("the variable holds a number"))
}

/// The seeds to run, and whether there are enough of them for the coverage checks.
fn seeds(count: u64) -> (Range<u64>, bool) {
    let seeds = match number("ADIT_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("ADIT_SIM_SEEDS").unwrap_or(count),
    };
    let enough = seeds.end - seeds.start >= count;
    (seeds, enough)
}

/// Upstream (tunnels): An upload before an immediate close reaches the target completely.
#[test]
fn links_leave_nothing_behind_and_lose_nothing() {
    let (seeds, enough) = seeds(SEEDS);
    let (mut tally, mut simulated) = (Tally::default(), Duration::ZERO);
    for seed in seeds {
        let _named = Seed(seed);
        let mut world = World::new(seed);
        world.live(&mut tally);
        simulated += world.simulated();
    }
    if enough {
        tally.check();
        assert!(simulated >= SIMULATED_LEAST, "only {simulated:?}");
    }
}

#[test]
fn lanes_come_back_clean_and_never_mix_tunnels_up() {
    let (seeds, enough) = seeds(LANE_SEEDS);
    let (mut coverage, mut simulated) = (Coverage::default(), Duration::ZERO);
    for seed in seeds {
        let _named = Seed(seed);
        let mut world = LaneWorld::new(seed);
        world.live(&mut coverage);
        simulated += world.simulated();
    }
    if enough {
        coverage.check();
        assert!(simulated >= SIMULATED_LEAST, "only {simulated:?}");
    }
}

#[test]
fn dials_are_opened_once_and_counted_once_while_agents_fall_silent() {
    let (seeds, enough) = seeds(FAILOVER_SEEDS);
    let (mut shown, mut simulated) = (Shown::default(), Duration::ZERO);
    for seed in seeds {
        let _named = Seed(seed);
        let mut world = FailoverWorld::new(seed);
        world.live(&mut shown);
        simulated += world.simulated();
    }
    if enough {
        shown.check();
        assert!(simulated >= SIMULATED_LEAST / 4, "only {simulated:?}");
    }
}

/// Mutations caught: `scope` searches agents here through all strategies first (`check_scope`); `pick_local` chooses a peer, and
/// no check of the owner of a hedge (`ask_local`); `choose` asks peers before agents here (`check_pick`).
#[test]
fn forwarded_dials_reach_the_right_agent_once_wherever_agents_move() {
    let (seeds, enough) = seeds(PEER_SEEDS);
    let (mut seen, mut simulated) = (Seen::default(), Duration::ZERO);
    for seed in seeds {
        let _named = Seed(seed);
        let mut world = PeerWorld::new(seed);
        seen.add(world.live());
        simulated += world.simulated();
    }
    if enough {
        seen.check();
        assert!(simulated >= SIMULATED_LEAST, "only {simulated:?}");
    }
}
