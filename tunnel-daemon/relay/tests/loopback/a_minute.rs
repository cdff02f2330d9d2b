//! What is to be seen over a minute. Tests start in the order of their names: this one comes first, so that the others run
//! while it waits.

use std::time::Duration;

use adit_relay::Engine;

use crate::{
    scale::{self, Reading},
    support::{Moves, Setup, Transport, each_alone, is_allowed},
};

/// Readers of 20 KB/s, at both drivers and both movers at the same time: they wait, that is all.
#[test]
fn slow_readers_hold_bounded_memory_for_a_minute() {
    let path = concat!(
        module_path!(),
        "::slow_readers_hold_bounded_memory_for_a_minute"
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
        length: Duration::from_secs(60),
        pace: Duration::from_millis(25),
    };
    each_alone(path, &setups, |setup| scale::slow_readers(setup, &reading));
}
