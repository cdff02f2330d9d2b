//! Tests that bytes arrive once, in order and counted, for all sizes and movers.

use std::{io::Write, net::Shutdown, thread};

use adit_relay::{Engine, PairEnd, Progress, Thresholds};

use crate::support::{
    Endless, Moves, Pattern, Setup, Transport, Tunnel, World, heard, is_allowed, is_nightly,
    matrix, receive_all, receive_exactly, reset, send_all,
};

matrix!(
    both_directions_are_byte_exact_for_random_sizes_and_chunks,
    a_gibibyte_is_byte_exact_in_chunks_of_random_size,
    counters_equal_the_bytes_both_peers_saw,
    bytes_handed_over_come_first_in_both_directions,
    echo_of_single_bytes_goes_on_for_long,
    bytes_behind_an_urgent_one_arrive,
    many_pairs_at_once_do_not_mix,
);

/// The urgent byte itself is not part of the stream. Unix sockets do not support urgent data everywhere. io_uring does
/// not report urgent data, so later bytes may wait for further bytes or for EOF.
fn bytes_behind_an_urgent_one_arrive(setup: &Setup) {
    if setup.transport == Transport::Unix {
        return;
    }
    let next: &[u8] = match setup.engine {
        Engine::Epoll => b"",
        Engine::IoUring => b", next",
    };
    let world = setup.start();
    for _ in 0..20 {
        let tunnel = world.open();
        let mut client = &tunnel.client;
        client.write_all(b"first").unwrap();
        assert_eq!(receive_exactly(&tunnel.target, 5), b"first");
        client.write_all(b"before").unwrap();
        client.send_out_of_band(b"!").unwrap();
        client.write_all(b" and behind").unwrap();
        assert_eq!(receive_exactly(&tunnel.target, 6), b"before");
        client.write_all(next).unwrap();
        let behind = [b" and behind", next].concat();
        assert_eq!(receive_exactly(&tunnel.target, behind.len()), behind);
        client.send_out_of_band(b"!").unwrap();
        client.write_all(b"last").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(receive_all(&tunnel.target, 16, 1).unwrap(), b"last");
        tunnel.target.shutdown(Shutdown::Write).unwrap();
        let outcome = tunnel.outcome();
        assert!(matches!(outcome.end, PairEnd::Finished));
        assert_eq!(outcome.to_b.bytes, 26 + next.len() as u64);
    }
}

/// Sends in both directions at once and checks both ends.
fn exchange(world: &World, up: &[u8], down: &[u8], chunk_max: usize, seed: u64) {
    let tunnel = world.open();
    let (client, target) = (&tunnel.client, &tunnel.target);
    thread::scope(|scope| {
        scope.spawn(|| send_all(client, up, chunk_max, seed));
        scope.spawn(|| send_all(target, down, chunk_max, seed + 1));
        let got_down = scope.spawn(|| receive_all(client, chunk_max, seed + 2).unwrap());
        let got_up = receive_all(target, chunk_max, seed + 3).unwrap();
        assert!(got_up == up, "up");
        assert!(got_down.join().unwrap() == down, "down");
    });
    let outcome = tunnel.outcome();
    assert!(matches!(outcome.end, PairEnd::Finished), "{outcome:?}");
    assert_eq!(outcome.to_b.bytes, up.len() as u64);
    assert_eq!(outcome.to_a.bytes, down.len() as u64);
}

pub(crate) fn both_directions_are_byte_exact_for_random_sizes_and_chunks(setup: &Setup) {
    let world = setup.start();
    let mut random = Pattern::new(1);
    let mut sizes = vec![(0, 0, 1), (1, 1, 1), (0, 4096, 512), (65_536, 1, 65_536)];
    for _ in 0..8 {
        let (up, down) = (random.up_to(1 << 20), random.up_to(1 << 20));
        sizes.push((up, down, random.up_to(64 * 1024)));
    }
    sizes.push((8 << 20, 8 << 20, 256 * 1024));
    for (round, (up, down, chunk_max)) in sizes.into_iter().enumerate() {
        let seed = 10 * round as u64 + 7;
        let up = Pattern::new(seed).bytes(up);
        let down = Pattern::new(seed + 5).bytes(down);
        exchange(&world, &up, &down, chunk_max, seed);
    }
    world.until_empty();
}

/// Too much to keep in memory: checked while it arrives.
pub(crate) fn a_gibibyte_is_byte_exact_in_chunks_of_random_size(setup: &Setup) {
    const BYTES: usize = 1 << 30;
    let (world, endless) = (setup.start(), Endless::new(77));
    let tunnel = world.open();
    thread::scope(|scope| {
        scope.spawn(|| endless.send(&tunnel.client, BYTES, 1));
        assert_eq!(endless.receive(&tunnel.target, 2), BYTES);
    });
    tunnel.target.shutdown(Shutdown::Write).unwrap();
    let outcome = tunnel.outcome();
    assert!(matches!(outcome.end, PairEnd::Finished), "{outcome:?}");
    assert_eq!(outcome.to_b.bytes, BYTES as u64);
    world.until_empty();
}

