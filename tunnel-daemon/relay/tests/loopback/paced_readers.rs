//! Tests with paced readers, in parallel: the readers mostly sleep.

use std::time::Duration;

use adit_relay::Engine;

use crate::{
    scale::{self, Reading},
    support::{Moves, Setup, Transport, each_alone, is_allowed, is_nightly},
};

/// For both drivers and both movers at the same time; nightly for a minute.
///
/// Limit (memory): Relay buffers
/// Limit (isolation): Memory of 20 readers of 20 KB/s at one relay | 256 KiB or one pipe each, 16 MiB more in the
/// process
#[test]
fn readers_of_20_kb_a_second_hold_bounded_memory() {
    let path = concat!(
        module_path!(),
        "::readers_of_20_kb_a_second_hold_bounded_memory"
    );
    let mut setups = Vec::new();
    for engine in [Engine::Epoll, Engine::IoUring] {
        if !is_allowed(engine, path) {
            continue;
        }
        for moves in [Moves::Copy, Moves::Splice] {
            setups.push(Setup {
                engine,
                moves,
                transport: Transport::Tcp,
            });
        }
    }
    let reading = Reading {
        length: Duration::from_secs(if is_nightly() { 60 } else { 10 }),
        pace: Duration::from_millis(25),
    };
    each_alone(path, &setups, |setup| scale::slow_readers(setup, &reading));
}
