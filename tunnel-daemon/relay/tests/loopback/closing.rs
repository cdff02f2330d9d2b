//! Tests of EOF, resets, and peers that close first.

use std::{
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    thread,
};

use adit_relay::{PairEnd, Side};
use socket2::Socket;

use crate::support::{
    Pattern, Setup, Transport, Tunnel, heard, matrix, receive_all, receive_exactly, reset, send_all,
};

matrix!(
    end_without_a_byte_is_passed_on,
    client_ends_first_with_data_pending_both_ways,
    target_ends_first_with_data_pending_both_ways,
    ended_direction_leaves_the_other_open,
    reset_by_either_side_while_bytes_flow_names_it,
    reset_of_a_paused_source_is_noticed,
    reset_of_a_paused_sink_is_noticed,
    reset_of_an_idle_side_reaches_the_other,
    sink_that_closes_first_ends_the_pair,
    both_sides_at_once_are_fine,
);

pub(crate) fn end_without_a_byte_is_passed_on(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    tunnel.client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive_all(&tunnel.target, 16, 1).unwrap(), b"");
    tunnel.target.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive_all(&tunnel.client, 16, 1).unwrap(), b"");
    let outcome = tunnel.outcome();
    assert!(matches!(outcome.end, PairEnd::Finished));
    assert_eq!((outcome.to_a.bytes, outcome.to_b.bytes), (0, 0));
    world.until_empty();
}

/// `first` sends more than the sockets hold, then FIN; only then does the other side start to read and to answer.
fn half_close(tunnel: &Tunnel, first: &Socket, second: &Socket) {
    let request = Pattern::new(4).bytes(12 << 20);
    let answer = Pattern::new(5).bytes(12 << 20);
    thread::scope(|scope| {
        scope.spawn(|| send_all(first, &request, 100_000, 1));
        scope.spawn(|| send_all(second, &answer, 100_000, 2));
        assert!(receive_all(second, 200_000, 3).unwrap() == request);
        // The first side has sent FIN by now, and the answer is still in flight.
        assert!(receive_all(first, 200_000, 4).unwrap() == answer);
    });
    let outcome = tunnel.outcome();
    assert!(matches!(outcome.end, PairEnd::Finished), "{outcome:?}");
}

pub(crate) fn client_ends_first_with_data_pending_both_ways(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    half_close(&tunnel, &tunnel.client, &tunnel.target);
}

pub(crate) fn target_ends_first_with_data_pending_both_ways(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    half_close(&tunnel, &tunnel.target, &tunnel.client);
}

pub(crate) fn ended_direction_leaves_the_other_open(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    send_all(&tunnel.client, b"request", 7, 1);
    assert_eq!(receive_all(&tunnel.target, 16, 1).unwrap(), b"request");
    for _ in 0..200 {
        (&tunnel.target).write_all(b"part").unwrap();
        assert_eq!(receive_exactly(&tunnel.client, 4), b"part");
    }
    tunnel.target.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive_all(&tunnel.client, 16, 1).unwrap(), b"");
    assert!(matches!(tunnel.outcome().end, PairEnd::Finished));
}

/// Writes until the path is full: the tunnel is paused.
fn fill(socket: &Socket) -> u64 {
    socket.set_nonblocking(true).unwrap();
    let chunk = vec![7; 1 << 16];
    let mut written = 0;
    let mut full = 0;
    while full < 20_000 {
        match (&*socket).write(&chunk) {
            Ok(count) => {
                written += count as u64;
                full = 0;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                full += 1;
                thread::yield_now();
            }
        }
    }
    socket.set_nonblocking(false).unwrap();
    written
}

#[track_caller]
fn assert_failed(end: &PairEnd, expected: Side) {
    match end {
        PairEnd::Failed { side, .. } => assert_eq!(*side, expected),
        other => panic!("{other}"),
    }
}

