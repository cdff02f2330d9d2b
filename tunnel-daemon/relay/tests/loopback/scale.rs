//! Tests of many pairs and of slow readers, and of their cost. Each test runs alone in its process, since it counts all
//! of the process.

use std::{
    io::{ErrorKind, Read, Write},
    thread,
    time::{Duration, Instant},
};

use adit_relay::Pair;

use crate::far_ends::FarEnds;
use crate::support::{
    Moves, PATIENCE, Setup, Transport, Tunnel, World, is_nightly, matrix_alone, open_descriptors,
    promise, raise_limit, receive_exactly, reset, resident_bytes, until,
};

matrix_alone!(
    idle_pairs_cost_little_and_all_still_work,
    opened_and_closed_pairs_leave_nothing_behind,
    exhausted_pipe_pool_degrades_to_copy,
    bulk_pair_does_not_starve_an_echo,
);

/// Idle pairs, if the descriptor limit allows two for each. A limit of 20,000 allows 9,968 pairs.
const IDLE: usize = 10_000;
/// Descriptors of the process for all other purposes.
const OTHER_DESCRIPTORS: u64 = 64;

/// Pairs opened and closed nightly over each transport; fewer otherwise. Most then use Unix sockets, which leave no
/// TIME_WAIT sockets for later connections.
const OPENED: usize = 100_000;
/// Pairs of these that are open at the same time.
const OPEN_AT_ONCE: usize = 50;
/// Largest growth of memory over the rounds with Unix sockets; at most 84 bytes per pair in nightly runs.
const GROWTH_MAX_BYTES: usize = 8 << 20;

/// Limit (isolation): 10,000 idle pairs of a relay | less than 4 KiB each, no buffer, no pipe
fn idle_pairs_cost_little_and_all_still_work(setup: &Setup) {
    let room = raise_limit().saturating_sub(OTHER_DESCRIPTORS) / 2;
    let pairs = IDLE.min(usize::try_from(room).unwrap_or(usize::MAX));
    let mut config = setup.config();
    // Pairs are submitted faster than a thread takes them.
    config.queue_pairs = pairs;
    let world = setup.start_with(&config);
    let (mut clients, mut targets) = (FarEnds::start(pairs), FarEnds::start(pairs));
    let (a, b) = (clients.connect(), targets.connect());
    let before = resident_bytes();
    let promises: Vec<_> = a
        .into_iter()
        .zip(b)
        .map(|(a, b)| {
            let (done, outcome) = promise();
            let pair = Pair::new(a.into(), b.into());
            world.handle.submit(pair, done).unwrap();
            outcome
        })
        .collect();
    clients.all_send();
    targets.all_receive();
    let expected = u64::try_from(pairs).unwrap();
    world.until("idle pairs hold nothing", |stats| {
        stats.active_pairs == expected && stats.buffer_bytes == 0 && stats.pipes_in_use == 0
    });
    let each = (resident_bytes().saturating_sub(before)) / pairs;
    assert!(
        each < 4096,
        "{each} bytes for an idle pair, test's own included"
    );
    let wakeups = world.stats().wakeups;
    targets.all_send();
    clients.all_receive();
    let wakeups = world.stats().wakeups - wakeups;
    assert!(
        wakeups <= 3 * expected,
        "{wakeups} wake-ups for {pairs} messages"
    );
    drop((clients, targets));
    for outcome in promises {
        let _end = outcome.recv_timeout(PATIENCE).unwrap();
    }
    world.until_empty();
}

