//! Memory that runs out: whether a limit reaches what a sockmap holds, and whether a byte that was taken is lost by it (ADR 0023).

use super::{GROWTH, UNGUARDED};
use crate::support::memory::TcpMemory;
use crate::support::privilege::{ready, say};
use crate::support::role::{Role, tell};
use crate::support::sockmap::{
    Crossing, End, PATIENCE, QUIET, Sizes, Sockmap, Stop, pull, push, report,
};

/// What sockets of a cgroup may hold: far beyond their buffers, far below what is sent.
const ROOM: u64 = 8 << 20;

/// What became of a stream whose reader stalls, in a cgroup without much memory for TCP.
struct Filled {
    /// Bytes that were taken from the writer.
    sent: u64,
    /// Bytes that its reader got afterwards.
    got: u64,
    /// Why no more were taken, and why no more came.
    why: String,
}

/// `None` where this host cannot limit memory of TCP alone, which is said.
fn filled(test: &str, how: &str) -> Option<Filled> {
    if !ready(test) {
        return None;
    }
    let memory = match TcpMemory::limited(ROOM) {
        Ok(memory) => memory,
        Err(why) => {
            say(test, &why);
            return None;
        }
    };
    let mut role = Role::start("sockmap-memory", Some(memory.path()), how);
    let told = role.hear();
    let mut words = told.splitn(3, ' ');
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let (sent, got) = (number(), number());
    let why = words.next().unwrap().to_owned();
    role.kill();
    Some(Filled { sent, got, why })
}

/// The process in the cgroup.
pub(crate) fn play(how: &str) {
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let Crossing {
        client,
        a,
        b,
        target,
    } = &crossing;
    if how == "message" {
        sockmap.route(client, target, true);
    } else {
        sockmap.join(a, b, UNGUARDED);
    }
    let (sent, stop) = push(client, 0, GROWTH, QUIET);
    // Compares each byte.
    let (got, end) = pull(target, 0, sent, PATIENCE);
    tell(&format!("{sent} {got} {stop:?}, {end:?}"));
}

#[test]
fn memory_that_runs_out_refuses_what_is_put_where_another_receives_and_loses_nothing() {
    let Some(Filled { sent, got, why }) = filled("sk_msg ingress without memory", "message") else {
        return;
    };
    report(&format!(
        "sk_msg ingress, {ROOM} bytes for TCP: {sent} bytes taken, {got} arrive ({why})"
    ));
    assert!(
        sent > 0 && sent < GROWTH,
        "this kernel does not bound it: ADR 0023 wants to know"
    );
    assert_eq!(got, sent);
    // By an error that ends a program which knows EAGAIN only, or by EAGAIN of a socket that polls writable.
    let is_error = why.starts_with("Failed(OutOfMemory)");
    assert!(is_error || why.starts_with("Refused"), "{why}");
}

#[test]
fn what_a_sockmap_queues_is_in_no_account_that_could_run_out() {
    let Some(Filled { sent, got, why }) = filled("a queue without memory", "verdict") else {
        return;
    };
    report(&format!(
        "no guard, stalled reader, {ROOM} bytes for TCP: {sent} bytes taken, {got} arrive ({why})"
    ));
    assert_eq!(
        sent, GROWTH,
        "this kernel bounds it: ADR 0023 wants to know"
    );
    assert_eq!(got, sent);
}

#[test]
fn the_smallest_receive_buffer_takes_what_is_put_there_and_loses_nothing() {
    /// The kernel makes its least of it.
    const LEAST: Sizes = Sizes {
        receive: 1,
        send: Sizes::SMALL.send,
    };
    if !ready("sk_msg ingress without a buffer") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::sized(LEAST, Sizes::SMALL));
    let Crossing { client, target, .. } = &crossing;
    sockmap.route(client, target, true);
    let (sent, stop) = push(client, 0, GROWTH, QUIET);
    let (got, end) = pull(target, 0, sent, PATIENCE);
    report(&format!(
        "sk_msg ingress, least receive buffer: {sent} bytes taken ({stop:?}), {got} arrive"
    ));
    assert_eq!(
        (sent, stop),
        (GROWTH, Stop::All),
        "this kernel bounds it: ADR 0023 wants to know"
    );
    assert_eq!((got, end), (sent, End::All));
}