pub(crate) fn counters_equal_the_bytes_both_peers_saw(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    let mut expected = Progress {
        has_spliced: setup.moves == Moves::Splice,
        ..Progress::default()
    };
    for (up, down) in [(1, 0), (0, 1), (70_000, 3), (5, 300_000)] {
        (&tunnel.client).write_all(&vec![1; up]).unwrap();
        receive_exactly(&tunnel.target, up);
        (&tunnel.target).write_all(&vec![2; down]).unwrap();
        receive_exactly(&tunnel.client, down);
        expected.to_b += up as u64;
        expected.to_a += down as u64;
        // The peer may receive bytes slightly before the relay thread counts them.
        crate::support::until(
            "the counters agree while the pair is open",
            || tunnel.submitted.progress() == expected,
            || format!("{:?} {expected:?}", tunnel.submitted.progress()),
        );
    }
    drop((tunnel.client, tunnel.target));
    let outcome = heard(&tunnel.outcome);
    let counted = (outcome.to_a.bytes, outcome.to_b.bytes);
    assert_eq!(counted, (expected.to_a, expected.to_b));
    assert_eq!(outcome.engine, setup.engine);
    match setup.moves {
        Moves::Copy => assert_eq!(outcome.to_b.spliced_bytes, 0),
        Moves::Splice => assert_eq!(outcome.to_b.spliced_bytes, expected.to_b),
    }
    assert_eq!(outcome.to_b.movers.splice, setup.moves == Moves::Splice);
}

pub(crate) fn bytes_handed_over_come_first_in_both_directions(setup: &Setup) {
    let world = setup.start();
    // More than the socket buffers take at once, so that the rest waits for room.
    let early = Pattern::new(3).bytes(6 << 20);
    let tunnel = world.open_with(b"for the client ", &early);
    let (client, target) = (&tunnel.client, &tunnel.target);
    thread::scope(|scope| {
        scope.spawn(|| send_all(client, b"late", 4, 1));
        scope.spawn(|| send_all(target, b"and more", 8, 1));
        let got = receive_all(target, 1 << 18, 2).unwrap();
        assert!(got[..early.len()] == early && got[early.len()..] == b"late"[..]);
        let got = receive_all(client, 64, 2).unwrap();
        assert_eq!(got, b"for the client and more");
    });
    let outcome = tunnel.outcome();
    assert_eq!(outcome.to_b.bytes, early.len() as u64 + 4);
}

fn echo_of_single_bytes_goes_on_for_long(setup: &Setup) {
    let world = setup.start();
    let tunnel = world.open();
    for round in 0..3000_u32 {
        let byte = round.to_le_bytes();
        (&tunnel.client).write_all(&byte[..1]).unwrap();
        assert_eq!(receive_exactly(&tunnel.target, 1), byte[..1]);
        (&tunnel.target).write_all(&byte).unwrap();
        assert_eq!(receive_exactly(&tunnel.client, 4), byte);
    }
}

fn many_pairs_at_once_do_not_mix(setup: &Setup) {
    let mut config = setup.config();
    config.threads = 2;
    let world = setup.start_with(&config);
    thread::scope(|scope| {
        for number in 0..16 {
            let world = &world;
            scope.spawn(move || {
                let up = Pattern::new(number).bytes(400_000);
                let down = Pattern::new(number + 100).bytes(300_000);
                exchange(world, &up, &down, 50_000, number);
            });
        }
    });
    world.until_empty();
}

/// A relay that splices after that many bytes of a direction.
fn splicing_behind(offset: u64, engine: Engine, transport: Transport) -> World {
    let setup = Setup {
        engine,
        moves: Moves::Splice,
        transport,
    };
    let mut config = setup.config();
    config.thresholds = Thresholds {
        splice_after_bytes: offset,
        // One read per turn, so that the threshold is checked often.
        turn_reads: 1,
        ..Thresholds::splice_at_once()
    };
    setup.start_with(&config)
}

/// The switch happens between any two bytes, and at either end; no byte is lost, duplicated or reordered. Nightly runs
/// test every offset.
fn switch_at_every_offset(engine: Engine, transport: Transport) {
    const BYTES: usize = 4000;
    let bytes = Pattern::new(9).bytes(BYTES);
    let step = if is_nightly() { 1 } else { 20 };
    for offset in (0..=BYTES).step_by(step) {
        let world = splicing_behind(offset as u64, engine, transport);
        let tunnel = world.open();
        let (copied, spliced) = bytes.split_at(offset);
        // These bytes have arrived before others are sent, so a read ends exactly here.
        (&tunnel.client).write_all(copied).unwrap();
        assert_eq!(receive_exactly(&tunnel.target, offset), copied);
        (&tunnel.client).write_all(spliced).unwrap();
        tunnel.client.shutdown(Shutdown::Write).unwrap();
        let received = receive_all(&tunnel.target, 8192, 1).unwrap();
        assert!(received == spliced, "offset {offset}");
        tunnel.target.shutdown(Shutdown::Write).unwrap();
        let moved = tunnel.outcome().to_b;
        assert_eq!(moved.bytes, BYTES as u64);
        // With io_uring an apparently empty socket is checked by reading a byte, which may have just arrived.
        let not_spliced = moved.bytes - moved.spliced_bytes - offset as u64;
        assert!(not_spliced <= 1, "{not_spliced} bytes behind {offset}");
    }
}

