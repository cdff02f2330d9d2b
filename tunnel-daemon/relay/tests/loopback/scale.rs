//! Many pairs, slow readers, and what they may cost. Each test alone in its process, since it counts all of it.

use std::{
    io::{ErrorKind, Read, Write},
    thread,
    time::{Duration, Instant},
};

use crate::support::{
    Moves, Setup, Transport, is_nightly, matrix_alone, open_descriptors, receive_exactly,
    resident_bytes, until,
};

matrix_alone!(
    idle_pairs_cost_little_and_all_still_work,
    opened_and_closed_pairs_leave_nothing_behind,
    slow_readers_hold_bounded_memory,
    exhausted_pipe_pool_degrades_to_copy,
    bulk_pair_does_not_starve_an_echo,
);

/// Four descriptors each, of the 20,000 that a process has here.
const IDLE: usize = 4000;

fn idle_pairs_cost_little_and_all_still_work(setup: &Setup) {
    let world = setup.start();
    let before = resident_bytes();
    let tunnels: Vec<_> = (0..IDLE)
        .map(|_| {
            let tunnel = world.open();
            (&tunnel.client).write_all(b"hello").unwrap();
            receive_exactly(&tunnel.target, 5);
            tunnel
        })
        .collect();
    world.until("idle pairs hold nothing", |stats| {
        stats.active_pairs == IDLE as u64 && stats.buffer_bytes == 0 && stats.pipes_in_use == 0
    });
    let each = (resident_bytes().saturating_sub(before)) / IDLE;
    assert!(
        each < 4096,
        "{each} bytes for an idle pair, test's own included"
    );
    let wakeups = world.stats().wakeups;
    for tunnel in &tunnels {
        (&tunnel.target).write_all(b"x").unwrap();
        receive_exactly(&tunnel.client, 1);
    }
    let wakeups = world.stats().wakeups - wakeups;
    assert!(
        wakeups <= 3 * IDLE as u64,
        "{wakeups} wake-ups for {IDLE} messages"
    );
    let promises: Vec<_> = tunnels.into_iter().map(|tunnel| tunnel.outcome).collect();
    for outcome in promises {
        let _end = outcome.recv_timeout(crate::support::PATIENCE).unwrap();
    }
    world.until_empty();
}

fn opened_and_closed_pairs_leave_nothing_behind(setup: &Setup) {
    let world = setup.start();
    let rounds = if is_nightly() { 100_000 } else { 10_000 };
    let ours = open_descriptors();
    for round in 0..rounds {
        let tunnel = world.open();
        if round % 4 != 0 {
            (&tunnel.client).write_all(b"request").unwrap();
            receive_exactly(&tunnel.target, 7);
        }
        match round % 3 {
            0 => tunnel.submitted.cancel(),
            1 => crate::support::reset(tunnel.client),
            _ => {}
        }
    }
    world.until_empty();
    let stats = world.stats();
    let pipes = 2 * usize::try_from(stats.pipes_free).unwrap();
    until(
        "descriptors are back",
        || open_descriptors() == ours + pipes,
        || format!("{} now, {ours} before, {stats:?}", open_descriptors()),
    );
}

/// Over kernel TLS a tunnel is two pairs behind each other, and other tests run in the same process.
pub(crate) fn slow_readers_hold_bounded_memory(setup: &Setup) {
    let readers = 20;
    let pairs = if setup.transport == Transport::KernelTls {
        2
    } else {
        1
    };
    let length = Duration::from_secs(if is_nightly() { 60 } else { 2 });
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
    while start.elapsed() < length {
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
        thread::sleep(Duration::from_millis(1)); // The reader is slow, that is all.
    }
    // Kernel memory: the buffers of four sockets, which the kernel doubles, and one buffer or one pipe of ours.
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
    // Paused pairs wait for room; they do not ask for it over and over.
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
    let mut config = setup.config();
    config.pipe_budget_bytes = 4 * config.pipe_bytes;
    let world = setup.start_with(&config);
    let tunnels: Vec<_> = (0..10).map(|_| world.open()).collect();
    // Nobody reads, so every pipe stays in use.
    for tunnel in &tunnels {
        tunnel.client.set_nonblocking(true).unwrap();
        let mut full = 0;
        while full < 200 {
            match (&tunnel.client).write(&[1; 1 << 16]) {
                Ok(_) => full = 0,
                Err(_) => full += 1,
            }
            thread::yield_now();
        }
    }
    let splices = setup.moves == Moves::Splice;
    world.until("pipes in use are capped", |stats| {
        let exhausted = stats.pipes_exhausted > 0;
        stats.pipes_in_use == u64::from(splices) * 4 && exhausted == splices
    });
    for tunnel in &tunnels {
        (&tunnel.target).write_all(b"other way").unwrap();
        tunnel.client.set_nonblocking(false).unwrap();
        receive_exactly(&tunnel.client, 9);
        receive_exactly(&tunnel.target, 1 << 20);
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
        let start = Instant::now();
        for _ in 0..300 {
            (&echo.client).write_all(b"ping").unwrap();
            receive_exactly(&echo.target, 4);
        }
        let each = start.elapsed() / 300;
        assert!(
            each < Duration::from_millis(20),
            "{each:?} for an echo beside bulk"
        );
        bulk.submitted.cancel();
    });
}