/// Opens and closes that many pairs, some at a time, in all possible ways; each receives its outcome.
fn open_and_close(world: &World, rounds: usize) {
    for first in (0..rounds).step_by(OPEN_AT_ONCE) {
        let rounds = first..rounds.min(first + OPEN_AT_ONCE);
        let tunnels: Vec<_> = rounds.map(|round| (round, world.open())).collect();
        let spoken = || tunnels.iter().filter(|(round, _)| round % 4 != 0);
        for (_, tunnel) in spoken() {
            (&tunnel.client).write_all(b"request").unwrap();
        }
        for (_, tunnel) in spoken() {
            receive_exactly(&tunnel.target, 7);
        }
        let mut promises = Vec::new();
        for (round, tunnel) in tunnels {
            match round % 3 {
                0 => tunnel.submitted.cancel(),
                1 => reset(tunnel.client),
                _ => {}
            }
            promises.push(tunnel.outcome);
        }
        for outcome in promises {
            let _end = outcome.recv_timeout(PATIENCE).unwrap();
        }
    }
}

/// Limit (isolation): 110,000 pairs opened and closed in a relay | no descriptor, slot, pipe or byte leaks
fn opened_and_closed_pairs_leave_nothing_behind(setup: &Setup) {
    let mut world = setup.start();
    let ours = open_descriptors();
    let (over_tcp, over_unix) = if is_nightly() {
        (OPENED, OPENED)
    } else {
        (OPENED / 50, OPENED / 5)
    };
    open_and_close(&world, over_tcp);
    let resident = resident_bytes();
    world.switch_to(Transport::Unix);
    open_and_close(&world, over_unix);
    world.until_empty();
    let stats = world.stats();
    let pipes = 2 * usize::try_from(stats.pipes_free).unwrap();
    until(
        "descriptors are back",
        || open_descriptors() == ours + pipes,
        || format!("{} now, {ours} before, {stats:?}", open_descriptors()),
    );
    let grown = resident_bytes().saturating_sub(resident);
    assert!(grown < GROWTH_MAX_BYTES, "{grown} bytes more, {stats:?}");
}

/// A rate of reading, and its duration.
pub(crate) struct Reading {
    pub(crate) length: Duration,
    /// Pause between two reads of at most 512 bytes.
    pub(crate) pace: Duration,
}

/// Over kernel TLS a tunnel consists of two pairs in series, and other tests run in the same process.
pub(crate) fn slow_readers_hold_bounded_memory(setup: &Setup) {
    let length = Duration::from_secs(if is_nightly() { 60 } else { 2 });
    let pace = Duration::from_millis(1);
    slow_readers(setup, &Reading { length, pace });
}

