//! What was there before a socket came into a map.

use super::UNGUARDED;
use crate::support::privilege::ready;
use crate::support::sockmap::{
    Crossing, End, PATIENCE, QUIET, Sockmap, is_readable, pull, push, report, set_receive_low_water,
};

const EARLY: u64 = 100;
const HALF: u64 = 40;

#[test]
fn early_bytes_wait_until_somebody_kicks_the_socket() {
    if !ready("bytes before insertion") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    push(client, 0, EARLY, PATIENCE);
    assert!(is_readable(a, PATIENCE));
    let _there = sockmap.join(a, b, UNGUARDED);
    let (alone, _end) = pull(target, 0, EARLY, QUIET);
    set_receive_low_water(a, 1).unwrap();
    let (kicked, _end) = pull(target, alone, EARLY - alone, QUIET);
    report(&format!(
        "{EARLY} bytes before insertion: {alone} move by themselves, {kicked} when SO_RCVLOWAT is set"
    ));
    // Both in order, and none twice.
    push(client, EARLY, EARLY, PATIENCE);
    let had = alone + kicked;
    assert_eq!(
        pull(target, had, 2 * EARLY - had, PATIENCE),
        (2 * EARLY - had, End::All)
    );
    assert_eq!(pull(target, 2 * EARLY, 1, QUIET), (0, End::Quiet));
    assert_eq!(kicked, EARLY, "the kick is what moves them");
}

#[test]
fn a_segment_that_was_read_in_part_is_sent_again_as_a_whole() {
    if !ready("a segment read in part") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    push(client, 0, EARLY, PATIENCE);
    assert_eq!(pull(a, 0, HALF, PATIENCE), (HALF, End::All));
    let _there = sockmap.join(a, b, UNGUARDED);
    set_receive_low_water(a, 1).unwrap();
    assert!(is_readable(target, PATIENCE));
    // The target sees the stream from its first byte again, not from where the relay had come to.
    let (whole, _end) = pull(target, 0, EARLY, PATIENCE);
    report(&format!(
        "of {EARLY} bytes {HALF} were read before insertion: {whole} are sent on"
    ));
    assert_eq!(whole, EARLY);
}
