//! The other kind of sockmap: what one local program writes is put where another one receives, or sends.

use std::io::{ErrorKind, Write as _};

use super::GROWTH;
use crate::support::privilege::ready;
use crate::support::sockmap::{
    Crossing, End, PATIENCE, QUIET, Sockmap, Stop, is_writable, pull, push, report,
};

#[test]
fn what_is_put_where_a_stalled_program_receives_grows_beyond_its_buffer() {
    if !ready("sk_msg ingress") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing { client, target, .. } = &crossing;
    sockmap.route(client, target, true);
    let (sent, stop) = push(client, 0, GROWTH, QUIET);
    report(&format!(
        "sk_msg ingress, stalled reader: {sent} bytes taken ({stop:?})"
    ));
    assert_eq!(
        (sent, stop),
        (GROWTH, Stop::All),
        "this kernel bounds it: ADR 0017 wants to know"
    );
    assert_eq!(pull(target, 0, sent, PATIENCE), (sent, End::All));
}

#[test]
fn a_writer_to_a_full_sink_is_refused_though_it_polls_writable() {
    const SPINS: u32 = 1_000;
    if !ready("sk_msg egress") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing { client, b, .. } = &crossing;
    sockmap.route(client, b, false);
    let (mut taken, mut spins) = (0, 0);
    let chunk = vec![0; 64 * 1024];
    while spins < SPINS && taken < GROWTH {
        match (&mut &*client).write(&chunk) {
            Ok(count) => taken += count as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !is_writable(client, QUIET) {
                    break;
                }
                spins += 1;
            }
            Err(error) => panic!("after {taken} bytes: {error}"),
        }
    }
    report(&format!(
        "sk_msg egress, stalled reader: {taken} bytes taken, then {spins} refusals of a socket that polls writable"
    ));
    assert_eq!(
        spins, SPINS,
        "this kernel lets it wait: ADR 0017 wants to know"
    );
}