pub(crate) fn slow_readers(setup: &Setup, reading: &Reading) {
    let readers = 20;
    let pairs = if setup.transport == Transport::KernelTls {
        2
    } else {
        1
    };
    let mut world = setup.start();
    world.socket_bytes = Some(128 * 1024);
    let before = resident_bytes();
    let tunnels: Vec<_> = (0..readers).map(|_| world.open()).collect();
    for tunnel in &tunnels {
        tunnel.client.set_nonblocking(true).unwrap();
    }
    let (start, chunk) = (Instant::now(), vec![3; 1 << 16]);
    let mut taken = vec![0_u8; 512];
    let (mut most_buffers, mut most_pipes, mut most_resident, mut syscalls) = (0, 0, 0, 0);
    let (mut sent, mut received) = (0_u64, 0_u64);
    while start.elapsed() < reading.length {
        for tunnel in &tunnels {
            match (&tunnel.client).write(&chunk) {
                Ok(count) => sent += count as u64,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            received += (&tunnel.target).read(&mut taken).unwrap() as u64;
        }
        let stats = world.stats();
        most_buffers = stats.buffer_bytes.max(most_buffers);
        most_pipes = stats.pipes_in_use.max(most_pipes);
        most_resident = resident_bytes().max(most_resident);
        syscalls = stats.syscalls;
        thread::sleep(reading.pace);
    }
    // Kernel memory: the buffers of four sockets, which the kernel doubles, and one buffer or pipe of the relay.
    let held = (sent - received) / readers;
    let most = pairs * (4 * 2 * 128 + 256) * 1024;
    assert!(held <= most, "{held} bytes on their way in each tunnel");
    assert!(
        most_buffers <= pairs * readers * 256 * 1024,
        "{most_buffers}"
    );
    assert!(most_pipes <= pairs * readers, "{most_pipes}");
    assert!(
        pairs > 1 || most_resident.saturating_sub(before) < 16 << 20,
        "{most_resident}"
    );
    if setup.moves == Moves::Splice && pairs == 1 {
        assert_eq!(most_buffers, 0);
    }
    // Paused pairs wait for room; they do not poll for it.
    let most_calls = pairs * (2000 + 4 * received / 512);
    assert!(
        syscalls < most_calls + pairs * sent / 512,
        "{syscalls} calls, {received} bytes"
    );
    for tunnel in tunnels {
        tunnel.submitted.cancel();
    }
    world.until_empty();
}

fn exhausted_pipe_pool_degrades_to_copy(setup: &Setup) {
    const TAKEN_BYTES: usize = 1 << 20;
    let mut config = setup.config();
    config.pipe_budget_bytes = 4 * config.pipe_bytes;
    let world = setup.start_with(&config);
    let tunnels: Vec<_> = (0..10).map(|_| world.open()).collect();
    // No client reads, so every pipe stays in use.
    for tunnel in &tunnels {
        tunnel.client.set_nonblocking(true).unwrap();
        let (mut full, mut sent) = (0, 0);
        let start = Instant::now();
        while full < 200 || sent < TAKEN_BYTES {
            assert!(start.elapsed() < PATIENCE, "only {sent} bytes are taken");
            match (&tunnel.client).write(&[1; 1 << 16]) {
                Ok(count) => (full, sent) = (0, sent + count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => full += 1,
                Err(error) => panic!("{error} after {sent} bytes"),
            }
            thread::yield_now();
        }
    }
    let splices = setup.moves == Moves::Splice;
    world.until("pipes in use are capped", |stats| {
        // A relay thread that ran late has made room since.
        for tunnel in &tunnels {
            while (&tunnel.client).write(&[1; 1 << 16]).is_ok() {}
        }
        let exhausted = stats.pipes_exhausted > 0;
        stats.pipes_in_use == u64::from(splices) * 4 && exhausted == splices
    });
    for tunnel in &tunnels {
        (&tunnel.target).write_all(b"other way").unwrap();
        tunnel.client.set_nonblocking(false).unwrap();
        receive_exactly(&tunnel.client, 9);
        receive_exactly(&tunnel.target, TAKEN_BYTES);
        tunnel.submitted.cancel();
    }
    world.until_empty();
}

fn bulk_pair_does_not_starve_an_echo(setup: &Setup) {
    let world = setup.start();
    let (bulk, echo) = (world.open(), world.open());
    thread::scope(|scope| {
        let (client, target) = (&bulk.client, &bulk.target);
        scope.spawn(move || while (&*client).write_all(&[1; 1 << 16]).is_ok() {});
        scope.spawn(move || {
            let mut buffer = vec![0; 1 << 18];
            while (&*target).read(&mut buffer).is_ok_and(|count| count > 0) {}
        });
        // This must also run if an echo fails: the threads above are joined.
        let bulk = Cancelled(&bulk);
        let mut echoes = [(); 300].map(|()| {
            let start = Instant::now();
            (&echo.client).write_all(b"ping").unwrap();
            receive_exactly(&echo.target, 4);
            start.elapsed()
        });
        drop(bulk);
        // The bound holds for two thirds of the echoes: this process may lose its CPU now and then.
        echoes.sort();
        let (most, mean) = (echoes[200], echoes.iter().sum::<Duration>() / 300);
        assert!(
            most < Duration::from_millis(20) && mean < Duration::from_millis(100),
            "{most:?}, {mean:?} on average for an echo beside bulk"
        );
    });
}

/// Cancels its tunnel when dropped.
struct Cancelled<'a>(&'a Tunnel);

impl Drop for Cancelled<'_> {
    fn drop(&mut self) {
        self.0.submitted.cancel();
    }
}
