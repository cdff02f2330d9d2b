//! A reset, which no redirect forwards either: what of the bytes in flight still arrives, and who hears of it (ADR 0023).

use std::io::ErrorKind;
use std::net::TcpStream;

use super::loss::{SENT, queued};
use super::{GROWTH, UNGUARDED, limited};
use crate::support::privilege::ready;
use crate::support::sockmap::{
    Crossing, End, PATIENCE, QUIET, Sockmap, Stop, is_broken, pull, push, report, reset,
    taken_error, until,
};

/// What the guard lets through, where there is one.
const GUARD: u64 = 256 * 1024;
/// What is left to user space beyond that; the window takes it.
const LEFT: u64 = 64 * 1024;

/// Payload that the other end's kernel has said to have, of who connected.
fn acknowledged(socket: &TcpStream) -> u64 {
    adit_relay::tcp_state(socket).unwrap().bytes_acked - 1
}

#[test]
fn what_a_client_sent_before_its_reset_arrives_and_its_target_hears_nothing() {
    if !ready("a reset of the client") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let there = queued(&mut sockmap, &crossing);
    let Crossing {
        client,
        a,
        b,
        target,
    } = crossing;
    reset(client);
    assert!(is_broken(&a, PATIENCE));
    let waiting = there.queued(&sockmap.moved(&there), &b);
    assert!(waiting > 0, "nothing waits, so nothing is tried");
    let (got, _end) = pull(&target, 0, SENT, PATIENCE);
    let (more, at_target) = pull(&target, SENT, 1, QUIET);
    let errors = [&a, &b].map(|socket| taken_error(socket).map(|error| error.kind()));
    report(&format!(
        "client reset, {waiting} bytes queued at the sink: {got} of {SENT} bytes arrive, then {at_target:?}; errors {errors:?}"
    ));
    assert_eq!((got, more), (SENT, 0));
    assert_eq!(
        at_target,
        End::Quiet,
        "this kernel forwards it: ADR 0023 wants to know"
    );
    assert_eq!(errors, [Some(ErrorKind::ConnectionReset), None]);
}

#[test]
fn after_the_reset_of_its_target_a_client_is_told_that_all_arrives() {
    if !ready("a reset of the target") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let _there = queued(&mut sockmap, &crossing);
    let Crossing {
        client,
        a,
        b,
        target,
    } = crossing;
    reset(target);
    assert!(is_broken(&b, PATIENCE));
    let (more, stop) = push(&client, SENT, GROWTH, QUIET);
    assert_eq!(
        (more, stop),
        (GROWTH, Stop::All),
        "this kernel stops it: ADR 0023 wants to know"
    );
    until("acknowledgement", || acknowledged(&client) == SENT + more);
    let (_none, at_client) = pull(&client, 0, 1, QUIET);
    let error = taken_error(&b).map(|error| error.kind());
    drop(b);
    drop(a);
    let (_none, when_closed) = pull(&client, 0, 1, PATIENCE);
    report(&format!(
        "target reset: {more} further bytes are acknowledged to the client, which hears {at_client:?}; error {error:?} at the sink; \
         once the relay closes both, {when_closed:?}"
    ));
    assert_eq!(
        at_client,
        End::Quiet,
        "this kernel tells it: ADR 0023 wants to know"
    );
    // Whoever watches the sink can know, and end the client's connection.
    assert!(error.is_some());
    assert_ne!(when_closed, End::Quiet);
}

#[test]
fn sockets_that_were_reset_stay_in_their_maps_until_they_are_closed() {
    if !ready("maps after a reset") {
        return;
    }
    let mut sockmap = Sockmap::new();
    let members = [true, false].map(|is_held| {
        let crossing = Crossing::new();
        let there = sockmap.join(&crossing.a, &crossing.b, UNGUARDED);
        let Crossing {
            client,
            a,
            b,
            target,
        } = crossing;
        reset(client);
        reset(target);
        assert!(is_broken(&a, PATIENCE) && is_broken(&b, PATIENCE));
        let held = is_held.then_some((a, b));
        let members = sockmap.withdraw(&there);
        drop(held);
        members
    });
    report(&format!(
        "both ends reset: source and sink are in their maps {:?}, once closed {:?}",
        members[0], members[1]
    ));
    assert_eq!(members, [(true, true), (false, false)]);
}

#[test]
fn what_the_guard_left_to_user_space_is_read_after_a_reset() {
    if !ready("a reset behind passed bytes") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = crossing;
    let there = sockmap.join(&a, &b, limited(GUARD));
    assert_eq!(
        push(&client, 0, GUARD + LEFT, PATIENCE),
        (GUARD + LEFT, Stop::All)
    );
    until("end of it at the relay", || {
        let moved = sockmap.moved(&there);
        moved.forwarded_bytes + moved.passed_bytes == GUARD + LEFT
    });
    let moved = sockmap.moved(&there);
    reset(client);
    assert!(is_broken(&a, PATIENCE));
    let (got, at_relay) = pull(&a, moved.forwarded_bytes, moved.passed_bytes + 1, PATIENCE);
    report(&format!(
        "client reset behind a guard of {GUARD}: {got} of {} passed bytes are read, then {at_relay:?}",
        moved.passed_bytes
    ));
    assert_eq!(
        (got, at_relay),
        (moved.passed_bytes, End::Failed(ErrorKind::ConnectionReset))
    );
    let forwarded = moved.forwarded_bytes;
    assert_eq!(pull(&target, 0, forwarded, PATIENCE), (forwarded, End::All));
}

#[test]
fn what_the_guard_left_to_user_space_is_lost_by_a_reset_where_both_directions_stall() {
    // More than `a` can send, so that some of it waits in its queue.
    const QUEUED: u64 = 2 << 20;
    if !ready("a reset behind a queue") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = crossing;
    let there = sockmap.join(&a, &b, limited(QUEUED));
    let back = sockmap.join(&b, &a, limited(QUEUED));
    assert_eq!(push(&target, 0, QUEUED, PATIENCE), (QUEUED, Stop::All));
    until("queue towards the client", || {
        sockmap.moved(&back).forwarded_bytes == QUEUED
    });
    let all = QUEUED + LEFT;
    assert_eq!(push(&client, 0, all, PATIENCE), (all, Stop::All));
    until("end of it at the relay", || {
        let moved = sockmap.moved(&there);
        moved.forwarded_bytes + moved.passed_bytes == all
    });
    let moved = sockmap.moved(&there);
    assert!(moved.passed_bytes > 0);
    reset(client);
    assert!(is_broken(&a, PATIENCE));
    let (got, at_relay) = pull(&a, moved.forwarded_bytes, moved.passed_bytes, QUIET);
    report(&format!(
        "client reset, both directions stalled: {got} of {} passed bytes are read, then {at_relay:?}",
        moved.passed_bytes
    ));
    assert_eq!(got, 0, "this kernel keeps them: ADR 0023 wants to know");
}

#[test]
fn what_a_copy_has_not_read_outlives_a_reset() {
    // For the size of its buffers alone.
    if !ready("a reset of a copy's client") {
        return;
    }
    let Crossing { client, a, .. } = Crossing::new();
    assert_eq!(push(&client, 0, LEFT, PATIENCE), (LEFT, Stop::All));
    until("end of it at the relay", || {
        adit_relay::tcp_state(&a).unwrap().bytes_received == LEFT
    });
    reset(client);
    assert!(is_broken(&a, PATIENCE));
    assert_eq!(
        pull(&a, 0, LEFT + 1, PATIENCE),
        (LEFT, End::Failed(ErrorKind::ConnectionReset))
    );
}
