//! What is lost where something ends: bytes that the sender's kernel was told have arrived.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use super::{GROWTH, UNGUARDED, limited};
use crate::support::privilege::ready;
use crate::support::role::{Role, tell, told};
use crate::support::sockmap::{
    Crossing, Direction, End, PATIENCE, QUIET, Sockmap, Stop, is_readable, is_writable, pull, push,
    report, until,
};

/// Sent before something ends, far more than buffers hold.
pub(super) const SENT: u64 = GROWTH / 4;
/// What the relay of these tests copies at once.
const BUFFER: usize = 64 * 1024;
/// What the guard lets through, where there is one.
const GUARD: u64 = 256 * 1024;

/// Bytes on their way to a target that does not read.
pub(super) fn queued(sockmap: &mut Sockmap, crossing: &Crossing) -> Direction {
    let there = sockmap.join(&crossing.a, &crossing.b, UNGUARDED);
    assert_eq!(push(&crossing.client, 0, SENT, PATIENCE), (SENT, Stop::All));
    until("end of it at the relay", || {
        sockmap.moved(&there).forwarded_bytes == SENT
    });
    there
}

#[test]
fn closing_the_sink_destroys_what_is_queued_and_looks_like_an_end() {
    if !ready("closing with a queue") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    queued(&mut sockmap, &crossing);
    let Crossing {
        a,
        b,
        target,
        client,
    } = crossing;
    drop(b);
    let (got, end) = pull(&target, 0, SENT, PATIENCE);
    report(&format!(
        "sink closed: {got} of {SENT} bytes arrive, then {end:?}"
    ));
    assert!(
        got < SENT,
        "this kernel lost nothing: ADR 0017 wants to know"
    );
    assert_eq!(end, End::Eof);
    drop((a, client));
}

#[test]
fn removing_the_sink_destroys_what_is_queued_and_says_nothing() {
    if !ready("removal with a queue") {
        return;
    }
    let (mut sockmap, crossing) = (Sockmap::new(), Crossing::new());
    let there = queued(&mut sockmap, &crossing);
    sockmap.remove_sink(&there);
    sockmap.remove_source(&there);
    let (got, end) = pull(&crossing.target, 0, SENT, QUIET);
    report(&format!(
        "sink removed from the map: {got} of {SENT} bytes arrive, then {end:?}"
    ));
    assert!(
        got < SENT,
        "this kernel lost nothing: ADR 0017 wants to know"
    );
    assert_eq!(end, End::Quiet);
}

#[test]
fn what_a_socket_was_given_by_a_copy_outlives_it() {
    if !ready("what a copy leaves behind") {
        return;
    }
    let Crossing { b, target, .. } = Crossing::new();
    let (given, stop) = push(&b, 0, GROWTH, QUIET);
    assert_eq!(stop, Stop::Stalled);
    drop(b);
    assert_eq!(pull(&target, 0, given + 1, PATIENCE), (given, End::Eof));
}

/// What a killed relay leaves behind: bytes acknowledged to the client, bytes that reached the target, and how the client's
/// and the target's connections end.
fn killed(how: &str) -> (u64, u64, End, End) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    let mut role = Role::start("sockmap-relay", None, &format!("{how} {at}"));
    let (target, _peer) = listener.accept().unwrap();
    let relay: SocketAddr = role.hear().parse().unwrap();
    let client = TcpStream::connect(relay).unwrap();
    for end in [&client, &target] {
        end.set_nonblocking(true).unwrap();
    }
    assert_eq!(role.hear(), "relaying");
    // More than all buffers of the system hold.
    let _taken = push(&client, 0, 2 * GROWTH, QUIET);
    let acknowledged = adit_relay::tcp_state(&client).unwrap().bytes_acked - 1;
    role.kill();
    let (got, at_target) = pull(&target, 0, 3 * GROWTH, PATIENCE);
    let (_none, at_client) = pull(&client, 0, 1, PATIENCE);
    (acknowledged, got, at_client, at_target)
}

#[test]
fn a_killed_sockmap_relay_loses_without_bound_and_tells_nobody() {
    if !ready("a killed relay") {
        return;
    }
    let (acknowledged, got, at_client, at_target) = killed("sockmap");
    report(&format!(
        "relay killed: {got} of {acknowledged} acknowledged bytes arrive; target {at_target:?}, client {at_client:?}"
    ));
    assert!(acknowledged - got > GROWTH);
    assert_eq!((at_target, at_client), (End::Eof, End::Eof));
}

#[test]
fn a_killed_sockmap_relay_with_a_guard_loses_less_and_tells_nobody() {
    if !ready("a killed relay with a guard") {
        return;
    }
    let (acknowledged, got, at_client, at_target) = killed("guarded");
    report(&format!(
        "relay with a guard killed: {got} of {acknowledged} acknowledged bytes arrive; target {at_target:?}, client {at_client:?}"
    ));
    assert!(got < acknowledged && acknowledged < GROWTH);
    // What waits for user space is not where the kernel looks for bytes that nobody read.
    assert_eq!((at_target, at_client), (End::Eof, End::Eof));
}

#[test]
fn a_killed_copy_relay_resets_its_client() {
    let (acknowledged, got, at_client, at_target) = killed("copy");
    report(&format!(
        "copy relay killed: {got} of {acknowledged} acknowledged bytes arrive; target {at_target:?}, client {at_client:?}"
    ));
    assert_eq!(at_target, End::Eof);
    assert_eq!(at_client, End::Failed(ErrorKind::ConnectionReset));
}

/// The process that is killed.
pub(crate) fn play(arguments: &str) {
    let (how, target) = arguments.split_once(' ').unwrap();
    let b = TcpStream::connect(target).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    tell(&listener.local_addr().unwrap().to_string());
    let (a, _peer) = listener.accept().unwrap();
    for socket in [&a, &b] {
        socket.set_nonblocking(true).unwrap();
    }
    if how == "copy" {
        tell("relaying");
        return copy(&a, &b);
    }
    let mut sockmap = Sockmap::new();
    let terms = if how == "guarded" {
        limited(GUARD)
    } else {
        UNGUARDED
    };
    let _there = sockmap.join(&a, &b, terms);
    tell("relaying");
    // Until it is killed, or its test is gone.
    while told().is_some() {}
}

fn copy(mut a: &TcpStream, mut b: &TcpStream) {
    let mut buffer = vec![0; BUFFER];
    while is_readable(a, PATIENCE) {
        let count = a.read(&mut buffer).unwrap();
        let mut written = 0;
        while written < count {
            if !is_writable(b, PATIENCE) {
                return;
            }
            written += b.write(&buffer[written..count]).unwrap_or(0);
        }
    }
}
