//! The parts of the byte path that have no I/O: packets, frames, a step of a session, the choice of an agent.
//!
//! Numbers are per operation and of one core; what a system call or a cache miss adds is for `cargo xtask perf`.

mod frames;
mod packets;
mod sessions;
mod strategies;

use std::time::Duration;

use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    packets::bench(&mut criterion);
    frames::bench(&mut criterion);
    sessions::bench(&mut criterion);
    strategies::bench(&mut criterion);
    criterion.final_summary();
}