/// A reset arrives as a reset; Unix sockets have none, and report EOF or an error.
pub(crate) fn assert_reset(setup: &Setup, mut socket: &Socket) {
    let mut buffer = vec![0; 1 << 16];
    let error = loop {
        match socket.read(&mut buffer) {
            Ok(0) => break None,
            Ok(_) => {}
            Err(error) => break Some(error.kind()),
        }
    };
    match setup.transport {
        Transport::Tcp | Transport::KernelTls => {
            assert_eq!(error, Some(ErrorKind::ConnectionReset));
        }
        Transport::Unix => assert_ne!(error, Some(ErrorKind::WouldBlock)),
    }
}

pub(crate) fn reset_by_either_side_while_bytes_flow_names_it(setup: &Setup) {
    for side in [Side::A, Side::B] {
        let world = setup.start();
        let tunnel = world.open();
        let Tunnel { client, target, .. } = &tunnel;
        let (ours, theirs) = match side {
            Side::A => (client, target),
            Side::B => (target, client),
        };
        thread::scope(|scope| {
            scope.spawn(|| while (&*theirs).write_all(&[1; 4096]).is_ok() {});
            receive_exactly(ours, 1 << 20);
            (&*ours).write_all(b"something").unwrap();
            receive_exactly(theirs, 9);
            abort(setup, ours);
        });
        assert_failed(&tunnel.outcome().end, side);
        world.until_empty();
    }
}

/// Resets a connection without closing the descriptor, which another thread borrows.
fn abort(setup: &Setup, socket: &Socket) {
    match setup.transport {
        // Dissolving the association sends RST, as closing with zero linger would.
        Transport::Tcp | Transport::KernelTls => rustix::net::connect_unspec(socket).unwrap(),
        Transport::Unix => socket.shutdown(Shutdown::Both).unwrap(),
    }
}

pub(crate) fn reset_of_a_paused_source_is_noticed(setup: &Setup) {
    if setup.transport == Transport::Unix {
        return; // A Unix peer that closes has delivered its bytes: they are drained, not dropped.
    }
    let world = setup.start();
    let tunnel = world.open();
    fill(&tunnel.client);
    reset(tunnel.client);
    let end = heard(&tunnel.outcome).end;
    assert_failed(&end, Side::A);
    assert_reset(setup, &tunnel.target);
    world.until_empty();
}

pub(crate) fn reset_of_a_paused_sink_is_noticed(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    fill(&tunnel.client);
    reset(tunnel.target);
    let end = heard(&tunnel.outcome).end;
    assert_failed(&end, Side::B);
    assert_reset(setup, &tunnel.client);
    world.until_empty();
}

fn reset_of_an_idle_side_reaches_the_other(setup: &Setup) {
    if setup.transport == Transport::Unix {
        return; // An idle Unix peer that closes causes EOF, as in the next test.
    }
    let world = setup.start();
    let tunnel = world.open();
    world.until("the pair is adopted", |stats| stats.slots == 1);
    reset(tunnel.target);
    assert_reset(setup, &tunnel.client);
    let end = heard(&tunnel.outcome).end;
    assert_failed(&end, Side::B);
}

fn sink_that_closes_first_ends_the_pair(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    (&tunnel.client).write_all(b"hello").unwrap();
    receive_exactly(&tunnel.target, 5);
    drop(tunnel.target);
    // EOF of the target arrives; bytes written after it cannot be delivered.
    assert_eq!(receive_all(&tunnel.client, 16, 1).unwrap(), b"");
    while (&tunnel.client).write_all(&[1; 4096]).is_ok() {}
    let outcome = heard(&tunnel.outcome);
    assert_failed(&outcome.end, Side::B);
    world.until_empty();
}

pub(crate) fn both_sides_at_once_are_fine(setup: &Setup) {
    let world = setup.start();
    for _ in 0..200 {
        let tunnel = world.open_with(b"x", b"y");
        let Tunnel {
            client,
            target,
            outcome,
            ..
        } = tunnel;
        drop((client, target));
        let _any_end = heard(&outcome);
    }
    world.until_empty();
}