/// Like [`switch_at_every_offset`], with bytes in the socket that the switch must keep in order, and across buffer sizes.
fn switch_in_a_stream(engine: Engine, transport: Transport) {
    const LARGE: [u64; 7] = [1023, 4096, 16_383, 16_384, 16_385, 32_768, 39_999];
    let bytes = Pattern::new(9).bytes(40_000);
    let mut spliced = 0;
    for offset in (0..600).step_by(20).chain(LARGE) {
        let world = splicing_behind(offset, engine, transport);
        let tunnel = world.open();
        let chunk = 1 + usize::try_from(offset).unwrap() / 2;
        thread::scope(|scope| {
            scope.spawn(|| {
                send_all(&tunnel.client, &bytes, chunk.max(500), offset);
            });
            let received = receive_all(&tunnel.target, 8192, 1).unwrap();
            assert!(received == bytes, "offset {offset}");
        });
        drop(tunnel.target);
        let outcome = heard(&tunnel.outcome);
        assert_eq!(outcome.to_b.bytes, 40_000);
        spliced += outcome.to_b.spliced_bytes;
    }
    assert!(spliced > 0);
}

#[test]
fn switch_to_splice_is_exact_at_every_offset_with_epoll() {
    for transport in [Transport::Tcp, Transport::Unix] {
        switch_at_every_offset(Engine::Epoll, transport);
        switch_in_a_stream(Engine::Epoll, transport);
    }
}

#[test]
fn switch_to_splice_is_exact_at_every_offset_with_the_ring() {
    if !is_allowed(Engine::IoUring, "switch_to_splice") {
        return;
    }
    for transport in [Transport::Tcp, Transport::Unix] {
        switch_at_every_offset(Engine::IoUring, transport);
        switch_in_a_stream(Engine::IoUring, transport);
    }
}

/// Runs the script of a seed on a connection; returns the bytes of each direction and the end.
fn play(setup: &Setup, seed: u64) -> (Vec<u8>, Vec<u8>, String) {
    let world = setup.start();
    let mut random = Pattern::new(seed);
    let tunnel = world.open();
    let (mut up, mut down) = (Vec::new(), Vec::new());
    let (mut up_open, mut down_open) = (true, true);
    for _ in 0..random.up_to(12) {
        let magnitude = random.up_to(14);
        let size = random.up_to(16 << magnitude);
        let bytes = random.bytes(size);
        match random.up_to(10) {
            1..=4 if up_open => {
                (&tunnel.client).write_all(&bytes).unwrap();
                up.extend(receive_exactly(&tunnel.target, size));
            }
            5..=8 if down_open => {
                (&tunnel.target).write_all(&bytes).unwrap();
                down.extend(receive_exactly(&tunnel.client, size));
            }
            9 if up_open && down_open => {
                tunnel.client.shutdown(Shutdown::Write).unwrap();
                assert_eq!(receive_all(&tunnel.target, 9, 1).unwrap(), b"");
                up_open = false;
            }
            10 if up_open && down_open => {
                tunnel.target.shutdown(Shutdown::Write).unwrap();
                assert_eq!(receive_all(&tunnel.client, 9, 1).unwrap(), b"");
                down_open = false;
            }
            _ => {}
        }
    }
    let Tunnel {
        client,
        target,
        outcome,
        ..
    } = tunnel;
    if setup.transport == Transport::Tcp && up_open && down_open && random.up_to(2) == 1 {
        reset(client);
    } else {
        client.shutdown(Shutdown::Both).unwrap();
        drop((client, target));
    }
    let outcome = heard(&outcome);
    assert_eq!(outcome.to_b.bytes, up.len() as u64, "seed {seed}");
    assert_eq!(outcome.to_a.bytes, down.len() as u64, "seed {seed}");
    (up, down, outcome.end.to_string())
}

#[test]
fn every_driver_and_mover_ends_as_plain_copy_does() {
    if !is_allowed(Engine::IoUring, "every_driver_and_mover") {
        return;
    }
    for transport in [Transport::Tcp, Transport::Unix] {
        for seed in 0..60 {
            let with = |engine, moves| {
                let setup = Setup {
                    engine,
                    moves,
                    transport,
                };
                play(&setup, seed)
            };
            let plain = with(Engine::Epoll, Moves::Copy);
            for (engine, moves) in [
                (Engine::Epoll, Moves::Splice),
                (Engine::IoUring, Moves::Copy),
                (Engine::IoUring, Moves::Splice),
            ] {
                assert!(
                    with(engine, moves) == plain,
                    "seed {seed}, {transport:?}, {engine:?}, {moves:?}"
                );
            }
        }
    }
}
