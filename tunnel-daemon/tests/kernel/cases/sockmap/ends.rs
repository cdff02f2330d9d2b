//! The end of a stream, which no redirect forwards.

use std::net::Shutdown;

use adit_ebpf_abi::{EMPTY_DROP, EMPTY_PASS, EMPTY_REDIRECT, Grant};

use super::{GROWTH, UNGUARDED};
use crate::support::privilege::ready;
use crate::support::sockmap::{
    Crossing, End, PATIENCE, QUIET, Sockmap, pull, push, report, taken_error, until,
};

const WORD: u64 = 100;

/// What a bare FIN of the client did.
struct Seen {
    /// Segments without payload that the program saw.
    empty: u64,
    /// What the relay reads from the client's connection.
    at_relay: End,
    /// What the kernel says of the target's connection.
    error: Option<i32>,
    /// What the target reads.
    at_target: End,
    /// Bytes that still come the other way.
    back: u64,
}

fn bare_end(on_empty: u64) -> Seen {
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    let there = sockmap.join(
        a,
        b,
        Grant {
            on_empty,
            ..UNGUARDED
        },
    );
    let _back = sockmap.join(
        b,
        a,
        Grant {
            on_empty,
            ..UNGUARDED
        },
    );
    push(client, 0, WORD, PATIENCE);
    assert_eq!(pull(target, 0, WORD, PATIENCE), (WORD, End::All));
    client.shutdown(Shutdown::Write).unwrap();
    let (_none, at_relay) = pull(a, WORD, 1, PATIENCE);
    let (_none, at_target) = pull(target, WORD, 1, QUIET);
    let error = taken_error(b).and_then(|error| error.raw_os_error());
    push(target, 0, WORD, QUIET);
    let (back, _end) = pull(client, 0, WORD, QUIET);
    let empty = sockmap.moved(&there).empty_packets;
    Seen {
        empty,
        at_relay,
        error,
        at_target,
        back,
    }
}

#[test]
fn an_end_that_is_left_to_user_space_is_seen_there_and_nowhere_else() {
    if !ready("ends that are passed") {
        return;
    }
    let seen = bare_end(EMPTY_PASS);
    report(&format!(
        "bare FIN: the program sees {} segments without payload",
        seen.empty
    ));
    assert_eq!((seen.at_relay, seen.at_target), (End::Eof, End::Quiet));
    assert_eq!((seen.error, seen.back), (None, WORD));
}

#[test]
fn an_end_that_is_thrown_away_is_seen_as_well() {
    if !ready("ends that are dropped") {
        return;
    }
    let seen = bare_end(EMPTY_DROP);
    assert_eq!((seen.at_relay, seen.at_target), (End::Eof, End::Quiet));
    assert_eq!((seen.error, seen.back), (None, WORD));
}

#[test]
fn an_end_that_is_redirected_breaks_the_other_connection() {
    if !ready("ends that are redirected") {
        return;
    }
    let seen = bare_end(EMPTY_REDIRECT);
    report(&format!(
        "bare FIN redirected: error {:?} at the sink, {} of {WORD} bytes come the other way",
        seen.error, seen.back
    ));
    assert_eq!(seen.error, Some(libc::EPIPE));
}

/// What the client gets whose target was still sending when it ended its own half.
struct Download {
    /// Bytes that waited in the relay at that moment, and how many of them came.
    before: (u64, u64),
    /// Bytes that the target sent afterwards, and how many of them came.
    after: (u64, u64),
    error: Option<i32>,
}

fn end_beside_a_queue(on_empty: u64) -> Download {
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    let terms = Grant {
        on_empty,
        ..UNGUARDED
    };
    let _there = sockmap.join(a, b, terms);
    let back = sockmap.join(b, a, terms);
    let (sent, _stop) = push(target, 0, GROWTH / 4, PATIENCE);
    until("queue", || {
        let moved = sockmap.moved(&back);
        moved.forwarded_bytes == sent && back.queued(&moved, a) > sent / 2
    });
    client.shutdown(Shutdown::Write).unwrap();
    until("end", || {
        adit_relay::tcp_state(a).unwrap().bytes_received == 1
    });
    // Reading has the kernel go on with the queue.
    let (got, _end) = pull(client, 0, sent, QUIET);
    until("program's count of it", || {
        sockmap.moved(&back).forwarded_bytes == sent
    });
    let (more, _stop) = push(target, sent, WORD, PATIENCE);
    let (got_more, _end) = pull(client, got, more, QUIET);
    Download {
        before: (sent, got),
        after: (more, got_more),
        error: taken_error(a).and_then(|error| error.raw_os_error()),
    }
}

#[test]
fn an_end_that_is_left_to_user_space_breaks_a_download_that_goes_on() {
    if !ready("ends beside a queue, passed") {
        return;
    }
    let Download {
        before,
        after,
        error,
    } = end_beside_a_queue(EMPTY_PASS);
    report(&format!(
        "bare FIN passed beside a queue: {} of {} bytes that waited arrive, {} of {} sent later; error {error:?}",
        before.1, before.0, after.1, after.0
    ));
    assert_eq!(
        error,
        Some(libc::EPIPE),
        "this kernel breaks nothing: ADR 0017 wants to know"
    );
    assert!(after.1 < after.0);
}

#[test]
fn an_end_that_is_thrown_away_breaks_nothing() {
    if !ready("ends beside a queue, dropped") {
        return;
    }
    let Download {
        before,
        after,
        error,
    } = end_beside_a_queue(EMPTY_DROP);
    report(&format!(
        "bare FIN dropped beside a queue: {} of {} bytes that waited arrive, {} of {} sent later; error {error:?}",
        before.1, before.0, after.1, after.0
    ));
    assert_eq!(before.0, before.1);
    assert_eq!((after.0, error), (after.1, None));
}
