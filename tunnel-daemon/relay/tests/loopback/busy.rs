//! Busy polling: a thread that asks without waiting hears all that wakes one from its sleep.

use std::{io::Write, time::Duration};

use adit_relay::BusyPoll;

use crate::support::{Setup, matrix, receive_exactly};

matrix!(thread_that_spins_adopts_pairs_and_lets_them_go);

/// Neither the bell nor a slot that is free again is an event of a pair, and each is reported once: a thread that goes on
/// asking after it was told, and then sleeps, adopts no pair or counts a slot for ever.
fn thread_that_spins_adopts_pairs_and_lets_them_go(setup: &Setup) {
    let mut config = setup.config();
    config.busy_poll = BusyPoll {
        at_most: Duration::from_millis(5),
        percent: 100,
    };
    let world = setup.start_with(&config);
    for _ in 0..300 {
        let tunnel = world.open();
        (&tunnel.client).write_all(b"a").unwrap();
        assert_eq!(receive_exactly(&tunnel.target, 1), b"a");
    }
    world.until_empty();
}
