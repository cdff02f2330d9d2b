//! Simulation of links: servers, agents, legs and faults in one thread, without a clock.
//!
//! A seed is a whole world. `ADIT_SIM_SEED=n` replays one, `ADIT_SIM_SEEDS=n` runs that many.
#![expect(
    clippy::unwrap_used,
    reason = "a test: a panic is its way to fail, helpers included"
)]

mod end;
mod ledger;
mod leg;
mod pipe;
mod record;
mod rng;
mod world;

use record::Tally;
use world::World;

const SEEDS: u64 = 3_000;

/// Names the seed of a world that failed.
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

#[test]
fn links_leave_nothing_behind_and_lose_nothing() {
    let seeds = match number("ADIT_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("ADIT_SIM_SEEDS").unwrap_or(SEEDS),
    };
    let mut tally = Tally::default();
    let enough = seeds.end - seeds.start >= SEEDS;
    for seed in seeds {
        let _named = Seed(seed);
        World::new(seed).live(&mut tally);
    }
    if enough {
        tally.check();
    }
}
